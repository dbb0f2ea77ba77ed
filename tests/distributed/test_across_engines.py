"""Weights and counters go from one engine to another with --weights_only; what else does, between which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launching import audits, launch, records, run_python
from test_same_answer import COMMON, HERE, SGD, distance

pytestmark = pytest.mark.slow
TO = ["--resume_from_checkpoint", "auto", "--weights_only"]


def settings(folder: Path, max_steps: int, *more: str) -> list[str]:
    steps = ["--max_steps", str(max_steps), "--eval_every", "never", "--keep_last", "9"]
    return [*COMMON, *SGD, "--micro_batch_size", "3", *steps, "--output_dir", str(folder), *more]


def opened(layout: str, source: Path, at: int) -> Path:
    """Two runs that open `source`'s checkpoint of step `at` under `layout`: one ends, one goes on."""
    still, on = source.with_name(f"{layout}-still"), source.with_name(f"{layout}-on")
    for folder in (still, on):
        shutil.copytree(source, folder)
        shutil.rmtree(folder / "model")
    runs = json.dumps([settings(still, at, *TO), settings(on, at + 3, *TO)])
    if layout == "cpu":
        done = run_python(HERE / "several_runs.py", runs)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        launch(layout, 2, HERE / "several_runs.py", runs, ADAPTIVE_TIMEOUT_MINUTES="0.5")
        assert set(audits(on)) == {0, 1}
    assert distance(still, source) < 1e-7, "the weights are the checkpoint's"
    assert [r["step"] for r in records(on)] == list(range(1, at + 4))
    assert distance(on, source) > 1e-4, "it trains on: the engine steps from its own copy of the weights"
    return on


def test_weights_go_from_engine_to_engine(tmp_path):
    """One process to ZeRO-2 to ZeRO-3 to one process, 3 steps on each, as one process throughout: to 1e-6.

    SGD without momentum has no state to lose. Mutations: the fp32 copy not refreshed (the first step undoes
    the load); weights of rank 0 only; counters from anew.
    """
    first, whole = tmp_path / "first", tmp_path / "whole"
    done = run_python(HERE / "several_runs.py", json.dumps([settings(first, 4), settings(whole, 13)]))
    assert done.returncode == 0, done.stderr[-3000:]
    second = opened("cpu_zero2", first, 4)
    third = opened("cpu_zero3", second, 7)
    last = opened("cpu", third, 10)
    assert distance(last, whole) < 1e-6
    assert [r["positions"] for r in records(last)] == [r["positions"] for r in records(whole)]


def test_fsdp2_and_one_process_open_each_others_checkpoints(tmp_path):
    """One process to FSDP2 on 2, with the optimizer's momentum, as one process throughout: to 1e-6.

    The way back is in test_resume.py. Mutation: `_own_part` that hands on no state (1e-2).
    """
    momentum = ["--optim_args", "momentum=0.9", "--learning_rate", "0.02"]
    first, whole = tmp_path / "first", tmp_path / "whole"
    runs = [settings(first, 6, *momentum), settings(whole, 12, *momentum)]
    done = run_python(HERE / "several_runs.py", json.dumps(runs))
    assert done.returncode == 0, done.stderr[-3000:]
    on = [settings(first, 12, *momentum, "--resume_from_checkpoint", "auto")]
    launch("cpu_fsdp2", 2, HERE / "several_runs.py", json.dumps(on), ADAPTIVE_TIMEOUT_MINUTES="0.5")
    assert set(audits(first)) == {0, 1}
    assert distance(first, whole) < 1e-6
