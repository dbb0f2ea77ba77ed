"""Positions -> rows: sources, one fetch a step, read-ahead by sample.

A rank's next positions are known before the size of the step is (position p is rank p mod W's), so workers
fetch samples, not batches: whatever size the schedule decides, the rows are the right ones and nothing read
ahead is late or lost. The loader is never passed to accelerator.prepare, whose prefetch is by batch.
To add a dataset: --dataset_name with a name, a folder or a file (corpus.py).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from adaptive.config import BadSetting, Config
from adaptive.order import Order
from adaptive.plan import StepPlan, share

READ_AHEAD = 16  # samples a worker fetches at once
AT_ONCE = 256  # positions whose indices are computed at once: they cost little more than one


class Source:
    """One dataset in its own endless shuffled order, read by one rank."""

    def __init__(self, name: str, dataset: Any, seed: int, rank: int, world_size: int, workers: int):
        """`dataset` has len() and [index] or __getitems__([index]); rows are dictionaries."""
        self.name, self.dataset, self.workers = name, dataset, workers
        self.rank, self.world_size = rank, world_size
        if not len(dataset):
            raise BadSetting(
                f"the training data {name!r} has no rows; write a --dataset_name or --task that has some"
            )
        self.order = Order(seed, name, len(dataset))
        self._kept_from = 0  # a position; indices kept are those at it, + W, + 2 W, ...
        self._kept = np.empty(0, dtype=np.int64)
        self._stream: Iterator[tuple[int, dict]] | None = None
        self._next = -1  # position the stream yields next
        self._buffer: deque[tuple[int, dict]] = deque()

    def read(self, positions: np.ndarray) -> tuple[list[dict], list[int]]:
        """(rows, their indices) at this rank's `positions` (k,), in their order, with one fetch."""
        if not len(positions):
            return [], []
        indices = self._indices(positions)
        if not self.workers:
            return fetch_each(self.dataset, indices), indices.tolist()
        return [self._read(int(position)) for position in positions], indices.tolist()

    def _indices(self, positions: np.ndarray) -> np.ndarray:
        """`order.indices` (k,); those of this rank's next AT_ONCE positions are computed at once and kept."""
        first, n = int(positions[0]), len(positions)
        assert positions[-1] - first == (n - 1) * self.world_size, "a rank's positions are W apart"
        at, off = divmod(first - self._kept_from, self.world_size)
        if off or at < 0 or at + n > len(self._kept):
            ahead = first + self.world_size * np.arange(max(n, AT_ONCE))
            self._kept_from, self._kept, at = first, self.order.indices(ahead), 0
        return self._kept[at : at + n]

    def _read(self, position: int) -> dict:
        """The row from the workers' stream; positions that were skipped (a discarded rest) are thrown
        away.
        """
        expected = self._buffer[0][0] if self._buffer else self._next
        if self._stream is None or not expected <= position or (position - expected) % self.world_size:
            self._start(position)
        while True:
            if not self._buffer:
                self._buffer.extend(next(self._stream))
                self._next = self._buffer[-1][0] + self.world_size
            at, row = self._buffer.popleft()
            if at == position:
                return row

    def _start(self, position: int) -> None:
        """Workers that fetch position, position + W, position + 2 W, ..."""
        chunks = (
            range(start, start + READ_AHEAD * self.world_size, self.world_size)
            for start in _count(position, READ_AHEAD * self.world_size)
        )
        loader = DataLoader(
            _Positions(self.dataset, self.order),
            sampler=chunks,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_is,
            worker_init_fn=_alone,
            # The workers' seed must not come from the global generator.
            generator=torch.Generator().manual_seed(0),
        )
        self._buffer.clear()
        self._stream, self._next = iter(loader), position


class Unreadable:
    """In place of a row that raised."""

    def __init__(self, error: Exception):
        self.why = " ".join(f"{type(error).__name__}: {error}".split())[:200]


class Data:
    """All sources of a run, as one rank sees them."""

    def __init__(self, datasets: dict[str, Any], config: Config, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        seed, workers = config.run.seed, config.data.dataloader_num_workers
        self.sources = {n: Source(n, d, seed, rank, world_size, workers) for n, d in datasets.items()}
        self._idle: dict | None = None
        self.config = config

    @property
    def lengths(self) -> dict[str, int]:
        return {name: len(source.dataset) for name, source in self.sources.items()}

    def share(self, plan: StepPlan) -> tuple[list[dict], list[str], list[int]]:
        """(rows, their sources, their indices) of this rank in this step; all empty where it has nothing."""
        rows, names, indices = [], [], []
        for name, positions in share(plan, self.rank, self.world_size):
            more_rows, more_indices = self.sources[name].read(positions)
            rows, indices, names = rows + more_rows, indices + more_indices, names + [name] * len(positions)
        return rows, names, indices

    def take(
        self, plan: StepPlan, weight: float, engine: Any, state: Any
    ) -> tuple[list[dict], list[str], list[int], float]:
        """`share` without rows that raised, and the weight of those that are left.

        --on_bad_sample stop: BadSetting that names the row, on every rank. skip: collective; such a sample is
        consumed and teaches nothing, and the others weigh as if the step had been made of them alone.
        """
        rows, sources, indices = self.share(plan)
        bad = [k for k, row in enumerate(rows) if isinstance(row, Unreadable)]
        told = [f"row {indices[k]} of {sources[k]} cannot be read ({rows[k].why})" for k in bad]
        if self.config.data.on_bad_sample == "stop":
            if bad:
                raise engine.stop_all(f"{told[0]}; mend it, or write --on_bad_sample skip")
            return rows, sources, indices, weight
        (n_bad,) = engine.sum_integers([len(bad)])
        for line in told:
            print(f"warning: step {state.step + 1}: {line}; skipped", file=sys.stderr, flush=True)
        state.bad_samples += n_bad
        good = [k for k in range(len(rows)) if k not in bad]
        rows, sources, indices = ([values[k] for k in good] for values in (rows, sources, indices))
        if self.config.batch.normalize_by == "samples" and plan.size > n_bad:  # tokens are counted anyway
            weight *= plan.size / (plan.size - n_bad)
        return rows, sources, indices, weight

    def longest_row(self, look_at: int) -> dict:
        """The longest of `look_at` rows from all over the first source."""
        dataset = next(iter(self.sources.values())).dataset
        chosen = np.unique(np.linspace(0, len(dataset) - 1, look_at).astype(np.int64))
        rows = [row for row in fetch_each(dataset, chosen) if isinstance(row, dict)]
        return max(rows, key=lambda row: sum(np.size(value) for value in row.values()))

    def idle_row(self) -> dict:
        """A row for passes of weight 0, which ranks without a sample run so that every rank takes part."""
        if self._idle is None:
            dataset = next(iter(self.sources.values())).dataset
            rows = (fetch_each(dataset, np.array([number]))[0] for number in range(len(dataset)))
            self._idle = next(row for row in rows if not isinstance(row, Unreadable))
        return self._idle


class _Positions(torch.utils.data.Dataset):
    """Ranges of positions -> [(position, row)], in a worker."""

    def __init__(self, dataset: Any, order: Order):
        self.dataset, self.order = dataset, order

    def __getitem__(self, positions: range) -> list[tuple[int, dict]]:
        indices = self.order.indices(np.fromiter(positions, dtype=np.int64))
        return list(zip(positions, fetch_each(self.dataset, indices), strict=True))


def fetch(dataset: Any, indices: np.ndarray) -> list[dict]:
    """Rows of `dataset` at `indices` (k,): one look-up where it has one (2 to 20 times faster than k)."""
    columns = _columns(dataset) if hasattr(dataset, "with_format") else None
    if columns is not None:
        values = [column.at(indices) for column in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices.tolist())
    return [dataset[i] for i in indices.tolist()]


def fetch_each(dataset: Any, indices: np.ndarray) -> list[dict | Unreadable]:
    """`fetch`, with an Unreadable for each row that raises."""
    try:
        return fetch(dataset, indices)
    except Exception as error:  # whatever a dataset does with a broken file
        if len(indices) == 1:
            return [Unreadable(error)]
    return [fetch_each(dataset, indices[k : k + 1])[0] for k in range(len(indices))]


class _Column:
    """An Arrow column of integers or lists of them: the rows of datasets' NumPy format, several times faster.

    Views of the table, which lies in a file as a rule: no memory of its own.
    """

    def __init__(self, column: Any):
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.starts = np.cumsum([0] + [len(chunk) for chunk in chunks[:-1]])  # each chunk's first row
        self.is_list = hasattr(column.type, "value_type")
        self.values = [(chunk.values if self.is_list else chunk).to_numpy() for chunk in chunks]
        self.bounds = [chunk.offsets.to_numpy() for chunk in chunks] if self.is_list else []  # of rows

    def at(self, indices: np.ndarray) -> list:
        """(k,) int64 arrays, or numbers, of their own memory."""
        chunks = self.starts.searchsorted(indices, "right") - 1
        places = zip(chunks.tolist(), (indices - self.starts[chunks]).tolist(), strict=True)
        if not self.is_list:
            return [np.int64(self.values[chunk][row]) for chunk, row in places]
        values, bounds = self.values, self.bounds
        return [values[k][bounds[k][row] : bounds[k][row + 1]].astype(np.int64) for k, row in places]


@functools.lru_cache(maxsize=8)  # the training and validation data of a few sources
def _columns(dataset: Any) -> dict[str, _Column] | None:
    """Of a `datasets` Dataset in NumPy format, of integers and lists of them, none missing; else None."""
    import pyarrow.types as kinds

    form = getattr(dataset, "format", None)
    rows_chosen = getattr(dataset, "_indices", True)  # by select or shuffle: not the table's own rows
    if rows_chosen is not None or not isinstance(form, dict):
        return None
    if form["type"] != "numpy" or form["format_kwargs"]:
        return None
    columns = {name: dataset.data.column(name) for name in form["columns"]}
    for column in columns.values():
        is_list = kinds.is_list(column.type)
        has_none = column.null_count or (is_list and any(chunk.values.null_count for chunk in column.chunks))
        if has_none or not kinds.is_integer(column.type.value_type if is_list else column.type):
            return None
    return {name: _Column(column) for name, column in columns.items()}


def _alone(worker: int) -> None:
    """A signal to the whole group stops the run after its step, which still needs its workers."""
    os.setpgrp()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def _as_is(rows: list) -> list:
    return rows


def _count(start: int, step: int) -> Iterator[int]:
    while True:
        yield start
        start += step
