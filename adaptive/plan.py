"""Target size (exact fraction) -> who computes which positions (integers).

The data of a source is an endless line of positions, a step is an interval of it. Position p belongs to rank
p mod W, so shares differ by at most one for every size and W, and the samples a rank will need next do not
depend on the schedule. Nothing here knows a tensor; a plan costs the same for 1 process and for 16,384. To
add one: a policy for the end of an epoch is a branch of `_cut`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Above this denominator a carry is rounded: sizes that change for ever would grow it without bound.
CARRY_DENOMINATOR = 10**40
ENDLESS = 2**62  # rows of a stream, whose number nobody knows


@dataclass(frozen=True)
class Interval:
    """Positions [start, stop) of one source."""

    source: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Pick:
    """One position drawn from a reservoir (participation.py), with the factor on its weight."""

    source: str
    position: int
    factor: float


@dataclass(frozen=True)
class StepPlan:
    """What one step does, the same on every rank."""

    target: dict[str, Fraction]  # source -> G, samples over all processes
    intervals: tuple[Interval, ...]
    carry: dict[str, Fraction]  # source -> after the step
    cursor: dict[str, int]  # source -> after the step
    consumed: int  # samples before the step, over all sources
    cut: bool  # shortened by the end of an epoch or of the run
    participation: str = "carry"  # how the fractions became whole samples
    picks: tuple[Pick, ...] | None = None  # what is trained on instead of the intervals, by source
    reservoir: dict[str, list] | None = None  # source -> slots after the step

    @functools.cached_property
    def size(self) -> int:
        """n, the realised size: samples over all processes."""
        return sum(map(len, self.intervals)) if self.picks is None else len(self.picks)

    @functools.cached_property
    def asked(self) -> Fraction:
        """G over all sources."""
        return functools.reduce(operator.add, self.target.values())

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """n_s: source -> samples of the step over all processes; every source of the run is there."""
        counts = dict.fromkeys(self.target, 0)
        for part in self.intervals if self.picks is None else self.picks:
            counts[part.source] += len(part) if self.picks is None else 1
        return counts


@dataclass(frozen=True)
class Lengths:
    """What bounds a run."""

    sources: dict[str, int]  # source -> N, its rows
    epochs: Fraction
    max_samples: int | None = None
    max_steps: int = -1
    reach: Callable[[str, int, int], int] | None = None
    """Of a stream: (source, start, stop) -> the largest position up to `stop` that it reaches; collective."""

    @property
    def known(self) -> bool:
        """Whether the number of rows is; epochs and coverage are null without it."""
        return ENDLESS not in self.sources.values()

    @property
    def total(self) -> int | None:
        """Samples of the whole run (of a stream at most so many), None where nobody knows."""
        return self.samples if self.known else self.max_samples

    def describe(self) -> str:
        """The data in a few words."""
        if self.known:
            return f"{self.samples:,} samples"
        most = f"up to {self.max_samples:,} samples of " if self.max_samples else ""
        return f"{most}a stream of unknown length (no coverage: `cover` shows the samples seen)"

    @functools.cached_property
    def positions(self) -> int:
        """Positions of the whole run: epochs x sum of N, rounded up."""
        return -(-self.epochs * sum(self.sources.values()) // 1)

    @property
    def samples(self) -> int:
        """Samples the run will consume when nothing is discarded."""
        return min(self.positions, self.max_samples or self.positions)

    def left(self, cursor: dict[str, int], samples: int) -> int:
        """Samples that may still be consumed."""
        left = self.positions - sum(cursor.values())
        return max(0, left if self.max_samples is None else min(left, self.max_samples - samples))

    def coverage(self, cursor: dict[str, int]) -> dict[str, float | None]:
        """Source -> share of its running epoch used, 1.0 at the end of one, 0.0 before the first sample."""
        if not self.known:
            return dict.fromkeys(self.sources)
        passed = {
            source: cursor[source] % rows or rows * bool(cursor[source])
            for source, rows in self.sources.items()
        }
        return {source: n / self.sources[source] for source, n in passed.items()}

    def progress(self, cursor: dict[str, int], samples: int, step: int) -> float:
        """Share of the run that is over, in [0, 1]: by samples, positions or steps, whichever is furthest."""
        shares = [sum(cursor.values()) / self.positions if self.known else 0.0]
        if self.max_samples is not None:
            shares.append(samples / self.max_samples)
        if self.max_steps > 0:
            shares.append(step / self.max_steps)
        return min(1.0, max(shares))


@functools.lru_cache(maxsize=256)  # the same few sizes come at every step
def exact(size: float | int | Fraction | str) -> Fraction:
    """The decimal number a person wrote: 0.3 is 3/10, not the nearest binary fraction; or a text "p/q"."""
    return Fraction(size if isinstance(size, (str, Fraction)) else repr(size))


def plan_step(
    target: dict[str, Fraction],
    cursor: dict[str, int],
    carry: dict[str, Fraction],
    lengths: Lengths,
    epoch_end: str,
    consumed: int,
    drawn: dict[str, int] | None = None,
) -> StepPlan | None:
    """Round each target by error diffusion and take that many positions; None when the run is over.

    `n = floor(carry + G); carry += G - n`, so that after any number of steps the samples differ from the
    sizes asked for by less than one. `epoch_end` (keep, wrap, drop) applies to a run with one source; several
    wrap by themselves. `drawn`: whole numbers to take instead of rounding; the carry then stays as it is.
    """
    left = lengths.left(cursor, consumed)
    if not left:
        return None
    if len(target) == 1 and epoch_end != "wrap":
        return _cut(target, cursor, carry, lengths, epoch_end, consumed, drawn)
    wanted, after = _whole(target, carry, drawn)
    cut = sum(wanted.values()) > left
    if cut:  # the run's end: shares of what is left, in proportion, the earlier sources first
        wanted = _shrink(wanted, left)
    return StepPlan(
        target=target,
        intervals=_intervals({s: (cursor[s], cursor[s] + n) for s, n in wanted.items()}),
        carry=dict.fromkeys(target, Fraction(0)) if cut else after,
        cursor={s: cursor[s] + wanted[s] for s in target},
        consumed=consumed,
        cut=cut,
    )


def _whole(target, carry, drawn) -> tuple[dict[str, int], dict[str, Fraction]]:
    """(samples of each source, its carry after the step): rounded by error diffusion, unless drawn."""
    if drawn is not None:
        return drawn, carry
    due = {source: carry[source] + size for source, size in target.items()}
    wanted = {source: math.floor(size) for source, size in due.items()}
    return wanted, {source: _rounded(size - wanted[source]) for source, size in due.items()}


def _cut(target, cursor, carry, lengths, epoch_end, consumed, drawn) -> StepPlan | None:
    """One source whose epochs do not mix: the last step of each is kept short or discarded."""
    (source,) = target
    start, length = cursor[source], lengths.sources[source]
    wanted, after = _whole(target, carry, drawn)
    want = wanted[source]
    room = min(length - start % length, lengths.left(cursor, consumed))
    if want > room and epoch_end == "drop":
        start += room
        if not lengths.left({source: start}, consumed) or room < length - cursor[source] % length:
            return None  # what is left of the run is less than one step
        room = min(length, lengths.left({source: start}, consumed))
        if want > room:
            return None
    if lengths.reach:
        room = lengths.reach(source, start, start + min(max(want, 1), room)) - start
        if not room:
            return None  # the stream is over
    cut = want > room
    stop = start + min(want, room)
    return StepPlan(
        target, _intervals({source: (start, stop)}), {source: Fraction(0)} if cut else after, {source: stop},
        consumed, cut,
    )  # fmt: skip


def share(plan: StepPlan, rank: int, world_size: int) -> list[tuple[str, np.ndarray]]:
    """[(source, positions int64 (k,))] of one rank, in step order; every position of the step has one owner.

    One source: position p belongs to rank p mod W. Several: the intervals stand one after the other and the
    j-th sample of the step belongs to rank (samples consumed so far + j) mod W, balanced over the sum. So do
    the picks of a reservoir.
    """
    if plan.picks is not None:
        own = own_picks(plan, rank, world_size)
        by_source = {
            source: [pick.position for pick in own if pick.source == source] for source in plan.target
        }
        return [(source, np.array(found, dtype=np.int64)) for source, found in by_source.items() if found]
    shares, before = (
        [],
        plan.intervals[0].start if len(plan.target) == 1 and plan.intervals else plan.consumed,
    )
    for interval in plan.intervals:
        first = interval.start + (rank - before) % world_size
        shares.append((interval.source, np.arange(first, interval.stop, world_size, dtype=np.int64)))
        before += len(interval)
    return shares


def own_picks(plan: StepPlan, rank: int, world_size: int) -> tuple[Pick, ...]:
    """The picks of one rank, by source in the order of the step."""
    assert plan.picks is not None
    return plan.picks[(rank - plan.consumed) % world_size :: world_size]


def passes(size: int, world_size: int, micro_batch_size: int) -> int:
    """Forward-backward passes every rank runs: enough for the largest share, equal on all ranks."""
    largest_share = -(-size // world_size)
    return -(-largest_share // micro_batch_size)


def _intervals(bounds: dict[str, tuple[int, int]]) -> tuple[Interval, ...]:
    return tuple(Interval(source, start, stop) for source, (start, stop) in bounds.items() if stop > start)


def _rounded(carry: Fraction) -> Fraction:
    return carry if carry.denominator <= CARRY_DENOMINATOR else carry.limit_denominator(CARRY_DENOMINATOR)


def _shrink(wanted: dict[str, int], left: int) -> dict[str, int]:
    total, given, taken = sum(wanted.values()), {}, 0
    seen = 0
    for source, count in wanted.items():
        seen += count
        given[source] = seen * left // total - taken
        taken += given[source]
    return given
