"""A step's gradient recomputed by one process: it agrees, it notices, and training does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launching import records
from test_schedules import refused

import train
from adaptive.config import parse
from adaptive.engine import Engine
from adaptive.tasks import Loaded, Task


class Noisy(torch.nn.Module):
    """Dropout, and a buffer that counts forward passes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)
        self.unused = torch.nn.Parameter(torch.zeros(3))
        self.drop = torch.nn.Dropout(0.3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.two(self.drop(torch.tanh(self.one(x))))[:, 0]


class Regression(Task):
    def load(self, config):
        draw = np.random.default_rng(3)
        return Loaded(train=[{"x": draw.normal(size=6), "y": draw.normal()} for _ in range(300)])

    def model(self, config):
        return Noisy().double()

    def loss_sum(self, model, batch):
        return (model(batch["x"]) - batch["y"]) ** 2


RUN = [
    "--task", f"{__file__}:Regression", "--learning_rate", "1e-2", "--report_to", "none", "--eval_every",
    "never", "--save_every", "never", "--log_every", "never", "--dtype", "float64", "--batch_size", "2.5",
    "--schedule", "linear(interval=3, max_size=20, increment=3)", "--max_steps", "20",
    "--micro_batch_size", "3", "--optim", "adamw_torch", "--track", "noise_scale",
]  # fmt: skip


def run(folder, *arguments: str) -> tuple[list[dict], dict]:
    train.main(parse([*RUN, "--output_dir", str(folder), *arguments]))
    return records(folder), torch.load(folder / "model" / "weights.pt")


def test_it_agrees_and_training_does_not_notice(tmp_path, capfd):
    """Every second step checked, or none: the same records, weights, draws and buffers, to the bit.

    Mutations: engine.seed not called again (other masks); buffers not put back (twice the passes); hooks of
    the noise scale left on (another noise scale); training mode (0.3 apart).
    """
    plain, weights = run(tmp_path / "plain")
    checked, same = run(tmp_path / "checked", "--self_check", "2")
    for record in (*plain, *checked):
        del record["seconds"]
    differences = [record.pop("self_check") for record in checked if "self_check" in record]
    assert len(differences) == 10 and all(0 <= difference < 1e-12 for difference in differences)
    assert checked == plain and plain[-1]["noise_scale"] is not None
    assert set(weights) == set(same) and all(torch.equal(weights[name], same[name]) for name in weights)
    assert "self check" not in capfd.readouterr().err


@pytest.mark.parametrize("wrong", ["scale", "last pass"])
def test_it_notices(tmp_path, monkeypatch, capfd, wrong):
    """A backward that scales by 1.01, and one that keeps the last pass only: recorded, and warned of.

    Mutation: the gradient compared with itself (0); the norms compared (a pass lost may have any norm).
    """
    backward = Engine.backward

    def scaled(engine, loss):
        backward(engine, loss * 1.01)

    def forgetful(engine, loss):
        engine.optimizer.zero_grad(set_to_none=True)
        backward(engine, loss)

    monkeypatch.setattr(Engine, "backward", scaled if wrong == "scale" else forgetful)
    told, _ = run(tmp_path / "run", "--self_check", "20")
    warning = capfd.readouterr().err
    assert "self check of step 20" in warning and "1 process(es)" in warning
    if wrong == "scale":
        assert told[-1]["self_check"] == pytest.approx(0.01, rel=1e-6)
    else:
        assert told[-1]["self_check"] > 0.05


def test_fp16_is_refused():
    refused(lambda: parse(["--self_check", "5", "--fp16"]), "--self_check", "--fp16", "--bf16")


def test_adapted_runs_resume_exactly(tmp_path):
    """half_life with adascale, stopped at step 9 and resumed: records and weights to the bit.

    Mutation: beta2_product left out of the state (1e-3).
    """
    adapt = ["--beta_scaling", "half_life", "--lr_scaling", "adascale", "--lr_scheduler_type", "constant"]
    adapt += ["--adam_beta2", "0.9"]
    whole, weights = run(tmp_path / "whole", *adapt)
    run(tmp_path / "cut", *adapt, "--max_steps", "9")
    cut, same = run(tmp_path / "cut", *adapt, "--resume_from_checkpoint", "auto")
    for record in (*whole, *cut):
        del record["seconds"]
    assert cut == whole and len({record["learning_rate"] for record in whole}) > 5
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_half_life_needs_adamw():
    arguments = ["--beta_scaling", "half_life", "--optim", "sgd"]
    refused(lambda: parse(arguments), "half_life", "adamw_torch", "sgd")
    arguments = ["--beta_scaling", "half_life", "--find_unused_parameters"]
    refused(lambda: parse(arguments), "half_life", "--find_unused_parameters")
