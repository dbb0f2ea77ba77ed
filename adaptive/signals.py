"""What a step measured -> numbers that are equal on every rank, by name.

A schedule names the signals it wants as parameters; a signal without a value yet is None. Everything a step
measures travels in one fused fp64 all-reduce (`Measured`), after the last backward and with one host read of
the device.
To add one: a line in KNOWN and a line in `after_step`; a task adds its own through `signals()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from adaptive import noise_scale
from adaptive.config import BadSetting

KNOWN = {
    "step": "decisions so far",
    "updates": "changes of the weights so far",
    "current_size": "last target, in the schedule's unit",
    "initial_size": "target of the first step, in the schedule's unit",
    "samples": "samples consumed so far, over all processes",
    "tokens": "supervised tokens consumed so far, over all processes",
    "epoch": "virtual epochs so far (2.4: two and 40 %)",
    "train_coverage": "share of the running epoch used",
    "loss": "of the last step, mean over its samples or tokens",
    "loss_ema": "loss averaged with a half-life of 10 updates",
    "eval_loss": "of the last evaluation",
    "grad_norm": "of the last step, before clipping",
    "noise_scale": "gradient noise scale, averaged: the size at which noise equals signal (samples)",
    "grad_variance": "tr(S), variance of one sample's gradient, averaged",
    "grad_cosine": "expected cosine between the gradients of two halves of a step, averaged",
    "memory_usage": "memory taken over memory there is, of the fullest process",
    "learning_rate": "of the last step",
    "lr_decay": "decay factor of the coming step, without warmup and batch scaling, in [0, 1]",
    "step_seconds": "wall clock of the last step",
    "samples_per_second": "of the last step",
    "world_size": "data-parallel processes",
}
# Recorded by name when in use; the others are in every record.
MEASURED = noise_scale.SIGNALS | {
    "loss_ema",
    "eval_loss",
    "memory_usage",
    "step_seconds",
    "samples_per_second",
}
WORST = 4  # samples that each process names when a step is not finite
LOSS_EMA_KEEP = 0.5 ** (1 / 10)


@dataclass
class Measured:
    """One step's sums over all ranks; `loss` and `grad_norm` are None where there is no finite value."""

    loss: float | None  # mean over the samples or tokens trained on
    grad_norm: float | None  # before clipping
    items: int  # supervised tokens (or samples) trained on
    input_tokens: int
    padding_tokens: int
    finite: bool
    seconds: float  # rank 0's clock
    stop: bool  # a signal asked some process to stop
    passes: tuple[float, ...] | None  # means of |g_k|^2 and 1/b_k, samples, their weight (noise_scale.py)
    memory_usage: float | None
    world_size: int = 1
    suspects: list[tuple[int, int, float]] = field(default_factory=list)  # of a step that is not finite

    @classmethod
    def reduce(
        cls, engine: Any, losses: list[torch.Tensor], weighing: int, items: int, token_counts: list[tuple]
    ) -> Measured:
        """This rank's sums -> Measured, in one fp64 all-reduce and one host read of the device.

        `losses`: (rows,) of each real pass. `weighing`: what their mean is over (samples or tokens).
        `token_counts`: (input, padding) per real pass.
        """
        norms = engine.norms
        own_loss, own_square, own_passes = engine.read(
            _total(losses, engine.device), engine.squared_norm(), norms.total(engine.device)
        )
        if not engine.sharded:  # every rank holds the whole gradient
            own_square /= engine.world_size
        inputs, padding = (
            (sum(counts) for counts in zip(*token_counts, strict=True)) if token_counts else (0, 0)
        )
        clock = engine.seconds() if engine.rank == 0 else 0.0
        slots: list[float] = []
        if "memory_usage" in engine.wanted:  # a maximum, through a sum: one place for each rank
            slots = [0.0] * engine.world_size
            slots[engine.rank] = engine.memory_usage()
        own = [own_loss, weighing, own_square, items, inputs, padding, clock, engine.stop_asked]
        own += [own_passes, *norms.sums, *slots]
        loss, weight, square, items, inputs, padding, seconds, stops, *rest = engine.sum(own)
        pass_square, inverse, n, samples, total, *memory = rest
        finite = math.isfinite(loss) and math.isfinite(square)  # one rank's NaN or inf is in the sum of all
        return cls(
            loss=loss / weight if math.isfinite(loss) and weight else None,
            grad_norm=math.sqrt(square) if finite and items else None,
            items=int(items),
            input_tokens=int(inputs),
            padding_tokens=int(padding),
            finite=finite,
            seconds=seconds,
            stop=stops > 0,
            passes=(pass_square / n, inverse / n, samples, total) if n else None,
            memory_usage=max(memory, default=None),
            world_size=engine.world_size,
            suspects=[] if finite else suspects(engine, losses),
        )


def _total(losses: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(losses).double().sum() if losses else torch.zeros((), device=device)


def suspects(engine: Any, losses: list[torch.Tensor]) -> list[tuple[int, int, float]]:
    """Collective: (rank, number within its share, loss) of the samples that spoilt a step: those without a
    finite loss, or, where only the gradient has none, those with the largest.
    """
    values = torch.cat(losses).double().tolist() if losses else []
    worst = sorted(range(len(values)), key=lambda j: (math.isfinite(values[j]), -values[j]))[:WORST]
    width = 1 + 2 * WORST  # how many, then two numbers for each
    slots = [0.0] * (width * engine.world_size)
    told = [float(len(worst)), *(number for j in worst for number in (float(j), values[j]))]
    slots[width * engine.rank : width * engine.rank + len(told)] = told
    slots, found = engine.sum(slots), []
    for rank in range(engine.world_size):
        count, *pairs = slots[width * rank : width * (rank + 1)]
        found += [(rank, int(pairs[2 * k]), pairs[2 * k + 1]) for k in range(int(count))]
    spoilt = [entry for entry in found if not math.isfinite(entry[2])]
    return spoilt or sorted(found, key=lambda entry: -entry[2])[:WORST]


def wanted(named: set[str], tracked: tuple[str, ...]) -> frozenset[str]:
    """Signals in use: those a schedule names and those of --track. BadSetting for an unknown one."""
    unknown = [name for name in tracked if name not in KNOWN]
    if unknown:
        raise BadSetting(f"--track {unknown[0]} is no signal; write one of {', '.join(KNOWN)}")
    return frozenset(named) | frozenset(tracked)


def before_step(state: Any, world_size: int, lr_decay: float) -> dict[str, Any]:
    """Signals of the steps so far, as the next decision sees them."""
    return state.signals | {
        "step": state.step,
        "updates": state.updates,
        "current_size": state.size,
        "initial_size": state.initial_size,
        "samples": state.samples,
        "tokens": state.tokens,
        "world_size": world_size,
        "lr_decay": lr_decay,
    }


def after_step(
    state: Any, record: dict[str, Any], measured: Measured | None, before: float, half_life: float
) -> None:
    """Remember what the step measured, in state.signals; a value that was not measured stays as it was.

    before: the run's seconds before the step; half_life: of the noise scale's averages, in samples.
    """
    seen, seconds = state.signals, state.seconds - before
    for name in ("epoch", "train_coverage", "learning_rate", "loss", "grad_norm"):
        if record[name] is not None:
            seen[name] = record[name]
    if record["loss"] is not None:
        average = seen.get("loss_ema", record["loss"])
        seen["loss_ema"] = LOSS_EMA_KEEP * average + (1 - LOSS_EMA_KEEP) * record["loss"]
    seen["step_seconds"] = seconds
    seen["samples_per_second"] = record["batch_size"] / seconds if seconds > 0 else None
    if measured and measured.memory_usage is not None:
        seen["memory_usage"] = measured.memory_usage
    if measured and measured.passes and not record["skipped"]:
        _learn_noise(state, record, measured, half_life)


def _learn_noise(state: Any, record: dict[str, Any], measured: Measured, half_life: float) -> None:
    pass_square, inverse_size, n, weight = measured.passes
    square = (measured.grad_norm / weight) ** 2  # of the mean gradient
    parts = noise_scale.estimate(square, pass_square, inverse_size, n)
    if parts is None:
        state.invalid += 1
        return
    state.noise = noise_scale.averaged(state.noise, parts, n, half_life)
    signal, noise = (state.noise[name] / state.noise["weight"] for name in ("signal", "noise"))
    state.signals |= {"grad_variance": noise, "noise_scale": noise_scale.noise_scale(state.noise)}
    if signal > 0 and noise >= 0:
        state.signals["grad_cosine"] = signal / (signal + 2 * noise / n)
