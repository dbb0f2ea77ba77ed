"""What a step measures travels together: one host read of the device and one sum over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import records
from test_gradient import QUIET, alone, reset  # noqa: F401 (a fixture)

import train
from adaptive.config import parse
from adaptive.engine import Engine
from adaptive.noise_scale import PassNorms

HERE = Path(__file__).parent
READS = {"item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__", "numpy", "cpu"}
events: list[str] = []


class OnDevice(torch.Tensor):
    """A tensor whose values the host cannot see for nothing; so is what is computed from it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in READS:
            events.append("read")
        return super().__torch_function__(function, types, args, kwargs or {})


def told(name: str, monkeypatch) -> None:
    """`Engine.NAME` also writes its name into `events`."""
    method = getattr(Engine, name)

    def call(engine, *args):
        events.append(name)
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, OnDevice) else a for a in args]
        return method(engine, *plain)  # a backward of OnDevice would hide what hooks do

    monkeypatch.setattr(Engine, name, call)


ONE = ["--task", f"{HERE / 'test_gradient.py'}:Tiny", "--schedule", "noise_scale(interval=2)", "--track",
       "grad_variance", "grad_cosine", "difficulty", "memory_usage", "loss_ema"]  # fmt: skip
TWO = ["--task", f"{HERE / 'test_mixing.py'}:Mixed", "--dataset_name", "a", "b", "--new_sources", "b",
       "--source_weights", "0.5", "0.5", "--schedule", "incremental()", "--track", "difficulty",
       "memory_usage", "source_loss", "task_ratios"]  # fmt: skip


@pytest.mark.parametrize("flags", [ONE, TWO], ids=["noise", "sources"])
@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_a_step_reads_the_device_once(tmp_path, monkeypatch, flags, by):
    """With all that can be measured, after the last backward, and one sum of fp64 numbers.

    Mutations: float(loss) in the loop over passes; engine.read of the noise's sum, or of the difficulty, by
    itself, or of a hook's square; a sum for memory of its own.
    """
    to_device, gradients, add = Engine.to_device, Engine._gradients, PassNorms._add
    monkeypatch.setattr(
        Engine, "to_device",
        lambda *args: {name: t.as_subclass(OnDevice) for name, t in to_device(*args).items()},
    )  # fmt: skip
    monkeypatch.setattr(Engine, "_gradients", lambda self: [g.as_subclass(OnDevice) for g in gradients(self)])
    monkeypatch.setattr(PassNorms, "_add", lambda self, gradient: add(self, gradient.as_subclass(OnDevice)))
    for name in ("backward", "sum", "update"):
        told(name, monkeypatch)
    events.clear()
    reset()
    more = ["--batch_size", "8", "--micro_batch_size", "3", "--max_steps", "8", "--normalize_by", by]
    more += ["--num_train_epochs", "9"]
    train.main(parse([*QUIET, *flags, *more, "--optim", "adamw_torch", "--max_grad_norm", "0.1",
                      "--eval_every", "never", "--output_dir", str(tmp_path)]))  # fmt: skip
    right = []
    for record in records(tmp_path):
        right += ["backward"] * record["passes"] + ["read", "sum", "update"]
    assert len(right) > 8 * 4 and events[: len(right)] == right
