"""Functions of progress: sizes that follow from step and samples alone, so they are the same on any machine.

To add one: a function whose parameters are signals (adaptive/signals.py) and settings, and a line in
SCHEDULES of adaptive/schedules/__init__.py; or any file of yours, by path. A class has its settings in the
constructor. A schedule with `start` decides the first size itself.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from adaptive.config import warn
from adaptive.plan import exact

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


class replay:  # noqa: N801
    """The sizes of another run again, step by step: what a feedback schedule decided, without its feedback.

    Reads RUN_DIR/metrics.jsonl, written by any number of processes. The recorded targets are asked for, of
    each source where there are several, so that the same rounding gives the same realised sizes, weights
    included; where they alone do not lead there (sizes drawn by --participation, shares that no decimal
    number says), the realised sizes are asked for, without the empty steps. After the last recorded step its
    size stays, with a warning.
    """

    needs = {"per_device_train_batch_size": None}  # noqa: RUF012 (records are global)

    def __init__(self, run_dir: str):
        self.run_dir = run_dir
        records = _train_records(Path(run_dir))
        targets = [_by_source(record, "target_batch_size") for record in records]
        realised = [_by_source(record, "batch_size") for record in records if record["batch_size"]]
        if not realised:
            raise ValueError(f"no step of {run_dir} ran a sample; nothing to replay")
        sizes = targets if _round_to(records) else realised
        self.sizes = [size if len(size) > 1 else size[""] for size in sizes]

    def __call__(self, step):
        if step == len(self.sizes):
            warn(f"replay({self.run_dir!r}) has {step} steps and ends here; its last size stays")
        return self.sizes[min(step, len(self.sizes) - 1)]

    @property
    def start(self):
        return self.sizes[0]


def _train_records(folder: Path) -> list[dict]:
    """Of every step of a run; a line that a kill cut short does not count."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        raise ValueError(
            f"{folder} has no metrics.jsonl that can be read; write the output_dir of a run"
        ) from None
    try:
        parsed = [json.loads(line) for line in lines if line.endswith("\n")]
        records = [record for record in parsed if record["kind"] == "train"]
        steps = [record["step"] for record in records]
        sound = all(record["target_batch_size"] > 0 and record["batch_size"] >= 0 for record in records)
    except (ValueError, KeyError, TypeError, IndexError):
        steps, sound = [], False
    if not sound:
        raise ValueError(f"{folder}/metrics.jsonl is not the record of a run of train.py")
    if not steps or steps != list(range(1, len(steps) + 1)):
        told = f"{len(steps)} of them, not all from 1 on" if steps else "none"
        raise ValueError(f"{folder}/metrics.jsonl has not the steps of a whole run ({told})")
    return records


def _by_source(record: dict, name: str) -> dict[str, float]:
    """{source: its part of the field `name`}; the only one is called ""."""
    parts = {field.partition("/")[2]: field for field in record if field.startswith(f"{name}/")}
    return {source: float(record[field]) for source, field in (parts or {"": name}).items()}


def _round_to(records: list[dict]) -> bool:
    """Whether carrying the rest from step to step leads from the targets to the realised sizes."""
    carry: dict[str, Fraction] = {}
    for record in records:
        ran = _by_source(record, "batch_size")
        for source, size in _by_source(record, "target_batch_size").items():
            total = carry.get(source, Fraction(0)) + exact(size)
            n = total // 1
            if ran[source] > n or (ran[source] < n and record["carry"]):
                return False
            carry[source] = Fraction(0) if ran[source] < n else total - n
    return True
