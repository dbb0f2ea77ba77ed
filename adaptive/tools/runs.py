"""The folder of a run -> its settings and its records, as the tools read them.

Nothing here writes. A last line that a kill cut short is passed over.
To add one: what several tools want to know of a run is a function here.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, parse
from adaptive.plan import Interval, Lengths, Pick, StepPlan, exact
from adaptive.state import RunState


@dataclass(frozen=True)
class Run:
    """One output folder; BadSetting where it holds no run."""

    folder: Path

    def __post_init__(self):
        if not (self.folder / "metrics.jsonl").is_file():
            raise BadSetting(f"{self.folder} has no metrics.jsonl; write the --output_dir of a run")

    @cached_property
    def config(self) -> Config:
        """Settings of the last start."""
        return parse(["--config", str(self.folder / "config.yaml")])

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        found = lines(path)
        if not all(isinstance(record, dict) and {"kind", "step"} <= set(record) for record in found):
            raise BadSetting(f"{path} is not the record of a run of train.py; write the --output_dir of one")
        return found

    @cached_property
    def train(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "train"]

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "eval"]

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """{"step", "world_size", ...} of every start, in time; those of step 0 are fresh, others resumes."""
        return lines(self.folder / "starts.jsonl")

    @cached_property
    def begin(self) -> RunState | None:
        """State at the checkpoint of another run that this one begins at; None of one from step 0.

        BadSetting where that checkpoint is not there.
        """
        from adaptive.checkpoint import MANIFEST, state_at

        if not self.starts or not self.starts[0]["step"]:
            return None
        path = Path(self.starts[0].get("from") or "")
        if not (path / MANIFEST).is_file():
            what = f"begins at step {self.starts[0]['step']} of another run's checkpoint"
            raise BadSetting(f"{self.folder} {what}, which is not to be found; verify that run")
        return state_at(path, json.loads((path / MANIFEST).read_text()), self.config)

    @cached_property
    def audits(self) -> dict[int, dict[int, dict[str, Any]]]:
        """{rank: {step: its line}}, of the steps that were recorded; empty without --audit."""
        paths = {int(p.stem.removeprefix("rank")): p for p in (self.folder / "audit").glob("rank*.jsonl")}
        last = self.train[-1]["step"] if self.train else 0
        return {
            rank: {line["step"]: line for line in lines(path) if line["step"] <= last}
            for rank, path in sorted(paths.items())
        }

    @cached_property
    def sources(self) -> list[str]:
        """Names, in the order of their first sample."""
        return list(dict.fromkeys(source for record in self.train for source, _, _ in record["positions"]))

    @cached_property
    def cursor(self) -> dict[str, int]:
        """Source -> its next position, after the last record."""
        return {source: stop for record in self.train for source, _, stop in taken(record)}

    @cached_property
    def n_rows(self) -> int | None:
        """Sum of N over the sources, from the records; None before the first sample, and of a stream."""
        passed, epochs = sum(self.cursor.values()), self.train[-1]["epoch"] if self.train else None
        return round(passed / epochs) if passed and epochs else None

    def world_size(self, step: int) -> int | None:
        """Processes that ran this step; None where neither starts.jsonl nor an audit says."""
        ran = [start["world_size"] for start in self.starts if start["step"] < step]
        if ran:
            return ran[-1]
        return sum(step in audit for audit in self.audits.values()) or None

    def lengths(self, n_rows: dict[str, int]) -> Lengths:
        run = self.config.run
        return Lengths(n_rows, exact(run.num_train_epochs), run.max_samples, run.max_steps)

    def plan(self, record: dict[str, Any]) -> StepPlan:
        """What `share` needs to know of a step."""
        intervals = tuple(Interval(*interval) for interval in record["positions"])
        target = dict.fromkeys(self.sources, Fraction(0))
        before = record["samples"] - record["batch_size"]
        if "arrived" not in record:
            return StepPlan(target, intervals, {}, {}, before, False)
        picks = tuple(Pick(part.source, part.start, 1.0) for part in intervals)
        return StepPlan(target, (), {}, {}, before, False, "reservoir", picks)


def taken(record: dict[str, Any]) -> list[list]:
    """[[source, start, stop]] that a step moved the cursors by; a reservoir draws from what has `arrived`."""
    return record.get("arrived", record["positions"])


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects of a file, one a line; [] without one."""
    found = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
