"""Signals -> target size: parse "name(settings)", give a schedule what it names, decide once and agree.

A schedule is any callable. Its parameters that are called after signals receive them, the others are its
settings; in `def grow(i, size, rate=2)` the first two, which are no signals, are step and current size. Rank
0 calls it, the result is checked here and nowhere else, and every rank gets the same exact number, or the
same error.
To add one: any function, by path: --schedule "my_idea.py:grow(rate=2)"; or a line in SCHEDULES.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

from adaptive.config import BadSetting, Batch, Config, warn
from adaptive.plan import Lengths, exact
from adaptive.schedules import feedback, mixing, open_loop
from adaptive.schedules.candidate import candidate
from adaptive.schedules.literal import parse_call
from adaptive.state import RunState

# Signals that are known without running a step: a schedule of these alone is open-loop and can be planned.
PROGRESS = {
    "step", "updates", "current_size", "initial_size", "samples", "epoch", "train_coverage", "learning_rate",
    "lr_decay", "world_size", "size_unit",
}  # fmt: skip


class Schedule:
    """A callable with the names of the signals it wants.

    `signals`: names it asks for. `call(signals, otherwise)`: its raw answer, or `otherwise` where a signal it
    needs has no value yet.
    """

    def __init__(self, name: str, function: Callable, known_signals: set[str]):
        self.name, self.function, self.owner = name, function, function
        while isinstance(self.owner, functools.partial):  # settings of an object that keeps a memory
            self.owner = self.owner.func
        bound = function.keywords if isinstance(function, functools.partial) else {}
        self.wanted: dict[str, tuple[str, bool]] = {}  # parameter -> (signal, whether it is needed)
        received = received_signals(function, known_signals)
        for parameter, spec in inspect.signature(function).parameters.items():
            needed = spec.default is spec.empty
            if parameter in bound or spec.kind in (spec.VAR_POSITIONAL, spec.VAR_KEYWORD):
                continue
            if parameter in received:
                self.wanted[parameter] = (received[parameter], needed)
            elif needed:
                raise BadSetting(
                    f"the schedule {name} has no value for {parameter}; write {name}({parameter}=...), "
                    f"or use a signal's name: {', '.join(sorted(known_signals))}"
                )
        self.signals = {signal for signal, _ in self.wanted.values()}
        parameters = inspect.signature(function).parameters.items()
        self.by_place = {name: spec.default for name, spec in parameters if spec.kind is spec.POSITIONAL_ONLY}

    def call(self, signals: dict[str, Any], otherwise: float) -> Any:
        """The schedule's own answer, not judged; `otherwise` when a signal without a default has no value
        yet.
        """
        given = {parameter: signals.get(signal) for parameter, (signal, _) in self.wanted.items()}
        if any(given[parameter] is None for parameter, (_, needed) in self.wanted.items() if needed):
            return otherwise
        given = {parameter: value for parameter, value in given.items() if value is not None}
        by_place = [given.pop(parameter, default) for parameter, default in self.by_place.items()]
        return self.function(*by_place, **given)

    @property
    def start(self) -> float | dict[str, float] | None:
        """First size, or {source: size}, of a schedule that decides it itself, else None."""
        return getattr(self.owner, "start", None)

    @property
    def needs(self) -> dict[str, str]:
        """{flag: value} this schedule is only right with."""
        return getattr(self.owner, "needs", {})

    def state_dict(self) -> Any:
        """The schedule's own memory (JSON values), None where it has none."""
        return self.owner.state_dict() if hasattr(self.owner, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        if state is None:
            return
        try:
            self.owner.load_state_dict(state)
        except Exception as error:  # whatever a user's makes of the memory of an older version
            raise BadSetting(
                f"the schedule {self.name} cannot take up its memory of the checkpoint ({described(error)}); "
                "mend its load_state_dict, or go on under another name, which starts without one"
            ) from error


def load_schedule(config: Config, known_signals: set[str]) -> Schedule:
    """--schedule -> Schedule; BadSetting for an unknown name, file or setting, or one it cannot be used
    with.
    """
    schedule = parse_schedule(config.batch.schedule, known_signals)
    settings = config.flat()
    for flag, value in schedule.needs.items():
        if settings[flag] != value:
            how = (
                f"needs --{flag} {value}; it is"
                if value is not None
                else f"has no use for --{flag}, which is"
            )
            raise BadSetting(f"the schedule {schedule.name} {how} {settings[flag]}")
    unknown = sorted(schedule.signals & {"epoch", "train_coverage", "source_coverage"})
    if config.data.streaming and unknown:
        raise BadSetting(
            f"the schedule {schedule.name} follows {unknown[0]}, which a stream of unknown length does not "
            "have; write one that follows samples"
        )
    measured = sorted(schedule.signals - PROGRESS)
    if config.run.dry_run and config.optim.lr_scaling.startswith("adascale"):
        raise BadSetting(
            "--dry_run: --lr_scaling adascale follows the noise scale, which only a run measures"
        )
    if config.run.dry_run and measured:
        raise BadSetting(
            f"--dry_run: the schedule {schedule.name} follows {', '.join(measured)}, which only a run "
            "measures; run it (a few --max_steps), or plan a run that was made with 'replay(\"RUN_DIR\")'"
        )
    return schedule


def first_size(schedule: Schedule, batch: Batch) -> float:
    """Size of decision 1, in the schedule's unit: the schedule's own, else the flag's, else 8."""
    asked = (
        batch.batch_size if batch.per_device_train_batch_size is None else batch.per_device_train_batch_size
    )
    if schedule.start is None:
        size = float(sum(map(exact, batch.source_sizes))) or 8.0 if asked is None else asked
    else:
        start = schedule.start
        size = checked(sum(start.values()) if isinstance(start, dict) else start, schedule.name, 1)
        if asked is not None and asked != size:
            warn(f"the schedule {schedule.name} starts at {size:g}, not at {asked:g}")
    if batch.per_device_train_batch_size is None:
        batch.batch_size = size
    else:
        batch.per_device_train_batch_size = size
    return size


def parse_schedule(text: str, known_signals: set[str]) -> Schedule:
    """Text "NAME(settings)" or "FILE.py:NAME(settings)" -> Schedule; BadSetting for what it does not know."""
    path, found = None, re.match(r"\s*(.+\.py):(.*)", text, re.DOTALL)
    if found:
        path, text = Path(found[1]), found[2]
    name, arguments, settings = parse_call(text, "--schedule")
    if path:
        function = from_file(path, name, "--schedule")
    elif name in SCHEDULES:
        function = SCHEDULES[name]
    else:
        raise BadSetting(
            f'--schedule is "{text}"; write one of {", ".join(SCHEDULES)}, or FILE.py:NAME(settings)'
        )
    try:
        return Schedule(name, _bind(function, arguments, settings, known_signals), known_signals)
    except BadSetting:
        raise
    except Exception as error:  # a class of the user's may raise anything
        reason = error if isinstance(error, (TypeError, ValueError)) else described(error)
        raise BadSetting(f'--schedule "{text}": {reason}') from None


def _bind(function: Callable, arguments: list, settings: dict, known_signals: set[str]) -> Callable:
    """A class is instantiated; a function keeps its settings through functools.partial."""
    if inspect.isclass(function):
        return function(*arguments, **settings)
    if not arguments and not settings:
        return function
    parameters, received = inspect.signature(function).parameters, received_signals(function, known_signals)
    free = [parameter for parameter in parameters if parameter not in received]
    unknown = [name for name in settings if name not in parameters]
    if unknown or len(arguments) > len(free):
        wrong = unknown[0] if unknown else arguments[-1]
        raise ValueError(f"{wrong!r} is no setting of it; it has {', '.join(free) or 'none'}")
    return functools.update_wrapper(
        functools.partial(function, **dict(zip(free, arguments, strict=False)), **settings), function
    )


def received_signals(function: Callable, known_signals: set[str]) -> dict[str, str]:
    """{parameter: the signal it receives}: its own name; step and current_size for the first two of other
    names.
    """
    received: dict[str, str] = {}
    for place, (parameter, spec) in enumerate(inspect.signature(function).parameters.items()):
        by_place = place == 0 or (place == 1 and list(received.values()) == ["step"])
        if parameter in known_signals:
            received[parameter] = parameter
        elif (
            by_place
            and spec.default is spec.empty
            and spec.kind in (spec.POSITIONAL_ONLY, spec.POSITIONAL_OR_KEYWORD)
        ):
            received[parameter] = ("step", "current_size")[place]
    return received


def from_file(path: Path, name: str, flag: str) -> Any:
    """Object `name` of a user's Python file. BadSetting when there is none."""
    if not path.is_file():
        raise BadSetting(f"{flag} {path}: no such file")
    module_name = f"user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadSetting(f"{flag} {path}: {described(error)}") from error
    if not hasattr(module, name):
        names = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name
        ]
        raise BadSetting(f"{flag}: {path} has no {name}; it has {', '.join(names) or 'nothing callable'}")
    return getattr(module, name)


def described(error: BaseException) -> str:
    """An exception of a user's code in one line: "ValueError: message (file.py:12)"."""
    frames = traceback.extract_tb(error.__traceback__)
    known = frames and not isinstance(error, SyntaxError)  # which names its own line
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if known else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def decide(
    schedule: Schedule,
    state: RunState,
    signals: dict[str, Any],
    batch: Batch,
    lengths: Lengths,
    seconds: float,
) -> dict[str, Any]:
    """The size of the next step, in JSON values that every rank can be sent; called on rank 0 only.

    {"size": in the schedule's unit, "target": G as "p/q", "sizes" and "targets": the same by source,
    "clamped": why the schedule's own answer was not taken, "schedule": its memory, "seconds": `seconds`,
    "invalid": how many of the signals it names were NaN or infinite, which is None to it}.
    Decision 1 uses the initial size, split as the schedule says where it starts with {source: size}.
    """
    step, invalid = state.step + 1, _invalid(schedule, signals) if state.step else {}
    answer: Any = schedule.start if isinstance(schedule.start, dict) else state.initial_size
    if state.step:
        unit = float(global_size(1.0, batch, state.world_size))
        try:
            answer = schedule.call(signals | invalid | {"size_unit": unit}, otherwise=state.size)
        except (Exception, SystemExit) as error:
            raise BadSetting(
                f"the schedule {schedule.name} failed at step {step}: {described(error)}"
            ) from error
    parts, answer = _by_source(answer, schedule.name, step, batch, list(lengths.sources))
    size = checked(answer, schedule.name, step)
    clamped = None
    if batch.max_batch_size is not None and size > batch.max_batch_size:
        size, clamped = float(batch.max_batch_size), f"--max_batch_size {batch.max_batch_size:g}"
    if batch.fraction == "accumulate" and size > 1:
        raise BadSetting(
            f"the schedule {schedule.name} returned {size:g} at step {step}: with --fraction accumulate "
            "it is the share of an update that one pass is; write --max_batch_size 1, or another schedule"
        )
    target = global_size(sum(parts.values()) if parts and not clamped else size, batch, state.world_size)
    rows = sum(lengths.sources.values())
    if len(lengths.sources) == 1 and target > rows:
        target, clamped = Fraction(rows), f"the dataset's {rows} rows"
        if batch.fraction == "participate":
            size = float(target / global_size(1.0, batch, state.world_size))
    by_flag = dict(zip(lengths.sources, map(exact, batch.source_sizes), strict=False))
    shares = _shares(parts or by_flag or lengths.sources)
    if clamped:
        clamped = f"the schedule asks for more than {float(target):g} samples, which is held at {clamped}"
    return {
        "size": size,
        "target": str(target),
        "targets": {source: str(target * share) for source, share in shares.items()},
        "sizes": {s: size if share == 1 else float(exact(size) * share) for s, share in shares.items()},
        "clamped": clamped,
        "schedule": remembered(schedule, step),
        "seconds": seconds,
        "invalid": len(invalid),
    }


def _invalid(schedule: Schedule, signals: dict[str, Any]) -> dict[str, None]:
    """{name: None} of the signals that are no finite number, as a task's own may be: no measurements."""
    named = {name: signals.get(name) for name in schedule.signals}
    return {k: None for k, v in named.items() if isinstance(v, float) and not math.isfinite(v)}


def remembered(schedule: Schedule, step: int) -> Any:
    """The schedule's memory; BadSetting at the first steps, and not at the first checkpoint, where it is no
    JSON.
    """
    try:
        memory = schedule.state_dict()
        if step <= 2:  # before its first call, and after
            json.dumps(memory)
            _refuse_keys(memory)
    except Exception as error:
        raise BadSetting(
            f"the state_dict() of the schedule {schedule.name} cannot be saved ({described(error)}); return "
            "plain numbers, texts, lists and dictionaries with texts as keys"
        ) from error
    return memory


def _refuse_keys(memory: Any) -> None:
    """TypeError for a key that JSON would make a text of."""
    if isinstance(memory, dict):
        for key in memory:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
        memory = memory.values()
    elif not isinstance(memory, (list, tuple)):
        return
    for part in memory:
        _refuse_keys(part)


def _shares(parts: dict[str, Any]) -> dict[str, Fraction | int]:
    """{source: its share of the step}; 1 for a single one."""
    if len(parts) == 1:
        return dict.fromkeys(parts, 1)
    return {source: Fraction(part) / sum(parts.values()) for source, part in parts.items()}


def _by_source(
    answer: Any, schedule: str, step: int, batch: Batch, sources: list[str]
) -> tuple[dict[str, Fraction], Any]:
    """({source: its part}, their sum) of an answer {source: size}; ({}, the answer) of a single number."""
    if not isinstance(answer, dict) or not answer:
        return {}, answer
    if set(answer) != set(sources):
        raise BadSetting(
            f"the schedule {schedule} returned sizes of {', '.join(map(str, answer))} at "
            f"step {step}; it must return one for each of {', '.join(sources)}, 0 for no samples"
        )
    if batch.fraction == "accumulate":
        raise BadSetting(
            f"the schedule {schedule} returned a size for each source at step {step}: with --fraction "
            "accumulate a size is the share of an update that one pass is; write --fraction participate"
        )
    zero = {s: answer[s] for s in sources if isinstance(answer[s], Real) and answer[s] == 0}
    parts = {s: Fraction(0) if s in zero else exact(checked(answer[s], schedule, step)) for s in sources}
    return parts, float(sum(parts.values()))


def checked(size: Any, schedule: str, step: int) -> float:
    """`size` as a float; the one place where a schedule's answer is judged.

    Raises BadSetting naming schedule, step and value unless it is a finite real number above 0.
    """
    try:
        number = float(size) if isinstance(size, Real) and not isinstance(size, bool) else math.nan
    except OverflowError:  # an integer beyond any float
        number = math.inf
    if not 0 < number < math.inf:
        raise BadSetting(
            f"the schedule {schedule} returned {size!r} at step {step}; it must return a number above 0"
        )
    return number


def global_size(size: float, batch: Batch, world_size: int) -> Fraction:
    """The schedule's number, in its unit -> samples over all processes; `world_size` of the first start.

    Per-device sizes b are b W samples, or c W / b with --fraction accumulate.
    """
    if batch.per_device_train_batch_size is None:
        return exact(size)
    if batch.fraction == "accumulate":
        return batch.samples_per_pass * world_size / exact(size)
    return exact(size) * world_size


def in_unit(target: Fraction, batch: Batch, world_size: int) -> float:
    """Inverse of `global_size`."""
    if batch.per_device_train_batch_size is None:
        return float(target)
    if batch.fraction == "accumulate":
        return float(batch.samples_per_pass * world_size / target)
    return float(target / world_size)


SCHEDULES: dict[str, Callable] = {
    "constant": open_loop.constant,
    "linear": open_loop.linear,
    "steps": open_loop.steps,
    "ramp": open_loop.ramp,
    "exponential": open_loop.exponential,
    "cosine": open_loop.cosine,
    "seesaw": open_loop.seesaw,
    "replay": open_loop.replay,
    "gradient_memory": feedback.gradient_memory,
    "noise_scale": feedback.noise_scale,
    "seesaw_noise": feedback.seesaw_noise,
    "norm_test": feedback.norm_test,
    "cosine_target": feedback.cosine_target,
    "loss_plateau": feedback.loss_plateau,
    "cabs": feedback.cabs,
    "goodput": feedback.goodput,
    "task_aware": mixing.task_aware,
    "incremental": mixing.incremental,
    "curriculum": mixing.curriculum,
    "candidate": candidate,
}
