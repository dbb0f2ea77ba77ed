"""Positions -> rows: sources, one fetch a step, read-ahead by sample.

A rank's next positions are known before the size of the step is (position p is rank p mod W's), so workers
fetch samples, not batches: whatever size the schedule decides, the rows are the right ones and nothing read
ahead is late or lost. The loader is never passed to accelerator.prepare, whose prefetch is by batch. With
several sources on several ranks the owner of a position depends on the sizes before it: there a rank reads in
the loop what no worker could know.
With --streaming sources are streams (stream.py).
To add a dataset: --dataset_name with a name, a folder or a file (corpus.py).
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from adaptive import scaling
from adaptive.config import BadSetting, Config, eval_datasets, sources
from adaptive.order import Order
from adaptive.plan import StepPlan, own_picks, share
from adaptive.stream import Stream

READ_AHEAD = 16  # samples a worker fetches at once
AT_ONCE = 1024  # positions whose indices are computed at once: they cost twice as much as one


@dataclass
class Sources:
    """What a task loaded, by source."""

    train: dict[str, Any]
    eval: dict[str, Any]  # None where a source has no validation data
    tokenizer: Any
    fingerprint: str


def load(task: Any, config: Config) -> Sources:
    """`task.load` for each source of --dataset_name; a task sees the settings of one source at a time.

    The number of rows is part of the fingerprint: cut otherwise (--sequence_length), the same texts have
    other rows at the same positions.
    """
    held, loaded, streaming = eval_datasets(config.data), {}, config.data.streaming
    for name, dataset in sources(config.data).items():
        if config.data.dataset_is_sharded:
            dataset = dataset.replace("{rank}", os.environ.get("RANK", "0"))
        data = replace(config.data, dataset_name=dataset, eval_dataset=held.get(name))
        loaded[name] = task.load(replace(config, data=data))
    buffer = f"stream with --shuffle_buffer {config.data.shuffle_buffer}, " if streaming else ""
    counts = {name: "" if streaming else f"/{_length(one.train)}" for name, one in loaded.items()}
    prints = {name: f"{buffer}{one.fingerprint}{counts[name]}" for name, one in loaded.items()}
    return Sources(
        train={name: one.train for name, one in loaded.items()},
        eval={name: one.eval for name, one in loaded.items()},
        tokenizer=next(iter(loaded.values())).tokenizer,
        fingerprint=prints["train"] if list(prints) == ["train"] else " ".join(map(":".join, prints.items())),
    )


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None  # a stream is refused by Source


@dataclass
class Share:
    """What one rank trains on in a step of `size` samples; rows stand by source."""

    rows: list[dict]
    size: int  # n, over all ranks
    weights: list[float]  # (k,) of each sample in the step's gradient, without the factor W
    sources: list[str] = field(default_factory=list)  # (k,)
    indices: list[int] = field(default_factory=list)  # (k,) rows of the datasets
    groups: list[int] = field(default_factory=list)  # (k,) samples whose tokens weigh alike
    sizes: tuple[int, ...] = ()  # of each group, over all ranks
    counts: dict[str, int] = field(default_factory=dict)  # source -> this rank's rows
    difficulty: list[float] | None = None  # (k,) of --difficulty_column
    places: list[int] = field(default_factory=list)  # (k,) of the samples, where some are left out
    items: list[int] = field(default_factory=list)  # (k,) supervised ones of each, once they are collated

    @classmethod
    def alike(cls, rows: list[dict], size: int, weight: float) -> Share:
        """Rows of one source that weigh the same."""
        names, n = ["train"] * len(rows), len(rows)
        return cls(rows, size, [weight] * n, names, [0] * n, [0] * n, (size,), {"train": n})

    @property
    def bad(self) -> list[int]:
        """Rows that could not be read."""
        return [k for k, row in enumerate(self.rows) if isinstance(row, Unreadable)]

    def bad_by_group(self) -> list[int]:
        bad = [self.groups[k] for k in self.bad]
        return [bad.count(group) for group in range(len(self.sizes))]

    def without_bad(self, n_bad: list[int], by_samples: bool) -> Share:
        """The rows that could be read; n_bad: of each group the others, over all ranks.

        Where samples weigh alike those that are left take over the weight; tokens are counted anyway.
        """
        bad = set(self.bad)
        good = [k for k in range(len(self.rows)) if k not in bad]
        left = [n / (n - b) if by_samples and n > b else 1.0 for n, b in zip(self.sizes, n_bad, strict=True)]
        names = [self.sources[k] for k in good]
        return replace(
            self,
            rows=[self.rows[k] for k in good],
            weights=[self.weights[k] * left[self.groups[k]] for k in good],
            sources=names,
            indices=[self.indices[k] for k in good],
            groups=[self.groups[k] for k in good],
            counts={source: names.count(source) for source in self.counts},
            difficulty=self.difficulty and [self.difficulty[k] for k in good],
            places=good,
        )

    def group_totals(self) -> list[int]:
        """This rank's supervised items in each group."""
        totals = [0] * len(self.sizes)
        for group, count in zip(self.groups, self.items, strict=True):
            totals[group] += count
        return totals

    def loss_scales(
        self, totals: list[int] | None, world_size: int, lengths: list[int]
    ) -> tuple[torch.Tensor, ...]:
        """(rows,) fp64 of each pass: what a row's sum of losses is multiplied by, 0 in an idle pass.

        totals: items of each group over all ranks, None where samples weigh alike (scaling.py). lengths: rows
        of each pass, the idle ones last.
        """
        if totals is None:
            unit = scaling.loss_scale(1.0, self.size, world_size, None)
            scales = [unit * weight / max(n, 1) for weight, n in zip(self.weights, self.items, strict=True)]
        else:
            pairs = zip(self.sizes, totals, strict=True)
            units = [scaling.loss_scale(1.0, size, world_size, total) for size, total in pairs]
            scales = [units[group] * weight for group, weight in zip(self.groups, self.weights, strict=True)]
        scales += [0.0] * (sum(lengths) - len(scales))
        scales = torch.from_numpy(np.array(scales))
        return scales.split(lengths) if len(lengths) > 1 else (scales,)


class Source:
    """One dataset in its own endless shuffled order, read by one rank."""

    def __init__(self, name: str, dataset: Any, seed: int, rank: int, world_size: int, workers: int):
        """`dataset` has len() and [index] or __getitems__([index]); rows are dictionaries."""
        self.name, self.dataset, self.workers = name, dataset, workers
        self.rank, self.world_size = rank, world_size
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise BadSetting(
                f"the training data {name!r} is a stream ({type(dataset).__name__}), and a position is a row "
                "that can be looked up; write --streaming, or write it into files once (save_to_disk) and "
                "name that folder: it is read from the disk, and any size will do"
            )
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

    @property
    def length(self) -> int:
        return len(self.dataset)

    def first(self) -> dict:
        """The first row that can be read."""
        for number in range(self.length):
            (row,) = fetch_each(self.dataset, np.array([number]))
            if not isinstance(row, Unreadable):
                return row
        raise BadSetting(
            f"no row of the training data {self.name!r} can be read (the last: {row.why}); write another"
        )

    def some(self, n: int) -> list[dict]:
        """About `n` rows from all over it, those that can be read."""
        chosen = np.unique(np.linspace(0, self.length - 1, n).astype(np.int64))
        return [row for row in fetch_each(self.dataset, chosen) if isinstance(row, dict)]

    def read(self, positions: np.ndarray, scattered: bool = False) -> tuple[list[dict], list[int]]:
        """(rows, their indices) at this rank's `positions` (k,), in their order, with one fetch.

        scattered: they follow from what only this step decided, and are not W apart from those before.
        """
        if not len(positions):
            return [], []
        indices = self.order.indices(positions) if scattered else self._indices(positions)
        by_workers = self.workers and not scattered
        rows = [self._read(int(p)) for p in positions] if by_workers else fetch_each(self.dataset, indices)
        if "position" in next((row for row in rows if isinstance(row, dict)), ()):  # see tasks/__init__.py
            for at, position in enumerate(positions.tolist()):
                if isinstance(rows[at], dict):
                    rows[at] = rows[at] | {"position": position}
        return rows, indices.tolist()

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

    def __init__(
        self, datasets: dict[str, Any], config: Config, rank: int, world_size: int, engine: Any = None
    ):  # fmt: skip
        """`engine` agrees on where a stream ends."""
        self.rank, self.world_size, self.streaming = rank, world_size, config.data.streaming
        seed, workers = config.run.seed, config.data.dataloader_num_workers
        self.sources: dict[str, Any] = {
            n: Stream(n, d, config, rank, world_size, engine)
            if self.streaming
            else Source(n, d, seed, rank, world_size, workers)
            for n, d in datasets.items()
        }
        self.by_source = bool(config.batch.source_weights)
        self.column = config.data.difficulty_column
        self._idle: dict | None = None
        self.config = config
        if self.column or len(self.sources) > 1:
            self._check_columns()

    @property
    def lengths(self) -> dict[str, int]:
        return {name: source.length for name, source in self.sources.items()}

    @property
    def reach(self) -> Callable[[str, int, int], int] | None:
        """For Lengths: how far a stream goes; None where that is known."""
        return (lambda name, *bounds: self.sources[name].reach(*bounds)) if self.streaming else None

    def seek(self, state: Any) -> None:
        """Go on where `state` left off; only a stream has to know it before the first step."""
        if self.config.data.dataset_is_sharded and state.step and state.world_size != self.world_size:
            raise BadSetting(
                f"--dataset_is_sharded: the run was started on {state.world_size} processes, each with files "
                f"of its own; continue it on as many, not on {self.world_size}"
            )
        for source in self.sources.values() if self.streaming else ():
            source.seek(state.stream)

    def share(self, plan: StepPlan, weights: dict[str, float], whole: bool = False) -> Share:
        """What this rank trains on in this step; `weights`: source -> of one of its samples.

        `whole`: what all ranks do, together.
        """
        rank, world_size = (0, 1) if whole else (self.rank, self.world_size)
        counts, sizes = dict.fromkeys(self.sources, 0), plan.counts
        own = Share([], plan.size, [], sizes=tuple(sizes.values()) if self.by_source else (plan.size,))
        own.counts, places = counts, {name: at for at, name in enumerate(sizes)}
        scattered = plan.picks is not None or whole or (len(self.sources) > 1 and world_size > 1)
        for name, positions in share(plan, rank, world_size):
            rows, indices = self.sources[name].read(positions, scattered)
            counts[name] = n = len(rows)
            own.rows, own.indices = own.rows + rows, own.indices + indices
            own.sources, own.weights = own.sources + [name] * n, own.weights + [weights[name]] * n
            own.groups += [places[name] if self.by_source else 0] * n
        if plan.picks is not None:
            factors = [pick.factor for pick in own_picks(plan, rank, world_size)]
            own.weights = [weight * factor for weight, factor in zip(own.weights, factors, strict=True)]
        if self.column:
            rows = (row if isinstance(row, dict) else {self.column: 0.0} for row in own.rows)
            own.difficulty = [float(row[self.column]) for row in rows]
        return own

    def take(self, plan: StepPlan, weights: dict[str, float], engine: Any, state: Any) -> Share:
        """`share` without rows that raised, and the weights of those that are left.

        --on_bad_sample stop: BadSetting that names the row, on every rank. skip: collective; such a sample is
        consumed and teaches nothing, and the others weigh as if its group had been made of them alone.
        """
        own = self.share(plan, weights)
        if self.streaming:
            ((name, source),) = self.sources.items()
            state.stream = source.mark_before(plan.cursor[name])
        told = [
            f"row {own.indices[k]} of {own.sources[k]} cannot be read ({own.rows[k].why})" for k in own.bad
        ]
        if self.config.data.on_bad_sample == "stop":
            if told:
                raise engine.stop_all(f"{told[0]}; mend it, or write --on_bad_sample skip")
            return own
        n_bad = engine.sum_integers(own.bad_by_group())
        for line in told:
            print(f"warning: step {state.step + 1}: {line}; skipped", file=sys.stderr, flush=True)
        state.bad_samples += sum(n_bad)
        return own.without_bad(n_bad, self.config.batch.normalize_by == "samples")

    def longest_row(self, look_at: int) -> dict:
        """The longest of `look_at` rows from all over each source, of a stream from its start."""
        rows = [row for source in self.sources.values() for row in source.some(look_at)]
        return max(rows or [self.idle_row()], key=lambda row: sum(np.size(value) for value in row.values()))

    @staticmethod
    def copies(row: dict, n: int) -> Share:
        """`row` n times, to try how much memory it takes."""
        return Share.alike([row] * n, n, 1 / n)

    def idle_row(self) -> dict:
        """A row for passes of weight 0, which ranks without a sample run so that every rank takes part."""
        if self._idle is None:
            self._idle = next(iter(self.sources.values())).first()
        return self._idle

    def _check_columns(self) -> None:
        """Rows of all sources share passes, so they have the same columns."""
        columns = {name: sorted(source.first()) for name, source in self.sources.items()}
        first, *others = columns
        for other in others:
            if columns[other] != columns[first]:
                raise BadSetting(
                    f"the sources {first} and {other} have the columns {', '.join(columns[first])} and "
                    f"{', '.join(columns[other])}; samples of one step need the same"
                )
        if self.column and not isinstance(self.sources[first].first().get(self.column), Real):
            raise BadSetting(
                f"--difficulty_column {self.column} is no number of the samples, which have "
                f"{', '.join(columns[first])}; write one of these that is"
            )


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
        if len(columns) == 1:
            ((name, column),) = columns.items()
            return [{name: value} for value in column.at(indices)]
        values = [column.at(indices) for column in columns.values()]
        return [dict(zip(columns, row)) for row in zip(*values)]  # noqa: B905 (it takes a third longer)
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
        # Of rows; a memoryview gives a Python integer, in a third of the time that NumPy needs for its own.
        self.bounds = [memoryview(chunk.offsets.to_numpy()) for chunk in chunks] if self.is_list else []

    def at(self, indices: np.ndarray) -> list:
        """(k,) int64 arrays, or numbers; not the table's memory, but one piece for all of them."""
        chunks = self.starts.searchsorted(indices, "right") - 1
        places = zip(chunks.tolist(), (indices - self.starts[chunks]).tolist(), strict=True)
        if not self.is_list:
            return [np.int64(self.values[chunk][row]) for chunk, row in places]
        values, bounds = self.values, self.bounds
        views = [values[k][bounds[k][row] : bounds[k][row + 1]] for k, row in places]
        lengths, copied = list(map(len, views)), np.concatenate(views, dtype=np.int64)
        if len(set(lengths)) == 1:
            return list(copied.reshape(len(views), -1))
        ends = list(itertools.accumulate(lengths))
        return [copied[start:end] for start, end in zip([0, *ends], ends)]  # noqa: B905 (one longer)


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
