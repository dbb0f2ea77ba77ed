"""Records -> metrics.jsonl, trackers, console; cannot change training.

metrics.jsonl has every decision as it was. Console and trackers follow --log_every: there `loss` and the
throughput are means since the line before, every other number is the last step's. Only rank 0 tells; the
others open and import nothing, and nothing here communicates between processes. What fails is said once and
switched off.
To add one: a tracker is a line of TRACKERS, a function that returns a started accelerate `GeneralTracker`; a
column of the console is a line of COLUMNS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import numbers
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, Every

COUNTERS = ("step", "updates", "samples", "tokens", "seconds")
HEADER_EVERY = 20  # lines
REFRESH_SECONDS = 0.25


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead; numbers of any library become Python's own."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _show(value: float | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def _clock(seconds: float | None) -> str:
    """Time left: 59:59, 23:59:59, then 2d 03h."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


# Heading, width with its space before it, text: 80 together, so that the usual terminal does not wrap them.
COLUMNS = (
    ("step", 6, lambda r: _show(r["step"])),
    ("asked", 7, lambda r: _show(r.get("target_batch_size"), ".5g")),
    ("run", 6, lambda r: _show(r.get("batch_size"))),
    ("passes", 7, lambda r: f"{_show(r.get('passes'))}x{_show(r.get('micro_batch_size'))}"),
    ("cover", 6, lambda r: _show(r.get("train_coverage"), ".1%").replace("100.0", "100")),
    ("epoch", 6, lambda r: _show(r.get("epoch"), ".2f")),
    ("loss", 8, lambda r: _show(r.get("loss"), ".4f")),
    ("lr", 8, lambda r: _show(r.get("learning_rate"), ".2e").replace("e-0", "e-")),
    ("norm", 8, lambda r: _show(r.get("grad_norm"), ".3g")),
    ("samples/s", 10, lambda r: _show(r.get("samples_per_second"), ".1f")),
    ("left", 8, lambda r: _clock(r.get("seconds_left"))),
)


class Window:
    """Means since the last logged line; the loss weighed by what the loss itself is a mean over."""

    def __init__(self, weigh_by: str, start: dict[str, float]) -> None:
        self.weigh_by, self.start, self.last = weigh_by, start, start  # "tokens" or "samples"
        self.loss_sum, self.n_items, self.n_records = 0.0, 0, 0

    def add(self, record: dict[str, Any]) -> None:
        n_items = record[self.weigh_by] - self.last[self.weigh_by]
        if record.get("loss") is not None and n_items > 0:
            self.loss_sum += record["loss"] * n_items
            self.n_items += n_items
        self.last, self.n_records = record, self.n_records + 1

    def close(self) -> dict[str, float | None]:
        """{name: mean}, None where the window has none; the next window starts here."""
        seconds = self.last["seconds"] - self.start["seconds"]
        means = {"loss": self.loss_sum / self.n_items if self.n_items else None}
        for name in ("samples", "tokens"):
            n = self.last[name] - self.start[name]
            means[f"{name}_per_second"] = n / seconds if seconds > 0 else None
        self.__init__(self.weigh_by, self.last)
        return means


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
                encoding = sys.stdout.encoding or "utf-8"
                print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def move(self, record: dict[str, Any], seconds_left: float | None) -> None:
        """The bar, at most every REFRESH_SECONDS."""
        if self.progress is None or time.monotonic() - self.drawn < REFRESH_SECONDS:
            return
        with self.guard("progress bar", self.stop):
            self.drawn = time.monotonic()
            total = f"/{self.total_samples:,}" if self.total_samples else ""
            text = f"{record['samples']:,}{total} samples  epoch {_show(record.get('epoch'), '.2f')}"
            text += f"  covered {_show(record.get('train_coverage'), '.1%')}  left {_clock(seconds_left)}"
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
        config=report.config.flat(), settings=settings,
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
    if not tracker.run.disabled:
        report.sync_line = f"wandb sync {shlex.quote(str(Path(tracker.run.dir).parent))}"
    if not tracker.run.offline and tracker.run.url:  # silent keeps it back
        report.say(f"wandb    {tracker.run.url}")
    return tracker


def start_tensorboard(report: Report) -> Any:
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("tensorboard", report.folder)
    tracker.start()
    settings = "\n".join(f"    {name}: {value}" for name, value in report.config.flat().items())
    tracker.writer.add_text("config", settings)  # store_init_configuration takes no lists, opens a second run
    return tracker


TRACKERS = {"wandb": start_wandb, "tensorboard": start_tensorboard}


class Report:
    """What a run tells, from rank 0; a context manager that closes the display before a traceback is printed.

    total_samples: end of the run, None where it is not known; state: a RunState to continue from; run_id: the
    `wandb_run_id` to continue. Raises BadSetting, on every process, if a tracker is not installed.
    """

    finish_seconds = 30.0  # the longest that one tracker may hold up the end of a run

    def __init__(
        self, config: Config, accelerator: Any, total_samples: int | None = None, state: Any = None,
        run_id: str | None = None,
    ) -> None:  # fmt: skip
        self.config, self.total_samples, self.wandb_run_id = config, total_samples, run_id
        self.is_main = accelerator.is_main_process
        self.folder = Path(config.run.output_dir)
        self.every = Every.parse(config.output.log_every, "log_every")
        # A copy: the caller's state moves on while we still need where it was.
        self.start = {name: getattr(state, name, 0) for name in COUNTERS}
        self.last: dict[str, Any] = self.start
        self.window = Window("samples" if config.batch.normalize_by == "samples" else "tokens", self.start)
        self.trackers: list[Any] = []  # accelerate's GeneralTracker: name, tracker, log, finish
        self.file: Any = None
        self.screen = Screen(self._guard, total_samples)
        self.off: set[str] = set()  # parts that failed
        self.eval_loss: float | None = None
        self.best_eval_loss: float | None = None
        self.n_lines, self.sync_line = 0, ""
        for name in set(config.output.report_to) - {"none"}:
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:  # no origin: a mere folder of that name
                raise BadSetting(f"--report_to {name}: not installed; pip install {name}, or write none")

    def __enter__(self) -> Report:
        if not self.is_main:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        if path.exists():
            self._recall(path)
        self.file = path.open("ab", buffering=0)
        for name in self.config.output.report_to:
            if name != "none":
                with self._guard(name):
                    self.trackers.append(TRACKERS[name](self))
        with self._guard("progress bar"):
            self.screen.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(failed=error is not None and not (isinstance(error, SystemExit) and not error.code))

    def say(self, line: str) -> None:
        """One notice; above the progress bar where there is one."""
        if self.is_main:
            self.screen.line(line)

    def warn(self, line: str) -> None:
        """One warning, on stderr."""
        if self.is_main:
            with contextlib.suppress(Exception):  # nowhere left to say it
                print(f"warning: {line}", file=sys.stderr, flush=True)

    def train(self, record: dict[str, Any]) -> None:
        """A decision, fields as in the README: to metrics.jsonl now, elsewhere when --log_every says."""
        if not self.is_main:
            return
        with self._guard("train record"):
            record = {"kind": "train", **_plain(record)}
            self._write(record)
            self.window.add(record)
            due = self.every.due(self.last, record)
            self.last = record
            if record.get("skipped") not in (None, "empty"):
                self.screen.line(f"step {record['step']} skipped: {record['skipped']}", "yellow")
            self.screen.move(record, self._seconds_left(record))
            if due:
                self._log()

    def eval(self, record: dict[str, Any]) -> None:
        """An evaluation, `eval_loss`, further `eval_*` and the counters: to everything at once."""
        if not self.is_main:
            return
        with self._guard("eval record"):
            record = {"kind": "eval", **_plain(record)}
            self._write(record)
            self._remember(record)
            values = {name: value for name, value in record.items() if name.startswith("eval_")}
            told = [f"{k} {_show(v, '.4f' if isinstance(v, float) else '')}" for k, v in values.items()]
            self.screen.line("  ".join(["eval", f"step {record['step']}", *told]), "green")
            self._track(record)

    def close(self, failed: bool = False) -> None:
        """Close the display, then the trackers, each for at most `finish_seconds`, then say what was done."""
        if not self.is_main or self.file is None:
            return
        if self.window.n_records and self.every.count:
            with self._guard("last line"):
                self._log()
        self.screen.stop()
        for tracker in list(self.trackers):
            self._finish(tracker, failed)
        with self._guard("summary"):
            self._summary(failed)
        self.file.close()
        self.file = None

    def _log(self) -> None:
        means = self.window.close()
        record = self.last | means
        if self.n_lines % HEADER_EVERY == 0:
            self.screen.line("".join(name.rjust(width) for name, width, _ in COLUMNS), "bold")
        self.n_lines += 1
        told = record | {"seconds_left": self._seconds_left(record)}
        self.screen.line("".join(text(told).rjust(width) for _, width, text in COLUMNS))
        self._track(record)

    def _seconds_left(self, record: dict[str, Any]) -> float | None:
        """By samples, not steps, at the mean speed since this process began."""
        n, seconds = (record[name] - self.start[name] for name in ("samples", "seconds"))
        if not self.total_samples or n <= 0:
            return None
        return max(self.total_samples - record["samples"], 0) * seconds / n

    @contextlib.contextmanager
    def _guard(self, part: str, switch_off: Any = None):
        """Training goes on whatever happens inside: one warning per part. KeyboardInterrupt passes."""
        try:
            yield
        except Exception as error:
            if switch_off is not None:
                switch_off()
            if part not in self.off:
                self.off.add(part)
                told = " ".join(f"{type(error).__name__}: {error}".split())
                self.warn(f"{part} failed ({told}); training goes on without it")

    def _write(self, record: dict[str, Any]) -> None:
        """One line, whole or not at all: a full disk tears none, and is tried again with the next record."""
        size = os.fstat(self.file.fileno()).st_size
        with self._guard("metrics.jsonl"):
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
            try:
                if self.file.write(line) != len(line):
                    raise OSError("the disk took a part of the line only")
            except OSError:
                os.ftruncate(self.file.fileno(), size)
                raise

    def _recall(self, path: Path) -> None:
        """The evaluations before a resume, for the best one."""
        for line in path.read_text(errors="replace").splitlines():
            if '"kind": "eval"' in line:
                with contextlib.suppress(ValueError):
                    self._remember(json.loads(line))

    def _remember(self, record: dict[str, Any]) -> None:
        loss = record.get("eval_loss")
        self.eval_loss = loss
        if loss is not None:
            self.best_eval_loss = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)

    def _track(self, record: dict[str, Any]) -> None:
        """Numbers and reasons to every tracker that still works; they take no null and no lists."""
        values = {k: v for k, v in record.items() if isinstance(v, (int, float, str)) and k != "kind"}
        for tracker in list(self.trackers):
            with self._guard(tracker.name, lambda tracker=tracker: self.trackers.remove(tracker)):
                if tracker.name == "tensorboard":
                    tracker.log(values, step=record["step"])
                    tracker.log({f"by_samples/{k}": v for k, v in values.items()}, step=record["samples"])
                else:
                    tracker.log(values)
                if tracker.name == "wandb" and record["kind"] == "eval":
                    best = {"eval_loss": self.eval_loss, "best_eval_loss": self.best_eval_loss}
                    tracker.tracker.summary.update({k: v for k, v in best.items() if v is not None})

    def _finish(self, tracker: Any, failed: bool) -> None:
        """Bounded: an upload that hangs must not keep a finished run from ending."""
        errors: list[BaseException] = []

        def finish() -> None:
            try:
                tracker.tracker.finish(exit_code=int(failed)) if tracker.name == "wandb" else tracker.finish()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=finish, daemon=True)
        with self._guard(tracker.name):
            offline = tracker.name != "wandb" or tracker.tracker.offline
            thread.start()
            thread.join(self.finish_seconds + 1)  # W&B's own limit comes first, and keeps the data
            if thread.is_alive():
                errors.append(TimeoutError(f"not finished after {self.finish_seconds:g} seconds"))
            if not errors:
                self.sync_line = self.sync_line if offline else ""
                return
            raise errors[0]

    def _summary(self, failed: bool) -> None:
        steps, updates, samples, _, seconds = (self.last[name] for name in COUNTERS)
        told = "stopped by an error after " if failed else ""
        told += f"{steps:,} steps, {updates:,} updates, {samples:,} samples, {seconds / 60:.1f} minutes"
        if self.eval_loss is not None:
            told += f", eval_loss {self.eval_loss:.4f} (best {self.best_eval_loss:.4f})"
        self.screen.line(told, "bold")
        self.screen.line(f"output   {self.folder}")
        self.screen.line(f"metrics  {self.folder / 'metrics.jsonl'}")
        if self.sync_line:
            self.screen.line(self.sync_line)
