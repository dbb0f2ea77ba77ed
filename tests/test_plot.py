"""Pictures of real runs: made, not empty, with every quantity that the run has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_inspect import TASK, TEXT, start

from adaptive.config import BadSetting
from adaptive.tools.figure import COLORS, series
from adaptive.tools.plot import main as plot
from adaptive.tools.plot import one, smoothed
from adaptive.tools.runs import Run

FLAGS = ["--task", TASK, "--num_train_epochs", "2", "--eval_every", "5 steps"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    one = start(folder / "small", *FLAGS, "--batch_size", "2.5", "--track", "noise_scale")
    other = start(folder / "growing", *FLAGS, "--schedule", "ramp(start=2, end=20, over=120)")
    return [one, other]


def ink(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"), float)


def test_one_run(runs, tmp_path):
    """Mutation: a panel left without its line: its colour is not in the picture."""
    path = tmp_path / "run.png"
    assert plot([str(runs[0]), "--out", str(path)]) == 0
    pixels = ink(path)
    assert pixels.shape[1] > 1200 and 0.005 < (pixels.min(axis=2) < 128).mean() < 0.3
    for color in (COLORS[0], COLORS[1], COLORS[2], COLORS[3], COLORS[5]):  # loss, asked, rate, noise, run
        wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=2) < 12).sum() > 50, color


def test_svg_names_every_quantity(runs, tmp_path):
    path = tmp_path / "run.svg"
    plot([str(runs[0]), "--out", str(path)])
    text = path.read_text()
    for name in (
        "batch size (samples)",
        "loss",
        "learning rate",
        "noise scale",
        "data used (%)",
        "samples",
        "steps",
    ):
        assert f">{name}" in text or name in text
    other = tmp_path / "other.svg"
    plot([str(runs[1]), "--out", str(other)])
    assert "noise scale" not in other.read_text(), "a run that did not measure it has no panel for it"


def test_several_runs(runs, tmp_path):
    """Loss against samples, steps and seconds; the steps saved are the records'."""
    path = tmp_path / "compare.svg"
    plot([*map(str, runs), "--out", str(path), "--labels", "fixed", "grown"])
    text = path.read_text()
    assert "fixed" in text and "grown" in text and "seconds" in text and text.count("loss") >= 3
    first, second = (len(Run(run).train) for run in runs)
    assert f"{second}, {1 - second / first:.0%} saved" in text
    assert f"loss {smoothed(Run(runs[1]))[1][-1]:.3g}" in text, "what the saved steps cost"
    plot([str(runs[1]), str(runs[0]), "--out", str(path)])
    assert f"{first}, {first / second - 1:.0%} more" in path.read_text()


def test_lines_differ_without_colour():
    styles = [series(k) for k in range(7)]
    assert len({style["marker"] for style in styles}) == 7
    assert len({style["color"] for style in styles}) == 7


def test_the_running_mean_is_of_samples(runs):
    """Constant losses stay what they are. Mutation: no bias correction, which starts from 0."""
    run = Run(runs[1])
    for record in run.train:
        record["loss"] = 3.0
    assert smoothed(run)[1] == pytest.approx(3.0)


def test_what_cannot_be_drawn_is_a_bad_setting(runs, tmp_path):
    with pytest.raises(BadSetting, match="NAME.png or NAME.svg"):
        plot([str(runs[0]), "--out", str(tmp_path / "run.doc")])
    with pytest.raises(BadSetting, match="one each"):
        plot([*map(str, runs), "--labels", "one"])
    with pytest.raises(BadSetting, match=r"write .*run.png"):
        plot([str(runs[0]), "--out", str(tmp_path / "run")])
    with pytest.raises(BadSetting, match="required: runs"):
        plot([])


def test_a_run_with_empty_steps_shows_the_loss_of_the_others(tmp_path):
    """Mutation: the loss of every step with a gap at each empty one: points without a line between them."""
    flags = ["--task", TASK, "--per_device_train_batch_size", "0.3", "--schedule", "constant()"]
    folder = start(tmp_path / "run", *flags, "--max_steps", "60")
    figure = one(Run(folder))
    (raw,) = [line for line in figure.axes[2].lines if line.get_label() == "train, each step"]
    assert len(raw.get_xdata()) == 18 and np.isfinite(raw.get_ydata()).all()


def test_a_stream_has_no_panel_for_what_nobody_knows(tmp_path):
    """Mutation: an empty panel of its coverage, from -0.04 to 0.04 %."""
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {n} of a stream\n" for n in range(120)))
    flags = [*TEXT, "--streaming", "--dataset_name", str(text), "--eval_dataset", str(text)]
    folder = start(tmp_path / "run", *flags, "--lr_scheduler_type", "constant", "--max_steps", "4")
    plot([str(folder), "--out", str(tmp_path / "run.svg")])
    told = (tmp_path / "run.svg").read_text()
    assert "learning rate" in told and "data used" not in told
