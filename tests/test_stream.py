"""Streams: which row stands at which position, for every cut; where they end, and how they are resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import audits, records, run_python
from safetensors.torch import load_file

import train
from adaptive.config import BadSetting, parse
from adaptive.console import covered
from adaptive.data import load
from adaptive.stream import MARK_EVERY, Stream
from adaptive.tasks import load_task

QUICK = ["--report_to", "none", "--schedule", "constant()", "--sequence_length", "32"]


class Numbers:
    """n rows that count how often they are read; broken: the row that cannot be."""

    def __init__(self, n: int, broken: int = -1):
        self.n, self.broken, self.read = n, broken, 0

    def __iter__(self):
        for number in range(self.n):
            self.read += 1
            if number == self.broken:
                raise OSError("the disk\nis gone")
            yield {"number": number, "tokens": [number, number]}


CONFIG = parse(["--streaming", "--max_steps", "9"])


def stream(dataset, rank=0, world_size=1, buffer=0) -> Stream:
    config = replace(CONFIG, data=replace(CONFIG.data, shuffle_buffer=buffer))
    return Stream("train", dataset, config, rank, world_size)


def walk(one: Stream, sizes: list[int], start: int = 0) -> list[list[tuple[int, int, int]]]:
    """(position, place, number) of each step of this rank, until the stream is over."""
    steps = []
    for size in sizes:
        stop = one.reach(start, start + size)
        if stop == start:
            break
        first = start + (one.rank - start) % one.world_size
        own = np.arange(first, stop, one.world_size)
        rows, places = one.read(own)
        steps.append([(p, at, row["number"]) for p, at, row in zip(own.tolist(), places, rows, strict=True)])
        start = stop
    return steps


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60), buffer=st.integers(0, 12), world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=60, max_size=60),
)  # fmt: skip
def test_each_row_once_and_alike_for_every_cut(n, buffer, world_size, sizes):
    """Mutations: the order of a whole block for a last, shorter one: rows are lost (IndexError); a rank keeps
    positions by row instead of by position: KeyError with a buffer.
    """
    whole = walk(stream(Numbers(n), 0, 1, buffer), sizes)
    parts = [walk(stream(Numbers(n), rank, world_size, buffer), sizes) for rank in range(world_size)]
    assert [sorted(sum(step, [])) for step in zip(*parts, strict=True)] == whole
    told = sum(whole, [])
    assert [position for position, _, _ in told] == list(range(n))
    assert sorted(number for _, _, number in told) == list(range(n))
    assert all(place == number for _, place, number in told)
    assert all(abs(position - number) < max(buffer, 1) for position, _, number in told)
    assert [len(step) for step in whole[:-1]] == sizes[: len(whole) - 1]  # the last one may be cut


def test_a_buffer_shuffles_every_block_otherwise():
    """Mutation: one order for all blocks."""
    ((*told,),) = walk(stream(Numbers(400), buffer=100), [400])
    numbers = np.array([number for _, _, number in told]).reshape(4, 100)
    assert (numbers // 100 == np.arange(4)[:, None]).all()
    orders = numbers % 100
    assert len({tuple(order) for order in orders}) == 4
    assert all(np.abs(order - np.arange(100)).mean() > 20 for order in orders)  # 33 of a random one


def test_a_row_that_cannot_be_read_is_named():
    """Mutation: the exception as it comes: a traceback through generators, no row."""
    one = stream(Numbers(9, broken=5))
    assert one.reach(0, 5) == 5
    with pytest.raises(BadSetting, match=r"row 5 of the stream 'train'.*OSError: the disk is gone") as said:
        one.reach(5, 7)
    assert "\n" not in str(said.value)


def test_what_can_be_read_once_only_is_refused():
    """Mutation: no look at it: the first row goes to a pass of weight 0 and is never trained on."""
    for dataset in (iter([{"number": 0}]), map(dict, []), 3):
        with pytest.raises(BadSetting, match="read only once") as said:
            stream(dataset)
        assert "\n" not in str(said.value)


def files(folder: Path, rows: int = 1500) -> Path:
    """Two jsonl files of `rows` texts in all, of 1 to 60 characters."""
    folder.mkdir()
    for part in range(2):
        lines = [{"text": f"{n}: {'x' * (n % 57)}"} for n in range(part, rows, 2)]
        (folder / f"part_{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def loaded(folder: Path, *flags: str):
    config = parse(["--dataset_name", str(folder), "--packing", "none", "--sequence_length", "16", *flags])
    return load(load_task("causal_lm"), config).train["train"]


def rest(one: Stream, start: int) -> dict[int, tuple[int, tuple]]:
    """{position: (place, tokens)} of this rank from `start` to the end, 50 samples a step."""
    found = {}
    while (stop := one.reach(start, start + 50)) > start:
        own = np.arange(start + (one.rank - start) % one.world_size, stop, one.world_size)
        rows, places = one.read(own)
        pairs = zip(own.tolist(), rows, places, strict=True)
        found |= {p: (place, tuple(row["input_ids"])) for p, row, place in pairs}
        start = stop
    return found


@pytest.mark.parametrize("buffer", [0, 100])
def test_a_mark_reads_on_without_what_came_before(tmp_path, buffer):
    """A mark goes through JSON and to another number of processes; little is read again. Mutations: a block's
    last mark with its first row: rows come twice; `filled` not set to the mark's row: rows of other places.
    """
    rows = loaded(files(tmp_path / "data", 1100), "--streaming", "--max_steps", "9")
    one, marks, start = stream(rows, buffer=buffer), {}, 0
    while (stop := one.reach(start, start + 37)) > start:
        one.read(np.arange(start, stop))
        marks[start := stop] = json.loads(json.dumps(one.mark_before(stop)))
    whole = rest(stream(rows, buffer=buffer), 0)
    assert len(whole) == start > 1600 and sorted(place for place, _ in whole.values()) == list(range(start))
    for begin, world_size in ((37, 1), (37 * 30, 3), (37 * 40, 2), (start, 1)):
        found = {}
        for rank in range(world_size):
            other = stream(rows, rank, world_size, buffer)
            other.seek(marks[begin])
            other.reach(begin, begin)
            first = other._marks[0]["row"] if other._marks else 0
            assert begin - first < MARK_EVERY + 37 + buffer
            found |= rest(other, begin)
        assert found == {p: row for p, row in whole.items() if p >= begin}


@pytest.mark.parametrize("flags", [
    ["--packing", "stream"], ["--packing", "documents"], ["--packing", "none"], ["--task", "masked_lm"],
])  # fmt: skip
def test_files_give_the_rows_they_give_without_streaming(tmp_path, flags):
    """Mutation: texts tokenized one by one: packed rows end with every text."""
    folder = files(tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaptive.corpus._hold_out", lambda ds, share, seed: (ds, None))
        config = parse(["--dataset_name", str(folder), "--sequence_length", "48", *flags])
        mapped = load(load_task(config.data.task), config).train["train"]
    config = parse(["--dataset_name", str(folder), "--sequence_length", "48", "--streaming", "--max_steps",
                    "9", *flags])  # fmt: skip
    streamed = list(load(load_task(config.data.task), config).train["train"])
    assert len(streamed) == len(mapped) > 100
    for one, other in zip(streamed, mapped, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one if name != "position")


def test_other_files_and_tasks(tmp_path):
    """Text, csv, parquet and saved folders; a ClassLabel; pairs; a split of its own for validation."""
    rows = datasets.Dataset.from_dict(
        {"text": ["a", None, "c"], "target": ["x", "y", "z"], "label": [0, 1, 0]}
    ).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.txt").write_text("a\n\nc\n")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "saved")
    for task, name, n_eval in (
        ("seq2seq", "rows.csv", 0), ("seq2seq", "rows.parquet", 0), ("causal_lm", "rows.txt", 0),
        ("classification", "saved", 1), ("seq2seq", "saved", 1),
    ):  # fmt: skip
        packing = ["--packing", "none"] if task == "causal_lm" else []
        config = parse(["--task", task, "--dataset_name", str(tmp_path / name), "--streaming", "--max_steps",
                        "9", *packing, "--text_column", "text"])  # fmt: skip
        got = load(load_task(task), config)
        assert len(list(got.train["train"])) == (2 if name == "rows.txt" else 3), (task, name)
        assert len(got.eval["train"] or []) == n_eval
    with pytest.raises(BadSetting, match="does not name its classes"):
        config = parse(["--task", "classification", "--dataset_name", str(tmp_path / "rows.csv"),
                        "--streaming", "--max_steps", "9", "--label_column", "target"])  # fmt: skip
        load(load_task("classification"), config)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(BadSetting, match="no rows"):
        config = parse(["--dataset_name", str(tmp_path / "empty.txt"), "--streaming", "--max_steps", "9"])
        load(load_task("causal_lm"), config)


@pytest.mark.parametrize(("flags", "instead"), [
    ([], "--max_samples or --max_steps, or --lr_scheduler_type constant"),
    (["--max_steps", "9", "--num_train_epochs", "2"], "--max_samples or --max_steps"),
    (["--max_steps", "9", "--eval_share", "0.2"], "--eval_dataset"),
    (["--max_steps", "9", "--epoch_end", "wrap"], "write keep"),
    (["--max_steps", "9", "--warmup_ratio", "0.1"], "--warmup_samples"),
    (["--lr_scheduler_type", "constant", "--dry_run"], "--max_samples or --max_steps"),
    (["--max_steps", "9", "--participation", "reservoir"], "carry or bernoulli"),
    (["--max_steps", "9", "--difficulty_column", "hard"], "leave it out"),
    (["--max_steps", "9", "--on_bad_sample", "skip"], "write stop"),
    (["--max_steps", "9", "--dataloader_num_workers", "2"], "write 0"),
    (["--max_steps", "9", "--dataset_name", "stdlib", "stdlib_topics"], "one --dataset_name"),
    (["--max_steps", "9", "--task", "contrastive"], "leave it out"),
    (["--max_steps", "9", "--self_check", "2", "--dataset_is_sharded"], "leave one of them out"),
])  # fmt: skip
def test_what_a_stream_cannot_do(flags, instead):
    """R42. Mutation: any line of config._beyond_streams without its condition."""
    with pytest.raises(BadSetting, match=instead) as said:
        parse(["--streaming", *flags])
    assert "\n" not in str(said.value)


def test_refusals_are_one_line_and_exit_status_2(tmp_path):
    """Before torch is imported, or where the schedule is known. Mutation: `epoch` left among the signals: the
    size never changes and nobody knows why.
    """
    done = run_python("train.py", "--streaming", "--output_dir", tmp_path / "run", timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--max_samples" in done.stderr
    with pytest.raises(BadSetting, match="write --streaming as well"):
        parse(["--dataset_is_sharded"])
    (tmp_path / "by_epoch.py").write_text("def by_epoch(step, current_size, epoch):\n    return 8\n")
    flags = ["--streaming", "--max_steps", "3", "--schedule", f"{tmp_path}/by_epoch.py:by_epoch()"]
    with pytest.raises(BadSetting, match="follows epoch, which a stream"):
        train.main(parse([*flags, "--output_dir", str(tmp_path / "run"), "--report_to", "none"]))


def run(folder: Path, *flags: str) -> list[dict]:
    train.main(parse([*QUICK, "--output_dir", str(folder), *flags]))
    return records(folder)


def distance(one: Path, other: Path) -> float:
    """Of all weights together, over their norm."""
    a, b = (load_file(next((folder / "model").glob("*.safetensors"))) for folder in (one, other))
    squares = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    return float((sum(s for s, _ in squares) / sum(t for _, t in squares)).sqrt())


def test_a_stream_trains_as_the_same_rows_in_that_order_do(tmp_path):
    """To the end of both, with a cut last step. Mutations: a cut step that keeps its carry, or weighs 1/G:
    the last update differs by 1e-2; one row skipped at the start: by 1e-1.
    """
    material = Path(__file__).parent / "distributed" / "material.py"
    flags = ["--task", f"{material}:InOrder", "--schedule", f"{material}:wild()", "--optim", "sgd",
             "--learning_rate", "0.1", "--lr_scheduler_type", "constant", "--audit"]  # fmt: skip
    mapped = run(tmp_path / "mapped", *flags)
    streamed = run(tmp_path / "streamed", *flags, "--streaming", "--shuffle_buffer", "0")
    for one, other in zip(streamed, mapped, strict=True):
        assert one["epoch"] is None and one["train_coverage"] is None
        for name in ("positions", "batch_size", "weight", "carry", "samples", "tokens", "skipped"):
            assert one[name] == other[name], name
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert streamed[-1]["samples"] == 367 and streamed[-1]["batch_size"] < 10
    assert sum((line["indices"] for line in audits(tmp_path / "streamed")[0]), []) == list(range(367))
    assert distance(tmp_path / "streamed", tmp_path / "mapped") < 1e-6


def test_stop_rules_and_what_is_said(tmp_path, capsys):
    """R42. By samples, by steps, and at the stream's end, which is said. Mutation: `total` from the rows: the
    bar has 2^62 samples to go.
    """
    folder = files(tmp_path / "data", 60)
    flags = ["--dataset_name", str(folder), "--streaming", "--packing", "none", "--batch_size", "0.4"]
    told = run(tmp_path / "few", *flags, "--max_samples", "5")
    assert told[-1]["samples"] == 5 and [r["batch_size"] for r in told[:3]] == [0, 0, 1]
    flags[-1] = "16"
    assert run(tmp_path / "steps", *flags, "--max_steps", "2")[-1]["samples"] == 32
    capsys.readouterr()
    told = run(tmp_path / "all", *flags, "--lr_scheduler_type", "constant", "--log_every", "1 steps")
    n = told[-1]["samples"]
    assert 60 <= n < 120 and told[-1]["batch_size"] == n % 16
    out, err = capsys.readouterr()
    assert f"is over after {n:,} samples" in err and "nothing is evaluated" in err
    lines = [line for line in out.splitlines() if line.strip()[:1].isdigit() and "e-" in line]
    assert lines and all(line.endswith("     -") for line in lines)  # time left
    assert "a stream of unknown length" in out and f"{n:>6}     -" in out and "%" not in out
    assert records(tmp_path / "all", "eval") == []
    assert [covered({"samples": n}) for n in (0, 999, 12345, 4_560_000)] == ["0", "999", "12.3k", "4.56M"]


def test_stop_and_resume(tmp_path):
    """With a buffer, from a state_dict and, where there is none, by skipping. Mutations: `stream` not saved,
    with a dataset that forbids reading its start again; another buffer taken without a word.
    """
    folder = files(tmp_path / "data", 700)
    flags = ["--dataset_name", str(folder), "--streaming", "--packing", "none", "--shuffle_buffer", "150",
             "--batch_size", "47.5", "--lr_scheduler_type", "constant", "--audit", "--optim", "sgd",
             "--learning_rate", "0.1", "--self_check", "5"]  # fmt: skip
    whole = run(tmp_path / "whole", *flags)
    assert {r["self_check"] < 1e-5 for r in whole if r.get("self_check") is not None} == {True}
    run(tmp_path / "again", *flags, "--max_steps", "9")
    manifest = tmp_path / "again" / "checkpoints" / "step_9" / "manifest.json"
    state = json.loads(manifest.read_text())["state"]
    assert state["cursor"]["train"] - 150 < state["stream"]["row"] <= state["cursor"]["train"]
    shutil.copytree(tmp_path / "again", tmp_path / "other")
    again = run(tmp_path / "again", *flags, "--resume_from_checkpoint", "auto")
    for name in ("positions", "loss", "samples"):
        assert [r[name] for r in again] == [r[name] for r in whole]
    assert audits(tmp_path / "again") == audits(tmp_path / "whole")
    assert distance(tmp_path / "again", tmp_path / "whole") == 0
    flags[flags.index("150")] = "100"
    with pytest.raises(BadSetting, match="another dataset.*--shuffle_buffer 150"):
        run(tmp_path / "other", *flags, "--resume_from_checkpoint", "auto")
