"""Model -> exact means over the whole validation set.

Every sample once, on any number of processes, with the same number of passes on each (ZeRO-3 needs that).
Sums and counts are added, never means, so the value does not depend on size, micro-batch or processes; no
draw, no gradient and no counter of training is touched.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from adaptive.config import Config
from adaptive.data import fetch
from adaptive.plan import Lengths, passes
from adaptive.records import counters
from adaptive.state import RunState


def evaluate(
    engine: Any, task: Any, dataset: Any, batch_size: int, normalize_by: str
) -> dict[str, float] | None:
    """{"eval_loss": ..., "eval_NAME": ...}: means over all supervised tokens, or over all samples.

    `batch_size`: samples of one pass on one process. None when a signal on some process asked to stop.
    """
    totals = _totals(engine, task, dataset, batch_size, normalize_by)
    return None if totals is None else _means(*totals)


def _totals(
    engine: Any, task: Any, dataset: Any, batch_size: int, normalize_by: str
) -> tuple[list[str], list[float]] | None:
    """(metrics, the loss first; their sums over all processes, then the loss's weight and the samples)."""
    positions = np.arange(engine.rank, len(dataset), engine.world_size)
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64)
    engine.model.eval()
    try:
        with torch.no_grad():
            for k in range(passes(len(dataset), engine.world_size, batch_size)):
                mine = positions[k * batch_size : (k + 1) * batch_size]
                batch = task.collate(fetch(dataset, mine if len(mine) else np.zeros(1, dtype=np.int64)))
                values = task.measure(engine.model, engine.to_device(batch))
                if not names:
                    names, sums = (
                        sorted(values, key="loss".__ne__),
                        torch.zeros(len(values) + 2, dtype=torch.float64, device=engine.device),
                    )
                if engine.sum_integers([engine.stop_asked])[0]:
                    return None
                if len(mine):
                    sums += _sums(values, names, task.items(batch).to(engine.device), normalize_by)
    finally:
        engine.model.train()
    return names, engine.sum(sums.tolist())


def _means(names: list[str], totals: list[float]) -> dict[str, float | None]:
    *sums, weight, samples = totals
    means = {}
    for name, total in zip(names, sums, strict=True):
        count = weight if name == "loss" else samples
        means[f"eval_{name}"] = total / count if count and math.isfinite(total) else None
    return means


def _sums(
    values: dict[str, torch.Tensor], names: list[str], items: torch.Tensor, normalize_by: str
) -> torch.Tensor:
    """(metrics + 2,) fp64: the sum of each of `names` (the loss first), then the loss's weight and the number
    of samples.
    """
    supervised = items > 0
    losses = values["loss"].double()
    if normalize_by == "samples":
        losses = torch.where(supervised, losses / items.clamp(min=1), 0.0)
    others = [torch.where(supervised, values[name].double(), 0.0).sum() for name in names[1:]]
    weight = supervised.sum() if normalize_by == "samples" else items.sum()
    return torch.stack([losses.sum(), *others, weight.double(), supervised.sum().double()])


def tell_evaluation(
    engine: Any, task: Any, datasets: dict[str, Any], config: Config, state: RunState, lengths: Lengths,
    report: Any,
) -> bool:  # fmt: skip
    """Evaluate, remember `eval_loss` as a signal, write the record; False when a signal cut it off.

    datasets: source -> validation data or None. With several sources the means are over the samples of all,
    and NAME/SOURCE over those of one.
    """
    size, normalize_by = config.eval.per_device_eval_batch_size, config.batch.normalize_by
    names: list[str] = []
    totals: list[list[float]] = []
    parts: dict[str, float | None] = {}
    for source, dataset in datasets.items():
        if dataset is None or not len(dataset):
            continue
        found = _totals(engine, task, dataset, size, normalize_by)
        if found is None:
            return False
        names = found[0]
        totals.append(found[1])
        if len(datasets) > 1:
            parts |= {f"{name}/{source}": value for name, value in _means(*found).items()}
    if totals:
        means = _means(names, [sum(column) for column in zip(*totals, strict=True)])
        state.signals["eval_loss"] = means["eval_loss"]
        report.eval({"kind": "eval", **counters(state, lengths), **means, **parts})
    state.evaluated_at, state.evaluation_owed = state.step, False
    return True
