"""What the finder found -> a table, critical_batch.json, a picture, and both in W&B where it is on.

To add one: a line of `table` or a panel of `picture`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from adaptive.config import Config, warn
from adaptive.tools.search import Search, written

# Published ranges, as reference: they hold for their data, optimizer and stage of training.
KNOWN_RANGES = (
    ("BERT-base, 110M", "1024 to 2048"),
    ("GPT-2 medium, 345M", "512 to 1024"),
    ("T5-large, 770M", "2048 to 4096"),
    ("encoders", "larger than decoders"),
    ("more than 24 layers", "at most 1024"),
)
NOISE_WARNING = (
    "the noise scale is an estimate from gradients and can be several times off the critical size that "
    "a sweep or branches measure; use it to choose their candidates"
)


def tell(report: dict[str, Any], search: Search, config: Config) -> None:
    """Everything, on rank 0."""
    written(search.folder / "critical_batch.json", report)
    for line in table(report):
        search.say(line)
    path = search.folder / "critical_batch.png"
    try:
        picture(report, path)
    except ImportError:
        warn("no picture: pip install matplotlib")
        path = None
    search.say(f"results  {search.folder / 'critical_batch.json'}" + (f", {path}" if path else ""))
    if "wandb" in config.output.report_to:
        log(report, path, search.folder, config)


def table(report: dict[str, Any]) -> list[str]:
    """The terminal's table: candidates, then what follows from them, then the known ranges."""
    columns = ("size", "seed", "steps", "metric", "steps to", "samples to", "ended")
    told = ["", "".join(name.rjust(12) for name in columns)]
    for row in report["candidates"]:
        cells = [row.get("size"), row.get("seed"), row["steps"], row.get("metric"), row.get("steps_to")]
        cells += [row.get("samples_to"), row["ended"]]
        told.append("".join(_cell(cell).rjust(12) for cell in cells))
        if row["anomalies"]:
            told.append(f"{'':>12}{row['anomalies']} steps with a gradient norm above 1e5 or not finite")
    told += ["", *RESULTS[report["method"]](report)]
    if report["schedule"]:
        told.append(f"use it   --schedule 'steps(\"{report['schedule']}\")'")
    told += ["", "known ranges, as reference only (sequences; another task or optimizer has others):"]
    return told + [f"  {name:<22}{size}" for name, size in KNOWN_RANGES]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _swept(report: dict[str, Any]) -> list[str]:
    told = []
    if report["turning_point"] is not None:
        largest = max(report["means"])
        more = "; the largest tried, so perhaps more" if report["turning_point"] == largest else ""
        told.append(
            f"turning point {report['turning_point']:g}: the largest size within {report['tolerance']:.1%} "
            f"of the best {report['metric']}{more}"
        )
    if report["fits"]:
        low, high = report["interval"]
        spread = f", 95 % interval {low:.4g} to {high:.4g}" if low == low else ", one seed: no interval"
        told.append(
            f"critical size {report['critical_batch_size']:.4g}{spread}, from the trade of steps against "
            f"samples to {report['metric']} {report['target']:.4g}"
        )
    else:
        told.append("no fit: fewer than three sizes reached the target, or their steps show no trade")
    return told


def _branched(report: dict[str, Any]) -> list[str]:
    told = []
    for point in report["points"]:
        largest = max(row["size"] for row in point["candidates"])
        more = " or more" if point["critical"] == largest else ""
        size = "none" if point["critical"] is None else f"{point['critical']:g}{more}"
        told.append(f"after {point['samples']:,} samples: critical size {size} (within {report['eps']:g})")
    return told


def _noise(report: dict[str, Any]) -> list[str]:
    told = [f"after {p['samples']:,} samples: noise scale {p['critical']:g}" for p in report["points"]]
    return [*told, f"note: {NOISE_WARNING}"]


RESULTS = {"sweep": _swept, "branch": _branched, "noise": _noise}


def picture(report: dict[str, Any], path: Path) -> None:
    """Metric against size, and what the critical size follows from."""
    from adaptive.tools.figure import BLACK, GREY, finish, log_scale, panels, series

    figure, (left, right) = panels(1, 2)
    if report["method"] == "noise":
        _noise_panels(report, left, right)
        finish(figure, path)
        return
    for at, (name, rows) in enumerate(_curves(report).items()):
        known = sorted((r["size"], r["metric"]) for r in rows if r["metric"] not in (None, float("inf")))
        left.plot(*zip(*known, strict=True), **series(at), label=name) if known else None
    left.set(xlabel="batch size (samples)", ylabel=report["metric"])
    log_scale(left.xaxis, sorted({row["size"] for row in report["candidates"]}))
    if report["critical_batch_size"]:
        told = f"critical: {report['critical_batch_size']:.3g}"
        left.axvline(report["critical_batch_size"], color=BLACK, linestyle="--", linewidth=1, label=told)
    if report["method"] == "branch":
        known = [(p["samples"], p["critical"]) for p in report["points"] if p["critical"]]
        right.plot(*zip(*known, strict=True), **series(0)) if known else None
        right.set(xlabel="samples before the branch", ylabel="critical batch size (samples)")
        log_scale(right.yaxis, sorted({row["size"] for row in report["candidates"]}))
    else:
        reached = [r for r in report["candidates"] if r["steps_to"]]
        for at, seed in enumerate(sorted({r["seed"] for r in reached})):
            own = sorted((r["samples_to"], r["steps_to"]) for r in reached if r["seed"] == seed)
            right.plot(*zip(*own, strict=True), **series(at) | {"linestyle": ""}, label=f"seed {seed}")
        for s_min, e_min in report["fits"] if reached else []:
            most = max(r["samples_to"] for r in reached)
            samples = [e_min * 1.02 + (most * 1.1 - e_min * 1.02) * t / 200 for t in range(201)]
            right.plot(samples, [s_min / (1 - e_min / e) for e in samples], color=GREY, linewidth=1)
        right.set(xlabel=f"samples to {report['metric']} {report['target']:.3g}", ylabel="steps")
        log_scale(right.xaxis)
        log_scale(right.yaxis)
    left.legend(frameon=False)
    finish(figure, path)


def _curves(report: dict[str, Any]) -> dict[str, list[dict]]:
    """Lines of the left panel: one a seed, or one a checkpoint."""
    curves: dict[str, list[dict]] = {}
    for row in report["candidates"]:
        name = f"after {row['begin']:,} samples" if "begin" in row else f"seed {row['seed']}"
        curves.setdefault(name, []).append(row)
    return curves


def _noise_panels(report: dict[str, Any], left: Any, right: Any) -> None:
    from adaptive.tools.figure import log_scale, series

    samples, values = zip(*report["curve"], strict=True)
    left.plot(samples, values, **series(0) | {"marker": ""})
    left.set(xlabel="samples", ylabel="gradient noise scale (samples)")
    log_scale(left.yaxis)
    points = [(p["samples"], p["critical"]) for p in report["points"]]
    right.step(*zip(*points, strict=True), where="post", color=series(1)["color"])
    right.set(xlabel="samples", ylabel="batch size that follows it (samples)")


def log(report: dict[str, Any], path: Path | None, folder: Path, config: Config) -> None:
    """A run of the same group with the table and the picture; a failure is a warning."""
    try:
        import wandb

        from adaptive.trackers import wandb_mode

        output = config.output
        run = wandb.init(
            project=output.project_name, name=f"{folder.name} {report['method']}", dir=str(folder),
            group=output.run_group or folder.name, job_type="critical_batch", mode=wandb_mode(wandb),
            tags=list(output.run_tags) or None, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        names = ("size", "seed", "steps", "samples", "seconds", "metric", "steps_to", "samples_to", "ended")
        rows = [[row.get(name) for name in names] for row in report["candidates"]]
        logged: dict[str, Any] = {"candidates": wandb.Table(columns=list(names), data=rows)}
        if path is not None:
            logged["critical_batch"] = wandb.Image(str(path))
        run.log(logged)
        run.summary.update(
            {"critical_batch_size": report["critical_batch_size"], "schedule": report["schedule"]}
        )
        where = "" if not run.offline else f"wandb sync {shlex.quote(str(Path(run.dir).parent))}"
        run.finish()
        print(where or f"wandb    {run.url}", flush=True)
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        warn(f"wandb failed ({told}); the results are in {folder}")
