"""What a step measures travels together: one host read of the device and one sum over processes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import records
from test_gradient import QUIET, Tiny, alone, reset  # noqa: F401 (a fixture)

import train
from adaptive import signals
from adaptive.config import BadSetting, parse
from adaptive.engine import Engine
from adaptive.noise_scale import PassNorms
from adaptive.tools.inspect_run import main as inspect_run

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


class Hints(Tiny):
    """With a signal of its own: 3, 4, nothing yet, no number, infinity, and 5 from then on."""

    def load(self, config):
        self.hints = [3, 4.0, None, math.nan, math.inf]
        return super().load(config)

    def signals(self):
        return {"hint": self.hints.pop(0) if getattr(self, "hints", None) else 5.0}


def follow(hint):
    return hint


def test_a_tasks_signal_that_is_no_number_is_no_measurement(tmp_path, capsys):
    """The size stays where the hint is None, NaN or infinity; the last two are counted. Records have what
    each decision saw, from which the schedule can be asked again.

    Mutations: NaN handed on (the run ends: "returned nan"); not counted; counted where the data is over, and
    again when a longer run goes on from there; recorded after the step instead.
    """
    flags = ["--task", f"{__file__}:Hints", "--schedule", f"{__file__}:follow", "--batch_size", "2"]
    reset()
    train.main(parse([*QUIET, *flags, "--max_steps", "6", "--output_dir", str(tmp_path)]))
    told = records(tmp_path)
    assert [record["target_batch_size"] for record in told] == [2, 4, 4, 4, 4, 5]
    assert [record.get("invalid_measurements") for record in told] == [None, None, None, 1, 2, 2]
    assert [record["hint"] for record in told] == [3, 4, None, None, None, 5], "as each decision saw it"
    assert inspect_run([str(tmp_path), "--verify"]) == 0
    assert "every size asked for is its answer" in capsys.readouterr().out


def test_a_tasks_signal_is_recorded_where_it_is_tracked(tmp_path):
    """A name that nobody has is refused with those there are.

    Mutation: recorded though nobody named it.
    """
    flags = [*QUIET, "--task", f"{__file__}:Hints", "--max_steps", "2"]
    for more, hints in (([], [None, None]), (["--track", "hint"], [3, 4])):
        reset()
        train.main(parse([*flags, *more, "--output_dir", str(tmp_path / str(len(more)))]))
        assert [record.get("hint") for record in records(tmp_path / str(len(more)))] == hints
    reset()
    with pytest.raises(BadSetting, match="--track hints is no signal; write one of .*, hint$"):
        train.main(parse([*flags, "--track", "hints", "--output_dir", str(tmp_path / "x")]))


class Weighty(Tiny):
    """Its signal has the name of a field of the records."""

    def signals(self):
        return {"weight": 17.0}


def test_a_tasks_signal_does_not_replace_a_field(tmp_path):
    """Mutation: record | seen."""
    reset()
    flags = ["--task", f"{__file__}:Weighty", "--track", "weight", "--batch_size", "2", "--max_steps", "1"]
    train.main(parse([*QUIET, *flags, "--output_dir", str(tmp_path)]))
    assert records(tmp_path)[0]["weight"] == 0.5


class Lost(Tiny):
    """Its signal is always NaN."""

    def signals(self):
        return {"hint": math.nan}


def test_no_measurement_is_counted_by_a_decision_that_is_no_step(tmp_path):
    """Mutation: counted before the plan says that the data is over."""
    flags = [*QUIET, "--task", f"{__file__}:Lost", "--schedule", f"{__file__}:follow", "--batch_size", "8"]
    reset()
    state = train.main(parse([*flags, "--output_dir", str(tmp_path)]))
    assert state.invalid == state.step - 1 > 1


def test_losses_are_summed_in_fp64():
    """2^24 and three times 1 in fp32, in which their sum is 2^24. Mutation: summed before they are cast."""
    losses = [torch.tensor([2.0**24, 1.0]), torch.tensor([1.0, 1.0])]
    own = SimpleNamespace(counts={"train": 4}, items=[1] * 4)
    _, (total,) = signals._source_sums(own, losses, by_tokens=True)
    assert float(total) == 2**24 + 3
