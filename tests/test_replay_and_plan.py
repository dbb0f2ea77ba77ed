"""A run repeated from its records, and a run planned without running it: both against the real loop."""

from __future__ import annotations

import io
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import records
from test_schedules import SIGNALS, refused

import train
from adaptive import dry_run
from adaptive.config import parse
from adaptive.plan import Lengths, exact, plan_step
from adaptive.schedules import load_schedule, parse_schedule

KNOWN = f"{Path(__file__).parent / 'test_noise_scale.py'}:Known"
MIXED = f"{Path(__file__).parent / 'test_mixing.py'}:Mixed"
WILD = f"{Path(__file__).parent / 'distributed' / 'material.py'}:wild"
QUIET = [
    "--task", KNOWN, "--optim", "sgd", "--learning_rate", "1e-3", "--report_to", "none", "--eval_every",
    "never", "--save_every", "never", "--log_every", "never",
]  # fmt: skip


def run(folder: Path, *arguments: str) -> list[dict]:
    train.main(parse([*QUIET, "--output_dir", str(folder), *arguments]))
    return records(folder)


def write_run(folder: Path, targets: list, sizes: list, carries: list | None = None) -> str:
    """A metrics.jsonl with these steps; returns the schedule that replays it."""
    carries = carries or [0.0] * len(targets)
    lines = [{"kind": "eval", "step": 0, "eval_loss": 1.0}]
    for step, (target, size, carry) in enumerate(zip(targets, sizes, carries, strict=True), 1):
        lines.append(
            {"kind": "train", "step": step, "target_batch_size": target, "batch_size": size, "carry": carry,
             "positions": [["train", 0, size]]}
        )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"replay('{folder}')"


# Replay


def test_replay_asks_for_the_recorded_sizes_and_keeps_the_last(tmp_path, capfd):
    """Mutation: `self.sizes[step - 1]`: every size one decision late."""
    schedule = parse_schedule(write_run(tmp_path / "a", [2.5, 2.5, 7.0], [2, 3, 7]), SIGNALS)
    assert schedule.start == 2.5 and schedule.signals == {"step"}
    assert [schedule.function(step=step) for step in (1, 2)] == [2.5, 7.0]
    assert capfd.readouterr().err == ""
    assert [schedule.function(step=step) for step in (3, 4, 99)] == [7.0, 7.0, 7.0]
    assert capfd.readouterr().err.count("has 3 steps and ends here") == 1


def test_sizes_that_rounding_does_not_explain_are_replayed_as_they_were(tmp_path):
    """Drawn sizes (participation) 3, 0, 2 of 1.7: 3 and 2, without the empty step.

    Mutation: targets whatever the sizes were: 1, 2, 2.
    """
    drawn = write_run(tmp_path / "a", [1.7, 1.7, 1.7], [3, 0, 2], [0.0, 0.0, 0.0])
    assert parse_schedule(drawn, SIGNALS).function.sizes == [3, 2]
    cut = write_run(tmp_path / "b", [4.5, 4.5, 4.5], [4, 3, 4], [0.5, 0.0, 0.5])  # an epoch ended at step 2
    assert parse_schedule(cut, SIGNALS).function.sizes == [4.5] * 3


def test_what_cannot_be_replayed_is_said(tmp_path):
    """Mutations: `sound` always True (a KeyError's traceback); steps not compared (half a run replayed)."""
    refused(lambda: parse_schedule(f"replay('{tmp_path / 'no'}')", SIGNALS), "no metrics.jsonl", "output_dir")
    refused(lambda: parse_schedule("replay()", SIGNALS), "run_dir")
    for text, words in (
        ("", "none"), ("{}\n", "not the record"), ("[1]\n", "not the record"), ("# log\n", "not the record"),
        ('{"kind": "train", "step": 1, "loss": 2.0}\n', "not the record"),
        ('{"kind": "train", "step": 1, "target_batch_size": 8, "batch_size": 8, "carry": 0, "posi', "none"),
    ):  # fmt: skip
        (tmp_path / "metrics.jsonl").write_text(text)
        refused(lambda: parse_schedule(f"replay('{tmp_path}')", SIGNALS), words)
    half = write_run(tmp_path / "half", [8, 8, 8], [8, 8, 8])
    lines = (tmp_path / "half" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "half" / "metrics.jsonl").write_text("".join(lines[2:]))
    refused(lambda: parse_schedule(half, SIGNALS), "not the steps of a whole run", "2 of them")
    refused(
        lambda: parse_schedule(write_run(tmp_path / "empty", [0.2, 0.2], [0, 0], [0.2, 0.4]), SIGNALS),
        "nothing to replay",
    )
    whole = write_run(tmp_path / "whole", [8], [8])
    per_device = parse(["--schedule", whole, "--per_device_train_batch_size", "4"])
    refused(lambda: load_schedule(per_device, SIGNALS), "replay has no use for", "which is 4.0")


SIZES = st.lists(st.integers(1, 400).map(lambda n: n / 20), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, rows=st.integers(1, 90), policy=st.sampled_from(["keep", "wrap", "drop"]))
def test_the_same_rounding_gives_the_same_realised_sizes(tmp_path_factory, sizes, rows, policy):
    """Any sizes and any end of an epoch: planning the replayed sizes runs the recorded ones.

    Mutation: the carry not reset where an epoch cuts a step.
    """
    lengths = Lengths({"train": rows}, Fraction(3))

    def realised(asked: list) -> tuple[list, list, list]:
        cursor, carry, done, plans = {"train": 0}, {"train": Fraction(0)}, 0, []
        for size in asked:
            plan = plan_step({"train": exact(min(size, rows))}, cursor, carry, lengths, policy, done)
            if plan is None:
                break
            cursor, carry, done = plan.cursor, plan.carry, done + plan.size
            plans.append(plan)
        return (
            [float(p.target["train"]) for p in plans], [p.size for p in plans],
            [float(p.carry["train"]) for p in plans],
        )  # fmt: skip

    targets, n, carries = realised(sizes)
    if not sum(n):
        return
    text = write_run(tmp_path_factory.mktemp("run"), targets, n, carries)
    assert realised(parse_schedule(text, SIGNALS).function.sizes)[1] == n


def test_a_replayed_run_is_the_run(tmp_path):
    """A feedback schedule on the real loop, and its replay: the same sizes, weights and losses.

    Mutation: realised sizes asked for instead of targets (weights 1/n instead of 1/M).
    """
    bounds = "smallest=2.5, largest=9.75, interval=3"
    shared = ["--batch_size", "2.5", "--max_steps", "60", "--lr_scaling", "none"]
    one = run(tmp_path / "one", "--schedule", f"noise_scale({bounds})", *shared)
    two = run(tmp_path / "two", "--schedule", f"replay('{tmp_path / 'one'}')", *shared)
    same = ("step", "target_batch_size", "batch_size", "carry", "weight", "positions", "learning_rate")
    assert [[r[name] for name in same] for r in two] == [[r[name] for name in same] for r in one]
    assert len({r["target_batch_size"] for r in one}) > 2, "nothing was decided"
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-12)
    assert "noise_scale" in one[0] and "noise_scale" not in two[0]


@pytest.mark.parametrize("sized", [["--source_sizes", "3.5", "2.7"], []], ids=["targets", "realised"])
def test_a_run_with_sources_is_replayed(tmp_path, sized):
    """Sizes of its own for each source, 0 at times; or 7 split by rows, 13 to 29, whose parts no decimal
    number says: at step 6 a carry would fall short of 1. The same positions in either, and where the targets
    lead there the same losses; the replay is given other --source_sizes, which have no say.

    Mutations: the first decision split by the flags; the sum of the sources alone (other positions).
    """
    both = ["--task", MIXED, "--dataset_name", "a", "b", "--num_train_epochs", "3", "--lr_scaling", "none"]
    own = f"{MIXED.partition(':')[0]}:by_source" if sized else "constant()"
    one = run(tmp_path / "one", *both, *sized, "--batch_size", "7", "--schedule", own)
    again = ["--schedule", f"replay('{tmp_path / 'one'}')", "--source_sizes", "1", "5"]
    two = run(tmp_path / "two", *both, *again)
    ran = [r for r in one if r["batch_size"]]
    assert [r["positions"] for r in two if r["batch_size"]] == [r["positions"] for r in ran]
    assert len({r["batch_size/b"] for r in ran}) > 1
    if sized:
        same = ("step", "target_batch_size/a", "target_batch_size/b", "carry", "weight/b")
        assert [[r[name] for name in same] for r in two] == [[r[name] for name in same] for r in one]
        assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-12)
    else:
        assert {r["carry"] for r in two} == {0}, "realised sizes"
    planned = train.main(parse([*QUIET, *both, *again, "--output_dir", str(tmp_path / "no"), "--dry_run"]))
    assert (planned.step, planned.samples) == (len(two), two[-1]["samples"])


# Dry run


@pytest.mark.parametrize("arguments", [
    ["--schedule", WILD, "--num_train_epochs", "0.05", "--batch_size", "0.3"],
    ["--schedule", "seesaw()", "--max_samples", "900", "--max_batch_size", "20", "--warmup_ratio", "0.1"],
    ["--schedule", "ramp(0.25, 40, 500)", "--max_samples", "1000", "--epoch_end", "drop"],
    ["--schedule", "linear(interval=7)", "--max_steps", "41", "--per_device_train_batch_size", "1.3"],
    ["--schedule", "constant()", "--batch_size", "30000", "--num_train_epochs", "2.5", "--epoch_end", "wrap"],
], ids=lambda arguments: arguments[1].split(":")[-1].split("(")[0])  # fmt: skip
def test_the_plan_is_the_run(tmp_path, capfd, arguments):
    """Sizes, steps, updates, samples and learning rates of the plan are those of the real run, to the bit.

    Mutation: `mean_size` of the realised size; progress after the step instead of before; the first size not
    the schedule's own.
    """
    planned = train.main(parse([*QUIET, "--output_dir", str(tmp_path / "none"), "--dry_run", *arguments]))
    told = capfd.readouterr().out
    assert not (tmp_path / "none").exists(), "a plan leaves nothing behind"
    real = run(tmp_path / "run", *arguments)
    assert (planned.step, planned.samples) == (len(real), real[-1]["samples"])
    assert planned.updates == real[-1]["updates"]
    assert f"{len(real):,} steps, {planned.updates:,} updates, {planned.samples:,} samples" in told

    config = parse([*QUIET, *arguments])
    schedule = load_schedule(config, SIGNALS)
    run_ = config.run
    lengths = Lengths({"train": 20_000}, exact(run_.num_train_epochs), run_.max_samples, run_.max_steps)
    walked = dry_run.walk(config, schedule, lengths, 1)
    assert walked.sizes == [r["batch_size"] for r in real]
    assert walked.targets == [r["target_batch_size"] for r in real]
    assert walked.rates == [r["learning_rate"] for r in real]


def test_a_plan_is_told_where_stdout_has_no_blocks(monkeypatch):
    """Mutation: print alone: a UnicodeEncodeError instead of the plan."""
    held = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", held)
    train.main(parse([*QUIET, "--dry_run", "--schedule", "ramp(4, 64, 2000)"]))
    assert b"sizes from 4 to" in held.buffer.getvalue() and b"?" in held.buffer.getvalue()


def test_steps_saved_against_a_constant_size():
    """1000 samples: 250 steps of 4; a ramp's share of them. Mutation: 1000 / 4 with max_steps ignored."""
    config = parse(["--schedule", "exponential(4, 16, 1000)", "--max_samples", "1000"])
    lengths = Lengths({"train": 5000}, Fraction(1), 1000)
    lines = dry_run._summary(
        config, load_schedule(config, SIGNALS), lengths, walked := dry_run.walk(
            config, load_schedule(config, SIGNALS), lengths, 1), 0.0,
    )  # fmt: skip
    share = 1 - len(walked.sizes) / 250
    assert f"a constant 4 would take 250 steps: {share:.1%} fewer here" in lines[-1]
    assert 0.4 < share < 0.7
    capped = Lengths({"train": 5000}, Fraction(1), 1000, 100)
    config.run.max_steps = 100
    assert dry_run._constant_steps(config, capped, Fraction(4)) == 100


def test_a_plot_shows_the_curve():
    """A rising line fills columns from left to right. Mutation: columns by step instead of by samples."""
    lines = dry_run.plot("size", [0, 1, 2, 90], [1.0, 1.0, 1.0, 8.0])
    top, bottom = lines[1].split("│")[1], lines[dry_run.HEIGHT].split("│")[1]
    assert len(bottom) == dry_run.WIDTH and top == " " * (dry_run.WIDTH - 1) + "█"


def test_a_schedule_that_measures_cannot_be_planned():
    for text in ("noise_scale()", "gradient_memory()", "loss_plateau()"):
        config = parse(["--dry_run", "--schedule", text])
        words = ("--dry_run", text.split("(")[0], "only a run measures", "replay")
        refused(lambda config=config: load_schedule(config, SIGNALS), *words)


@pytest.mark.parametrize("flags", [
    ["--batch_size", "0.25"], ["--per_device_train_batch_size", "0.3"], ["--batch_size", "3"],
    ["--batch_size", "0.5", "--base_batch_size", "0.1"],
])  # fmt: skip
def test_a_constant_size_keeps_the_rate_that_was_asked_for(flags):
    """Also below 1, where an update is one sample: --learning_rate is that of the base size.

    Mutation: rule(M / base) with a base of 0.25, for which M is 1: twice the rate.
    """
    more = ["--schedule", "constant()", "--lr_scheduler_type", "constant", "--learning_rate", "1e-3"]
    config = parse([*flags, *more, "--num_train_epochs", "1"])
    schedule = load_schedule(config, SIGNALS)
    walked = dry_run.walk(config, schedule, Lengths({"train": 39}, Fraction(1)), 1)
    assert set(walked.rates) == {1e-3}
