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
from adaptive.data import Unreadable, fetch_each
from adaptive.plan import Lengths, passes
from adaptive.records import counters
from adaptive.state import RunState
from adaptive.tasks import one_per_row


def evaluate(
    engine: Any, task: Any, dataset: Any, batch_size: int, normalize_by: str
) -> dict[str, float] | None:
    """{"eval_loss": ..., "eval_NAME": ...}: means over all supervised tokens, or over all samples.

    `batch_size`: samples of one pass on one process. None when a signal on some process asked to stop.
    """
    totals = _totals(engine, task, dataset, batch_size, normalize_by)
    return None if totals is None else _means(totals)


def _totals(
    engine: Any, task: Any, dataset: Any, batch_size: int, normalize_by: str
) -> dict[str, tuple[float, float]] | None:
    """{metric: (sum, what it is divided by)} over all processes, the loss first."""
    positions = np.arange(engine.rank, len(dataset), engine.world_size)
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64)
    pooled: list[list[torch.Tensor]] = []
    engine.model.eval()
    try:
        with torch.no_grad():
            for k in range(passes(len(dataset), engine.world_size, batch_size)):
                mine = positions[k * batch_size : (k + 1) * batch_size]
                batch = task.collate(
                    _rows(engine, dataset, mine if len(mine) else np.zeros(1, dtype=np.int64))
                )
                values = task.measure(engine.model, engine.to_device(batch, batch_size))
                pooled.append([values.pop(name)[: len(mine)] for name in task.pooled])
                if not names:
                    names, sums = (
                        sorted(values, key="loss".__ne__),
                        torch.zeros(2 * len(values), dtype=torch.float64, device=engine.device),
                    )
                if engine.stop_asked_anywhere():
                    return None
                if len(mine):
                    items = task.items(batch).to(engine.device)
                    values = {n: one_per_row(value, len(items), batch_size) for n, value in values.items()}
                    sums += _sums(values, names, items, normalize_by)
            pool = _pool(engine, task, pooled, len(dataset))
    finally:
        engine.model.train()
    total = engine.sum(sums.tolist())
    return _added(dict(zip(names, zip(total[::2], total[1::2], strict=True), strict=True)), pool)


def _rows(engine: Any, dataset: Any, indices: np.ndarray) -> list[dict]:
    """BadSetting, on every rank, that names a row which cannot be read: here none is left out."""
    rows = fetch_each(dataset, indices)
    for index, row in zip(indices.tolist(), rows, strict=True):
        if isinstance(row, Unreadable):
            raise engine.stop_all(
                f"row {index} of the validation data cannot be read ({row.why}); mend it, or write another "
                "--eval_dataset: it is read in full, whatever --on_bad_sample says"
            )
    return rows


def _pool(engine: Any, task: Any, pooled: list[list[torch.Tensor]], n: int) -> dict[str, tuple[float, float]]:
    """`task.measure_pool` of the n rows in the data's order; rank r computed r, r + W, ..."""
    if not task.pooled or not n:
        return {}
    values = {}
    gathered = engine.gather(*(torch.cat(parts) for parts in zip(*pooled, strict=True)))
    for name, parts in zip(task.pooled, gathered, strict=True):
        values[name] = parts[0].new_empty(n, *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            values[name][rank :: engine.world_size] = part
    return engine.from_rank0(lambda: task.measure_pool(values))


def _added(*totals: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sums and counts, by name."""
    found: dict[str, tuple[float, float]] = {}
    for part in totals:
        for name, (total, count) in part.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + total, before[1] + count)
    return found


def _means(totals: dict[str, tuple[float, float]]) -> dict[str, float | None]:
    return {
        f"eval_{name}": total / count if count and math.isfinite(total) else None
        for name, (total, count) in totals.items()
    }


def _sums(
    values: dict[str, torch.Tensor], names: list[str], items: torch.Tensor, normalize_by: str
) -> torch.Tensor:
    """(2 x metrics,) fp64: the sum of each of `names` (the loss first), and the number it is divided by."""
    supervised = items > 0
    losses = values["loss"].double()
    if normalize_by == "samples":
        losses = torch.where(supervised, losses / items.clamp(min=1), 0.0)
    weight, samples = supervised.sum() if normalize_by == "samples" else items.sum(), supervised.sum()
    sums = [losses.sum(), weight.double()]
    for name in names[1:]:
        sums += [torch.where(supervised, values[name].double(), 0.0).sum(), samples.double()]
    return torch.stack(sums)


def tell_evaluation(
    engine: Any, task: Any, datasets: dict[str, Any], config: Config, state: RunState, lengths: Lengths,
    report: Any,
) -> bool:  # fmt: skip
    """Evaluate, remember `eval_loss` as a signal, write the record; False when a signal cut it off.

    datasets: source -> validation data or None. With several sources the means are over the samples of all,
    and NAME/SOURCE over those of one.
    """
    size, normalize_by = config.eval.per_device_eval_batch_size, config.batch.normalize_by
    totals: list[dict[str, tuple[float, float]]] = []
    parts: dict[str, float | None] = {}
    for source, dataset in datasets.items():
        if dataset is None or not len(dataset):
            continue
        with engine.only_once("the evaluation", f"write a smaller --per_device_eval_batch_size than {size}"):
            found = _totals(engine, task, dataset, size, normalize_by)
        if found is None:
            return False
        totals.append(found)
        if len(datasets) > 1:
            parts |= {f"{name}/{source}": value for name, value in _means(found).items()}
    if totals:
        means = _means(_added(*totals))
        state.learn_evaluation(means["eval_loss"])
        report.eval({"kind": "eval", **counters(state, lengths), **means, **parts})
    state.evaluated_at, state.evaluation_owed = state.step, False
    return True
