"""Functions of progress: sizes that follow from step and samples alone, so they are the same on any machine.

To add one: a function whose parameters are signals (adaptive/signals.py) and settings, and a line in
SCHEDULES of adaptive/schedules/__init__.py; or any file of yours, by path. A class has its settings in the
constructor. A schedule with `start` decides the first size itself.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

SUFFIXES = {"": 1, "K": 1_000, "M": 1_000_000, "B": 1_000_000_000}


def constant(step, current_size):
    """The initial size for ever."""
    return current_size


def linear(step, current_size, interval=100, max_size=32, increment=2):
    """Every `interval` steps `increment` more, up to `max_size` (the adaptive batch-size trainer's
    example).
    """
    if step % interval == 0:
        return min(current_size + increment, max_size)
    return current_size


def seesaw(initial_size, lr_decay):
    """Where the learning rate would fall by a, grow the size by a and let the rate fall by sqrt(a).

    Needs --lr_scaling sqrt, which turns the cut into its root. Meterez et al. 2025, "Seesaw".
    """
    return initial_size / max(lr_decay, 1e-12)


seesaw.needs = {"lr_scaling": "sqrt"}


class steps:  # noqa: N801 (named as it is written on the command line)
    """A table "samples:size samples:size ...": from that many samples on, that size. Suffixes K, M, B."""

    def __init__(self, table: str):
        self.rows = []
        for entry in table.split():
            found = re.fullmatch(r"([0-9.]+)([KMB]?):([0-9.eE+-]+)", entry)
            if not found:
                raise ValueError(f'{entry!r} is no entry of a table such as "0:768 250M:1536" (samples:size)')
            self.rows.append((float(found[1]) * SUFFIXES[found[2]], float(found[3])))
            if not 0 < self.rows[-1][1] < math.inf:
                raise ValueError(f"{entry!r} has the size {found[3]}; write a number above 0")
        if not self.rows or self.rows[0][0] != 0 or self.rows != sorted(self.rows, key=lambda row: row[0]):
            raise ValueError(f'the table {table!r} must start at 0 and rise, as in "0:768 250M:1536"')

    def __call__(self, samples):
        return [size for start, size in self.rows if start <= samples][-1]

    @property
    def start(self):
        return self.rows[0][1]


@dataclass
class ramp:  # noqa: N801
    """From `start` to `end`, linear in samples, over the first `over` samples."""

    start: float
    end: float
    over: float

    def __post_init__(self):
        for name in ("start", "end", "over"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}; write a number above 0")

    def __call__(self, samples):
        return self.curve(min(1.0, samples / self.over))

    def curve(self, p):
        return self.start + (self.end - self.start) * p


@dataclass
class exponential(ramp):  # noqa: N801
    """From `start` to `end` by equal factors, over the first `over` samples."""

    def curve(self, p):
        return self.start * (self.end / self.start) ** p


@dataclass
class cosine(ramp):  # noqa: N801
    """From `start` to `end` along half a cosine, slow at both ends, over the first `over` samples."""

    def curve(self, p):
        return self.start + (self.end - self.start) * 0.5 * (1 - math.cos(math.pi * p))
