"""What re-sharding a step costs a rank: number of processes W -> microseconds of planning.

    python benchmarks/planning.py

Times are of what one rank does between the decision and its rows: round the target and take the interval
(`plan_step`), find its own positions (`share`), count the passes (`passes`). Each rank has 64 samples of
the step whatever W is, so the step grows with W and the rank's work must not. Every W takes its turn inside
one loop.
"""

from __future__ import annotations

import statistics
import sys
import time
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

from adaptive.plan import Lengths, passes, plan_step, share  # noqa: E402

SIZES = (1, 2, 64, 1024, 16_384)  # W
PER_RANK, MICRO = 64, 16  # samples
CALLS = 4000


class Rank:
    """One rank after another of a run on `world_size` processes, with a size that is no whole number."""

    def __init__(self, world_size: int):
        self.world_size, self.rank, self.samples = world_size, 0, 0
        self.lengths = Lengths({"train": 10**12}, Fraction(1))
        self.cursor, self.carry = {"train": 0}, {"train": Fraction(0)}
        self.target = {"train": Fraction(PER_RANK * world_size) + Fraction(3, 10)}

    def step(self) -> tuple[float, float]:
        """(seconds of plan_step, seconds of share and passes) of the next step."""
        start = time.perf_counter()
        plan = plan_step(self.target, self.cursor, self.carry, self.lengths, "keep", self.samples)
        planned = time.perf_counter()
        ((_, positions),) = share(plan, self.rank, self.world_size)
        n_passes = passes(plan.size, self.world_size, MICRO)
        stop = time.perf_counter()
        assert PER_RANK <= len(positions) <= PER_RANK + 1 and len(positions) <= n_passes * MICRO
        self.cursor, self.carry, self.samples = plan.cursor, plan.carry, self.samples + plan.size
        self.rank = (self.rank + 1) % self.world_size
        return planned - start, stop - planned


def main() -> None:
    ranks = {world_size: Rank(world_size) for world_size in SIZES}
    seconds: dict[int, list[tuple[float, float]]] = {world_size: [] for world_size in SIZES}
    for _ in range(CALLS):
        for world_size, rank in ranks.items():
            seconds[world_size].append(rank.step())
    print(f"{PER_RANK} samples per rank and step, {CALLS} steps per row: microseconds of one rank, medians")
    print(f"{'W':>7} {'plan_step':>10} {'share+passes':>13} {'sum':>7} {'p10':>7} {'p90':>7} {'/ W=1':>7}")
    base = statistics.median(map(sum, seconds[SIZES[0]]))
    for world_size, times in seconds.items():
        sums = sorted(1e6 * sum(pair) for pair in times)
        plan, own = (1e6 * statistics.median(part) for part in zip(*times, strict=True))
        middle, tenth = statistics.median(sums), len(sums) // 10
        rest = f"{middle:7.1f} {sums[tenth]:7.1f} {sums[-1 - tenth]:7.1f} {1e-6 * middle / base:7.2f}"
        print(f"{world_size:7} {plan:10.1f} {own:13.1f} {rest}")


if __name__ == "__main__":
    main()
