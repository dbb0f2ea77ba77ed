"""What a step measured -> numbers that are equal on every rank, by name.

A schedule names the signals it wants as parameters; a signal without a value yet is None. Everything a step
measures travels in one fused fp64 all-reduce (`Measured`), after the last backward and with one host read of
the device.
To add one: a line in KNOWN and in MEASURED, and one in `after_step`; a task adds its own through `signals()`.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch

from adaptive import noise_scale
from adaptive.config import BadSetting, Config, warn

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
    "size_unit": "samples over all processes that a size of 1 stands for: 1, or W for per-device sizes",
    "current_sizes": "{source: last target}, in the schedule's unit",
    "task_ratios": "{source: share of the samples}, averaged with a half-life of 10 steps that have some",
    "new_data_ratio": "share of the sources named by --new_sources, averaged like task_ratios",
    "difficulty": "of the last step's samples: mean of --difficulty_column, else of 1 - exp(-loss)",
    "source_loss": "{source: loss}, each of the last step that had samples of it; loss/SOURCE in records",
    "source_coverage": "{source: share of its running epoch used}; coverage/SOURCE in records",
}
# Recorded by name when in use; the others are in every record, or follow from it.
MEASURED = noise_scale.SIGNALS | {
    "task_ratios",
    "new_data_ratio",
    "difficulty",
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
    source_loss: dict[str, float | None]  # source -> mean over its samples or tokens, None without any
    difficulty: float | None
    passes: tuple[float, ...] | None  # means of |g_k|^2 and 1/b_k, samples, their weight (noise_scale.py)
    memory_usage: float | None
    world_size: int = 1
    suspects: list[tuple[int, int, float]] = field(default_factory=list)  # of a step that is not finite

    @classmethod
    def reduce(cls, engine: Any, own: Any, losses: list, by_tokens: bool, padding: list) -> Measured:
        """What this rank ran -> Measured, in one fp64 all-reduce and one host read of the device.

        own: what it trained on (data.Share). losses: of each pass (rows,), sums over a sample's supervised
        items. padding: (input, padding) tokens of each real pass.
        """
        norms, (weighing, sums) = engine.norms, _source_sums(own, losses, by_tokens)
        difficulty = _difficulty(own, losses) if "difficulty" in engine.wanted else []
        own_square, *read = engine.read(engine.squared_norm(), *sums, *difficulty[:1], *norms.total())
        own_passes = read.pop() if norms.squares else 0.0
        if not engine.sharded:  # every rank holds the whole gradient
            own_square /= engine.world_size
        inputs, padded = (sum(counts) for counts in zip(*padding, strict=True)) if padding else (0, 0)
        clock = engine.seconds() if engine.rank == 0 else 0.0
        slots: list[float] = []
        if "memory_usage" in engine.wanted:  # a maximum, through a sum: one place for each rank
            slots = [0.0] * engine.world_size
            slots[engine.rank] = engine.memory_usage()
        sent = [own_square, sum(own.items), inputs, padded, clock, engine.stop_asked, own_passes, *norms.sums]
        sent += [*weighing, *read, *difficulty[1:], *slots]
        square, n_items, inputs, padded, seconds, stops, *rest = engine.sum(sent)
        (pass_square, inverse, n, samples, total), rest = rest[:5], rest[5:]
        k, d = len(own.counts), len(difficulty)
        weights, totals, (hard, memory) = rest[:k], rest[k : 2 * k], (rest[2 * k :][:d], rest[2 * k + d :])
        loss, weight = sum(totals), sum(weights)
        finite = math.isfinite(loss) and math.isfinite(square)  # one rank's NaN or inf is in the sum of all
        return cls(
            loss=_mean(loss, weight),
            grad_norm=math.sqrt(square) if finite and n_items else None,
            items=int(n_items),
            input_tokens=int(inputs),
            padding_tokens=int(padded),
            finite=finite,
            seconds=seconds,
            stop=stops > 0,
            source_loss={name: _mean(*pair) for name, *pair in zip(own.counts, totals, weights, strict=True)},
            difficulty=_mean(*hard) if hard else None,
            passes=(pass_square / n, inverse / n, samples, total) if n else None,
            memory_usage=max(memory, default=None),
            world_size=engine.world_size,
            suspects=[] if finite else suspects(engine, own, losses),
        )


def _mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None


def _source_sums(own: Any, losses: list, by_tokens: bool) -> tuple[list[int], list[torch.Tensor]]:
    """This rank's (weight of the loss, sum of losses on the device), each by source."""
    n, weights, start = list(own.counts.values()), [], 0
    for size in n:
        counts, start = own.items[start : start + size], start + size
        weights.append(sum(counts) if by_tokens else sum(count > 0 for count in counts))
    sums = torch.cat(losses) if len(losses) > 1 else losses[0]
    parts = [sums] if n == [len(sums)] else sums[: sum(n)].split(n)  # what comes after is of idle passes
    if not by_tokens:
        counts = _items(own, sums.device).clamp(min=1).split(n)
        parts = [part.double() / count for part, count in zip(parts, counts, strict=True)]
    return weights, [part.double().sum() for part in parts]


def _difficulty(own: Any, losses: list) -> list:
    """[sum on the device, number] of this rank's samples; by loss only of those that are supervised."""
    n, sums = len(own.rows), torch.cat(losses).double()
    if own.difficulty is not None:
        known = [value for value in own.difficulty if math.isfinite(value)]  # a missing one is NaN
        total = torch.tensor(sum(known), dtype=torch.float64)
        return [total.to(sums.device, non_blocking=True), len(known)]
    counts = _items(own, sums.device)
    hard = -torch.expm1(-sums[:n] / counts.clamp(min=1))
    return [torch.where(counts > 0, hard, 0.0).sum(), sum(n > 0 for n in own.items)]


def _items(own: Any, device: torch.device) -> torch.Tensor:
    """(k,) on the device."""
    return torch.tensor(own.items, dtype=torch.int64).to(device, non_blocking=True)


def suspects(engine: Any, own: Any, passed: list[torch.Tensor]) -> list[tuple[int, int, float]]:
    """Collective: (rank, number within its share, loss) of the samples that spoilt a step: those without a
    finite loss, or, where only the gradient has none, those with the largest.
    """
    values = torch.cat(passed)[: len(own.rows)].double().tolist()
    places = own.places or range(len(values))
    worst = sorted(range(len(values)), key=lambda j: (math.isfinite(values[j]), -values[j]))[:WORST]
    width = 1 + 2 * WORST  # how many, then two numbers for each
    slots = [0.0] * (width * engine.world_size)
    told = [float(len(worst)), *(number for j in worst for number in (float(places[j]), values[j]))]
    slots[width * engine.rank : width * engine.rank + len(told)] = told
    slots, found = engine.sum(slots), []
    for rank in range(engine.world_size):
        count, *pairs = slots[width * rank : width * (rank + 1)]
        found += [(rank, int(pairs[2 * k]), pairs[2 * k + 1]) for k in range(int(count))]
    spoilt = [entry for entry in found if not math.isfinite(entry[2])]
    return spoilt or sorted(found, key=lambda entry: -entry[2])[:WORST]


def wanted(
    named: set[str], tracked: tuple[str, ...], config: Config, of_task: Set[str] = frozenset()
) -> frozenset[str]:
    """Signals in use: those a schedule names and those of --track, which may be a task's own. BadSetting for
    an unknown one, and for one that this run cannot have.
    """
    several = len(config.data.dataset_name) > 1
    if "new_data_ratio" in named and not config.data.new_sources:
        raise BadSetting("the schedule follows new_data_ratio and no source is new; write --new_sources NAME")
    unlike = several or config.batch.participation == "reservoir"
    unequal = sorted(noise_scale.SIGNALS & {*named, *tracked}) if unlike else []
    if set(unequal) & named:
        raise BadSetting(
            f"the schedule follows {unequal[0]}, which is measured with one source and without a reservoir: "
            "passes of other sources differ by more than noise; write another --schedule"
        )
    if unequal:
        warn(f"{unequal[0]} is not measured with several sources or a reservoir: its value stays null")
        named, tracked = set(named) - set(unequal), tuple(t for t in tracked if t not in unequal)
    known = [*KNOWN, *sorted(of_task)]
    unknown = [name for name in tracked if name not in known]
    if unknown:
        raise BadSetting(f"--track {unknown[0]} is no signal; write one of {', '.join(known)}")
    return frozenset(named) | frozenset(tracked)


def before_step(state: Any, world_size: int, lr_decay: float) -> dict[str, Any]:
    """Signals of the steps so far, as the next decision sees them."""
    return state.signals | {
        "step": state.step,
        "updates": state.updates,
        "current_size": state.size,
        "current_sizes": state.sizes,
        "initial_size": state.initial_size,
        "samples": state.samples,
        "tokens": state.tokens,
        "world_size": world_size,
        "lr_decay": lr_decay,
    }


def after_step(
    state: Any, plan: Any, lengths: Any, record: dict[str, Any], measured: Measured | None, before: float,
    config: Config,
) -> None:  # fmt: skip
    """Remember what the step measured, in state.signals; a value that was not measured stays as it was.

    before: the run's seconds before the step.
    """
    seen, seconds = state.signals, state.seconds - before
    seen["source_coverage"] = lengths.coverage(state.cursor)
    if measured:
        _learn_sources(seen, plan, measured, config.data.new_sources)
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
    if measured and measured.passes:
        _learn_noise(state, record, measured, config.batch.noise_half_life)
    if state.invalid or measured and measured.passes:
        record["invalid_measurements"] = state.invalid


def _learn_sources(seen: dict, plan: Any, measured: Measured, new_sources: tuple[str, ...]) -> None:
    shares = {source: n / plan.size for source, n in plan.counts.items()}
    kept = shares | seen.get("task_ratios", {})
    seen["task_ratios"] = {
        source: LOSS_EMA_KEEP * kept[source] + (1 - LOSS_EMA_KEEP) * share for source, share in shares.items()
    }
    seen["new_data_ratio"] = sum(seen["task_ratios"][source] for source in new_sources)
    losses = {source: loss for source, loss in measured.source_loss.items() if loss is not None}
    seen["source_loss"] = seen.get("source_loss", {}) | losses
    if measured.difficulty is not None:
        seen["difficulty"] = measured.difficulty


def _learn_noise(state: Any, record: dict[str, Any], measured: Measured, half_life: float) -> None:
    pass_square, inverse_size, n, weight = measured.passes
    parts = None
    if not record["skipped"]:
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
