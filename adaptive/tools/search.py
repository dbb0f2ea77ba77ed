"""A candidate's settings -> its result, trained once: the part of the finder that survives being killed.

Each candidate is an ordinary run in a folder of its own, through `train.main` in this process, so every
engine works. `result.json` in the folder says that it is over; a candidate without one goes on from its last
checkpoint. All processes read the same files and come to the same list of what is left.
To add one: a method of the finder is a function in critical_batch.py that asks for candidates.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config
from adaptive.tools.runs import lines

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ANOMALY = 1e5  # gradient norms above it are reported


@dataclass(frozen=True)
class Candidate:
    """One run of the search."""

    name: str  # of its folder
    config: Config
    tags: dict[str, float] = field(default_factory=dict)  # what its result repeats: size, seed, ...
    origin: str | None = None  # checkpoint it starts from

    @property
    def told(self) -> str:
        """Its name; of a branch also its size, and where it begins."""
        size = f"{self.config.batch.batch_size:g} samples a step"
        return self.name if self.origin is None else f"{self.name} ({size}, from {self.origin})"


class Search:
    """The folder of a search: candidates, and what they came to."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        """BadSetting where the folder holds a search with other settings; more seeds may be added, and
        anything may be corrected before the first candidate has begun.
        """
        self.folder, self.main = folder, os.environ.get("RANK", "0") == "0"
        path = folder / "search.json"
        if not self.main:
            return
        begun = any(path.is_dir() for path in folder.glob("*"))
        if path.is_file() and begun:
            before = json.loads(path.read_text())
            for name, value in json.loads(json.dumps(settings)).items():
                if before.get(name) != value:
                    raise BadSetting(
                        f"--output_dir {folder} holds a search with {name} {before.get(name)!r}, not "
                        f"{value!r}; write another --output_dir, or the same settings to go on"
                    )
        elif begun or any(other != path for other in folder.glob("*")):
            raise BadSetting(f"--output_dir {folder} is not empty; write a new folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            written(path, settings)

    def say(self, line: str) -> None:
        if self.main:
            print(line, flush=True)

    def result(self, name: str) -> dict[str, Any] | None:
        """What a candidate came to, None while it is not over."""
        path = self.folder / name / "result.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def results(self, candidates: list[Candidate]) -> list[dict[str, Any]]:
        return [found for c in candidates if (found := self.result(c.name)) is not None]

    def run(self, candidate: Candidate, place: str) -> dict[str, Any]:
        """The candidate's result, trained now unless it is over; `place` is told, e.g. "3 of 12"."""
        found = self.result(candidate.name)
        if found is not None:
            self.say(f"candidate {place}: {candidate.name} is done")
            return found
        self.say(f"candidate {place}: {candidate.told}, into {self.folder / candidate.name}")
        folder, config = self.folder / candidate.name, copy.deepcopy(candidate.config)
        own = any((folder / "checkpoints").glob("step_*/manifest.json"))
        config.run.output_dir = str(folder)
        config.run.resume_from_checkpoint = "auto" if own or candidate.origin is None else candidate.origin
        reason = self._train(config)
        if reason is None:
            self.say("the search is not over; the same command goes on with it")
            sys.exit(0)
        found = candidate.tags | {"name": candidate.name, "ended": reason, **outcome(folder)}
        if reason != "done":
            self.say(f"{candidate.name} has {reason}: that was a candidate's end, not the search's")
        if self.main:
            written(folder / "result.json", found)
        return found

    def _train(self, config: Config) -> str | None:
        """How it ended: done, lost or diverged; None where somebody else's signal stopped it."""
        from accelerate.state import AcceleratorState, GradientState

        import train

        try:
            state = train.main(config)
            lost = state.schedule and _clearly_lost(config, state)
            over = state.samples >= config.run.max_samples
            return "done" if over else "lost" if lost else None
        except RuntimeError as error:
            if "non-finite steps in a row" not in str(error):
                raise
            return "diverged"
        finally:
            for number in SIGNALS:  # the engine's handlers would only remember the signal
                signal.signal(number, _leave)
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            gc.collect()


def _leave(number: int, frame: Any) -> None:
    """Between two candidates there is nothing to save."""
    print("stopped by a signal; the same command goes on", flush=True)
    sys.exit(0)


def _clearly_lost(config: Config, state: Any) -> bool:
    """Whether it was the candidate itself that asked to stop."""
    from adaptive.schedules import parse_schedule

    judge = parse_schedule(config.batch.schedule, {"samples", "eval_loss"}).function
    loss = state.signals.get("eval_loss")
    return loss is not None and loss > judge.bound(state.samples)


def outcome(folder: Path) -> dict[str, Any]:
    """What the records of a run say: steps, samples, curve ([[samples, eval_loss]]), ..."""
    records = lines(folder / "metrics.jsonl")
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    metrics = {k: v for k, v in (evals[-1] if evals else {}).items() if k.startswith("eval_")}
    odd = [r for r in train if r["skipped"] == "nonfinite" or (r["grad_norm"] or 0) > ANOMALY]
    return {
        "steps": len(train),
        "samples": train[-1]["samples"] if train else 0,
        "seconds": train[-1]["seconds"] if train else 0.0,
        "learning_rate": max((r["learning_rate"] for r in train), default=None),
        "anomalies": len(odd),
        "losses": [r["loss"] for r in train[-64:] if r["loss"] is not None],
        "curve": [[r["samples"], r["eval_loss"]] for r in evals if r.get("eval_loss") is not None],
        "noise": [[r["samples"], r["noise_scale"]] for r in train if r.get("noise_scale")],
        **metrics,
    }


def bounds(rivals: list[list], total: int, begin: int, allowed: Any) -> list[list[float]]:
    """[[samples, eval_loss]] above which a candidate has clearly lost: after the first half, `allowed` of the
    best of `rivals`' curves there.
    """
    found: dict[int, float] = {}
    for samples, loss in (point for curve in rivals for point in curve):
        if (begin + total) / 2 < samples < total:
            found[samples] = min(allowed(loss), found.get(samples, math.inf))
    best, kept = math.inf, []
    for samples, most in sorted(found.items()):
        best = min(best, most)
        kept.append([samples, best])
    return kept


def written(path: Path, values: Any) -> None:
    """JSON, whole or not at all."""
    short = path.with_suffix(".part")
    short.write_text(json.dumps(_finite(values), indent=1, allow_nan=False) + "\n")
    os.replace(short, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value
