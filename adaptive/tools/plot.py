"""Runs -> one picture that a paper could take, PNG, SVG or PDF by the ending of --out.

    python -m adaptive.tools.plot RUN --out run.png             # sizes, loss, rate, noise, coverage
    python -m adaptive.tools.plot RUN OTHER --out compare.svg   # loss, sizes, steps saved

To add one: a function (axis, run, x) and its line in ROWS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from adaptive.config import BadSetting
from adaptive.tools.figure import BLACK, COLORS, GREY, finish, log_scale, panels, series
from adaptive.tools.flags import Flags, leave
from adaptive.tools.runs import Run

MOST_POINTS = 4000  # of a line; more are not seen in print and make an SVG heavy
SMOOTH = 0.02  # half-life of the loss's running mean, as a share of the run's samples
AXES = {"samples": "samples", "step": "steps", "seconds": "seconds"}


def main(arguments: list[str] | None = None) -> int:
    parser = Flags(prog="python -m adaptive.tools.plot", description="Runs as a picture.")
    parser.add_argument("runs", nargs="+", type=Path, help="output folders; others are compared to the first")
    parser.add_argument("--out", type=Path, default=Path("run.png"), help="NAME.png, .svg or .pdf")
    parser.add_argument("--labels", nargs="+", help="names of the runs; by default their folders'")
    asked = parser.parse_args(arguments)
    if not asked.out.suffix:  # matplotlib would add .png, and we name another file than was written
        raise BadSetting(f"--out {asked.out} has no ending; write {asked.out}.png or {asked.out}.svg")
    labels = asked.labels or [path.name for path in asked.runs]
    if len(labels) != len(asked.runs):
        raise BadSetting(f"--labels has {len(labels)} names for {len(asked.runs)} runs; write one each")
    runs = [Run(path) for path in asked.runs]
    for run in runs:
        if not run.train:
            raise BadSetting(f"{run.folder} has no step yet; plot it when it has")
    try:
        figure = one(runs[0]) if len(runs) == 1 else several(runs, labels)
    except ImportError:
        raise BadSetting("matplotlib is not installed; pip install matplotlib") from None
    finish(figure, asked.out)
    print(asked.out)
    return 0


def column(run: Run, name: str) -> np.ndarray:
    """(decisions,) float; NaN where there is no value."""
    values = [record.get(name) for record in run.train]
    return np.array([np.nan if value is None else value for value in values], float)


def thin(*arrays: np.ndarray) -> list[np.ndarray]:
    """The same places of each, at most MOST_POINTS; the last one stays."""
    n = len(arrays[0])
    places = np.unique(np.linspace(0, n - 1, min(n, MOST_POINTS)).astype(int))
    return [array[places] for array in arrays]


def smoothed(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """(places of the decisions with a loss, running mean of it), weighed by samples."""
    losses, samples = column(run, "loss"), column(run, "samples")
    places = np.flatnonzero(np.isfinite(losses))
    half_life, mean, weight, before, means = max(1.0, SMOOTH * samples[-1]), 0.0, 0.0, 0.0, []
    for at in places:
        keep = 0.5 ** ((samples[at] - before) / half_life)
        mean, weight, before = keep * mean + (1 - keep) * losses[at], keep * weight + 1 - keep, samples[at]
        means.append(mean / weight if weight else losses[at])
    return places, np.array(means)


def one(run: Run) -> Any:
    """A row a quantity; over samples on the left, over steps on the right."""
    needs = {noise: "noise_scale", coverage: "train_coverage"}  # of a stream no coverage is known
    rows = [row for row in ROWS if np.isfinite(column(run, needs.get(row, "samples"))).any()]
    figure, axes = panels(len(rows), 2, height=1.7, sharex="col", sharey="row")
    for row, pair in zip(rows, axes, strict=True):
        for x, axis in zip(("samples", "step"), pair, strict=True):
            row(axis, run, x)
            axis.margins(x=0.01)
        if pair[0].get_legend_handles_labels()[0]:  # above the panel, where no line is
            pair[0].legend(
                frameon=False, loc="lower right", bbox_to_anchor=(1, 0.97), borderaxespad=0, ncols=3
            )
        pair[1].set_ylabel("")
    for x, axis in zip(("samples", "step"), axes[-1], strict=True):
        axis.set_xlabel(AXES[x])
    figure.align_ylabels()
    return figure


def sizes(axis: Any, run: Run, x: str) -> None:
    at, ran, asked = thin(column(run, x), column(run, "batch_size"), column(run, "target_batch_size"))
    axis.plot(at, ran, color=COLORS[5], linewidth=0.8, drawstyle="steps-pre", label="run")
    axis.plot(at, asked, color=COLORS[1], linewidth=1.3, linestyle="--", drawstyle="steps-pre", label="asked")
    axis.set_ylabel("batch size (samples)")
    axis.set_ylim(bottom=0)


def loss(axis: Any, run: Run, x: str) -> None:
    places, means = smoothed(run)
    at, raw = thin(column(run, x)[places], column(run, "loss")[places])  # without steps that have none
    axis.plot(at, raw, color=COLORS[5], linewidth=0.5, alpha=0.5, label="train, each step")
    axis.plot(*thin(column(run, x)[places], means), color=COLORS[0], linewidth=1.3, label="train, averaged")
    evals = [(e[x], e["eval_loss"]) for e in run.evals if e.get("eval_loss") is not None]
    if evals:
        style = series(1) | {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.5}
        axis.plot(*zip(*evals, strict=True), **style, label="validation", zorder=3)
    axis.set_ylabel("loss")
    axis.set_ylim(*_range(np.concatenate([means, [loss for _, loss in evals]])))


def _range(values: np.ndarray) -> tuple[float, float]:
    """Limits that show the curve and not one outlier of its noise."""
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def rate(axis: Any, run: Run, x: str) -> None:
    at, rates = thin(column(run, x), column(run, "learning_rate"))
    axis.plot(at, rates, color=COLORS[2], linewidth=1.3)
    axis.set_ylabel("learning rate")
    axis.set_ylim(bottom=0)


def noise(axis: Any, run: Run, x: str) -> None:
    at, scale, asked = thin(column(run, x), column(run, "noise_scale"), column(run, "target_batch_size"))
    axis.plot(at, scale, color=COLORS[3], linewidth=1.3, label="noise scale")
    axis.plot(at, asked, color=COLORS[1], linewidth=1, linestyle="--", label="size asked")
    axis.set_ylabel("samples")
    log_scale(axis.yaxis)


def coverage(axis: Any, run: Run, x: str) -> None:
    at, share = thin(column(run, x), column(run, "train_coverage"))
    axis.plot(at, 100 * share, color=BLACK, linewidth=1)
    axis.set_ylabel("epoch's data used (%)")
    axis.set_ylim(0, 105 * np.nanmax(share))


ROWS = (sizes, loss, rate, noise, coverage)


def several(runs: list[Run], labels: list[str]) -> Any:
    """Loss against samples, steps and seconds; below, sizes, rates and the steps saved against the first."""
    figure, axes = panels(2, 3)
    for k, (run, label) in enumerate(zip(runs, labels, strict=True)):
        style = series(k) | {"markevery": 0.12}
        places, means = smoothed(run)
        for x, axis in zip(AXES, axes[0], strict=True):
            axis.plot(*thin(column(run, x)[places], means), **style, label=label)
            axis.set(xlabel=AXES[x], ylabel="training loss, averaged")
        for name, axis in zip(("target_batch_size", "learning_rate"), axes[1], strict=False):
            axis.plot(*thin(column(run, "samples"), column(run, name)), **style)
    limits = [_range(smoothed(run)[1]) for run in runs]
    for axis in axes[0]:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    axes[1][0].set(xlabel="samples", ylabel="batch size asked (samples)")
    log_scale(axes[1][0].yaxis, base=2)
    axes[1][1].set(xlabel="samples", ylabel="learning rate")
    saved(axes[1][2], runs, labels)
    axes[0][0].legend(frameon=False)
    return figure


def saved(axis: Any, runs: list[Run], labels: list[str]) -> None:
    """Bars: steps to the samples that all runs have, against the first run's, and the loss there."""
    shared = min(run.train[-1]["samples"] for run in runs)
    steps = [int(np.searchsorted(column(run, "samples"), shared)) + 1 for run in runs]
    bars = axis.barh(labels, steps, color=[COLORS[k % len(COLORS)] for k in range(len(runs))], height=0.6)
    told = []
    for run, n in zip(runs, steps, strict=True):
        share, (places, means) = 1 - n / steps[0], smoothed(run)
        before = means[places < n]
        told.append(f"{n:,}" + (f", {abs(share):.0%} {'saved' if share > 0 else 'more'}" if share else ""))
        told[-1] += f"\nloss {before[-1]:.3g}" if len(before) else ""
    axis.bar_label(bars, told, padding=3, fontsize=7, color=GREY if len(runs) < 2 else BLACK)
    axis.set_xlim(0, 1.45 * max(steps))
    axis.set_xlabel(f"steps to {shared:,} samples")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


if __name__ == "__main__":
    leave(main)
