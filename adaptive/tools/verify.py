"""Records of a run -> what was checked and holds, or the first thing that does not.

Three independent questions: do the positions cover each source once per epoch; do the sizes follow the
schedule, asked again here with the signals that the records hold, and the carry; and did the processes train
on the very rows (with --audit). The arithmetic is written down anew, from the README and not from plan.py.
To add one: a generator that yields sentences of what holds and raises `Wrong`, and its name in `verify`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from adaptive import scaling
from adaptive.config import BadSetting
from adaptive.order import Order
from adaptive.plan import CARRY_DENOMINATOR, ENDLESS, exact, share
from adaptive.schedules import decide, first_size, load_schedule
from adaptive.state import RunState
from adaptive.tools.runs import Run, taken


class Wrong(Exception):
    """One line that says where the records contradict themselves."""


def verify(run: Run, task: Any, n_rows: dict[str, int]) -> list[str]:
    """Sentences of what holds; raises Wrong at the first thing that does not. `n_rows`: source -> N."""
    if not run.train:
        raise Wrong("metrics.jsonl has no decision")
    told = [*counters(run), *positions(run, n_rows), *sizes(run, task, n_rows)]
    if run.begin is not None:
        told.insert(0, f"from step {run.begin.step:,} on, as {run.starts[0]['from']} was then")
    if not run.audits:
        return told
    return [*told, *(places(run) if ENDLESS in n_rows.values() else rows(run, n_rows))]


def counters(run: Run) -> Iterator[str]:
    """Steps count decisions, samples and updates add up."""
    begin = run.begin or RunState()
    step, samples, updates = begin.step, begin.samples, begin.updates
    for record in run.train:
        step, samples, updates = (
            step + 1, samples + record["batch_size"], updates + (record["skipped"] is None)
        )  # fmt: skip
        for name, counted in (("step", step), ("samples", samples), ("updates", updates)):
            if record[name] != counted:
                raise Wrong(f"step {record['step']}: {name} is {record[name]}, counted {counted}")
    yield f"{step:,} steps, {updates:,} updates and {samples:,} samples add up"


def positions(run: Run, n_rows: dict[str, int]) -> Iterator[str]:
    """Each source's intervals follow one another from the beginning without gap or overlap, so each epoch has
    every position once; with --epoch_end drop the rest of an epoch may be left out.
    """
    first = dict.fromkeys(n_rows, 0) | (run.begin.cursor if run.begin else {})
    cursor, dropped = dict(first), 0
    for record in run.train:
        if sum(stop - start for _, start, stop in record["positions"]) != record["batch_size"]:
            raise Wrong(f"step {record['step']}: its positions are not {record['batch_size']} samples")
        for source, start, stop in taken(record):
            before, n = cursor[source], n_rows[source]
            if start != before:
                may_drop = run.config.batch.epoch_end == "drop" and len(n_rows) == 1
                if not (may_drop and start > before and start == -(-before // n) * n):
                    what = "repeats" if start < before else "leaves out"
                    first, last = sorted((start, before))
                    raise Wrong(f"step {record['step']} {what} positions {first:,} to {last:,} of {source}")
                dropped += start - before
            cursor[source] = stop
        early = [at for source, at, stop in record["positions"] if stop > cursor[source]]
        if early:
            raise Wrong(f"step {record['step']} draws position {early[0]:,}, which has not arrived yet")
    once = "into the reservoir once" if _reservoir(run) else "once"
    for source, stop in cursor.items():
        whole, rest = divmod(stop - first[source], n_rows[source])
        epochs = "of a stream" if n_rows[source] == ENDLESS else f"{whole} whole epochs and {rest:,} samples"
        yield f"{source}: every position from {first[source]:,} to {stop:,} {once} ({epochs})"
    if dropped:
        yield f"{dropped:,} samples at the ends of epochs dropped, as --epoch_end drop says"


def _reservoir(run: Run) -> bool:
    return run.config.batch.participation == "reservoir"


def sizes(run: Run, task: Any, n_rows: dict[str, int]) -> Iterator[str]:
    """The sizes asked for are what the schedule answers, the sizes run are what the carry makes of them."""
    again, carry = Again(run, task, n_rows), sum(run.begin.carry.values() if run.begin else (), Fraction(0))
    drawn = run.config.batch.participation == "bernoulli"
    for record in run.train:
        target, n = again.target(record) or exact(record["target_batch_size"]), _taken(record)
        if float(target) != record["target_batch_size"]:
            raise Wrong(
                f"step {record['step']}: {again.text} asks for {float(target):g} samples, the record says "
                f"{record['target_batch_size']:g}"
            )
        after = carry + target - n
        fits = 0 <= after < len(n_rows) and abs(float(after) - record["carry"]) <= 1e-9
        if drawn:
            several = len(n_rows) > 1
            parts = [exact(record[f"target_batch_size/{s}"]) for s in n_rows] if several else [target]
            fits = sum(g // 1 for g in parts) <= n <= sum(-(-g // 1) for g in parts)
        cut = n < (carry + target) // 1 and record["carry"] == 0 and _may_cut(run, record, n_rows)
        if not (fits or cut):
            raise Wrong(
                f"step {record['step']}: {float(carry):g} was carried over and {float(target):g} asked for, "
                f"but {n} samples were run and {record['carry']:g} carried on"
            )
        carry = after if fits and not drawn else Fraction(0)
        if carry.denominator > CARRY_DENOMINATOR:
            carry = carry.limit_denominator(CARRY_DENOMINATOR)
        again.learn(record)
    yield f"{len(run.train):,} sizes run follow from the sizes asked for, to the sample"
    yield again.said


def _taken(record: dict[str, Any]) -> int:
    """Samples by which the cursors moved; of a reservoir's empty slots fewer are drawn."""
    return sum(stop - start for _, start, stop in taken(record))


def _may_cut(run: Run, record: dict[str, Any], n_rows: dict[str, int]) -> bool:
    """Whether this step may be shorter than asked: at the run's end, or at an epoch's with --epoch_end
    keep.
    """
    policy = run.config.batch.epoch_end if len(n_rows) == 1 else "wrap"
    run_end = record["samples"] == run.lengths(n_rows).samples
    run_end = run_end or (ENDLESS in n_rows.values() and record is run.train[-1])  # where the stream ends
    run_end = run_end or any(
        start["step"] == record["step"] for start in run.starts
    )  # of a shorter run, then
    epoch_end = any(stop % n_rows[source] == 0 for source, _, stop in taken(record))
    return (run_end and policy != "drop") or (epoch_end and policy == "keep")


class Again:
    """The schedule, asked once more for every step of a run."""

    def __init__(self, run: Run, task: Any, n_rows: dict[str, int]):
        from adaptive import signals

        self.run, self.lengths, self.signals = run, run.lengths(n_rows), signals
        self.evals = {record["step"]: record["eval_loss"] for record in run.evals}
        self.batch, self.text = run.config.batch, run.config.batch.schedule
        self.decay = scaling.parse_decay(run.config.optim)
        self.schedule, self.said = None, f"{self.text}: every size asked for is its answer"
        if any(start.get("schedule", self.text) != self.text for start in run.starts):
            self.said = "the schedule was not asked again: a resume has changed it"
            return
        self.of_task = set(task.signals()).difference(signals.KNOWN)
        try:
            schedule = load_schedule(run.config, {*signals.KNOWN, *self.of_task})
        except BadSetting as error:
            self.said = f"the schedule was not asked again: {error}"
            return
        inputs = {"step", "updates", "current_size", "initial_size", "samples", "tokens", "lr_decay", "epoch"}
        inputs |= {
            "train_coverage",
            "learning_rate",
            "loss",
            "grad_norm",
            "loss_ema",
            "world_size",
            "size_unit",
        }
        missing = schedule.signals - inputs - set(run.train[-1])
        if missing:
            self.said = f"{self.text} was not asked again: the records have no {', '.join(sorted(missing))}"
            return
        self.schedule = schedule
        first = RunState.fresh(list(n_rows), self._first_processes(), first_size(schedule, self.batch))
        self.state = copy.deepcopy(run.begin) or first
        schedule.load_state_dict(self.state.schedule)

    def _first_processes(self) -> int:
        """W of the first start, the unit of per-device sizes: from the first size, which is in samples."""
        if self.run.starts:
            return self.run.starts[0]["world_size"]
        share, first = self.batch.per_device_train_batch_size, self.run.train[0]["target_batch_size"]
        if share is None:
            return 1
        if self.batch.fraction == "accumulate":
            return max(1, round(first * share / self.batch.samples_per_pass))
        return max(1, round(first / share))

    def target(self, record: dict[str, Any]) -> Fraction | None:
        """G of this step as the schedule answers now; None where it cannot be asked."""
        if self.schedule is None:
            return None
        progress = self.lengths.progress(self.state.cursor, self.state.samples, self.state.step)
        world_size = self.run.world_size(record["step"]) or 1
        seen = self.signals.before_step(self.state, world_size, self.decay(progress))
        seen |= {name: record.get(name) for name in self.of_task}  # as this step's decision saw them
        decision = decide(self.schedule, self.state, seen, self.batch, self.lengths, 0.0)
        self.state.size, self.state.sizes = decision["size"], decision["sizes"]
        return Fraction(decision["target"])

    def learn(self, record: dict[str, Any]) -> None:
        """The signals as they stood after this step."""
        if self.schedule is None:
            return
        state, before = self.state, self.state.seconds
        for name in ("step", "updates", "samples", "tokens", "seconds"):
            setattr(state, name, record[name])
        state.cursor |= {source: stop for source, _, stop in taken(record)}
        plan = self.run.plan(record)
        self.signals.after_step(state, plan, self.lengths, record, None, before, self.run.config)
        measured = {n: v for n, v in record.items() if n in self.signals.MEASURED and v is not None}
        state.signals |= measured
        if self.evals.get(state.step) is not None:
            state.signals["eval_loss"] = self.evals[state.step]


def rows(run: Run, n_rows: dict[str, int]) -> Iterator[str]:
    """audit/: over the processes, each step trained on the rows of its positions, each epoch on every row
    once.
    """
    orders = {source: Order(run.config.run.seed, source, n) for source, n in n_rows.items()}
    epochs: dict[tuple[str, int], list[np.ndarray]] = {}
    bad = run.begin.bad_samples if run.begin else 0
    for record in run.train:
        bad, n_bad = record.get("bad_samples", bad), record.get("bad_samples", bad) - bad
        own, expected = _audited(run, record), dict.fromkeys(n_rows, np.array([], int))
        for source, start, stop in record["positions"]:
            at = np.arange(start, stop)
            indices = orders[source].indices(at)
            expected[source] = np.concatenate([expected[source], indices])
            for epoch in np.unique(at // n_rows[source]):
                epochs.setdefault((source, int(epoch)), []).append(indices[at // n_rows[source] == epoch])
        for source, indices in expected.items():
            lost = Counter(indices.tolist())
            lost.subtract(own.get(source, []))
            n_bad -= lost.total()  # not read, and left out
            if min(lost.values(), default=0) < 0 or n_bad < 0:
                raise Wrong(
                    f"step {record['step']}: the audit's {len(own.get(source, []))} rows of {source} are not "
                    f"those of its {len(indices)} positions"
                )
    told = f"audit of {len(run.audits)} process(es): the very rows of these positions"
    if _reservoir(run):
        yield f"{told}, again and again or never, as a reservoir draws"
        return
    for (source, epoch), parts in epochs.items():
        indices = np.concatenate(parts)
        if len(np.unique(indices)) != len(indices) or indices.max() >= n_rows[source]:
            raise Wrong(f"the audit has rows of {source} more than once in epoch {epoch}")
    yield f"{told}, none twice in an epoch"


def places(run: Run) -> Iterator[str]:
    """audit/ of a stream: each step as many rows as positions, none of the stream's places twice."""
    seen: set[int] = set()
    for record in run.train:
        own = [place for part in _audited(run, record).values() for place in part]
        if len(own) != record["batch_size"]:
            raise Wrong(f"step {record['step']}: the audit has {len(own)} rows of {record['batch_size']}")
        twice = seen.intersection(own)
        if twice or len(set(own)) < len(own):
            raise Wrong(f"step {record['step']}: row {min(twice or own):,} of the stream was there before")
        seen.update(own)
    yield f"audit of {len(run.audits)} process(es): {len(seen):,} rows of the stream, none twice"


def _audited(run: Run, record: dict[str, Any]) -> dict[str, list[int]]:
    """Source -> rows of one step, over all processes."""
    own: dict[str, list[int]] = {}
    ran = {rank: audit[record["step"]] for rank, audit in run.audits.items() if record["step"] in audit}
    for rank, line in ran.items():
        names = line.get("sources")
        if names is None:  # all its rows are of one source
            shares = share(run.plan(record), rank, run.world_size(record["step"]) or len(ran))
            names = [source for source, positions in shares for _ in positions]
        for source, index in zip(names, line["indices"], strict=False):
            own.setdefault(source, []).append(index)
    return own
