"""A stream of unknown length -> rows by position (--streaming): the interface of data.Source.

Position p is place p of the stream, so that steps, shares and records are those of any data. Every process
iterates the whole stream and keeps the rows of its own positions: right for every W and for what cannot be
split, at the price of reading W times as much over all processes. Where reading is what takes the time, each
process can be given files of its own (--dataset_is_sharded): its k-th row is then position k W + rank, and
the run ends for all with the first position that is missing.

**Order.** --shuffle_buffer B: B rows are read, given out in an order that follows from (seed, block), and
then the next B. Position p is thus row (p // B) B + order(seed, B)(p) of the stream, as in order.py with the
block for an epoch: no state of a generator has to be saved, and a resumed run reads at most one block again.
The last block is shorter, and permuted as what it is. No sample is moved by B places or more.

**Length.** Before a step is planned, `reach` reads as far as it wants to go; all processes agree on how far
that was, a step may be cut by the end, and then the run is over.

**Resume.** A mark is (place, the dataset's own state_dict there); the run's state has the newest mark before
its cursor, from which any number of processes reads on. What has no state_dict is read from its start.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from adaptive.config import BadSetting, Config, warn
from adaptive.order import Order
from adaptive.plan import ENDLESS

AT_ONCE = 1024  # rows read without a look at what they are for
MARK_EVERY = 256  # rows between marks, one of which takes about 50 us: what a resumed run reads again
COUNTED = 1_000_000  # rows left over that are counted, and no more


class Stream:
    """One stream, as one rank sees it."""

    length = ENDLESS

    def __init__(
        self, name: str, dataset: Any, config: Config, rank: int, world_size: int, engine: Any = None
    ):
        """`dataset`: iter() begins anew each time and gives dictionaries; `engine` agrees, None: one rank."""
        if not hasattr(dataset, "__iter__") or iter(dataset) is dataset:
            raise BadSetting(
                f"the training data {name!r} ({type(dataset).__name__}) can be read only once; let the "
                "task's load return what begins anew at each iter(), such as a datasets.IterableDataset"
            )
        self.name, self.dataset, self.engine = name, dataset, engine
        self.rank, self.world_size, self.seed = rank, world_size, config.run.seed
        self.buffer, self.sharded = config.data.shuffle_buffer, config.data.dataset_is_sharded
        self.keeps_all = self.sharded or world_size == 1 or bool(config.run.self_check)
        self.looks_back = bool(config.run.self_check)  # which reads the rows of a step again
        self.given: dict[str, Any] | None = None  # the mark to begin at
        self._live: Any = None  # the dataset that is being read
        self._rows: Iterator[dict] | None = None
        self._first: dict | None = None
        self._over = False

    def seek(self, mark: dict[str, Any] | None) -> None:
        """Begin at `mark`, of `mark_before`, at the next `reach`."""
        # Another --shuffle_buffer (--allow_dataset_change) has other blocks: from the start.
        fits = mark and mark["buffer"] == self.buffer and hasattr(self.dataset, "state_dict")
        self.given, self._rows = (mark if fits else None), None

    def reach(self, start: int, stop: int) -> int:
        """The largest position up to `stop` that all ranks can read from `start` on; collective."""
        self._open(self._own(start))
        self._fill(self._own(stop))
        there = min(stop, stop if self.filled >= self._own(stop) else self._position(self.filled))
        least, most = self._agree(there)
        if least < most and not self.sharded:
            raise BadSetting(
                f"the stream {self.name!r} ends at sample {least:,} on one process and not on another; let "
                "all read the same files, or write --dataset_is_sharded where each has its own"
            )
        if least < stop and not self._over:
            self._over = True
            self._tell_end(least)
        return least

    def read(self, positions: np.ndarray, scattered: bool = False) -> tuple[list[dict], list[int]]:
        """(rows, their places in the stream) at `positions` (k,), which `reach` has reached."""
        found = [self._held[self._own(p)] for p in positions.tolist()]
        if not self.looks_back:
            for position in positions.tolist():
                del self._held[self._own(position)]
        pairs = zip(positions.tolist(), found, strict=True)
        rows = [row | {"position": p} if "position" in row else row for p, (_, row) in pairs]
        return rows, [number for number, _ in found]

    def mark_before(self, position: int) -> dict[str, Any] | None:
        """JSON of where to read on from for `position`; None: from the start of the stream."""
        if self.sharded or self._rows is None:
            return None
        while len(self._marks) > 1 and self._marks[1]["row"] <= position:
            self._marks.popleft()
        return self._marks[0] if self._marks and self._marks[0]["row"] <= position else None

    def first(self) -> dict:
        """The first row."""
        if self._first is None:
            self._first = self.some(1)[0]
        return self._first

    def some(self, n: int) -> list[dict]:
        """Up to `n` rows from the start."""
        rows = [_arrays(row) for row in islice(iter(self._copy()), n)]
        if not rows:
            raise BadSetting(f"the training data {self.name!r} has no rows; write one that has some")
        return rows

    def _copy(self) -> Any:
        """The dataset with a state of its own: `datasets` keeps that of the last iter() only."""
        return copy.deepcopy(self.dataset) if hasattr(self.dataset, "state_dict") else self.dataset

    def _own(self, stop: int) -> int:
        """Rows of this rank's stream before position `stop`."""
        return max(0, -(-(stop - self.rank) // self.world_size)) if self.sharded else stop

    def _position(self, row: int) -> int:
        return row * self.world_size + self.rank if self.sharded else row

    def _agree(self, there: int) -> tuple[int, int]:
        """(least, most) over the ranks."""
        if self.engine is None or self.world_size == 1:
            return there, there
        least, most = self.engine.maximum([-there, there])
        return -int(least), int(most)

    def _open(self, row: int) -> None:
        """Rows before `row` are not needed any more."""
        if self._rows is None:
            self._live = self._copy()
            mark = self.given if self.given and self.given["row"] <= row else None
            if mark:
                self._live.load_state_dict(mark["state"])
            self._held: dict[int, tuple[int, dict]] = {}
            self._marks: deque[dict[str, Any]] = deque([mark] if mark else [])
            self.filled = mark["row"] if mark else 0  # rows read; those from `needed` on are held
            self._rows, self._ended = iter(self._live), False
        self.needed = row
        if self.looks_back:
            self._held = {at: held for at, held in self._held.items() if at >= row}

    def _fill(self, stop: int) -> None:
        """Read until the rows of the first `stop` places are held, or the stream ends."""
        while self.filled < stop and not self._ended:
            start, wanted = self.filled, self.buffer or min(stop - self.filled, AT_ONCE)
            rows = self._next(wanted)
            self._ended = len(rows) < wanted
            for at, number in enumerate(self._order(start, len(rows)), start):
                mine = self.keeps_all or at % self.world_size == self.rank
                if at >= self.needed and mine:
                    self._held[at] = (self._position(number), _arrays(rows[number - start]))
            self.filled += len(rows)
            last = self._marks[-1]["row"] if self._marks else 0
            if hasattr(self._live, "state_dict") and (self.buffer or self.filled - last >= MARK_EVERY):
                mark = {"row": self.filled, "buffer": self.buffer, "state": self._live.state_dict()}
                self._marks.append(mark)

    def _next(self, n: int) -> list[dict]:
        rows: list[dict] = []
        try:
            rows.extend(islice(self._rows, n))
        except Exception as error:  # whatever a dataset does with a broken file or connection
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise BadSetting(
                f"row {self.filled + len(rows):,} of the stream {self.name!r} cannot be read ({told}); mend "
                "it, and --resume_from_checkpoint auto goes on"
            ) from error
        return rows

    def _order(self, start: int, n: int) -> list[int]:
        """Rows in the order in which the `n` from `start` on are given out."""
        if not self.buffer or not n:
            return list(range(start, start + n))
        block = start // self.buffer
        return (start + Order(self.seed, self.name, n).indices(block * n + np.arange(n))).tolist()

    def _tell_end(self, end: int) -> None:
        """Say that the stream is over, and how much is left over where streams of several lengths end."""
        left = 0
        if self.sharded:
            left = sum(at >= self._own(end) for at in self._held)
            left += sum(1 for _ in islice(self._rows, COUNTED))
            (left,) = self.engine.sum_integers([left]) if self.engine else (left,)
        over = f"; {left:,} samples that other processes still had are left out" if left else ""
        warn(f"the stream {self.name!r} is over after {end:,} samples{over}")


def _arrays(row: dict) -> dict:
    """Lists as arrays, as the rows of other data come."""
    return {name: np.asarray(value) if isinstance(value, list) else value for name, value in row.items()}
