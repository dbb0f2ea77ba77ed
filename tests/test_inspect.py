"""inspect_run on real runs, and on runs whose records were tampered with."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from launching import records, unread

import train
from adaptive.config import BadSetting, parse
from adaptive.tools.inspect_run import main as inspect_run
from adaptive.tools.runs import Run

TASK = f"{Path(__file__).parent / 'quadratic.py'}:Small"
COMMON = ["--task", TASK, "--optim", "sgd", "--report_to", "none", "--max_grad_norm", "0", "--audit"]
COMMON += ["--learning_rate", "1e-3", "--eval_every", "7 steps", "--log_every", "never"]
OWN = f"{Path(__file__).parent / 'quadratic.py'}:clipped()"
RUNS = {
    "keep": ["--num_train_epochs", "2.5", "--batch_size", "2.3"],
    "drop": ["--num_train_epochs", "3", "--batch_size", "20.5", "--epoch_end", "drop"],
    "wrap": ["--num_train_epochs", "3", "--batch_size", "20.5", "--epoch_end", "wrap"],
    "empty": ["--max_steps", "50", "--per_device_train_batch_size", "0.3", "--schedule", "constant()"],
    "seesaw": ["--batch_size", "3", "--schedule", "seesaw()", "--max_batch_size", "40"],
    "accumulate": [
        "--per_device_train_batch_size", "0.35", "--fraction", "accumulate", "--schedule", "constant()",
    ],  # 20/7 samples a step, of which a record's decimal number is a little less
    "feedback": ["--schedule", OWN, "--num_train_epochs", "2"],
    "noise": ["--schedule", "noise_scale(interval=3)", "--num_train_epochs", "2"],
    "bernoulli": ["--participation", "bernoulli", "--batch_size", "2.3", "--num_train_epochs", "2"],
}  # fmt: skip


def start(folder: Path, *flags: str) -> Path:
    train.main(parse([*COMMON, "--output_dir", str(folder), *flags]))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: start(folder / name, *flags) for name, flags in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_is_right(runs, name, capsys):
    """Mutations: the carry's comparison with the record's float sums of G (accumulate); signals of the step
    itself instead of the one before (feedback).
    """
    assert inspect_run([str(runs[name]), "--verify"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"right: {runs[name]}\n") and "none twice in an epoch" in told
    assert "every size asked for is its answer" in told
    if name == "drop":
        assert "dropped, as --epoch_end drop says" in told


def test_a_stop_and_other_processes_are_right(tmp_path, capsys):
    """The unit of a per-device size stays that of the first start; both starts are told."""
    folder = start(tmp_path / "run", *RUNS["empty"][2:], "--max_steps", "20", "--save_every", "10 steps")
    again = ["--config", str(folder / "config.yaml"), "--resume_from_checkpoint", "auto", "--max_steps", "40"]
    start(folder, *again)
    assert inspect_run([str(folder), "--verify"]) == 0
    assert inspect_run([str(folder)]) == 0
    told = capsys.readouterr().out
    assert "start     after step 0, one process" in told and "resume    after step 20, one process" in told


def test_a_resume_with_another_schedule_is_right(tmp_path, capsys):
    """Mutation: the last schedule asked for the steps of the one before: "wrong" of a run that is not."""
    folder = start(tmp_path / "run", "--max_steps", "5", "--schedule", "constant()")
    again = ["--config", str(folder / "config.yaml"), "--resume_from_checkpoint", "auto", "--max_steps", "9"]
    start(folder, *again, "--schedule", "linear(interval=1)")
    assert inspect_run([str(folder), "--verify"]) == 0
    assert "not asked again: a resume has changed it" in capsys.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_begins_anew(runs, tmp_path, capsys):
    """--resume_from_checkpoint auto then starts fresh, and the records with it. Mutation: `_cut_back(0)` left
    out: steps twice, as a search that was killed had them.
    """
    folder = tmp_path / "run"
    shutil.copytree(runs["keep"], folder)
    shutil.rmtree(folder / "checkpoints")
    start(folder, "--config", str(folder / "config.yaml"), "--resume_from_checkpoint", "auto")
    assert inspect_run([str(folder), "--verify"]) == 0
    assert len(Run(folder).train) == len(Run(runs["keep"]).train)


def test_a_branch_is_verified_from_its_checkpoint(tmp_path, capsys, monkeypatch):
    """With the carry, the cursors and the signals that were there; without the checkpoint nothing is known.

    Mutations: verified from 0: "leaves out positions"; a carry of 0; signals of a fresh run; the checkpoint's
    path as it was written, from another folder.
    """
    origin = start(tmp_path / "run", *RUNS["feedback"], "--max_steps", "10", "--save_every", "5 steps")
    checkpoint = origin / "checkpoints" / "step_5"
    state = json.loads((checkpoint / "manifest.json").read_text())["state"]
    assert state["carry"]["train"] != "0"
    flags = [*RUNS["feedback"], "--resume_from_checkpoint", os.path.relpath(checkpoint)]
    folder = start(tmp_path / "branch", *flags, "--learning_rate", "2e-3")
    monkeypatch.chdir(tmp_path)
    assert inspect_run([str(folder), "--verify"]) == 0
    told = capsys.readouterr().out
    assert (
        f"from step 5 on, as {checkpoint} was then" in told and "every size asked for is its answer" in told
    )
    assert f"every position from {state['cursor']['train']} to 194 once" in told
    other = tampered({"branch": folder}, "branch", tmp_path, repeat)
    assert inspect_run([str(other), "--verify"]) == 1
    assert "step 11 repeats positions" in capsys.readouterr().out
    shutil.rmtree(checkpoint)
    with pytest.raises(BadSetting, match="begins at step 5 of another run's checkpoint, which is not"):
        inspect_run([str(folder), "--verify"])


def tampered(runs, name: str, tmp_path: Path, change) -> Path:
    """A copy in which change(records) has been at metrics.jsonl."""
    folder = tmp_path / "tampered"
    shutil.copytree(runs[name], folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change([line for line in lines if line["kind"] == "train"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def repeat(records):
    records[5]["positions"][0][1] -= 1
    records[5]["positions"][0][2] -= 1


def leave_out(records):
    for record in records[5:]:
        record["positions"] = [[s, a + 1, b + 1] for s, a, b in record["positions"]]


def ask_more(records):
    records[5]["target_batch_size"] += 0.1


def carry_away(records):
    records[5]["carry"] = 0.0 if records[5]["carry"] else 0.5


def run_more(records):
    """One sample more in one step and one less in the next: the sums agree, the carry does not."""
    records[5]["positions"][0][2] += 1
    records[6]["positions"][0][1] += 1
    records[5]["batch_size"] += 1
    records[5]["samples"] += 1
    records[6]["batch_size"] -= 1


def count_twice(records):
    for record in records[5:]:
        record["updates"] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (repeat, "step 6 repeats positions"),
        (leave_out, "step 6 leaves out positions"),
        (ask_more, "step 6: .* asks for"),
        (carry_away, "step 6: .* carried on"),
        (run_more, "step 6: .* carried on"),
        (count_twice, "step 6: updates is 7, counted 6"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_was_tampered_with_is_found(runs, tmp_path, capsys, change, said):
    """One line, exit status 1."""
    assert inspect_run([str(tampered(runs, "keep", tmp_path, change)), "--verify"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(said, line) and line.startswith("wrong: ")


def test_another_row_in_the_audit_is_found(runs, tmp_path, capsys):
    folder = tmp_path / "audit"
    shutil.copytree(runs["keep"], folder)
    path = folder / "audit" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[8]["indices"][0] = (lines[8]["indices"][0] + 1) % 97
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inspect_run([str(folder), "--verify"]) == 1
    assert "step 9: the audit's" in capsys.readouterr().out


def test_a_torn_last_line_is_passed_over(runs, tmp_path):
    folder = tmp_path / "torn"
    shutil.copytree(runs["keep"], folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 99')
    assert len(Run(folder).train) == len(Run(runs["keep"]).train)


def test_the_samples_of_a_step(runs, capsys):
    """Rows as the audit has them, with positions."""
    run = Run(runs["keep"])
    assert inspect_run([str(runs["keep"]), "--step", "4"]) == 0
    told = capsys.readouterr().out
    ((_, start, stop),) = run.train[3]["positions"]
    for position, index in zip(range(start, stop), run.audits[0][4]["indices"], strict=True):
        assert f"train position {position}, row {index}: factors" in told


def test_a_reservoir_is_inspected(tmp_path, capsys):
    """Its positions are those drawn, the rows are counted by those that arrived.

    Mutation: the cursor from `positions`: another number of rows, and the data taken for another's.
    """
    flags = [
        "--participation",
        "reservoir",
        "--per_device_train_batch_size",
        "0.7",
        "--num_train_epochs",
        "2",
    ]
    folder = start(tmp_path / "run", *flags, "--schedule", "constant()")
    assert Run(folder).n_rows == 97
    step = next(record["step"] for record in Run(folder).train[40:] if record["positions"])
    assert inspect_run([str(folder), "--step", str(step)]) == 0
    assert f"row {Run(folder).audits[0][step]['indices'][0]}: factors" in capsys.readouterr().out
    assert inspect_run([str(folder), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "into the reservoir once (2 whole epochs" in told and "every size asked for is its answer" in told


def arrive_twice(records):
    after = next(record for record in records if record["arrived"] and record["step"] > 40)
    after["arrived"][0][1] -= 1


def draw_early(records):
    drawn = next(record for record in records if record["positions"])
    drawn["positions"][0][1:] = [90, 91]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (arrive_twice, "repeats positions"), (draw_early, "draws position 90, which has not arrived"),
        (ask_more, "step 6: .* asks for"), (carry_away, "step 6: .* carried on"),
    ],
)  # fmt: skip
def test_a_reservoir_that_was_tampered_with_is_found(tmp_path, capsys, change, said):
    """Mutation: of a reservoir the counters alone, as if its sizes and arrivals followed from nothing."""
    flags = ["--participation", "reservoir", "--per_device_train_batch_size", "0.7", "--max_steps", "60"]
    runs = {"reservoir": start(tmp_path / "run", *flags, "--schedule", "constant()")}
    assert inspect_run([str(tampered(runs, "reservoir", tmp_path, change)), "--verify"]) == 1
    assert re.search(said, capsys.readouterr().out)


TEXT = ["--task", "causal_lm", "--sequence_length", "16", "--optim", "adamw_torch", "--batch_size", "3.5"]


def test_a_stream_that_ends_is_right_and_one_that_was_tampered_with_is_not(tmp_path, capsys):
    """Its rows cannot be looked up, but positions, sizes and the audit's places can.

    Mutations: streams refused; the last step, which the stream's end cuts, held to its size.
    """
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {n} of a stream\n" for n in range(120)))
    flags = [*TEXT, "--streaming", "--dataset_name", str(text), "--eval_dataset", str(text)]
    flags += ["--lr_scheduler_type", "constant", "--schedule", "linear(interval=5)"]
    folder = start(tmp_path / "run", *flags)
    assert Run(folder).train[-1]["batch_size"] < Run(folder).train[-1]["target_batch_size"] - 1
    assert inspect_run([str(folder), "--verify"]) == 0
    told = capsys.readouterr().out
    n = Run(folder).train[-1]["samples"]
    assert f"every position from 0 to {n} once (of a stream)" in told and f"{n} rows of the stream" in told
    assert "every size asked for is its answer" in told
    with pytest.raises(BadSetting, match="leave out --step"):
        inspect_run([str(folder), "--step", "2"])
    for change, said in ((leave_out, "step 6 leaves out positions"), (run_more, "step 6: .* carried on")):
        assert inspect_run([str(tampered({"s": folder}, "s", tmp_path / said[:8], change)), "--verify"]) == 1
        assert re.search(said, capsys.readouterr().out)
    path = folder / "audit" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[8]["indices"][0] = lines[2]["indices"][0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inspect_run([str(folder), "--verify"]) == 1
    assert "step 9: row" in capsys.readouterr().out


def test_several_sources_are_right(tmp_path, capsys):
    """A source that is asked for more begins again. Mutation: the cursor of one source for all."""
    names = []
    for name, n in (("code", 300), ("prose", 12)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {k}, long enough\n" for k in range(n)))
        names.append(f"{name}={tmp_path / name}.txt")
    flags = [*TEXT, "--dataset_name", *names, "--source_sizes", "1", "1", "--schedule", "linear(interval=9)"]
    folder = start(tmp_path / "run", *flags, "--num_train_epochs", "0.5")
    assert inspect_run([str(folder), "--verify"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"prose: every position from 0 to \d+ once \([1-9]\d* whole epochs", told), told
    assert "code: every position" in told and "none twice in an epoch" in told


def test_draws_from_several_sources_are_right(tmp_path, capsys):
    """1.5 of each: 2 to 4 samples a step. Mutation: the sum of 3 drawn as one number, which is always 3."""
    names = []
    for name in ("code", "prose"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {k}, long enough\n" for k in range(200)))
        names.append(f"{name}={tmp_path / name}.txt")
    flags = [*TEXT, "--dataset_name", *names, "--source_sizes", "1.5", "1.5", "--schedule", "constant()"]
    more = ["--batch_size", "3", "--participation", "bernoulli", "--max_steps", "12"]
    folder = start(tmp_path / "run", *flags, *more)
    sizes = {record["batch_size"] for record in records(folder)}
    assert {2, 4} & sizes, "else this test shows nothing"
    assert inspect_run([str(folder), "--verify"]) == 0, capsys.readouterr().out


def test_a_step_without_its_audit_and_with_a_row_that_cannot_be_read(runs, tmp_path, capsys, monkeypatch):
    """--audit given at a resume; --on_bad_sample skip. Mutations: the audit asked for every step: a KeyError;
    rows read bare.
    """
    folder = shutil.copytree(runs["keep"], tmp_path / "run")
    audit = folder / "audit" / "rank0.jsonl"
    lines = audit.read_text().splitlines(keepends=True)
    short = json.loads(lines[4])
    lines[4] = json.dumps(short | {"indices": short["indices"][1:]}) + "\n"
    audit.write_text("".join(lines[4:]))
    monkeypatch.setattr("adaptive.data.fetch", lambda dataset, indices: 1 / 0)
    for step in ("4", "5"):
        assert inspect_run([str(folder), "--step", step]) == 0
        assert "cannot be read (ZeroDivisionError" in capsys.readouterr().out


def test_text_is_decoded(tmp_path, capsys):
    text = tmp_path / "rows.csv"
    text.write_text("text,label\n" + "".join(f"number {n},{n % 2}\n" for n in range(40)))
    flags = ["--task", "classification", "--dataset_name", str(text), "--max_steps", "3"]
    folder = start(tmp_path / "run", *flags, "--batch_size", "2")
    assert inspect_run([str(folder), "--step", "2"]) == 0
    told = capsys.readouterr().out
    for index in Run(folder).audits[0][2]["indices"]:
        assert f"row {index}: " in told
    assert told.count("'number ") == 2 and "label 0" in told


def test_a_reader_who_leaves_ends_a_tool(runs):
    """As SIGPIPE would, without a word. Mutations: no such handler: a traceback; stdout not flushed in it:
    "Exception ignored" and status 120 after a short output.
    """
    assert unread("-m", "adaptive.tools.inspect_run", runs["keep"]) == (141, "")


def test_what_is_no_run_is_a_bad_setting(tmp_path, runs):
    """Mutation: `record["kind"]` of what another program wrote: a KeyError."""
    with pytest.raises(BadSetting, match="has no metrics.jsonl"):
        inspect_run([str(tmp_path)])
    for foreign in ('{"loss": 1.5}\n', "1\n"):
        (tmp_path / "metrics.jsonl").write_text(foreign)
        with pytest.raises(BadSetting, match="not the record of a run"):
            inspect_run([str(tmp_path)])
    with pytest.raises(BadSetting, match="steps 1 to"):
        inspect_run([str(runs["keep"]), "--step", "10000"])
