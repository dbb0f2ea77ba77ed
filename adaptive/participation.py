"""Target sizes (exact fractions) -> whole samples: how the fraction of a size takes part (--participation).

    carry       n = floor(carry + G), the rest is carried over: sums of n and G differ by less than 1
    bernoulli   n = floor(G) + 1 with probability G - floor(G): who is not drawn stays next in line
    reservoir   n positions arrive as with carry; each, with probability 1/K, takes one of K slots; n are then
                drawn from the slots

With `reservoir` a sample that is admitted stays for K^2/n steps on average and is drawn n/K times in each,
so every sample has the expected use of 1, and memory grows with K alone; but some are used often and most
never, which is the nature of a reservoir and outside the promise of once per epoch. K = ceil(1/b), b being
the size of one device at the first start. An empty slot that is drawn gives nothing: the first steps are
smaller, rather than made of the first samples again and again.

Draws are hashes of (seed, source, step or position): every process and every resumed run draws the same, and
no generator has a state to save.
To add one: a branch of `plan_with`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from adaptive.config import BadSetting, Batch, Config
from adaptive.plan import Lengths, Pick, StepPlan, exact, plan_step


def plan_with(config: Config, decision: dict[str, Any], state: Any, lengths: Lengths) -> StepPlan | None:
    """The plan of the next step for `decision` (schedules.decide); None when the run is over."""
    batch, seed, step = config.batch, config.run.seed, state.step + 1
    target = {source: exact(size) for source, size in decision["targets"].items()}
    drawn = None
    if batch.participation == "bernoulli":
        drawn = {source: bernoulli(size, seed, source, step) for source, size in target.items()}
    end, consumed = batch.epoch_end, state.samples
    plan = plan_step(target, state.cursor, state.carry, lengths, end, consumed, drawn)
    if plan is None or batch.participation == "carry":
        return plan
    plan = replace(plan, participation=batch.participation)
    if drawn:
        return plan
    for size in target.values():
        _refuse_whole(size, state.world_size)
    slots = {source: state.reservoir.get(source) or _empty(target[source], state) for source in target}
    return through_slots(plan, slots, batch, seed, step)


def bernoulli(size: Fraction, seed: int, source: str, step: int) -> int:
    """floor(G), and one more with probability G - floor(G)."""
    return math.floor(size) + (_uniform(seed, source, "takes part", step) < size % 1)


def through_slots(plan: StepPlan, slots: dict[str, list], batch: Batch, seed: int, step: int) -> StepPlan:
    """`plan` with what arrives put into the slots, and as many drawn from them.

    slots: source -> K entries, [position, uses so far] or None; not changed.
    """
    slots = {source: [entry and list(entry) for entry in entries] for source, entries in slots.items()}
    picks: list[Pick] = []
    for interval in plan.intervals:
        entries = slots[interval.source]
        for position in range(interval.start, interval.stop):
            place = _uniform(seed, interval.source, "arrives", position) * len(entries) ** 2
            if place < len(entries):  # with probability 1/K, and then any of the K alike
                entries[math.floor(place)] = [position, 0]
        order = sorted(
            range(len(entries)), key=lambda slot: _uniform(seed, interval.source, "drawn", step, slot)
        )
        for k in range(len(interval)):
            entry = entries[order[k % len(order)]]
            if entry is not None:
                factor = usage_factor(entry[1], entries, batch.usage_correction)
                picks.append(Pick(interval.source, entry[0], factor))
                entry[1] += 1
    return replace(plan, picks=tuple(picks), reservoir=slots)


def usage_factor(usage: int, entries: list, correction: float) -> float:
    """max(0, 1 - correction (usage - its mean over the slots)): over-used samples weigh less, others more."""
    uses = [entry[1] for entry in entries if entry is not None]
    return max(0.0, 1 - correction * (usage - sum(uses) / len(uses)))


def _refuse_whole(size: Fraction, world_size: int) -> None:
    """BadSetting from one sample per device on: there are fewer slots than samples to draw."""
    if size >= world_size:
        raise BadSetting(
            f"--participation reservoir is for sizes below 1 per device; it is {float(size):g} samples on "
            f"{world_size} device(s); write a smaller size or --max_batch_size, --schedule 'constant()', or "
            "--participation bernoulli"
        )


def _empty(size: Fraction, state: Any) -> list[None]:
    """K slots for a source of the global size `size`."""
    return [None] * math.ceil(state.world_size / size) if size else []


def _uniform(*key: Any) -> Fraction:
    """A number in [0, 1) that is a function of `key`."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return Fraction(int.from_bytes(digest, "little"), 2**64)
