"""What a step measured -> numbers that are equal on every rank, by name.

A schedule names the signals it wants as parameters; a signal without a value yet is None. Everything a step measures
travels in one fused fp64 all-reduce (`Measured`), after the last backward and with one host read of the device.
To add one: a line in KNOWN and a line in `after_step`; a task adds its own through `signals()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    "learning_rate": "of the last step",
    "lr_decay": "decay factor of the coming step, without warmup and batch scaling, in [0, 1]",
    "step_seconds": "wall clock of the last step",
    "samples_per_second": "of the last step",
    "world_size": "data-parallel processes",
}
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

    @classmethod
    def reduce(cls, engine: Any, loss_sum: Any, weighing: int, items: int, token_counts: list[tuple]) -> Measured:
        """This rank's sums -> Measured, in one fp64 all-reduce and one host read of the device.

        `weighing`: what the loss is a mean over (samples or tokens). `token_counts`: (input, padding) per real pass.
        """
        own_loss, own_square = engine.read(loss_sum, engine.squared_norm())
        if not engine.sharded:  # every rank holds the whole gradient
            own_square /= engine.world_size
        inputs, padding = (sum(counts) for counts in zip(*token_counts, strict=True)) if token_counts else (0, 0)
        clock = engine.seconds() if engine.rank == 0 else 0.0
        loss, weight, square, items, inputs, padding, seconds, stops = engine.sum(
            [own_loss, weighing, own_square, items, inputs, padding, clock, engine.stop_asked]
        )
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
        )


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


def after_step(state: Any, record: dict[str, Any], step_seconds: float) -> None:
    """Remember what the step measured, in state.signals; a value that was not measured stays as it was."""
    seen = state.signals
    for name in ("epoch", "train_coverage", "learning_rate", "loss", "grad_norm"):
        if record[name] is not None:
            seen[name] = record[name]
    if record["loss"] is not None:
        before = seen.get("loss_ema")
        seen["loss_ema"] = record["loss"] if before is None else (
            LOSS_EMA_KEEP * before + (1 - LOSS_EMA_KEEP) * record["loss"]
        )
    seen["step_seconds"] = step_seconds
    seen["samples_per_second"] = record["batch_size"] / step_seconds if step_seconds > 0 else None
