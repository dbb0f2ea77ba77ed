"""The contrastive task on two processes, DDP and ZeRO: the weights, losses and retrieval of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import audits, launch, records
from safetensors.torch import load_file

import train
from adaptive.config import parse

HERE = Path(__file__).parent


def jumping(step, current_size):
    """Steps of both ranks, of one, and empty ones."""
    return [0.9, 7.3, 1.4, 12.2][step % 4]


RUN = ["--task", "contrastive", "--dataset_name", "code=stdlib", "docstring=stdlib", "--source_sizes", "0.7",
       "1.3", "--schedule", f"{__file__}:jumping", "--batch_size", "7.3", "--max_steps", "20",
       "--optim", "sgd", "--learning_rate", "0.05", "--lr_scheduler_type", "constant", "--lr_scaling", "none",
       "--max_grad_norm", "0", "--sequence_length", "48", "--max_target_length", "32", "--source_weights",
       "0.4", "0.6", "--contrastive_scale", "0.5", "--audit", "--check_agreement", "--report_to", "none",
       "--eval_every", "never", "--save_every", "never"]  # fmt: skip
LAYOUTS = {"cpu_ddp": "3", "cpu_zero2": "2", "cpu_zero3": "4"}  # micro-batch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train.main(parse([*RUN, "--output_dir", str(folder)]))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = torch.load(folder / "model" / "heads.pt")
    for side in ("first", "second"):
        encoder = load_file(folder / "model" / side / "model.safetensors")
        found |= {f"{side}.{name}": tensor for name, tensor in encoder.items()}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_are_as_one(alone, tmp_path, layout):
    """SGD in fp32, 20 steps of 0.9 to 12.2 samples, 35 % of the first source: every tensor to 1e-6.

    Mutation: the pairs of this process alone in `before_passes` (the loss of a step: 6e-2).
    """
    runs = [[*RUN, "--output_dir", str(tmp_path / "run"), "--micro_batch_size", LAYOUTS[layout],
             "--self_check", "9", "--per_device_eval_batch_size", "5"]]  # fmt: skip
    launch(layout, 2, HERE / "several_runs.py", json.dumps(runs), ADAPTIVE_TIMEOUT_MINUTES="1")
    folder = tmp_path / "run"
    assert list(audits(folder)) == [0, 1], "another number of processes ran"
    ours, theirs = records(folder), records(alone)
    assert len(ours) == len(theirs) == 20
    assert {0, 1} < {r["batch_size"] for r in ours}, "no step of one rank alone"
    for a, b in zip(ours, theirs, strict=True):
        assert (a["positions"], a["batch_size"]) == (b["positions"], b["batch_size"])
        assert a["loss"] == b["loss"] or a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert all(r["self_check"] < 1e-5 for r in ours if "self_check" in r)
    for a, b in zip(records(folder, "eval"), records(alone, "eval"), strict=True):
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-5)
        assert a["eval_recall_at_5"] == pytest.approx(b["eval_recall_at_5"], abs=0.011)  # a tie of rounding
    mine, whole = weights(folder), weights(alone)
    assert mine.keys() == whole.keys()
    apart = max(float((mine[n] - whole[n]).norm() / whole[n].norm()) for n in whole)
    assert apart < 1e-6
