"""Records -> metrics.jsonl, trackers, console; cannot change training.

metrics.jsonl has every decision as it was. Console and trackers follow --log_every: there `loss` and the
throughput are means since the line before, every other number is the last step's. Only rank 0 tells; the
others open and import nothing, and nothing here communicates between processes. What fails is said once and
switched off.
To add one: a tracker in trackers.py, a column in console.py.
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
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Config, Every
from adaptive.console import COLUMNS, HEADER_EVERY, Screen, show
from adaptive.trackers import COUNTERS, TRACKERS

ENCODE = json.JSONEncoder(allow_nan=False).encode


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead; numbers of any library become Python's own."""
    # By type where possible: asking an ABC takes longer.
    if value is None or isinstance(value, (str, bool)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _encoded(record: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The record in plain values, and its line in metrics.jsonl."""
    try:
        line = ENCODE(record)  # plain already, as a rule
    except (TypeError, ValueError):
        record = _plain(record)
        line = ENCODE(record)
    return record, line.encode() + b"\n"


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
        self.settings = config.flat() | {"world_size": accelerator.num_processes}  # for trackers
        self.folder = Path(config.run.output_dir)
        self.every = Every.parse(config.output.log_every, "log_every")
        # A copy: the caller's state moves on while we still need where it was.
        self.start = {name: getattr(state, name, 0) for name in COUNTERS}
        self.last: dict[str, Any] = self.start
        self.window = Window("samples" if config.batch.normalize_by == "samples" else "tokens", self.start)
        self.told: set[str] = set()  # notices that come once
        self.held: Any = None  # (step, is_eval) -> whether a resumed W&B run has it (wandb_history.py)
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
        with self._guard("wandb history"):
            if self.held is not None and path.exists():
                self._catch_up(path)
        with self._guard("progress bar"):
            self.screen.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(failed=error is not None and not (isinstance(error, SystemExit) and not error.code))

    def say(self, line: str) -> None:
        """One notice; above the progress bar where there is one."""
        if self.is_main:
            self.screen.line(line)

    def leave_word(self, state: Any) -> None:
        """Say how to go on after a signal; of a candidate the search says it."""
        if self.config.searched:
            self.say(f"stopped after step {state.step} and saved")
            return
        settings = shlex.quote(f"{self.config.run.output_dir}/config.yaml")
        how = f"--config {settings} --resume_from_checkpoint auto"
        self.say(f"stopped by a signal after step {state.step} and saved; go on with:")
        self.say(f"accelerate launch ... train.py {how}")

    def once(self, line: str | None) -> None:
        """A notice, the first time only; None is nothing."""
        if line and line not in self.told:
            self.told.add(line)
            self.say(line)

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
            record, line = _encoded({"kind": "train", **record})
            self._write(line)
            self.window.add(record)
            due = self.every.due(self.last, record)
            self.last = record
            if record.get("skipped") not in (None, "empty"):
                self.screen.line(f"step {record['step']} skipped: {record['skipped']}", "yellow")
            if (record.get("grad_norm") or 0) > self.config.optim.grad_anomaly:
                told = f"step {record['step']}: gradient norm {record['grad_norm']:.3g} before clipping"
                self.screen.line(f"{told}, above --grad_anomaly", "yellow")
            self.screen.move(record, self._seconds_left(record))
            if due:
                self._log()

    def eval(self, record: dict[str, Any]) -> None:
        """An evaluation, `eval_loss`, further `eval_*` and the counters: to everything at once."""
        if not self.is_main:
            return
        with self._guard("eval record"):
            record, line = _encoded({"kind": "eval", **record})
            self._write(line)
            self._remember(record)
            values = {name: value for name, value in record.items() if name.startswith("eval_")}
            told = [f"{k} {show(v, '.4f' if isinstance(v, float) else '')}" for k, v in values.items()]
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
        """To the end of the samples or of --max_steps, at the mean speed since this process began."""
        done = {name: record[name] - self.start[name] for name in ("samples", "step", "seconds")}
        ends = {"samples": self.total_samples or 0, "step": self.config.run.max_steps}
        left = [
            max(end - record[name], 0) * done["seconds"] / done[name]
            for name, end in ends.items()
            if end > 0 and done[name] > 0
        ]
        return min(left, default=None)

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

    def _write(self, line: bytes) -> None:
        """One line, whole or not at all: a full disk tears none, and is tried again with the next record."""
        size = os.fstat(self.file.fileno()).st_size
        with self._guard("metrics.jsonl"):
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

    def _catch_up(self, path: Path) -> None:
        """Tell W&B what a kill took from it, and fill the window that the resumed run goes on with."""
        (wandb,) = (tracker for tracker in self.trackers if tracker.name == "wandb")
        self.last = dict.fromkeys(COUNTERS, 0)
        self.window.__init__(self.window.weigh_by, self.last)
        for line in path.read_text().splitlines():
            record = json.loads(line)
            due = record["kind"] == "eval" or self.every.due(self.last, record)
            if record["kind"] == "train":
                self.window.add(record)
                self.last = record
                record = record | self.window.close() if due else record
            if due:
                self._track(record, [wandb])

    def _remember(self, record: dict[str, Any]) -> None:
        loss = record.get("eval_loss")
        self.eval_loss = loss
        if loss is not None:
            self.best_eval_loss = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)

    def _track(self, record: dict[str, Any], trackers: list[Any] | None = None) -> None:
        """Numbers and reasons to every tracker that still works; they take no null and no lists."""
        values = {k: v for k, v in record.items() if isinstance(v, (int, float, str)) and k != "kind"}
        for tracker in list(self.trackers if trackers is None else trackers):
            if tracker.name == "wandb" and self.held and self.held(record["step"], record["kind"] == "eval"):
                continue
            with self._guard(tracker.name, lambda tracker=tracker: self.trackers.remove(tracker)):
                if tracker.name == "tensorboard":
                    tracker.log(values, step=record["step"])
                    for axis in ("samples", "tokens"):  # it has one x axis, and time
                        named = {f"by_{axis}/{k}": v for k, v in values.items()}
                        tracker.log(named, step=record[axis])
                elif tracker.name == "trackio":  # whose own column is called step
                    tracker.log({k: v for k, v in values.items() if k != "step"}, step=record["step"])
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
