"""Lines and a progress bar -> what a person sees; plain lines where there is no terminal.

To add one: a column is a line of COLUMNS.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

HEADER_EVERY = 20  # lines
REFRESH_SECONDS = 0.25


def show(value: float | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def clock(seconds: float | None) -> str:
    """Time left: 59:59, 23:59:59, then 2d 03h."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def covered(record: dict[str, Any]) -> str:
    """Share of the running epoch; of a stream, which has none, the samples so far: 850, 12.3k, 4.56M."""
    if record.get("train_coverage") is not None or "samples" not in record:
        return show(record.get("train_coverage"), ".1%").replace("100.0", "100")
    n = record["samples"]
    unit, name = next(((u, k) for u, k in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if n >= u), (1, ""))
    return f"{n / unit:.3g}{name}" if name else str(n)


def encodable(text: str) -> str:
    """`text` as stdout's encoding has it, with ? for what it has not."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


# Heading, width with its space before it, text: 80 together, so that the usual terminal does not wrap them.
COLUMNS = (
    ("step", 6, lambda r: show(r["step"])),
    ("asked", 7, lambda r: show(r.get("target_batch_size"), ".5g")),
    ("run", 6, lambda r: show(r.get("batch_size"))),
    ("passes", 7, lambda r: f"{show(r.get('passes'))}x{show(r.get('micro_batch_size'))}"),
    ("cover", 6, lambda r: covered(r)),
    ("epoch", 6, lambda r: show(r.get("epoch"), ".2f")),
    ("loss", 8, lambda r: show(r.get("loss"), ".4f" if (r.get("loss") or 0) < 100 else ".4g")),
    ("lr", 8, lambda r: show(r.get("learning_rate"), ".2e").replace("e-0", "e-")),
    ("norm", 8, lambda r: show(r.get("grad_norm"), ".3g")),
    ("samples/s", 10, lambda r: show(r.get("samples_per_second"), ".1f")),
    ("left", 8, lambda r: clock(r.get("seconds_left"))),
)


class Screen:
    """Lines on stdout; on a terminal a progress bar below them, elsewhere no control character."""

    def __init__(self, guard: Any, total_samples: int | None) -> None:
        self.guard, self.total_samples = guard, total_samples
        self.progress: Any = None
        self.works, self.drawn = True, 0.0

    def start(self) -> None:
        """Draw the bar, if stdout is a terminal that can."""
        if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        if os.environ.get("COLUMNS") == "0":
            del os.environ["COLUMNS"]  # rich would believe it
        # No refresh thread: a data worker forked while it holds rich's lock would wait for it forever.
        # Redirected, stderr would end in stdout: only where both are the terminal.
        self.progress = Progress(
            BarColumn(20), TextColumn("{task.description}", markup=False),
            console=Console(force_terminal=True), auto_refresh=False, transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip
        self.progress.add_task("", total=self.total_samples)
        self.progress.start()

    def line(self, text: str, style: str = "") -> None:
        """One line, never wrapped by us."""
        with self.guard("progress bar", self.stop):
            if self.progress is not None:
                from rich.text import Text

                # As print's own argument the style would colour the bar too.
                self.progress.console.print(Text(text, style=style), soft_wrap=True)
                return
        with self.guard("console", self._mute):
            if self.works:
                print(encodable(text), flush=True)

    def move(self, record: dict[str, Any], seconds_left: float | None) -> None:
        """The bar, at most every REFRESH_SECONDS."""
        if self.progress is None or time.monotonic() - self.drawn < REFRESH_SECONDS:
            return
        with self.guard("progress bar", self.stop):
            self.drawn = time.monotonic()
            total = f"/{self.total_samples:,}" if self.total_samples else ""
            text = f"{record['samples']:,}{total} samples"
            if record.get("epoch") is not None:
                text += (
                    f"  epoch {show(record['epoch'], '.2f')}  covered {show(record['train_coverage'], '.1%')}"
                )
            text += f"  left {clock(seconds_left)}"
            self.progress.update(self.progress.task_ids[0], completed=record["samples"], description=text)
            self.progress.refresh()

    def stop(self) -> None:
        """Leave the terminal as it was; lines go on without a bar."""
        progress, self.progress = self.progress, None
        if progress is not None:
            with self.guard("progress bar"):
                progress.stop()

    def _mute(self) -> None:
        """Nobody reads stdout now; Python's flush at exit would fail too, and change the exit status."""
        self.works = False
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
