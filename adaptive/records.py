"""A finished step -> its line in metrics.jsonl, and the audit of what each process trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config
from adaptive.plan import Lengths, StepPlan, share
from adaptive.state import RunState


def open_folder(config: Config) -> str:
    """Make --output_dir, on rank 0; BadSetting when it already holds something."""
    folder = Path(config.run.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not config.run.resume_from_checkpoint:
            raise BadSetting(
                f"--output_dir {folder} is not empty; write a new folder, or --resume_from_checkpoint auto"
            )
    except OSError as error:
        raise BadSetting(
            f"--output_dir {folder}: {error.strerror}; write a folder that can be made"
        ) from None
    return str(folder)


def counters(state: RunState, lengths: Lengths) -> dict[str, Any]:
    """The fields that train and eval records share; see the README's table of records."""
    passed, rows = sum(state.cursor.values()), sum(lengths.sources.values())
    used = passed % rows
    return {
        "step": state.step,
        "updates": state.updates,
        "seconds": round(state.seconds, 4),
        "samples": state.samples,
        "tokens": state.tokens,
        "input_tokens": state.input_tokens,
        "padding_tokens": state.padding_tokens,
        **({"bad_samples": state.bad_samples} if state.bad_samples else {}),
        "epoch": passed / rows,
        "train_coverage": used / rows if used or not passed else 1.0,
    }


def train_record(
    state: RunState, lengths: Lengths, plan: StepPlan, measured: Any, **others: Any
) -> dict[str, Any]:
    """One decision: counters, the sizes asked for and run, where its samples lie, what was measured,
    `others`.
    """
    return {
        "kind": "train",
        **counters(state, lengths),
        "target_batch_size": float(sum(plan.target.values())),
        "batch_size": plan.size,
        "carry": float(sum(plan.carry.values())),
        "positions": [[i.source, i.start, i.stop] for i in plan.intervals],
        "loss": measured.loss if measured and measured.items else None,
        "grad_norm": measured.grad_norm if measured else None,
        **({"worst_samples": _placed(plan, measured)} if measured and measured.suspects else {}),
        **others,
    }


def _placed(plan: StepPlan, measured: Any) -> list[list]:
    """[[source, position, loss]] of a step that was not finite; the loss as text where it is no number."""
    placed = []
    for rank, number, loss in measured.suspects:
        shares = share(plan, rank, measured.world_size)
        source, position = [(name, int(p)) for name, positions in shares for p in positions][number]
        placed.append([source, position, loss if math.isfinite(loss) else str(loss)])
    return placed


class Audit:
    """audit/rankR.jsonl: rows and weights of every step, as this process trained on them; for --audit."""

    def __init__(self, config: Config, rank: int):
        self.file = None
        if config.output.audit:
            path = Path(config.run.output_dir, "audit", f"rank{rank}.jsonl")
            path.parent.mkdir(exist_ok=True)
            self.file = path.open("a")

    def write(self, step: int, sources: list[str], indices: list[int], weight: float) -> None:
        """`indices` (k,) of the samples, each of `weight` (without the factor W of the ranks)."""
        if self.file:
            several = {"sources": sources} if len(set(sources)) > 1 else {}
            line = {"step": step, "indices": indices, "weights": [weight] * len(indices), **several}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
