"""What the finder found -> a table, critical_batch.json, a picture, and both in the trackers that are on.

To add one: a line of `table`, a panel of `picture`, a tracker in LOGS (returns lines for the screen).
"""

from __future__ import annotations

import contextlib
import io
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


# columns of the table by method, names of a candidate's result
COLUMNS = {
    "sweep": ("size", "seed", "steps", "metric", "steps_to", "samples_to", "ended"),
    "branch": ("begin", "factor", "size", "learning_rate", "steps", "metric", "ended"),
    "noise": ("size", "steps", "samples", "ended"),
}


def tell(report: dict[str, Any], search: Search, config: Config) -> None:
    """Everything, on rank 0; a tracker that fails is a warning. The screen is last: its reader may go."""
    written(search.folder / "critical_batch.json", report)
    path = search.folder / "critical_batch.png"
    try:
        picture(report, path)
    except ImportError:
        warn("no picture: pip install matplotlib")
        path = None
    files = ", ".join(map(str, filter(None, (search.folder / "critical_batch.json", path))))
    told = [*table(report), f"results  {files}"]
    for name in config.output.report_to:
        try:
            told += LOGS.get(name, lambda *_: ())(report, path, search.folder, config)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warn(f"{name} failed ({why}); the results are in {search.folder}")
    for line in told:
        search.say(line)


def cells(report: dict[str, Any]) -> list[list]:
    """Rows of the table: a candidate that gave up or diverged has no metric, and its last loss at its end;
    one that was at the target early has no steps to it.
    """
    rows = []
    for row in report["candidates"]:
        last = f" at {row['curve'][-1][1]:.5g}" if row["ended"] != "done" and row["curve"] else ""
        last += ", at the target early" if row.get("early") else ""
        values = row | {"metric": row.get("metric") if row["ended"] == "done" else None}
        rows.append([values.get(name) for name in COLUMNS[report["method"]][:-1]] + [row["ended"] + last])
    return rows


def table(report: dict[str, Any]) -> list[str]:
    """The terminal's table: candidates, then what follows from them, then the known ranges."""
    names = [name.replace("_", " ") for name in COLUMNS[report["method"]]]
    texts = [names, *([_cell(value) for value in row] for row in cells(report))]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in texts]
    told = ["", lines[0]]
    for row, line in zip(report["candidates"], lines[1:], strict=True):
        told.append(line)
        if row["anomalies"]:
            told.append(f"{'':>6}{row['anomalies']} steps with a gradient norm above 1e5 or not finite")
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
        told.append(
            f"critical size {report['critical_batch_size']:.4g}, {_spread(report)}: twice the fewest steps "
            f"and twice the fewest samples to eval_loss {report['target']:.4g}"
        )
    else:
        told.append("no fit: fewer than three sizes tell their steps to the target, or these show no trade")
    early = sum(row["early"] for row in report["candidates"])
    if early:
        told.append(
            f"note: {early} of {len(report['candidates'])} were at the target by their first evaluation and "
            "are not in the fit; write a lower --target or more --evaluations"
        )
    return told


def _spread(report: dict[str, Any]) -> str:
    """The interval, and of how many seeds it is."""
    (low, high), fits = report["interval"], len(report["fits"])
    seeds = len({row["seed"] for row in report["candidates"]})
    if seeds == 1:
        return "one seed: no interval"
    share = "" if fits == seeds else f"{fits} of {seeds} seeds with a fit"
    if fits == 1:
        return f"{share}: no interval"
    return f"95 % interval {low:.4g} to {high:.4g}" + (f" ({share})" if share else "")


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
    from adaptive.tools.figure import finish, panels

    figure, (left, right) = panels(1, 2)
    if report["method"] == "noise":
        _noise_panels(report, left, right)
    else:
        _metric_panel(report, left)
        {"sweep": _trade_panel, "branch": _growth_panel}[report["method"]](report, right)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
    finish(figure, path)


def _metric_panel(report: dict[str, Any], axis: Any) -> None:
    """The metric against size, a line a seed or a checkpoint; hollow where a candidate gave up."""
    from adaptive.tools.figure import BLACK, GREY, log_scale, series

    sizes = sorted({row["size"] for row in report["candidates"]})
    for at, (name, rows) in enumerate(_curves(report).items()):
        known = sorted((r["size"], r["metric"]) for r in rows if r["ended"] == "done")
        axis.plot(*zip(*known, strict=True), **series(at), label=name) if known else None
        lost = [(r["size"], r["curve"][-1][1]) for r in rows if r["ended"] == "lost"]
        if lost and report["metric"] == "eval_loss":
            hollow = {"linestyle": "", "markerfacecolor": "white"}
            axis.plot(*zip(*lost, strict=True), **series(at) | hollow, label=f"{name}: gave up")
    axis.set(xlabel="batch size (samples)", ylabel=report["metric"])
    log_scale(axis.xaxis, sizes)
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    if report["critical_batch_size"]:
        told = f"critical: {report['critical_batch_size']:.3g}"
        axis.axvline(report["critical_batch_size"], color=BLACK, linestyle="--", linewidth=1, label=told)
    low, high = report["interval"] or (None, None)
    if low is not None and low == low:
        axis.axvspan(low, high, color=GREY, alpha=0.25, linewidth=0, label="95 % interval")
    if report.get("fits"):
        told = f"turning point: {report['turning_point']:g}"
        axis.axvline(report["turning_point"], color=BLACK, linestyle=":", linewidth=1, label=told)


def _trade_panel(report: dict[str, Any], axis: Any) -> None:
    """Steps against samples to the target, and the fit of each seed."""
    from adaptive.tools.figure import GREY, log_scale, series

    reached = [r for r in report["candidates"] if r["steps_to"]]
    for at, seed in enumerate(sorted({r["seed"] for r in report["candidates"]})):
        own = sorted((r["samples_to"], r["steps_to"]) for r in reached if r["seed"] == seed)
        axis.plot(*zip(*own, strict=True), **series(at) | {"linestyle": ""}) if own else None
    for at, (s_min, e_min) in enumerate(report["fits"]):
        most = max(r["samples_to"] for r in reached)
        samples = [e_min * 1.02 + (most * 1.1 - e_min * 1.02) * t / 200 for t in range(201)]
        steps = [s_min / (1 - e_min / e) for e in samples]
        axis.plot(samples, steps, color=GREY, linewidth=1, label=None if at else "fit")
    axis.set(xlabel=f"samples to eval_loss {report['target']:.3g}", ylabel="steps to it")
    log_scale(axis.xaxis)
    log_scale(axis.yaxis)


def _growth_panel(report: dict[str, Any], axis: Any) -> None:
    """The critical size of each checkpoint."""
    from adaptive.tools.figure import BLACK, log_scale

    known = [(p["samples"], p["critical"]) for p in report["points"] if p["critical"]]
    axis.plot(*zip(*known, strict=True), color=BLACK, marker="o", markersize=4) if known else None
    axis.set(xlabel="samples before the branch", ylabel="critical batch size (samples)")
    log_scale(axis.yaxis, sorted({row["size"] for row in report["candidates"]}))


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
    right.set(xlabel="samples", ylabel="batch size (samples)")


def log_wandb(report: dict[str, Any], path: Path | None, folder: Path, config: Config) -> list[str]:
    """A run of the candidates' group with the table and the picture; returns where it is."""
    import wandb

    from adaptive.trackers import wandb_mode

    output = config.output
    run = wandb.init(
        project=output.project_name, name=f"{folder.name} {report['method']}", dir=str(folder),
        group=output.run_group or folder.name, job_type="critical_batch", mode=wandb_mode(wandb),
        tags=list(output.run_tags) or None, notes=output.run_notes, config=config.flat(),
        settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    table = wandb.Table(columns=list(COLUMNS[report["method"]]), data=cells(report))
    run.log({"candidates": table} | ({} if path is None else {"critical_batch": wandb.Image(str(path))}))
    run.summary.update(_found(report))
    told = f"wandb sync {shlex.quote(str(Path(run.dir).parent))}" if run.offline else f"wandb    {run.url}"
    run.finish()
    return [told]


def log_tensorboard(report: dict[str, Any], path: Path | None, folder: Path, config: Config) -> list[str]:
    """The same beside the candidates' folders."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("candidates", "\n".join(f"    {line}" for line in table(report)))
        for name, value in _found(report).items():
            writer.add_text(name, str(value))
        if path is not None:
            from matplotlib.image import imread

            writer.add_image("critical_batch", imread(path)[..., :3], dataformats="HWC")
    return []


def log_trackio(report: dict[str, Any], path: Path | None, folder: Path, config: Config) -> list[str]:
    """A run of the candidates' group, as in W&B."""
    import trackio

    output = config.output
    with contextlib.redirect_stdout(io.StringIO()):
        run = trackio.init(
            project=output.project_name, name=f"{folder.name} {report['method']}", embed=False,
            group=output.run_group or folder.name, config=config.flat() | _found(report),
        )  # fmt: skip
        table = trackio.Table(columns=list(COLUMNS[report["method"]]), data=cells(report))
        run.log(
            {"candidates": table} | ({} if path is None else {"critical_batch": trackio.Image(str(path))})
        )
        run.finish()
    return []


def _found(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("critical_batch_size", "schedule")}


LOGS = {"wandb": log_wandb, "tensorboard": log_tensorboard, "trackio": log_trackio}
