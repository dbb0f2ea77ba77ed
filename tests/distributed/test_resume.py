"""Stopped, killed and continued on another number of processes: the same run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import ROOT, audits, environment, launch, records, run_python
from safetensors.torch import load_file
from test_same_answer import ADAMW, COMMON, HERE, SGD, distance

pytestmark = pytest.mark.slow
DROPOUT = [  # BERT with dropout 0.1 on the standard library's source
    "--task", "classification", "--max_steps", "60", "--save_every", "8 steps", "--eval_every", "25 steps",
    "--report_to", "none", "--audit", "--sequence_length", "64", "--batch_size", "3.3", "--keep_last", "3",
]  # fmt: skip


def weights(folder: Path) -> dict:
    return load_file(folder / "model" / "model.safetensors")


def told(folder: Path) -> list[dict]:
    """metrics.jsonl without the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def start_and_signal(folder: Path, number: int, after: int) -> subprocess.Popen:
    """`python train.py`, sent a signal once `after` steps are recorded; returns when it has ended."""
    command = [sys.executable, "train.py", *DROPOUT, "--output_dir", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    deadline, metrics = time.monotonic() + 120, folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.said = process.communicate(timeout=60)[0]
    return process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run_python("train.py", *DROPOUT, "--output_dir", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_signal_and_kill_change_nothing(undisturbed, tmp_path):
    """R55. SIGTERM, then SIGKILL, then to the end: records, rows and weights are bit-identical, with dropout.

    Mutations: Engine.seed in the first step only (other masks); metrics not cut back (doubles).
    """
    folder = tmp_path / "run"
    stopped = start_and_signal(folder, signal.SIGTERM, after=12)
    assert stopped.returncode == 0 and "--resume_from_checkpoint auto" in stopped.said
    at = json.loads((newest(folder) / "manifest.json").read_text())["state"]["step"]
    assert at == told(folder)[-1]["step"], "the last step was saved"

    command = [
        sys.executable,
        "train.py",
        "--config",
        str(folder / "config.yaml"),
        "--resume_from_checkpoint",
        "auto",
    ]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    while told(folder)[-1]["step"] < at + 13:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    partial = (
        folder / "checkpoints" / "step_9999"
    )  # as a kill inside a save that renames too early would leave it
    shutil.copytree(newest(folder), partial)
    os.truncate(partial / "training.pt", 1000)
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passing over" in done.stdout and "training.pt" in done.stdout

    assert told(folder) == told(undisturbed)
    assert audits(folder) == audits(undisturbed)
    mine, theirs = weights(folder), weights(undisturbed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))


def runs(layout: str, processes: int, *arguments: list[str]) -> str:
    done = launch(
        layout, processes, HERE / "several_runs.py", json.dumps(list(arguments)), ADAPTIVE_TIMEOUT_MINUTES="1"
    )
    return done.stdout


MOMENTUM = [*SGD, "--optim_args", "momentum=0.9", "--learning_rate", "0.02"]
GENTLE_ADAMW = [*ADAMW[:2], "--learning_rate", "1e-4", "--max_steps", "40"]
CASES = [  # layout, processes until step 23, then, optimizer
    ("cpu_ddp", 2, (3, 1), MOMENTUM),
    ("cpu_zero1", 2, (3,), GENTLE_ADAMW),
    ("cpu_zero2", 2, (2, 1), GENTLE_ADAMW),
    ("cpu_zero3", 2, (2, 3), GENTLE_ADAMW),
    ("cpu_fsdp2", 2, (2, 3, 1), GENTLE_ADAMW),
]


@pytest.mark.parametrize(("layout", "first", "then", "optimizer"), CASES, ids=[case[0] for case in CASES])
def test_goes_on_with_any_number_of_processes(tmp_path, layout, first, then, optimizer):
    """R28 to R30, R49, R57, R58. W = 2 until step 23, then others to the end: rows, sizes and losses as
    without a stop, weights to 1e-6, and to the bit where W stays.

    Mutations: the cursor kept per rank (rows repeat); carry not saved (sizes differ by one); optimizer not
    loaded; settings of the parameter groups not put back after a conversion (biases decay); FSDP2's `_part`
    that gives every rank the first one's rows.
    """
    settings = [*COMMON, *optimizer, "--micro_batch_size", "3", "--warmup_samples", "400"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cut_short = [*settings, "--output_dir", str(cut), "--max_steps", "23"]
    runs(layout, first, [*settings, "--output_dir", str(whole)], cut_short)
    for at, processes in enumerate(then):
        folder = tmp_path / f"then-{processes}-{at}"
        shutil.copytree(cut, folder)
        resume = [*settings, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        said = runs(layout, processes, resume)
        changed = f"{processes} process(es) go on from {first}" in said
        assert changed == (processes != first)
        a, b = records(folder), records(whole)
        same = (
            "step",
            "positions",
            "batch_size",
            "samples",
            "tokens",
            "updates",
            "carry",
            "skipped",
            "learning_rate",
        )
        assert [[r[k] for k in same] for r in a] == [[r[k] for k in same] for r in b]
        assert [r["loss"] for r in a if r["loss"]] == pytest.approx(
            [r["loss"] for r in b if r["loss"]], rel=1e-5
        )
        assert b[22]["samples"] < 400, "warming up when it stopped"
        assert distance(folder, whole) < (1e-6 if processes != first else 1e-30)
        assert set(audits(folder)) == set(range(max(first, processes)))
        assert not list((folder / "checkpoints").glob(".*")), "nothing is left of a conversion"


def test_an_optimizer_without_conversion_is_refused(tmp_path):
    """R30. SGD with momentum under ZeRO-2, 2 processes to 3: one line that says why, never a fresh
    optimizer.
    """
    settings = [
        *COMMON,
        *MOMENTUM,
        "--micro_batch_size",
        "3",
        "--output_dir",
        str(tmp_path / "run"),
        "--max_steps",
    ]
    runs("cpu_zero2", 2, [*settings, "4"])
    resume = json.dumps([[*settings, "6", "--resume_from_checkpoint", "auto"]])
    done = launch("cpu_zero2", 3, HERE / "several_runs.py", resume, check=False, ADAPTIVE_TIMEOUT_MINUTES="1")
    assert done.returncode != 0
    assert (
        "saved by 2 process(es), which are 3 now, and DeepSpeed cannot convert its"
        in done.stdout + done.stderr
    )


def test_another_dataset_is_refused(tmp_path):
    folder = tmp_path / "run"
    small = [*DROPOUT, "--max_steps", "3", "--output_dir", str(folder), "--eval_every", "never"]
    assert run_python("train.py", *small).returncode == 0
    text = tmp_path / "other.csv"
    text.write_text("text,label\n" + "".join(f"word {n},{n % 2}\n" for n in range(40)))
    done = run_python("train.py", *small, "--resume_from_checkpoint", "auto", "--dataset_name", text)
    assert (
        done.returncode == 2 and "another dataset" in done.stderr and "--allow_dataset_change" in done.stderr
    )
