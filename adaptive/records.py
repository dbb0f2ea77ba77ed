"""A finished step -> its line in metrics.jsonl, and the audit of what each process trained on."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, save
from adaptive.plan import Lengths, StepPlan, share
from adaptive.state import RunState


def open_folder(config: Config) -> str:
    """Make --output_dir, on rank 0; BadSetting when it already holds something."""
    folder = Path(config.run.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        resumed = config.run.resume_from_checkpoint
        if any(folder.iterdir()) and not resumed:
            raise BadSetting(
                f"--output_dir {folder} is not empty; write a new folder, or --resume_from_checkpoint auto"
            )
        own = folder / "checkpoints"
        branches = resumed not in (None, "auto") and Path(resumed).resolve().parent != own.resolve()
        if branches and any(own.glob("step_*")):
            raise BadSetting(
                f"--output_dir {folder} holds a run of its own, which {resumed} would overwrite; write a new "
                "folder, or --resume_from_checkpoint auto to go on with that run"
            )
    except OSError as error:
        raise BadSetting(
            f"--output_dir {folder}: {error.strerror}; write a folder that can be made"
        ) from None
    return str(folder)


def note_start(config: Config, state: RunState, engine: Any, run_id: str | None = None) -> None:
    """config.yaml, and a line of starts.jsonl, which remembers every start; on rank 0.

    What was allowed for this start alone is not in config.yaml, from which the next one is made.
    """
    folder, once = Path(config.run.output_dir), {"weights_only": False, "allow_dataset_change": False}
    save(replace(config, run=replace(config.run, **once)), folder / "config.yaml")
    start = {"step": state.step, "world_size": engine.world_size, "engine": engine.describe()}
    start["schedule"] = config.batch.schedule
    resumed = config.run.resume_from_checkpoint
    start["from"] = resumed if resumed in (None, "auto") else str(Path(resumed).resolve())
    start["wandb_run_id"] = run_id  # a kill may come before the first checkpoint
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")


def last_run_id(folder: Path) -> str | None:
    """The W&B run of the last start in `folder`."""
    run_id = None
    path = folder / "starts.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # cut short by a kill
            run_id = json.loads(line).get("wandb_run_id") or run_id
    return run_id


def counters(state: RunState, lengths: Lengths) -> dict[str, Any]:
    """The fields that train and eval records share; see the README's table of records."""
    passed, rows = sum(state.cursor.values()), sum(lengths.sources.values())
    used = passed % rows
    covered = used / rows if used or not passed else 1.0
    return {
        "step": state.step,
        "updates": state.updates,
        "seconds": round(state.seconds, 4),
        "samples": state.samples,
        "tokens": state.tokens,
        "input_tokens": state.input_tokens,
        "padding_tokens": state.padding_tokens,
        **({"bad_samples": state.bad_samples} if state.bad_samples else {}),
        "epoch": passed / rows if lengths.known else None,
        "train_coverage": covered if lengths.known else None,
    }


def train_record(
    state: RunState, lengths: Lengths, plan: StepPlan, measured: Any, weights: dict[str, float], **others: Any
) -> dict[str, Any]:
    """One decision: counters, the sizes asked for and run, where its samples lie, what was measured,
    `others`.
    """
    return {
        "kind": "train",
        **counters(state, lengths),
        "target_batch_size": float(plan.asked),
        "batch_size": plan.size,
        "carry": float(sum(plan.carry.values())),
        "positions": [[i.source, i.start, i.stop] for i in plan.intervals]
        if plan.picks is None
        else [[p.source, p.position, p.position + 1] for p in plan.picks],
        "weight": _mean_weight(plan, weights),
        "loss": measured.loss if measured and measured.items else None,
        "grad_norm": measured.grad_norm if measured else None,
        **({"worst_samples": _placed(plan, measured)} if measured and measured.suspects else {}),
        **others,
        **_by_source(state, lengths, plan, measured, weights),
    }


def _mean_weight(plan: StepPlan, weights: dict[str, float]) -> float:
    counts = {source: n for source, n in plan.counts.items() if n}
    if len({weights[source] for source in counts}) == 1:  # as it is, not as a quotient
        return weights[next(iter(counts))]
    return sum(n * weights[source] for source, n in counts.items()) / max(plan.size, 1.0)


def _by_source(
    state: RunState, lengths: Lengths, plan: StepPlan, measured: Any, weights: dict[str, float]
) -> dict[str, Any]:
    """Fields of runs with several sources, NAME/SOURCE, and of participation by draw."""
    fields: dict[str, Any] = {}
    if len(plan.target) > 1:
        parts: dict[str, dict] = {
            "batch_size": plan.counts,
            "weight": weights,
            "coverage": lengths.coverage(state.cursor),
        }
        parts["target_batch_size"] = {source: float(size) for source, size in plan.target.items()}
        parts["loss"] = measured.source_loss if measured else dict.fromkeys(plan.target)
        fields = {f"{name}/{source}": values[source] for name, values in parts.items() for source in values}
    if plan.participation != "carry":
        fields["participation"] = plan.participation
    if plan.picks is not None:
        fields["arrived"] = [[i.source, i.start, i.stop] for i in plan.intervals]
    return fields


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

    def write(self, step: int, own: Any) -> None:
        """`own`: the samples of this process (data.Share), with weights without the factor W of the ranks."""
        if self.file:
            several = {"sources": own.sources} if len(own.counts) > 1 else {}
            line = {"step": step, "indices": own.indices, "weights": own.weights, **several}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
