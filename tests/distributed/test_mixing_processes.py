"""Two sources on two real processes, stopped and continued, are one process."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launching import audits, launch, records
from material import Uneven
from test_same_answer import HERE, distance

from adaptive.tasks import Loaded

pytestmark = pytest.mark.slow
FLAGS = [
    "--task", f"{__file__}:Mixed", "--dataset_name", "old", "new", "--source_sizes", "1.3", "0.7",
    "--source_weights", "1", "2", "--new_sources", "new", "--max_steps", "40", "--micro_batch_size", "3",
    "--optim", "sgd", "--learning_rate", "0.1", "--lr_scheduler_type", "constant", "--report_to", "none",
    "--audit", "--check_agreement", "--eval_every", "20 steps", "--track", "difficulty", "source_loss",
    "--num_train_epochs", "9",
]  # fmt: skip
WILD = [*FLAGS, "--schedule", f"{__file__}:wild"]
DRAWN = [*FLAGS, "--schedule", "incremental(smallest=0.5, largest=1.6, increment=0.1)", "--participation"]


def wild(step, new_data_ratio):
    """Sizes that follow what was measured, below the number of processes at times, at times 0."""
    return {"old": 0.3 + (step * 3.77) % 9, "new": 0 if step % 4 == 0 else 3.1 * (1 - new_data_ratio)}


class Mixed(Uneven):
    """Two parts of the uneven rows, by the name of the source."""

    def load(self, config):
        rows = super().load(config).train
        rows = {"old": rows[:211], "new": rows[211:260]}[config.data.dataset_name]
        return Loaded(train=rows, eval=rows[:11])


def test_two_processes_are_one(tmp_path):
    """R15, R71. Weights to 1e-6, records and rows alike, through a stop at step 17, tokens normalised per
    source; a reservoir's draws too.

    Mutations: token totals of this rank only in train.gradient (1e-2); picks of all ranks on each (rows
    twice); task_ratios from this rank's rows (other sizes, and --check_agreement fails).
    """
    flags = {"wild": WILD, "drawn": [*DRAWN, "bernoulli"], "slots": [*DRAWN, "reservoir"]}
    resume, stop = ["--resume_from_checkpoint", "auto"], ["--max_steps", "17"]

    def of(name: str, w: int, more: list[str]) -> list[str]:
        return [*flags[name], "--output_dir", str(tmp_path / f"{name}{w}"), *more]

    # A reservoir's slots are as many as at the first start: that of both runs is on two processes.
    two = [("wild", 2, stop), ("wild", 2, resume), ("drawn", 2, []), ("slots", 2, []), ("slots", 1, stop)]
    one = [("wild", 1, []), ("drawn", 1, []), ("slots", 1, resume)]
    for w, layout, runs in ((2, "cpu_ddp", two), (1, "cpu", one)):
        each = json.dumps([of(*which) for which in runs])
        launch(layout, w, HERE / "several_runs.py", each, ADAPTIVE_TIMEOUT_MINUTES="1")
    for name in flags:
        one, two = tmp_path / f"{name}1", tmp_path / f"{name}2"
        assert list(audits(two)) == [0, 1] and (name == "slots" or list(audits(one)) == [0]), "processes"
        assert len(records(one)) == len(records(two)) == 40
        for a, b in zip(records(one), records(two), strict=True):
            same = ("positions", "weight", "weight/new", "samples", "tokens", "skipped", "coverage/old")
            assert [a[k] for k in same] == [b[k] for k in same]
            for key in ("loss", "loss/old", "loss/new", "difficulty"):
                assert (a[key] is None) == (b[key] is None)
                assert a[key] is None or a[key] == pytest.approx(b[key], rel=1e-5), key
        assert distance(one, two) < 1e-6
        assert rows_by_step(one) == rows_by_step(two)
        assert records(one, "eval")[-1]["eval_loss/new"] == pytest.approx(
            records(two, "eval")[-1]["eval_loss/new"], rel=1e-5
        )
    assert any(r["batch_size/new"] == 0 for r in records(tmp_path / "wild1"))
    assert np.ptp([r["target_batch_size"] for r in records(tmp_path / "drawn1")]) > 0


def rows_by_step(folder) -> dict[int, list]:
    steps: dict[int, list] = {}
    for lines in audits(folder).values():
        for line in lines:
            names = line.get("sources", [])
            steps.setdefault(line["step"], []).extend(
                zip(line["indices"], names, line["weights"], strict=True)
            )
    return {step: sorted(rows) for step, rows in steps.items()}
