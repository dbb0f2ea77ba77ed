"""A run -> W&B, TensorBoard or trackio, through accelerate's trackers; on rank 0 only.

To add one: a line of TRACKERS, a function that returns a started accelerate `GeneralTracker`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive.wandb_history import rows_held

if TYPE_CHECKING:
    from adaptive.report import Report

COUNTERS = ("step", "updates", "samples", "tokens", "seconds")


def wandb_mode(wandb: Any) -> str | None:
    """None where WANDB_MODE decides, else what `wandb offline` wrote, else "offline" without a key."""
    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if os.environ.get("WANDB_MODE"):
        return None
    if settings.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return settings.mode
    try:  # W&B's own search (environment, netrc, settings file), without its prompt
        from wandb.sdk.lib.wbauth import authenticate_session

        how = {"source": "train.py", "prompt": False, "update_session": False}
        key = authenticate_session(host=settings.base_url, **how)
    except ImportError:  # not public: another version may have moved it
        key = settings.api_key
    return "online" if key else "offline"


def start_wandb(report: Report) -> Any:
    """W&B without its own output.

    No step is given to it: it drops what is not rising, as after a resume. "step" is an ordinary metric and
    the x axis of every curve; samples, tokens and seconds can be chosen instead.
    """
    import wandb
    from accelerate.tracking import WandBTracker

    output, run_id = report.config.output, report.wandb_run_id
    settings = wandb.Settings(
        silent=True, console="off", allow_val_change=True,
        finish_timeout=report.finish_seconds, finish_timeout_raises=True,
    )  # fmt: skip
    tracker = WandBTracker(
        output.project_name, name=output.run_name or report.folder.name, dir=str(report.folder),
        id=run_id, resume="allow" if run_id else None, mode=wandb_mode(wandb),
        group=output.run_group, tags=list(output.run_tags) or None, notes=output.run_notes,
        config=report.settings, settings=settings,
    )  # fmt: skip
    try:
        tracker.start()
    except Exception as error:
        if tracker.init_kwargs["mode"] == "offline":
            raise
        told = " ".join(str(error).split())
        report.warn(f"wandb cannot log in or reach its server ({told}); recording offline")
        tracker.init_kwargs["mode"] = "offline"
        tracker.start()
    for name in COUNTERS:
        tracker.run.define_metric(name)
    tracker.run.define_metric("*", step_metric="step")
    report.wandb_run_id = tracker.run.id
    if run_id:
        report.held = rows_held(report.folder, tracker.run)
    if not tracker.run.disabled:
        report.sync_line = f"wandb sync {shlex.quote(str(Path(tracker.run.dir).parent))}"
    if not tracker.run.offline and tracker.run.url:  # silent keeps it back
        report.say(f"wandb    {tracker.run.url}")
    return tracker


def start_tensorboard(report: Report) -> Any:
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("tensorboard", report.folder)
    tracker.start()
    settings = "\n".join(f"    {name}: {value}" for name, value in report.settings.items())
    tracker.writer.add_text("config", settings)  # store_init_configuration takes no lists, opens a second run
    return tracker


def start_trackio(report: Report) -> Any:
    """Local; a resumed run goes on under its name. Every curve's x axis is trackio's own step: one a line."""
    from accelerate.tracking import TrackioTracker

    output = report.config.output
    tracker = TrackioTracker(
        output.project_name, name=output.run_name or report.folder.name, group=output.run_group,
        config=report.settings, resume="allow", embed=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # which tells how to open its dashboard, at length
        tracker.start()
    report.say(f"trackio  trackio show --project {shlex.quote(output.project_name)}")
    return tracker


TRACKERS = {"wandb": start_wandb, "tensorboard": start_tensorboard, "trackio": start_trackio}
