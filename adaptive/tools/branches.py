"""A run's checkpoints -> the critical size at each: the branch rule of Merrill et al. 2025.

From a checkpoint, k times its size with f(k) times its learning rate, held there, over the same window of
samples; f is the square root for Adam and k itself for SGD. The starting run is only read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, parse, warn
from adaptive.schedules import global_size
from adaptive.state import RunState
from adaptive.tools import fit
from adaptive.tools.candidates import CLEARLY, Asked, metric_of, settings_of, table_of, with_bounds
from adaptive.tools.runs import Run
from adaptive.tools.search import Candidate, Search

# flags of train.py that say what a branch takes from its checkpoint
HELD = ("learning_rate", "base_batch_size", "lr_scheduler_type", "lr_scheduler_kwargs")
DECAYED = 0.1  # of the peak learning rate: below it a branch says little about sizes


def branch(asked: Asked, search: Search) -> dict[str, Any]:
    """From each checkpoint: k times the size and f(k) times the rate over the same window of samples."""
    flags, points = asked.flags, []
    for name in HELD:
        if name in asked.names:
            raise BadSetting(
                f"--{name}: a branch holds its checkpoint's learning rate, times f(k); leave it out"
            )
    starts = checkpoints_of(flags.start)
    for at, checkpoint in enumerate(starts):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        begin, base, size = branch_settings(asked, search, checkpoint, manifest)
        own: list[dict] = []
        for k in flags.factors:
            config = settings_of(asked, base, k * size, manifest["seed"], begin, begin + flags.samples)
            config.output.run_name = f"{checkpoint.name} x {k:g}"
            tags = {"size": k * size, "factor": k, "begin": begin, "seed": manifest["seed"]}
            one = Candidate(f"{checkpoint.name}_times_{k:g}", config, tags, str(checkpoint))
            one = with_bounds(one, asked, own, begin, lambda loss: loss + CLEARLY * flags.eps)
            place = at * len(flags.factors) + len(own) + 1
            own.append(search.run(one, f"{place} of {len(starts) * len(flags.factors)}"))
            metric_of(asked, own[-1])  # a name that is none is told now
        losses = {result["size"]: metric_of(asked, result) for result in own}
        rows = [result | {"metric": losses[result["size"]]} for result in own]
        points.append({"samples": begin, "critical": fit.branch_size(losses, flags.eps), "candidates": rows})
    known = [(p["samples"], p["critical"]) for p in points if p["critical"] is not None]
    return {
        "critical_batch_size": known[-1][1] if known else None, "interval": None, "points": points,
        "metric": flags.metric, "eps": flags.eps, "schedule": table_of(known),
        "candidates": [row for point in points for row in point["candidates"]],
    }  # fmt: skip


def checkpoints_of(start: str | None) -> list[Path]:
    """Whole checkpoints of --start, a run or one checkpoint, by step."""
    from adaptive.checkpoint import problem

    if start is None:
        raise BadSetting("--method branch needs --start; write a run's folder or RUN/checkpoints/step_N")
    path = Path(start)
    paths = [path] if (path / "manifest.json").is_file() else (path / "checkpoints").glob("step_*")
    whole = [p for p in paths if problem(p) is None]
    if not whole:
        raise BadSetting(
            f"--start {start} has no whole checkpoint; write a run with checkpoints/step_N in it"
        )
    return sorted(whole, key=lambda p: int(p.name.split("_")[1]))


def branch_settings(
    asked: Asked, search: Search, checkpoint: Path, manifest: dict
) -> tuple[int, Config, float]:
    """(samples so far, settings at the checkpoint with the learning rate held there, its size in samples)."""
    dropped = {"resume_from_checkpoint", "output_dir", "run_name"}
    values = {name: value for name, value in manifest["config"].items() if name not in dropped}
    config = parse([*_arguments(values), *asked.given, "--output_dir", str(search.folder)])
    state = RunState.from_json(manifest["state"])
    size = max(float(global_size(state.size, config.batch, state.world_size)), 1.0)
    run = Run(checkpoint.parents[1])
    own = [r for r in run.train if r["step"] <= state.step and r["skipped"] is None]
    plain = [r for r in own if abs(r["batch_size"] - r["target_batch_size"]) < 1] or own
    if not plain:
        raise BadSetting(f"{checkpoint} has no update before it; start from a later checkpoint")
    rate, peak = plain[-1]["learning_rate"], config.optim.learning_rate
    if peak and rate < DECAYED * peak:
        warn(
            f"{checkpoint} has {rate / peak:.1%} of the run's peak learning rate, with which all sizes look "
            "alike; start from an earlier one, or from a run with a constant rate and --save_every"
        )
    config.optim.learning_rate = rate
    config.optim.base_batch_size = max(plain[-1]["target_batch_size"], 1.0)
    config.optim.lr_scheduler_type, config.optim.lr_scheduler_kwargs = "constant", ""
    if "lr_scaling" not in asked.names:
        config.optim.lr_scaling = "linear" if config.optim.optim == "sgd" else "sqrt"
    return state.samples, config, size


def _arguments(values: dict[str, Any]) -> list[str]:
    """Settings of a manifest as flags; those without a value stay at their default."""
    told: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            told.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list):
            told += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            told.append(f"--{name}={value}")
    return told
