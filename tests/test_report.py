"""Report with a real Accelerator, offline W&B runs read back from disk, real pipes and a pseudo-terminal."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import Accelerator

from adaptive.config import BadSetting, parse
from adaptive.console import COLUMNS, clock
from adaptive.report import Report, Window
from adaptive.state import RunState
from adaptive.trackers import wandb_mode

ROOT = Path(__file__).parent.parent
HEADING = "".join(name.rjust(width) for name, width, _ in COLUMNS)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No account of whoever runs the tests: their key or mode would change what is tested."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["COLUMNS", "FORCE_COLOR"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no_settings"))
    monkeypatch.chdir(tmp_path)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def settings(folder, *flags, log_every="1 steps", report_to="none"):
    return parse(["--output_dir", str(folder), "--log_every", log_every, "--report_to", report_to, *flags])


def step(k, samples, n, loss, *, seconds=None, tokens=None, **more):
    """A train record; 10 supervised tokens a sample and 2 seconds a step unless said otherwise."""
    record = {
        "step": k, "updates": k, "seconds": 2.0 * k if seconds is None else seconds, "samples": samples,
        "tokens": 10 * samples if tokens is None else tokens, "epoch": samples / 100,
        "train_coverage": samples / 100, "target_batch_size": n + 0.5, "batch_size": n, "carry": 0.5,
        "weight": 1 / (n + 0.5), "micro_batch_size": 4, "passes": 1,
        "positions": [["train", samples - n, samples]], "loss": loss, "learning_rate": 3e-3,
        "grad_norm": 1.25, "skipped": None,
    }  # fmt: skip
    return record | more


def evaluation(k, samples, loss, **more):
    """An eval record with the counters of step(k, samples)."""
    counters = {"step": k, "updates": k, "seconds": 2.0 * k, "samples": samples, "tokens": 10 * samples}
    return counters | {"eval_loss": loss} | more


class Tracker:
    """A real tracker, with accelerate's interface, that keeps what it is given."""

    name = "kept"

    def __init__(self, log_error=None, finish=None):
        self.records, self.finished, self.log_error, self.finish_with = [], 0, log_error, finish

    def log(self, values, step=None):
        if self.log_error:
            raise self.log_error
        self.records.append(values)

    def finish(self):
        self.finished += 1
        if self.finish_with:
            self.finish_with()


def lines(folder):
    def no_constant(name):
        raise AssertionError(f"{name} in metrics.jsonl")

    text = (Path(folder) / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def tracked(tmp_path, accelerator, records, *flags, state=None, **options):
    """The records a tracker gets."""
    tracker = Tracker()
    with Report(settings(tmp_path / "run", *flags, **options), accelerator, 100, state) as report:
        report.trackers.append(tracker)
        for record in records:
            report.train(record)
    return tracker.records


def script(tmp_path, body, total=100):
    """The path of a script whose body runs inside `with Report(...)`."""
    head = f"""
        import sys, time, os
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from accelerate import Accelerator
        from test_report import step, settings, Report
        config = settings({str(tmp_path / "run")!r})
        with Report(config, Accelerator(cpu=True), {total}) as report:
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def environment(**more):
    """Ours without what changes a terminal or Python's buffering of it."""
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "TERM", "PYTHONUNBUFFERED")} | more


def run(path, **more):
    return subprocess.run([sys.executable, path], env=environment(**more), capture_output=True, text=True)


# metrics.jsonl


def test_every_decision_is_written_at_once_and_never_nan(tmp_path, accelerator):
    first = step(1, 4, 4, 2.0, noise_scale=np.float32("inf"), world=np.int64(3), grad_norm=float("nan"))
    with Report(settings(tmp_path / "run", log_every="never"), accelerator, 100) as report:
        report.train(first)
        assert len(lines(tmp_path / "run")) == 1, "not written at once"
        report.train(step(2, 8, 4, math.nan, skipped="nonfinite", positions=[["train", 4, 8]]))
        report.train(step(3, 8, 0, None, skipped="empty", positions=[]))
        report.eval(evaluation(3, 8, -math.inf, eval_n=7))
    one, two, three, four = lines(tmp_path / "run")
    assert one == {"kind": "train"} | first | {"noise_scale": None, "world": 3, "grad_norm": None}
    assert isinstance(one["world"], int)
    assert (two["loss"], two["skipped"]) == (None, "nonfinite")
    assert (three["positions"], three["batch_size"], three["skipped"]) == ([], 0, "empty")
    assert (four["kind"], four["eval_loss"], four["eval_n"]) == ("eval", None, 7)


def test_a_second_report_appends(tmp_path, accelerator):
    for k in (1, 2):
        with Report(settings(tmp_path / "run"), accelerator, 100) as report:
            report.train(step(k, 4 * k, 4, 2.0))
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2]


def test_a_full_disk_tears_no_line_and_is_tried_again(tmp_path):
    """Mutation: without the ftruncate the first 64 bytes of step 3 stay and the last line is no JSON."""
    body = """
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        report.train(step(1, 4, 4, 2.0)); report.train(step(2, 8, 4, 2.0))
        size = os.path.getsize(report.folder / "metrics.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 64, hard))
        report.train(step(3, 12, 4, 2.0)); report.train(step(4, 16, 4, 2.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        report.train(step(5, 20, 4, 2.0))
    """
    done = run(script(tmp_path, body))
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2, 5]
    assert done.stderr.count("warning: metrics.jsonl") == 1


# Window means


def test_loss_is_weighed_by_tokens_and_throughput_is_of_the_window(tmp_path, accelerator):
    """R87. Mutation: a mean of means gives 2.0 for the first window instead of 1.8."""
    records = [
        step(1, 4, 4, 1.0, tokens=40, seconds=1.0), step(2, 8, 4, 2.0, tokens=80, seconds=2.0),
        step(3, 10, 2, 3.0, tokens=100, seconds=4.0),
        step(4, 14, 4, 1.0, tokens=140, seconds=5.0), step(5, 18, 4, 1.0, tokens=180, seconds=5.5),
        step(6, 22, 4, 4.0, tokens=181, seconds=6.0),
    ]  # fmt: skip
    first, second = tracked(tmp_path, accelerator, records, log_every="3 steps")
    assert first["loss"] == pytest.approx((4 * 1 + 4 * 2 + 2 * 3) / 10)
    assert first["samples_per_second"] == pytest.approx(10 / 4)
    assert second["loss"] == pytest.approx((40 * 1 + 40 * 1 + 1 * 4) / 81)
    assert second["samples_per_second"] == pytest.approx(12 / 2)
    assert second["tokens_per_second"] == pytest.approx(81 / 2)
    assert (second["step"], second["batch_size"]) == (6, 4), "other numbers are the last step's"


def test_loss_is_weighed_by_samples_where_samples_weigh_equally(tmp_path, accelerator):
    records = [step(1, 3, 3, 1.0, tokens=1), step(2, 4, 1, 5.0, tokens=1001)]
    (by_samples,) = tracked(tmp_path, accelerator, records, "--normalize_by", "samples", log_every="2 steps")
    (by_tokens,) = tracked(tmp_path, accelerator, records, log_every="2 steps")
    assert by_samples["loss"] == pytest.approx(2.0)
    assert by_tokens["loss"] == pytest.approx((1 + 5000) / 1001)


def test_a_resumed_window_starts_at_the_state(tmp_path, accelerator):
    """Mutation: from zero, the speed is 108 samples in 52 seconds and the loss weighs step 1 with 108."""
    state = RunState(step=25, updates=25, samples=100, tokens=1000, seconds=50.0)
    records = [step(26, 104, 4, 1.0), step(27, 112, 8, 4.0)]
    (record,) = tracked(tmp_path, accelerator, records, state=state, log_every="27 steps")
    assert record["samples_per_second"] == pytest.approx(12 / 4)
    assert record["loss"] == pytest.approx((4 + 32) / 12)


def test_two_logs_on_one_step_divide_by_nothing(tmp_path, accelerator, capsys):
    """R87. The clock may not have moved between two lines, and a step may be told twice."""
    same = step(1, 4, 4, 2.0, seconds=1.0)
    records = [same, step(2, 8, 4, 1.0, seconds=1.0), step(2, 12, 0, None, seconds=1.0, tokens=80)]
    first, second, third = tracked(tmp_path, accelerator, records, log_every="4 samples")
    assert (first["loss"], second["loss"]) == (2.0, 1.0)
    assert "samples_per_second" not in second and "loss" not in third
    assert "warning" not in capsys.readouterr().err


def test_empty_steps_add_nothing_and_a_window_without_a_loss_logs_none(tmp_path, accelerator, capsys):
    """R87. Mutation: the loss of an empty step counted as 0."""
    empty = {"skipped": "empty", "positions": [], "grad_norm": None}
    records = [step(1, 1, 1, 2.0), step(2, 1, 0, None, **empty), step(3, 1, 0, None, **empty)]
    records += [step(4, 1, 0, None, **empty), step(5, 2, 1, math.nan, skipped="nonfinite")]
    records += [step(6, 3, 1, 3.0)]
    first, second, third = tracked(tmp_path, accelerator, records, log_every="2 steps")
    assert first["loss"] == 2.0
    assert "loss" not in second and second["samples_per_second"] == 0.0
    assert third["loss"] == 3.0
    out = capsys.readouterr().out
    assert "step 5 skipped: nonfinite" in out
    assert "skipped: empty" not in out


def test_console_follows_log_every_and_the_last_steps_are_told(tmp_path, accelerator, capsys):
    records = [step(k, 4 * k, 4, 2.0) for k in range(1, 8)]
    logged = tracked(tmp_path, accelerator, records, log_every="3 steps")
    assert [record["step"] for record in logged] == [3, 6, 7]
    assert len(lines(tmp_path / "run")) == 7
    out = capsys.readouterr().out.splitlines()
    assert out[0] == HEADING
    assert [row.split()[0] for row in out[1:4]] == ["3", "6", "7"]


def test_a_line_shows_asked_and_run_size_side_by_side(tmp_path, accelerator, capsys):
    with Report(settings(tmp_path / "run"), accelerator, 100) as report:
        report.train(step(1, 10, 10, 2.0, passes=3, learning_rate=2.5e-4, grad_norm=None))
        report.eval(evaluation(1, 10, 1.7321))
    out = capsys.readouterr().out.splitlines()
    cells = ["1", "10.5", "10", "3x4", "10.0%", "0.10", "2.0000", "2.50e-4", "-", "5.0", "0:18"]
    assert out[1].split() == cells
    assert len(out[1]) == len(HEADING) == 80
    assert out[2] == "eval  step 1  eval_loss 1.7321"
    assert out[3] == "1 steps, 1 updates, 10 samples, 0.0 minutes, eval_loss 1.7321 (best 1.7321)"
    assert str(tmp_path / "run" / "metrics.jsonl") in out[5]


def testclock():
    assert [clock(s) for s in (None, 5, 3599, 3600, 86399, 86400)] == [
        "-", "0:05", "59:59", "1:00:00", "23:59:59", "1d 00h",
    ]  # fmt: skip


# W&B


def wandb_records(folder):
    """(history, others) of the one offline run in `folder`: W&B's file is a LevelDB log of protobuf records.

    Blocks of 32 KiB; a record is crc (4), length (2), kind (1: whole, 2 to 4: first, middle, last), bytes.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    (path,) = folder.glob("*.wandb")
    data, at, parts, history, others = path.read_bytes(), 7, b"", [], []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # cut short by a kill, or being written
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = pb.Record.FromString(parts)
            parts = b""
            name = record.WhichOneof("record_type")
            if name == "history":
                items = record.history.item
                history.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
            else:
                others.append((name, getattr(record, name)))
    return history, others


def ended_records(folder):
    """`wandb_records` of a run that was finished: W&B may write its file after `finish`."""
    deadline = time.monotonic() + 60
    while True:
        history, others = wandb_records(folder)
        if "exit" in [name for name, _ in others] or time.monotonic() > deadline:
            return history, others
        time.sleep(0.05)


def run_folders(folder):
    return sorted((folder / "wandb").glob("*run-*-*"))


def assert_all_there(history, records):
    """Every number of every record, in order, in one row each."""
    assert len(history) == len(records)
    for row, record in zip(history, records, strict=True):
        wanted = {k: v for k, v in record.items() if isinstance(v, (int, float, str)) and k != "kind"}
        assert {name: row.get(name) for name in wanted} == wanted


def test_wandb_has_every_record_also_after_a_resume_at_an_earlier_step(tmp_path, accelerator, capfd):
    """R82. Mutation: `tracker.log(values, step=record["step"])` loses what comes after the step went back."""
    config = settings(tmp_path / "run", "--run_name", "named", "--project_name", "proj", report_to="wandb")
    logged = []

    def train(report, steps):
        for k in steps:
            logged.append(step(k, 4 * k, 4, 3.0 - 0.1 * k))
            report.train(logged[-1])
            if k % 2 == 0:
                logged.append(evaluation(k, 4 * k, 5.0 - k))
                report.eval(logged[-1])

    with Report(config, accelerator, 100) as report:
        train(report, range(1, 6))
        # The counters go back inside one W&B run: what resuming from an older checkpoint is, online.
        report.last = step(2, 8, 4, None)
        report.window = Window("tokens", report.last)
        train(report, range(3, 5))
    (folder,) = run_folders(tmp_path / "run")
    history, others = ended_records(folder)
    assert_all_there(history, logged)
    assert [row["step"] for row in history] == [1, 2, 2, 3, 4, 4, 5, 3, 4, 4]
    assert_described(others, config)
    out, err = capfd.readouterr()
    assert f"wandb sync {folder}" in out.splitlines()
    assert err == "" and "wandb:" not in out, "W&B talks itself, or was asked to log in"

    assert folder.name.endswith(report.wandb_run_id)
    n_logged = len(logged)
    time.sleep(1.1)  # W&B names folders by the second
    state = RunState(step=2, samples=8, tokens=80, seconds=4.0)
    with Report(config, accelerator, 100, state, run_id=report.wandb_run_id) as resumed:
        assert resumed.best_eval_loss == 1.0
        train(resumed, range(3, 8))
    old, new = run_folders(tmp_path / "run")
    later = [record for record in logged[n_logged:] if record["step"] > 5]
    assert_all_there(ended_records(new)[0], later)  # the others are there: each step comes once
    assert [record["step"] for record in later] == [6, 6, 7]
    (started,) = [record for name, record in ended_records(new)[1] if name == "run"]
    assert (started.run_id, started.resume) == (report.wandb_run_id, True)
    assert_all_there(ended_records(old)[0], logged[:n_logged])


def assert_described(others, config):
    """Name, settings, x axes and summary."""
    (started,) = [record for name, record in others if name == "run"]
    assert (started.display_name, started.project, started.resume) == ("named", "proj", False)
    kept = {update.key: json.loads(update.value_json) for update in started.config.update}
    assert {name: kept[name] for name in config.flat()} == config.flat()
    metrics = [record for name, record in others if name == "metric"]
    assert [m.step_metric for m in metrics if m.glob_name == "*"] == ["step"]
    assert {m.name for m in metrics} >= {"step", "samples", "tokens", "seconds"}
    assert (summary(others)["eval_loss"], summary(others)["best_eval_loss"]) == (1.0, 1.0)


def summary(others):
    values = {}
    for name, record in others:
        if name == "summary":
            values |= {u.key or ".".join(u.nested_key): json.loads(u.value_json) for u in record.update}
    return values


def test_a_failed_run_is_marked_failed(tmp_path, accelerator):
    config = settings(tmp_path / "run", report_to="wandb")
    with pytest.raises(RuntimeError), Report(config, accelerator, 100) as report:
        report.train(step(1, 4, 4, 2.0))
        raise RuntimeError("boom")
    _, others = ended_records(run_folders(tmp_path / "run")[0])
    assert [record.exit_code for name, record in others if name == "exit"] == [1]


@pytest.mark.parametrize(
    "given, mode",
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "0" * 40}, "online"),
        ({"NETRC": "netrc"}, "online"),
        ({"NETRC": "netrc", "WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandb_is_offline_without_a_key_unless_the_user_says_otherwise(given, mode, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text(f"machine wb.example.com\n  login user\n  password {'0' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wb.example.com")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    import wandb

    assert wandb_mode(wandb) == mode


def test_an_unreachable_server_is_recorded_offline(tmp_path, accelerator, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")  # of the offline start too
    with Report(settings(tmp_path / "run", report_to="wandb"), accelerator, 100) as report:
        report.train(step(1, 4, 4, 2.0))
    (folder,) = [folder for folder in run_folders(tmp_path / "run") if folder.name.startswith("offline")]
    assert_all_there(ended_records(folder)[0], [step(1, 4, 4, 2.0)])
    out, err = capsys.readouterr()
    assert err.count("warning: ") == 1 and "recording offline" in err
    assert out.splitlines()[-1] == f"wandb sync {folder}"


def test_tensorboard_by_step_and_by_samples(tmp_path, accelerator):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Report(settings(tmp_path / "run", report_to="tensorboard"), accelerator, 100) as report:
        report.train(step(1, 4, 4, 2.0))
        report.train(step(2, 12, 8, 1.0))
        report.eval(evaluation(2, 12, 1.5))
    events = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("by_samples/loss")] == [(4, 2.0), (12, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("by_tokens/loss")] == [(40, 2.0), (120, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("by_samples/eval_loss")] == [(12, 1.5)]


def test_a_missing_tracker_is_a_bad_setting_on_every_process(tmp_path, accelerator, monkeypatch):
    """A folder called tensorboard is not the package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    (tmp_path / "tensorboard").mkdir()
    for process in (accelerator, SimpleNamespace(is_main_process=False, num_processes=2)):
        with pytest.raises(BadSetting, match="pip install tensorboard"):
            Report(settings(tmp_path / "run", report_to="tensorboard"), process, 100)


# Failures


def test_a_tracker_that_raises_is_switched_off(tmp_path, accelerator, capsys):
    """R86. Mutation: `switch_off` left out (it is asked at every step)."""
    broken, works = Tracker(log_error=BrokenPipeError("gone")), Tracker()
    broken.name = "broken"
    with Report(settings(tmp_path / "run"), accelerator, 100) as report:
        report.trackers += [broken, works]
        for k in (1, 2, 3):
            report.train(step(k, 4 * k, 4, 2.0))
        assert report.trackers == [works]
    assert [record["step"] for record in works.records] == [1, 2, 3]
    assert (works.finished, broken.finished) == (1, 0)
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2, 3]
    err = capsys.readouterr().err.splitlines()
    assert err == ["warning: broken failed (BrokenPipeError: gone); training goes on without it"]


def test_a_finish_that_blocks_or_raises_is_bounded(tmp_path, accelerator, capsys):
    """R86. Mutation: `thread.join()` without a limit (60 seconds)."""

    def fail():
        raise ConnectionError("no route")

    hangs, fails, works = Tracker(finish=lambda: time.sleep(60)), Tracker(finish=fail), Tracker()
    hangs.name, fails.name = "hangs", "fails"
    began = time.monotonic()
    with Report(settings(tmp_path / "run"), accelerator, 100) as report:
        report.finish_seconds = 0.2
        report.trackers += [hangs, fails, works]
        report.train(step(1, 4, 4, 2.0))
    assert time.monotonic() - began < 10
    assert works.finished == 1
    out, err = capsys.readouterr()
    assert "1 steps, 1 updates" in out
    assert [line.split(" failed")[0] for line in err.splitlines()] == ["warning: hangs", "warning: fails"]


def test_a_reader_that_leaves_does_not_change_the_exit_status(tmp_path):
    """Mutation: without the dup2 Python's flush at exit fails and the status is 120."""
    body = "for k in range(1, 2000): report.train(step(k, k, 1, 2.0))"
    # One line is read, then the pipe is closed; 2,000 lines are more than it holds.
    command = f"{sys.executable} {script(tmp_path, body)} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines() == [HEADING, "0"]
    assert done.stderr.count("warning: ") == 1
    assert len(lines(tmp_path / "run")) == 1999


# The console


def test_plain_lines_have_no_escape_codes_and_are_not_wrapped(tmp_path):
    """Mutation: to trust rich, which believes FORCE_COLOR in a pipe."""
    body = """
        report.say("x" * 100 + " [red]" + "y" * 100)
        for k in range(1, 4): report.train(step(k, 4 * k, 4, 2.0))
        report.warn("careful")
    """
    path = script(tmp_path, body)
    narrow = {"COLUMNS": "40", "FORCE_COLOR": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    piped = [
        subprocess.Popen([sys.executable, path], env=environment(**narrow, TERM=term), **pipes)
        for term in ("dumb", "xterm")
    ]
    for process in piped:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)
        rows = out.splitlines()
        assert rows[:2] == ["x" * 100 + " [red]" + "y" * 100, HEADING]
        assert [row.split()[0] for row in rows[2:5]] == ["1", "2", "3"]
        assert err.splitlines() == ["warning: careful"]


def terminal(path, **variables):
    """What a terminal receives from the script, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, str(path)], environment(**variables))
    received = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        received += part
    return received.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_on_a_terminal_the_bar_is_closed_before_a_traceback(tmp_path):
    """R89. Mutation: `screen.stop` left out of close."""
    body = """
        for k in range(1, 4): report.train(step(k, 4 * k, 4, 2.0)); time.sleep(0.3)
        raise RuntimeError("boom")
    """
    received, status = terminal(script(tmp_path, body), TERM="xterm")
    assert status == 1
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert received.count(hide) == received.count(show) == 1
    alive, after = received.split(show)
    assert "12/100 samples  epoch 0.12  covered 12.0%" in alive and HEADING in alive
    assert "samples  epoch" not in after, "the bar is drawn again after it was closed"
    assert re.search(r"\nTraceback \(most recent call last\):\r\n.*RuntimeError: boom\r\n$", after, re.DOTALL)
    assert "\x1b" not in after[after.index("stopped by an error after 3 steps") :]


def test_an_unknown_total_has_no_question_mark(tmp_path):
    """R89. With COLUMNS=0, as some batch systems have it; rich would draw nothing."""
    body = "report.train(step(1, 4, 4, 2.0)); time.sleep(0.3); report.train(step(2, 8, 4, 2.0))"
    received, status = terminal(script(tmp_path, body, total=None), TERM="xterm", COLUMNS="0")
    assert status == 0
    assert "8 samples  epoch 0.08  covered 8.0%  left -" in received
    assert "?" not in re.sub(r"\x1b\[\?25[lh]", "", received)


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    """R89. Mutation: TERM not asked for."""
    body = "report.train(step(1, 4, 4, 2.0)); print('z' * 200)  # whose print goes through rich is wrapped"
    received, status = terminal(script(tmp_path, body), TERM="dumb")
    assert (status, "\x1b" in received, "covered" in received) == (0, False, False)
    assert HEADING in received and "z" * 200 in received


def test_other_ranks_do_nothing(tmp_path):
    """R84, R89. Mutation: a W&B run or a metrics.jsonl per rank. Its own process, so that imports can be
    seen.
    """
    code = f"""
        import sys
        from types import SimpleNamespace
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from adaptive.config import parse
        from adaptive.report import Report
        config = parse(["--output_dir", {str(tmp_path / "run")!r}, "--report_to", "wandb"])
        with Report(config, SimpleNamespace(is_main_process=False, num_processes=2), 100) as report:
            report.train({{"step": 1}}); report.eval({{}}); report.say("x"); report.warn("x")
        report.close()
        assert not {{"wandb", "rich.progress", "rich.live"}} & set(sys.modules), "imported"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "run").exists()


def test_time_left_ends_with_max_steps():
    """10 steps of 100 and 80 samples of 8,000 took 5 s. Mutation: by samples alone (495 s)."""
    report = object.__new__(Report)
    report.start = dict.fromkeys(("step", "samples", "seconds"), 0)
    record = {"step": 10, "samples": 80, "seconds": 5.0}
    for steps, samples, left in ((100, 8000, 45), (-1, 8000, 495), (100, None, 45), (-1, None, None)):
        report.config, report.total_samples = parse(["--max_steps", str(steps)]), samples
        assert report._seconds_left(record) == (left and pytest.approx(left))
