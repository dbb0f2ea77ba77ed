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
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, parse
from adaptive.tools import fit
from adaptive.tools.branches import branch
from adaptive.tools.candidates import CLEARLY, Asked, flag_name, metric_of, settings_of, table_of, with_bounds
from adaptive.tools.finder_report import tell
from adaptive.tools.flags import Flags, leave
from adaptive.tools.runs import Run
from adaptive.tools.search import Candidate, Search

# a flag of train.py that the search decides -> the one that says it
DECIDED = {
    "schedule": "--sizes or --factors", "batch_size": "--sizes or --factors",
    "per_device_train_batch_size": "--sizes or --factors", "seed": "--seeds", "max_samples": "--samples",
    "max_steps": "--samples", "num_train_epochs": "--samples", "eval_every": "--evaluations",
    "warmup_ratio": "--warmup", "warmup_samples": "--warmup", "run_name": "--run_group",
    "resume_from_checkpoint": "--start, or the same command to go on",
}  # fmt: skip
USED_BY = {  # own flags that not every method looks at
    "sizes": ("sweep", "noise"), "seeds": ("sweep", "noise"), "start": ("branch", "noise"),
    "factors": ("branch",), "eps": ("branch",), "tolerance": ("sweep",), "target": ("sweep",),
    "warmup": ("sweep",), "metric": ("sweep", "branch"), "give_up": ("sweep", "branch"),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    flags, given = _parser().parse_known_args(arguments)
    _check(flags, given)
    _check_method(flags, set(map(flag_name, arguments)))
    folder = Path(flags.output_dir)
    config = parse([*given, "--max_samples", str(flags.samples), "--output_dir", str(folder)])
    settings = {"method": flags.method, "samples": flags.samples, "start": flags.start, "flags": given}
    settings |= {name: getattr(flags, name) for name in ("sizes", "factors", "evaluations", "warmup")}
    search = Search(folder, settings)
    report = METHODS[flags.method](Asked(flags, config, given), search)
    report |= {
        "method": flags.method,
        "command": shlex.join(["critical_batch", *arguments]),
    }
    if search.main:
        tell(report, search, config)
    return 0


def _parser() -> Flags:
    parser = Flags(
        prog="python -m adaptive.tools.critical_batch", allow_abbrev=False,
        description="Find the critical batch size. Flags not listed here are train.py's.",
    )  # fmt: skip
    add, numbers = parser.add_argument, _numbers
    add("--method", choices=list(METHODS), default="sweep")
    add("--sizes", type=numbers, default=[8, 16, 32, 64], help="candidates (global samples)")
    add("--seeds", type=_seeds, default=[42], help="of weights and order (integers)")
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
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 < value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}; write numbers above 0, such as 8,16,32")
    return sorted({int(value) if value == int(value) else value for value in values})


def _seeds(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; write integers, such as 1,2,3") from None


def _check(flags: argparse.Namespace, given: list[str]) -> None:
    """BadSetting for what would make another search than the one that was meant."""
    for name in map(flag_name, given):
        if name in DECIDED:
            raise BadSetting(f"--{name}: every candidate has its own; write {DECIDED[name]} instead")
    for name in ("samples", "evaluations"):
        if getattr(flags, name) < 1:
            raise BadSetting(f"--{name} is {getattr(flags, name)}; write a number above 0")
    for name in ("tolerance", "eps"):
        if not 0 < getattr(flags, name) < math.inf:
            raise BadSetting(f"--{name} is {getattr(flags, name)}; write a number above 0, such as 0.01")
    if flags.target is not None and not math.isfinite(flags.target):
        raise BadSetting(f"--target is {flags.target}; write a loss, such as 1.5")
    if not 0 <= flags.warmup <= 1:
        raise BadSetting(f"--warmup is {flags.warmup}; write a share of the run between 0 and 1")


def _check_method(flags: argparse.Namespace, written: set[str]) -> None:
    """BadSetting for a flag that the method would not look at."""
    for name in sorted(written & set(USED_BY)):
        if flags.method not in USED_BY[name]:
            raise BadSetting(
                f"--method {flags.method} makes no use of --{name}; leave it out, or write --method "
                f"{' or '.join(USED_BY[name])}"
            )
    if flags.method != "noise":
        return
    for name in ("sizes", "seeds"):
        if flags.start and name in written:
            raise BadSetting(
                f"--method noise reads --start {flags.start} and trains nothing; leave out --{name}"
            )
        if name in written and len(getattr(flags, name)) > 1:
            raise BadSetting(f"--method noise trains one run; write one number as --{name}")


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
            one = with_bounds(one, asked, own, 0, lambda loss: loss + CLEARLY * flags.tolerance * abs(loss))
            own.append(search.run(one, f"{len(results) + len(own) + 1} of {n}"))
            metric_of(asked, own[-1])  # a name that is none is told now
        results += own
    return sweep_report(asked, results)


def sweep_report(asked: Asked, results: list[dict]) -> dict[str, Any]:
    """Turning point, and the fit of steps against samples to the target."""
    flags, rows = asked.flags, []
    sizes, seeds = flags.sizes, flags.seeds
    lowest = [
        min((loss for _, loss in r["curve"]), default=math.inf) for r in results if r["ended"] == "done"
    ]
    target = flags.target if flags.target is not None else max(lowest, default=math.nan)
    for result in results:
        early = result["curve"][:1] and result["curve"][0][1] <= target  # by then, and who knows when
        samples = None if early else fit.samples_to(target, result["curve"])
        row = result | {"metric": metric_of(asked, result), "early": bool(early), "samples_to": samples}
        rows.append(row | {"steps_to": None if samples is None else samples / result["size"]})
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


def program() -> int:
    """`main` in a process of its own, which ends with it."""
    status = main()
    from adaptive.engine import Engine

    Engine.leave()
    return status


if __name__ == "__main__":
    leave(program)
