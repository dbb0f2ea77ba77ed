"""Schedules: what the built-in ones return, how a callable gets what it names, and how a wrong answer is
met.
"""

import functools
import math
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adaptive.config import BadSetting, Batch, parse
from adaptive.plan import Lengths, exact
from adaptive.schedules import (
    SCHEDULES,
    Schedule,
    decide,
    first_size,
    global_size,
    in_unit,
    load_schedule,
    parse_schedule,
    received_signals,
    remembered,
)  # fmt: skip
from adaptive.signals import KNOWN
from adaptive.state import RunState

SIGNALS = set(KNOWN)
TASK_SIGNALS = SIGNALS | {
    "task_ratios",
    "new_data_ratio",
    "difficulty",
}  # what a task's own signals() may add
LENGTHS = Lengths({"train": 10**6}, Fraction(1))


# The published examples, as REQUIREMENTS A has them.


def linear(step, current_size, interval=100, increment=2, max_size=32):
    if step % interval == 0:
        return min(current_size + increment, max_size)
    return current_size


def task_aware(step, current_size, task_ratios, dominant="a", largest=64, smallest=8):
    if max(task_ratios, key=task_ratios.get) == dominant:
        return min(current_size + 2, largest)
    return max(current_size - 1, smallest)


def incremental(step, current_size, new_data_ratio, threshold=0.3):
    if new_data_ratio < threshold:
        return min(current_size + 1, 32)
    return max(current_size - 1, 8)


def curriculum(step, current_size, difficulty, threshold=0.8):
    if difficulty > threshold:
        return max(current_size - 2, 4)
    return min(current_size + 1, 32)


def asked(schedule: Schedule, **signals):
    """The schedule's answer, None where it would leave the size as it is."""
    return schedule.call(signals, otherwise=None)


def decision(function, batch: Batch | None = None, step: int = 1, size: float = 8.0,
 lengths: Lengths = LENGTHS,
             world_size: int = 1, **signals):  # fmt: skip
    """What `decide` makes of a callable after `step` steps of `size`."""
    schedule = function if isinstance(function, Schedule) else Schedule("mine", function, TASK_SIGNALS)
    state = RunState.fresh(["train"], world_size, size)
    state.step = step
    seen = {"step": step, "current_size": size, **signals}
    return decide(schedule, state, seen, batch or Batch(batch_size=size), lengths, 0.0)


def sizes_of(function, steps: int, first: float, **signals) -> list[float]:
    """Sizes of decisions 1 to `steps`, each fed back as current_size."""
    schedule, batch = Schedule("mine", function, TASK_SIGNALS), Batch(batch_size=first)
    state, sizes = RunState.fresh(["train"], 1, first), []
    for step in range(steps):
        state.step = step
        seen = {"step": state.step, "current_size": state.size, **signals}
        state.size = decide(schedule, state, seen, batch, LENGTHS, 0.0)["size"]
        sizes.append(state.size)
    return sizes


def refused(call, *words: str) -> str:
    """The one line of the BadSetting that `call` raises, which has all `words`."""
    with pytest.raises(BadSetting) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    assert all(word in message for word in words), message
    return message


# The built-in schedules


@pytest.mark.parametrize("text, signals, size", [
    ("constant()", {"step": 7, "current_size": 2.5}, 2.5),
    ("constant", {"step": 7, "current_size": 2.5}, 2.5),
    ("linear()", {"step": 99, "current_size": 8}, 8),
    ("linear()", {"step": 100, "current_size": 8}, 10),
    ("linear()", {"step": 101, "current_size": 10}, 10),
    ("linear()", {"step": 2300, "current_size": 31}, 32),
    ("linear()", {"step": 2300, "current_size": 32}, 32),
    ("linear(50, 64, 4)", {"step": 50, "current_size": 8}, 12),
    ("linear(interval=50, max_size=64, increment=4)", {"step": 50, "current_size": 62}, 64),
    ("linear(increment=0.3, interval=1)", {"step": 1, "current_size": 8.0}, 8.3),
    ("steps('0:768 250M:1536')", {"samples": 0}, 768),
    ("steps('0:768 250M:1536')", {"samples": 249_999_999}, 768),
    ("steps('0:768 250M:1536')", {"samples": 250_000_000}, 1536),
    ("steps('0:0.3 1.5K:2.5 2B:4')", {"samples": 1_499}, 0.3),
    ("steps('0:0.3 1.5K:2.5 2B:4')", {"samples": 1_500}, 2.5),
    ("steps('0:0.3 1.5K:2.5 2B:4')", {"samples": 2_000_000_000}, 4),
    ("ramp(4, 64, 100)", {"samples": 0}, 4),
    ("ramp(4, 64, 100)", {"samples": 25}, 19),
    ("ramp(start=4, end=64, over=100)", {"samples": 100}, 64),
    ("ramp(64, 4, 100)", {"samples": 50}, 34),
    ("ramp(4, 64, 100)", {"samples": 10**9}, 64),
    ("exponential(4, 64, 100)", {"samples": 0}, 4),
    ("exponential(4, 64, 100)", {"samples": 25}, 8),
    ("exponential(4, 64, 100)", {"samples": 50}, 16),
    ("exponential(4, 64, 100)", {"samples": 200}, 64),
    ("cosine(4, 64, 100)", {"samples": 0}, 4),
    ("cosine(4, 64, 100)", {"samples": 50}, 34),
    ("cosine(4, 64, 90)", {"samples": 30}, 19),
    ("cosine(4, 64, 100)", {"samples": 101}, 64),
    ("seesaw()", {"initial_size": 4.0, "lr_decay": 1.0}, 4),
    ("seesaw()", {"initial_size": 4.0, "lr_decay": 0.25}, 16),
])  # fmt: skip
def test_built_in_schedules(text, signals, size):
    """Mutations: `step % interval == 1`; `start < samples` in `steps`; ramp by steps; exponential linear (34
    for 16);
    a whole cosine (64 for 34); seesaw by the square root (8 for 16).
    """
    answer = asked(parse_schedule(text, SIGNALS), **signals)
    assert answer == pytest.approx(size, rel=1e-12)


def test_every_function_of_progress_is_in_the_table():
    """Mutation: one added to open_loop.py and SCHEDULES, and to no test (those of measurements, and replay,
    have their own).
    """
    table = next(mark for mark in test_built_in_schedules.pytestmark if mark.name == "parametrize").args[1]
    open_loop = {name for name, schedule in SCHEDULES.items() if schedule.__module__.endswith(".open_loop")}
    assert {text.split("(")[0] for text, _, _ in table} == open_loop - {"replay"}


@pytest.mark.parametrize("text, first", [
    ("ramp(4, 64, 100)", 4), ("exponential(0.5, 64, 100)", 0.5), ("cosine(4, 2, 10)", 4),
    ("steps('0:768 9:1')", 768),
])  # fmt: skip
def test_functions_of_progress_decide_their_own_first_size(text, first, capfd):
    """Mutation: `first_size` taking the flag: the first step of a ramp from 4 would have 8."""
    batch = Batch(batch_size=8.5)
    assert first_size(parse_schedule(text, SIGNALS), batch) == first == batch.batch_size
    told = capfd.readouterr().err
    assert text.split("(")[0] in told and f"{first:g}" in told and "8.5" in told and told.count("\n") == 1
    assert first_size(parse_schedule(text, SIGNALS), Batch()) == first
    assert capfd.readouterr().err == ""


def test_the_first_size_is_the_flag_or_eight():
    """Mutation: 1 as the default; a per-device size written into --batch_size as well."""
    linear_ = parse_schedule("linear()", SIGNALS)
    assert first_size(linear_, Batch(batch_size=2.5)) == 2.5
    assert first_size(linear_, Batch()) == 8
    batch = Batch(per_device_train_batch_size=0.25)
    assert first_size(linear_, batch) == 0.25
    assert (batch.batch_size, batch.per_device_train_batch_size) == (None, 0.25)


def test_seesaw_says_what_it_needs():
    """Mutation: `update_wrapper` left out of `_bind`, or `needs` not asked: seesaw runs with a linear
    rule.
    """
    refused(lambda: load_schedule(parse(["--schedule", "seesaw()", "--lr_scaling", "linear"]), SIGNALS),
            "seesaw", "--lr_scaling sqrt", "linear")  # fmt: skip
    assert load_schedule(parse(["--schedule", "seesaw()"]), SIGNALS).signals == {"initial_size", "lr_decay"}


# Parsing


@pytest.mark.parametrize("text, words", [
    ("linaer()", ["linaer()", *SCHEDULES, "FILE.py:NAME"]),
    ("linear(intervall=3)", ["'intervall'", "interval, max_size, increment"]),
    ("linear(1, 2, 3, 4)", ["4 is no setting"]),
    ("linear(1, interval=2)", ["interval"]),
    ("linear(interval=1, interval=2)", ["NAME(setting=1.5"]),
    ("constant(3)", ["3 is no setting", "none"]),
    ("ramp(4, 64)", ["over"]),
    ("ramp(4, 64, 100, 7)", ["ramp"]),
    ("ramp(0, 64, 100)", ["start=0", "above 0"]),
    ("ramp(4, -64, 100)", ["end=-64", "above 0"]),
    ("ramp(4, 64, 0)", ["over=0", "above 0"]),
    ("exponential(4, '64', 100)", ["end='64'", "above 0"]),
    ("steps('768')", ["'768'", "0:768 250M:1536"]),
    ("steps('1:768')", ["start at 0"]),
    ("steps('')", ["start at 0"]),
    ("steps('0:8 9:4 7:2')", ["rise"]),
    ("steps('0:8 9:-4')", ["9:-4", "above 0"]),
    ("steps('0:8 1.2.3:4')", ["1.2.3"]),
    ("steps(8)", ["steps"]),
    ("linear(", ["linear(", "NAME"]),
    ("", ["NAME"]),
    ("linear() + 1", ["NAME"]),
    ("lambda step, size: size", ["NAME"]),
    ("nowhere.py:grow", ["nowhere.py", "no such file"]),
])  # fmt: skip
def test_bad_schedules_are_answered_before_the_run(text, words):
    """Mutations: `ValueError` not caught in `parse_schedule`; unknown settings passed on to
    functools.partial, which
    fails at step 2; no check of ramps and tables, which fail in the middle of the run.
    """
    refused(lambda: parse_schedule(text, SIGNALS), "--schedule", *words)


@pytest.mark.parametrize("argument", [
    "__import__('os').system('touch {0}')", "open('{0}', 'w')", "[x for x in open('{0}', 'w')]",
    "interval=__import__('pathlib').Path('{0}').touch()", "*[1]", "**{{}}", "f'{{open(\"{0}\", \"w\")}}'",
    "{{[1]: 2}}",
])  # fmt: skip
def test_settings_are_literals_and_never_evaluated(argument, tmp_path):
    """Mutation: `eval` for `ast.literal_eval`: the file exists. Mutation: TypeError not caught: an unhashable
    key.
    """
    trace = tmp_path / "trace"
    refused(
        lambda: parse_schedule(f"linear({argument.format(trace)})", SIGNALS), "--schedule", "plain numbers"
    )
    assert not trace.exists()


def test_deeply_nested_settings_are_refused():
    """Mutation: RecursionError and MemoryError not caught in `parse_call`: a traceback of a thousand
    lines.
    """
    for nested in ("[" * 3_000 + "]" * 3_000, "-" * 100_000 + "1"):
        with pytest.raises(BadSetting, match="plain numbers"):
            parse_schedule(f"linear({nested})", SIGNALS)


# The user's own, by path


@pytest.fixture
def user_file(tmp_path):
    """Write a file of the user's; returns its path."""

    def write(source: str, name: str = "my_idea.py") -> Path:
        path = tmp_path / name
        path.write_text(source)
        return path

    yield write
    sys.modules.pop("user_my_idea", None)


OWN = """
import functools

def grow(i, size, rate=2):
    return size * rate

def mixed(step, n, rate=2, *, loss=None):
    return n + rate + (loss or 0)

half = functools.partial(grow, rate=0.5)

class Counts:
    def __init__(self, each=1):
        self.calls, self.each = 0, each
    def __call__(self, current_size):
        self.calls += 1
        return current_size + self.each * self.calls
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]

class Breaks:
    def __init__(self):
        open("/nowhere/at/all")

a_number = 8
"""


@pytest.mark.parametrize("text, size", [
    ("grow", 16), ("grow()", 16), ("grow(rate=3)", 24), ("grow(3)", 24), ("half", 4), ("half(rate=0.25)", 2),
    ("mixed", 10), ("mixed(5)", 13), ("mixed(rate=0.3)", 8.3), ("Counts", 9), ("Counts(each=2)", 10),
    ("Counts(3)", 11),
])  # fmt: skip
def test_a_schedule_by_path_gets_its_settings(text, size, user_file):
    """Mutation: `free` without the first two of other names: `mixed(5)` sets n, the size, to 5 and returns
    7.
    """
    schedule = parse_schedule(f"{user_file(OWN)}:{text}", SIGNALS)
    assert asked(schedule, step=3, current_size=8) == pytest.approx(size)
    assert schedule.name == text.split("(")[0]


@pytest.mark.parametrize("text, words", [
    ("grew", ["my_idea.py has no grew", "grow, mixed, half, Counts, Breaks"]),
    ("grow(speed=2)", ["'speed'", "it has rate"]),
    ("grow(2, 3)", ["3 is no setting"]),
    ("Counts(speed=2)", ["speed"]),
    ("Breaks", ["FileNotFoundError", "my_idea.py:2"]),
    ("a_number", ["not a callable"]),
    ("needs_more", ["no value for rate", "needs_more(rate=...)", "current_size, "]),
])  # fmt: skip
def test_a_bad_schedule_by_path(text, words, user_file):
    """Mutation: only TypeError and ValueError caught from a user's constructor: a traceback for a missing
    file.
    """
    more = "\ndef needs_more(step, current_size, rate):\n    return rate\n" if text == "needs_more" else ""
    path = user_file(OWN + more)
    words = [w if w != "grow, mixed, half, Counts, Breaks" else "grow, mixed, Counts, Breaks" for w in words]
    refused(lambda: parse_schedule(f"{path}:{text}", SIGNALS), *words)


@pytest.mark.parametrize("source, words", [
    ("x = 1\ndef f(:\n", ["SyntaxError", "my_idea.py, line 2"]),
    ("import no_such_module\n", ["ModuleNotFoundError", "no_such_module", "my_idea.py:1"]),
    ("\nraise RuntimeError('not today')\n", ["RuntimeError: not today", "my_idea.py:2"]),
])  # fmt: skip
def test_a_file_that_cannot_be_run(source, words, user_file):
    """Mutation: `exec_module` unguarded: a traceback. A SyntaxError's frames are the import system's, not the
    file's.
    """
    message = refused(lambda: parse_schedule(f"{user_file(source)}:f", SIGNALS), "--schedule", *words)
    assert "importlib" not in message


# Signals by name


def test_the_published_examples_run_unchanged_through_partial():
    """Mutation: bound parameters counted as places: `partial(linear, interval=2)` loses its current size."""
    grow = sizes_of(functools.partial(linear, interval=2, max_size=13), 10, first=8)
    assert grow == [8, 8, 10, 10, 12, 12, 13, 13, 13, 13]
    assert sizes_of(linear, 202, first=8)[99:] == [8] + [10] * 100 + [12, 12]
    up = sizes_of(functools.partial(task_aware, largest=12), 4, first=8, task_ratios={"a": 0.7, "b": 0.3})
    down = sizes_of(task_aware, 4, first=10, task_ratios={"a": 0.2, "b": 0.8})
    assert (up, down) == ([8, 10, 12, 12], [10, 9, 8, 8])
    assert sizes_of(incremental, 3, first=31, new_data_ratio=0.1) == [31, 32, 32]
    assert sizes_of(functools.partial(incremental, threshold=0.05), 3, first=9, new_data_ratio=0.1) == [
        9,
        8,
        8,
    ]
    assert sizes_of(curriculum, 4, first=7, difficulty=0.9) == [7, 5, 4, 4]
    assert sizes_of(functools.partial(curriculum, threshold=0.95), 3, first=31, difficulty=0.9) == [
        31,
        32,
        32,
    ]
    by_hand = functools.partial(curriculum, difficulty=0.9)  # wins over the signal
    assert sizes_of(by_hand, 2, first=9, difficulty=0.1) == sizes_of(by_hand, 2, first=9) == [9, 7]


@pytest.mark.parametrize("function, received", [
    (lambda step, current_size: 0, {"step": "step", "current_size": "current_size"}),
    (lambda i, size, rate=2: 0, {"i": "step", "size": "current_size"}),
    (lambda i, current_size: 0, {"i": "step", "current_size": "current_size"}),
    (lambda step, size: 0, {"step": "step", "size": "current_size"}),
    (lambda samples: 0, {"samples": "samples"}),
    (lambda i, samples: 0, {"i": "step", "samples": "samples"}),
    (lambda current_size, step: 0, {"current_size": "current_size", "step": "step"}),
    (lambda loss, current_size=1, rate=2: 0, {"loss": "loss", "current_size": "current_size"}),
    (lambda step, current_size, *, loss, rate=1: 0,
     {"step": "step", "current_size": "current_size", "loss": "loss"}),
    (lambda *, loss, rate=1: 0, {"loss": "loss"}),
    (lambda samples, rate: 0, {"samples": "samples"}),
    (lambda step, *others, **more: 0, {"step": "step"}),
])  # fmt: skip
def test_parameters_receive_the_signals_they_are_named_after(function, received):
    """Mutation: the second parameter always the current size, also behind another signal (`samples,
    rate`).
    """
    assert received_signals(function, SIGNALS) == received


def test_signals_arrive_by_name_wherever_they_stand():
    """Mutation: `self.function(*values)`: samples and current size are exchanged."""

    def mine(i, size, bonus=1, *, samples, loss=None):
        return {"i": i, "size": size, "bonus": bonus, "samples": samples, "loss": loss}

    schedule = Schedule("mine", functools.partial(mine, bonus=5), SIGNALS)
    assert schedule.signals == {"step", "current_size", "samples", "loss"}
    seen = {"loss": 2.5, "samples": 70, "current_size": 8, "step": 3, "epoch": 0.5}
    assert schedule.call(seen, otherwise=0) == {"i": 3, "size": 8, "bonus": 5, "samples": 70, "loss": 2.5}


def test_parameters_without_a_name_for_the_caller():
    """Mutations: all passed by name: a TypeError; one without a value left out: the next takes its place."""

    def mine(i, size, bonus=1, loss=None, eval_loss=None, /, *, samples):
        return [i, size, bonus, loss, eval_loss, samples]

    seen = {"eval_loss": 2.5, "samples": 70, "current_size": 8, "step": 3}
    assert Schedule("mine", mine, SIGNALS).call(seen, otherwise=0) == [3, 8, 1, None, 2.5, 70]


def test_a_signal_without_a_value_leaves_the_size_or_takes_the_default():
    """Mutation: None passed on: `loss=2.0` is overwritten by None; or `needed` ignored: a TypeError inside
    the user's code.
    """

    def needs(step, current_size, eval_loss):
        return 99

    def has_default(step, current_size, eval_loss=2.0):
        return current_size * eval_loss

    def own_none(step, current_size, eval_loss=None):
        return current_size if eval_loss is None else 99

    for missing in ({}, {"eval_loss": None}):
        assert decision(needs, size=7.5, **missing)["size"] == 7.5
        assert decision(has_default, size=7.5, **missing)["size"] == 15
        assert decision(own_none, size=7.5, **missing)["size"] == 7.5
    assert decision(needs, eval_loss=0.0)["size"] == 99, "zero is a value"
    assert decision(has_default, size=7.5, eval_loss=4.0)["size"] == 30


def test_an_object_keeps_its_memory():
    """Mutations: `schedule: None` in `decide`: a resumed run starts counting again; state_dict looked for on
    the functools.partial around an object with settings.
    """

    class Counts:
        def __init__(self):
            self.calls = 0

        def __call__(self, step, current_size):
            self.calls += 1
            return current_size + self.calls

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    first = Schedule("counts", Counts(), SIGNALS)
    assert decision(first, size=8.0)["size"] == 9
    made = decision(first, size=9.0)
    assert (made["size"], made["schedule"]) == (11, {"calls": 2})
    again = Schedule("counts", Counts(), SIGNALS)
    again.load_state_dict(made["schedule"])
    assert decision(again, size=11.0)["size"] == 14
    bound = Schedule(
        "counts", functools.partial(functools.partial(Counts()), step=0), SIGNALS
    )  # --schedule "FILE.py:object(...)"
    bound.load_state_dict(made["schedule"])
    assert decision(bound, size=11.0)["schedule"] == {"calls": 3}
    plain = Schedule("linear", linear, SIGNALS)
    plain.load_state_dict(None)
    assert decision(plain)["schedule"] is None


def test_a_memory_that_no_checkpoint_can_hold_is_named_at_once():
    """Mutation: left to the first checkpoint: each fails, and the run ends with the advice to free space."""

    class Sums:
        def __call__(self, step):
            return 4

        def state_dict(self):
            return {"sums": np.zeros(2)}

    with pytest.raises(BadSetting, match=r"state_dict\(\) of the schedule sums cannot be saved .*ndarray"):
        decision(Schedule("sums", Sums(), SIGNALS))


def test_a_memory_that_cannot_be_taken_up_is_one_line():
    """As of an older version of the user's file. Mutation: load_state_dict called bare: a KeyError and its
    traceback.
    """
    schedule = parse_schedule("gradient_memory()", SIGNALS)
    with pytest.raises(BadSetting, match="gradient_memory cannot take up its memory .*KeyError: 'history'"):
        schedule.load_state_dict({"calls": 2})


# The answer is judged in one place


class Strange:
    def __repr__(self):
        return "<strange>"


@pytest.mark.parametrize("answer, shown", [
    (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0, "0"), (0.0, "0.0"), (-1, "-1"),
    ("8", "'8'"),
    (True, "True"), (None, "None"), ([8], "[8]"), (1 + 2j, "(1+2j)"), (Strange(), "<strange>"), ({}, "{}"),
    (np.float64("nan"), "nan"), (np.array([8.0]), "array([8.])"), (np.bool_(True), "True"), (10**400, "1000"),
])  # fmt: skip
def test_a_wrong_answer_is_named_with_schedule_and_step(answer, shown):
    """Mutations: `isinstance(size, bool)` left out (True is 1); `None` read as "no value yet", so that a
    schedule

    without a return never changes the size; OverflowError of an integer beyond any float.
    """
    message = refused_answer(answer)
    assert (
        "the schedule mine" in message
        and "at step 5;" in message
        and shown in message
        and "above 0" in message
    )


def refused_answer(answer) -> str:
    with pytest.raises(BadSetting) as caught:
        decision(lambda step, current_size: answer, step=4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("answer, size", [
    (np.float64(2.5), 2.5), (np.float32(0.5), 0.5), (np.int64(7), 7.0), (np.float64(0.3), 0.3),
    (Fraction(5, 2), 2.5),
    (3, 3.0), (1e-3, 1e-3),
])  # fmt: skip
def test_numbers_of_any_library_are_taken(answer, size):
    """Mutation: `exact(size)` without float: numpy's repr "np.float64(2.5)" is no fraction."""
    made = decision(lambda step, current_size: answer)
    assert made["size"] == size and type(made["size"]) is float
    assert Fraction(made["target"]) == exact(size)
    assert made["clamped"] is None


def test_an_exception_of_the_users_is_one_line_with_its_place(user_file):
    """Mutation: the exception let through: rank 0 ends in a traceback, and the others wait."""
    path = user_file("def grow(step, current_size):\n    table = {1: 8}\n    return table[step]\n")
    schedule = parse_schedule(f"{path}:grow", SIGNALS)
    assert decision(schedule, step=1)["size"] == 8
    refused(
        lambda: decision(schedule, step=2),
        "the schedule grow failed at step 3",
        "KeyError: 2",
        "my_idea.py:3",
    )
    path = user_file("import sys\n\n\ndef grow(step, current_size):\n    sys.exit('enough')\n")
    leaves = parse_schedule(f"{path}:grow", SIGNALS)  # Mutation: SystemExit let through: the others wait
    refused(lambda: decision(leaves), "the schedule grow failed at step 2", "SystemExit: enough")


# Clamps, units, the first decision


def test_sizes_above_max_batch_size_are_clamped_and_said():
    """Mutation: `state.size` unclamped: the schedule goes on growing in secret and never comes back."""
    batch = Batch(batch_size=8, max_batch_size=20.5)
    held = decision(lambda step, current_size: 50, batch, step=4)
    assert (held["size"], Fraction(held["target"])) == (20.5, Fraction(41, 2))
    assert "--max_batch_size 20.5" in held["clamped"]
    assert decision(lambda step, current_size: 20.5, batch)["clamped"] is None
    per_device = Batch(per_device_train_batch_size=8, max_batch_size=20)
    held = decision(lambda step, current_size: 50, per_device, world_size=3)
    assert (held["size"], held["target"]) == (20, "60"), "in the unit of the initial size"


def test_sizes_above_the_dataset_are_clamped_to_it():
    """Mutation: no clamp: with 10 rows a size of 64 is cut every step, and the weights are never those of G
    (R37).
    """
    small = Lengths({"train": 10}, Fraction(3))
    held = decision(lambda step, current_size: 64, lengths=small)
    assert (held["size"], held["target"]) == (10, "10") and "10 rows" in held["clamped"]
    assert decision(lambda step, current_size: 10, lengths=small)["clamped"] is None
    per_device = Batch(per_device_train_batch_size=4)
    held = decision(lambda step, current_size: 4, per_device, lengths=small, world_size=4)
    assert (held["size"], held["target"]) == (2.5, "10")
    first = decision(lambda step, current_size: 1, Batch(batch_size=64), step=0, size=64.0, lengths=small)
    assert first["target"] == "10", "the first decision too"
    two = Lengths({"train": 10, "more": 10}, Fraction(1))
    assert decision(lambda step, current_size: 64, lengths=two)["clamped"] is None, "several sources wrap"


@pytest.mark.parametrize("batch, world_size, size, target", [
    (Batch(batch_size=8), 4, 2.5, Fraction(5, 2)),
    (Batch(per_device_train_batch_size=8), 4, 2.5, Fraction(10)),
    (Batch(per_device_train_batch_size=0.3), 3, 0.3, Fraction(9, 10)),
    (Batch(per_device_train_batch_size=0.25), 8, 0.25, Fraction(2)),
    (Batch(per_device_train_batch_size=0.25, fraction="accumulate"), 1, 0.25, Fraction(4)),
    (Batch(per_device_train_batch_size=0.25, fraction="accumulate", samples_per_pass=8), 1, 0.25,
     Fraction(32)),
    (Batch(per_device_train_batch_size=0.3, fraction="accumulate"), 1, 0.3, Fraction(10, 3)),
    (Batch(per_device_train_batch_size=0.3, fraction="accumulate", samples_per_pass=2), 3, 0.3, Fraction(20)),
    (Batch(per_device_train_batch_size=0.18, fraction="accumulate"), 1, 0.18, Fraction(50, 9)),
    (Batch(per_device_train_batch_size=1.0, fraction="accumulate"), 2, 1.0, Fraction(2)),
])  # fmt: skip
def test_units(batch, world_size, size, target):
    """Mutation: b W for accumulate: the published 0.25 with 8 samples a pass is 2 samples instead of 32.

    Mutation: binary fractions: 0.3 accumulates 3.33333333333333345 samples.
    """
    assert global_size(size, batch, world_size) == target
    assert in_unit(target, batch, world_size) == pytest.approx(size, rel=1e-15)
    made = decision(lambda step, current_size: size, batch, size=size, world_size=world_size)
    assert Fraction(made["target"]) == target and made["size"] == size


def test_accumulate_refuses_a_schedule_that_leaves_shares_behind():
    """Mutation: no check: `linear()` grows 0.25 to 2.25, and 4 samples a step become 0.44."""
    batch = Batch(per_device_train_batch_size=0.25, fraction="accumulate")
    call = functools.partial(decision, linear, batch, step=100, size=0.25)
    refused(call, "mine", "2.25", "step 101", "--fraction accumulate", "--max_batch_size 1")
    batch.max_batch_size = 1.0
    assert call()["target"] == "1"


def test_the_first_decision_is_the_initial_size_and_later_ones_see_the_steps_before():
    """Mutation: the schedule called at decision 1 (with step 0, `linear` grows at once: 10 instead of 8)."""
    seen = []

    def watch(step, current_size):
        seen.append((step, current_size))
        return current_size + 1

    assert sizes_of(watch, 4, first=2.5) == [2.5, 3.5, 4.5, 5.5]
    assert seen == [(1, 2.5), (2, 3.5), (3, 4.5)]
    assert sizes_of(linear, 1, first=8) == [8]


def test_a_bad_initial_size_of_a_schedule_is_named():
    """Mutation: `start` not judged: a run begins with NaN samples."""

    class Odd:
        start = math.nan

        def __call__(self, samples):
            return 8

    refused(lambda: first_size(Schedule("odd", Odd(), SIGNALS), Batch()), "odd", "nan", "step 1")


def test_a_memory_that_json_changes_is_refused_at_once():
    """A key that is no text comes back as one, which load_state_dict would not know. NaN and tuples pass.

    Mutation: json.dumps alone: saved, and not to be restored.
    """
    schedule = SimpleNamespace(name="mine", state_dict=lambda: {"deep": [({1: 2},)]})
    with pytest.raises(BadSetting, match="the key 1 is no text.*texts as keys"):
        remembered(schedule, 1)
    schedule.state_dict = lambda: {"pair": (1, math.nan)}
    assert remembered(schedule, 1)["pair"][0] == 1
