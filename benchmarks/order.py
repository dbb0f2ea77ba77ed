"""The cost of the random-access shuffle: (size, cursor) -> milliseconds and bytes for 256 indices.

    python benchmarks/order.py

Times are of one call of `Order.indices` with consecutive positions, on one thread. "first" also makes the
keys, as a resumed run does; median and 99th percentile are over the calls after it, at the same cursor.
Memory is the highest traced allocation of Python and numpy during one call; "process" is the growth of the
process's highest resident size over the whole table.
"""

import resource
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

from adaptive.order import Order  # noqa: E402

N_INDICES = 256
N_CALLS = 2000
ROW = "{:>8} {:>8} {:>10} {:>10} {:>10} {:>10}"


def seconds_of(order: Order, positions: np.ndarray) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    order.indices(positions)
    return time.perf_counter() - start


def peak_bytes(size: int, positions: np.ndarray) -> int:
    """Return the highest memory traced while an order is made and called, in bytes."""
    tracemalloc.start()
    Order(1, "train", size).indices(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def resident_bytes() -> int:
    """Return the highest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def main():
    resident_before = resident_bytes()
    print(f"{N_INDICES} indices, {N_CALLS} calls per row, numpy {np.__version__}")
    print(ROW.format("N", "cursor", "first ms", "median ms", "p99 ms", "peak KiB"))
    for size in (10**9, 10**12):
        for name, cursor in (("0", 0), ("N // 2", size // 2), ("10**15", 10**15)):
            positions = np.arange(cursor, cursor + N_INDICES)
            order = Order(0, f"{size} at {cursor}", size)  # a name of its own: no keys in the cache yet
            first = seconds_of(order, positions)
            seconds = [seconds_of(order, positions) for _ in range(N_CALLS)]
            times = 1e3 * first, 1e3 * np.median(seconds), 1e3 * np.percentile(seconds, 99)
            peak = peak_bytes(size, positions) / 1024
            print(ROW.format(f"{size:.0e}", name, *(f"{value:.3f}" for value in times), f"{peak:.0f}"))
    grown = (resident_bytes() - resident_before) / 2**20
    print(f"process: {grown:.1f} MiB more at the end than at the start")


if __name__ == "__main__":
    main()
