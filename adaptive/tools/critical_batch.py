"""A task -> its critical batch size: the largest one that still costs no more samples than a small one.

    python -m adaptive.tools.critical_batch --method sweep --sizes 8,16,32,64 --samples 4000 [train flags]
    python -m adaptive.tools.critical_batch --method branch --start RUN --factors 1,2,4,8 --samples 500
    python -m adaptive.tools.critical_batch --method noise --sizes 8 --samples 4000
    accelerate launch --config_file accelerate_configs/X.yaml -m adaptive.tools.critical_batch ...

**sweep** trains each size on the same samples from the same weights in the same order; **branch** (Merrill
et al. 2025) continues a run's checkpoints with k times the size; **noise** measures the gradient noise scale
along a run. Killed or stopped, the same command goes on; what is over is not run again. The mathematics:
fit.py.
To add one: a function (Asked, Search) -> report, and a line in METHODS.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, exit_with, parse
from adaptive.schedules import global_size
from adaptive.state import RunState
from adaptive.tools import fit
from adaptive.tools.finder_report import tell
from adaptive.tools.runs import Run
from adaptive.tools.search import Candidate, Search, bounds

CLEARLY = 10  # tolerances above the best: a candidate that has clearly lost


@dataclass
class Asked:
    """The finder's own flags, and the settings of its runs."""

    flags: argparse.Namespace
    config: Config
    given: list[str]  # train.py's flags

    @property
    def loss_metric(self) -> bool:
        return self.flags.metric.endswith("loss")


def main(arguments: list[str] | None = None) -> int:
    flags, given = _parser().parse_known_args(arguments)
    folder = Path(flags.output_dir)
    config = parse([*given, "--output_dir", str(folder)])
    settings = {"method": flags.method, "samples": flags.samples, "start": flags.start, "flags": given}
    settings |= {name: getattr(flags, name) for name in ("sizes", "factors", "evaluations", "warmup")}
    search = Search(folder, settings)
    report = METHODS[flags.method](Asked(flags, config, given), search)
    report |= {
        "method": flags.method,
        "command": shlex.join(["critical_batch", *(arguments or sys.argv[1:])]),
    }
    if search.main:
        tell(report, search, config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m adaptive.tools.critical_batch", allow_abbrev=False,
        description="Find the critical batch size. Flags not listed here are train.py's.",
    )  # fmt: skip
    add, numbers = parser.add_argument, _numbers
    add("--method", choices=list(METHODS), default="sweep")
    add("--sizes", type=numbers, default=[8, 16, 32, 64], help="candidates (global samples)")
    add("--seeds", type=numbers, default=[42], help="of weights and order (integers)")
    add("--samples", type=int, default=4000, help="of each candidate; of each branch's window (samples)")
    add("--tolerance", type=float, default=0.01, help="a metric this much above the best still holds (share)")
    add("--target", type=float, help="loss for steps-to-target; by default one that all reach (eval_loss)")
    add("--metric", default="eval_loss", help='compared at the end: eval_loss, eval_accuracy, "loss" (name)')
    add("--warmup", type=float, default=0.1, help="of the largest size; smaller ones in proportion (share)")
    add("--start", help="run or checkpoint that branches start from, or whose noise scale is read (path)")
    add("--factors", type=numbers, default=[1, 2, 4, 8], help="k of the branches (times the size)")
    add("--eps", type=float, default=0.01, help="a branch may be this much above smaller ones (loss)")
    add("--evaluations", type=int, default=20, help="of each candidate (evaluations)")
    add("--give_up", choices=["yes", "no"], default="yes", help="stop candidates that have clearly lost")
    add("--output_dir", default="runs/critical_batch", help="folder of the search (path)")
    return parser


def _numbers(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers above 0, such as 8,16,32")
    return sorted({int(value) if value == int(value) else value for value in values})


def settings_of(asked: Asked, base: Config, size: float, seed: int, begin: int, total: int) -> Config:
    """A run of one size up to `total` samples; `begin` where it starts."""
    config = copy.deepcopy(base)
    run, batch, optim = config.run, config.batch, config.optim
    run.seed, run.max_samples, run.max_steps, run.num_train_epochs = int(seed), total, -1, 1e6
    batch.batch_size, batch.per_device_train_batch_size, batch.max_batch_size = float(size), None, None
    batch.fraction, batch.schedule = "participate", f"candidate(size={float(size)!r})"
    optim.warmup_ratio, optim.warmup_samples = 0.0, None
    config.eval.eval_every = f"{max(1, (total - begin) // asked.flags.evaluations)} samples"
    config.output.save_every = f"{max(1, (total - begin) // 4)} samples"
    config.output.keep_last = 1
    config.output.run_group = config.output.run_group or Path(asked.flags.output_dir).name
    return config


def with_bounds(
    candidate: Candidate, asked: Asked, rivals: list, begin: int, total: int, allowed
) -> Candidate:
    """The same candidate, which gives up where it is clearly worse than those that are over."""
    if asked.flags.give_up == "no" or not asked.loss_metric:
        return candidate
    limits = bounds([rival["curve"] for rival in rivals if rival["ended"] == "done"], total, begin, allowed)
    config = copy.deepcopy(candidate.config)
    config.batch.schedule = f"candidate(size={config.batch.batch_size!r}, bounds={limits})"
    return Candidate(candidate.name, config, candidate.tags, candidate.origin)


def sweep(asked: Asked, search: Search) -> dict[str, Any]:
    """The published three steps: candidates, the same samples for each, metric against size."""
    flags, base = asked.flags, copy.deepcopy(asked.config)
    base.optim.base_batch_size = base.optim.base_batch_size or flags.sizes[0]
    results: list[dict] = []
    n = len(flags.seeds) * len(flags.sizes)
    for seed in flags.seeds:
        own: list[dict] = []
        for size in flags.sizes:
            config = settings_of(asked, base, size, seed, 0, flags.samples)
            config.optim.warmup_samples = int(flags.warmup * flags.samples * size / flags.sizes[-1])
            config.output.run_name = f"size {size:g} seed {seed}"
            one = Candidate(f"size_{size:g}_seed_{seed}", config, {"size": size, "seed": seed})
            one = with_bounds(
                one, asked, own, 0, flags.samples, lambda x: x + CLEARLY * flags.tolerance * abs(x)
            )
            own.append(search.run(one, f"{len(results) + len(own) + 1} of {n}"))
        results += own
    return sweep_report(asked, results)


def metric_of(asked: Asked, result: dict) -> float:
    """What a candidate ended with; the worst there is where it gave up or diverged."""
    worst = math.inf if asked.loss_metric else -math.inf
    if asked.flags.metric == "loss" and result["losses"]:
        value = fit.smoothed(result["losses"], 0.5)
    else:
        value = result.get(asked.flags.metric)
    return worst if value is None or result["ended"] != "done" else value


def sweep_report(asked: Asked, results: list[dict]) -> dict[str, Any]:
    """Turning point, and the fit of steps against samples to the target."""
    flags, rows = asked.flags, []
    sizes, seeds = flags.sizes, flags.seeds
    lowest = [
        min((loss for _, loss in r["curve"]), default=math.inf) for r in results if r["ended"] == "done"
    ]
    target = flags.target if flags.target is not None else max(lowest, default=math.nan)
    for result in results:
        samples = fit.samples_to(target, result["curve"])
        steps = None if samples is None else samples / result["size"]
        rows.append(result | {"metric": metric_of(asked, result), "steps_to": steps, "samples_to": samples})
    by_size = {b: [row for row in rows if row["size"] == b] for b in sizes}
    means = {b: sum(row["metric"] for row in own) / len(own) for b, own in by_size.items()}
    fits = [
        fit.fit_trade(*zip(*reached, strict=True))
        for seed in seeds
        if (reached := [(r["size"], r["steps_to"]) for r in rows if r["seed"] == seed and r["steps_to"]])
    ]
    found = [trade for trade in fits if trade is not None]
    turning = fit.turning_point(means, flags.tolerance, asked.loss_metric)
    critical = fit.interval([e_min / s_min for s_min, e_min in found])
    return {
        "critical_batch_size": critical[0] if critical else turning,
        "interval": critical[1:] if critical else None,
        "turning_point": turning, "target": target, "metric": flags.metric, "means": means,
        "fits": found, "candidates": rows, "schedule": None if turning is None else f"0:{turning:g}",
        "tolerance": flags.tolerance,
    }  # fmt: skip


def branch(asked: Asked, search: Search) -> dict[str, Any]:
    """From each checkpoint: k times the size and f(k) times the rate over the same window of samples."""
    flags, points = asked.flags, []
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
            allowed = lambda x: x + CLEARLY * flags.eps  # noqa: E731
            one = with_bounds(one, asked, own, begin, begin + flags.samples, allowed)
            own.append(
                search.run(
                    one, f"{at * len(flags.factors) + len(own) + 1} of {len(starts) * len(flags.factors)}"
                )
            )
        losses = {result["size"]: metric_of(asked, result) for result in own}
        rows = [result | {"metric": losses[result["size"]]} for result in own]
        points.append({"samples": begin, "critical": fit.branch_size(losses, flags.eps), "candidates": rows})
    known = [(p["samples"], p["critical"]) for p in points if p["critical"] is not None]
    return {
        "critical_batch_size": known[-1][1] if known else None, "interval": None, "points": points,
        "metric": flags.metric, "eps": flags.eps, "schedule": table_of(known),
        "candidates": [row for point in points for row in point["candidates"]],
    }  # fmt: skip


def table_of(known: list[tuple[int, float]]) -> str | None:
    """[(samples, size)] -> the table that the schedule `steps` reads; the first size from the beginning."""
    entries: list[tuple[int, float]] = []
    for samples, size in known:
        if not entries or size != entries[-1][1]:
            entries.append((samples if entries else 0, size))
    return " ".join(f"{samples}:{size:g}" for samples, size in entries) or None


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
    config.optim.learning_rate = plain[-1]["learning_rate"]
    config.optim.base_batch_size = max(plain[-1]["target_batch_size"], 1.0)
    config.optim.lr_scheduler_type, config.optim.lr_scheduler_kwargs = "constant", ""
    if "--lr_scaling" not in asked.given:
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


def noise(asked: Asked, search: Search) -> dict[str, Any]:
    """The gradient noise scale along a run: of --start where its records have it, else of a new run."""
    flags = asked.flags
    if flags.start:
        curve = [
            [r["samples"], r["noise_scale"]] for r in Run(Path(flags.start)).train if r.get("noise_scale")
        ]
        if not curve:
            raise BadSetting(f"--start {flags.start} has no noise_scale; run it with --track noise_scale")
        results = []
    else:
        config = settings_of(asked, asked.config, flags.sizes[0], flags.seeds[0], 0, flags.samples)
        config.output.track = (*config.output.track, "noise_scale")
        config.output.run_name = f"noise at {flags.sizes[0]:g}"
        results = [search.run(Candidate("noise", config, {"size": flags.sizes[0]}), "1 of 1")]
        curve = results[0]["noise"]
    points = [curve[len(curve) * at // 10 - 1] for at in range(1, 11) if len(curve) * at // 10]
    known = [(int(samples), max(1.0, round(size))) for samples, size in points]
    return {
        "critical_batch_size": points[-1][1] if points else None, "interval": None, "curve": curve,
        "points": [{"samples": samples, "critical": size} for samples, size in points],
        "schedule": table_of(known), "candidates": results,
    }  # fmt: skip


METHODS = {"sweep": sweep, "branch": branch, "noise": noise}

if __name__ == "__main__":
    try:
        status = main()
        from adaptive.engine import Engine

        Engine.leave()
        sys.exit(status)
    except BadSetting as error:
        exit_with(error)
