"""Settings and the number of rows -> sizes, steps and learning rates of a run that is not run (--dry_run).

Walks through the decisions and plans of train.py's loop with the same functions, so that the numbers are
those of the run; needs neither a model nor a gradient. Only for schedules that follow from progress alone:
what others see has to be measured.
To add one: a line in `_summary`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from adaptive import scaling, signals
from adaptive.config import Config
from adaptive.console import encodable
from adaptive.participation import plan_with
from adaptive.plan import ENDLESS, Lengths, exact, plan_step
from adaptive.records import counters
from adaptive.schedules import Schedule, decide, first_size, global_size
from adaptive.state import RunState

ROWS, WIDTH, HEIGHT = 12, 60, 6  # of the table, and of a plot in characters
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Walk:
    """Each step's samples before it, its realised and its target size, and its learning rate."""

    samples: list[int]
    sizes: list[int]
    targets: list[float]
    rates: list[float]
    state: RunState


def tell_plan(config: Config, schedule: Schedule, datasets: dict[str, Any], engine: Any) -> RunState:
    """Print the plan of the run on rank 0; returns the state it would end in, `updates` without bad steps."""
    run, started = config.run, time.monotonic()
    streaming = config.data.streaming  # then --max_samples or --max_steps bounds the plan
    rows = {name: ENDLESS if streaming else len(dataset) for name, dataset in datasets.items()}
    lengths = Lengths(rows, exact(run.num_train_epochs), run.max_samples, run.max_steps)
    done = walk(config, schedule, lengths, engine.world_size)
    if engine.is_main:
        told = _summary(config, schedule, lengths, done, time.monotonic() - started)
        print(encodable("\n".join(told)), flush=True)
    return done.state


def walk(config: Config, schedule: Schedule, lengths: Lengths, world_size: int) -> Walk:
    """Every decision of the run, in order; a rate is a share of its peak where that is not set."""
    optim, batch = config.optim, config.batch
    decay, rule = scaling.parse_decay(optim), scaling.parse_rule(optim.lr_scaling, optim.optim)
    state = RunState.fresh(list(lengths.sources), world_size, first_size(schedule, batch))
    base = max(global_size(optim.base_batch_size or state.initial_size, batch, world_size), scaling.ONE)
    warmup = optim.warmup_samples or int(optim.warmup_ratio * lengths.samples)
    done = Walk([], [], [], [], state)
    while not 0 < config.run.max_steps <= state.step:
        factor = decay(lengths.progress(state.cursor, state.samples, state.step))
        seen = signals.before_step(state, world_size, factor)
        decision = decide(schedule, state, seen, batch, lengths, 0.0)
        plan = plan_with(config, decision, state, lengths)
        if plan is None:
            break
        rate = (optim.learning_rate or 1.0) * factor * rule(float(scaling.mean_size(plan) / base))
        rate *= scaling.warmup(state.samples, plan.size, warmup)
        done.samples.append(state.samples)
        done.sizes.append(plan.size)
        done.targets.append(float(sum(plan.target.values())))
        done.rates.append(rate)
        state.advance(plan, None if plan.size else "empty", None, decision)
        told = counters(state, lengths)
        state.signals |= {
            "epoch": told["epoch"],
            "train_coverage": told["train_coverage"],
            "learning_rate": rate,
        }
    return done


def _constant_steps(config: Config, lengths: Lengths, size: Any) -> int:
    """Steps of the same run with the constant size `size`."""
    cursor, carry = dict.fromkeys(lengths.sources, 0), dict.fromkeys(lengths.sources, Fraction(0))
    steps = samples = 0
    while not 0 < config.run.max_steps <= steps:
        target = dict.fromkeys(lengths.sources, size)
        plan = plan_step(target, cursor, carry, lengths, config.batch.epoch_end, samples)
        if plan is None:
            break
        cursor, carry, steps, samples = plan.cursor, plan.carry, steps + 1, samples + plan.size
    return steps


def _summary(config: Config, schedule: Schedule, lengths: Lengths, done: Walk, seconds: float) -> list[str]:
    state, steps = done.state, len(done.sizes)
    if not steps:
        return ["no step: the data of the run is less than one"]
    size = global_size(state.initial_size, config.batch, state.world_size)
    constant = _constant_steps(config, lengths, min(size, Fraction(sum(lengths.sources.values()))))
    unit = "learning rate" if config.optim.learning_rate else "learning rate (of its peak)"
    picked = sorted({round(at * (steps - 1) / (ROWS - 1)) for at in range(ROWS)})
    lines = [f"{'step':>8} {'samples':>12} {'asked':>10} {'run':>8}  {unit}"]
    for at in picked:
        asked, ran = done.targets[at], done.sizes[at]
        lines.append(f"{at + 1:8,} {done.samples[at]:12,} {asked:10.5g} {ran:8,}  {done.rates[at]:.3e}")
    lines += ["", *plot("asked", done.samples, done.targets), "", *plot(unit, done.samples, done.rates), ""]
    lines.append(
        f"{config.batch.schedule}: {steps:,} steps, {state.updates:,} updates, {state.samples:,} samples on "
        f"{state.world_size} process(es); planned in {seconds:.1f} s"
    )
    lines.append(
        f"sizes from {min(done.targets):g} to {max(done.targets):g} samples, mean {state.samples / steps:.4g}"
    )
    saved = 1 - steps / constant
    told = f"{saved:.1%} fewer" if saved >= 0 else f"{-saved:.1%} more"
    lines.append(f"a constant {float(size):g} would take {constant:,} steps: {told} here")
    return lines


def plot(name: str, xs: list[int], ys: list[float]) -> list[str]:
    """`ys` over `xs` as HEIGHT lines of WIDTH blocks, from 0 to the largest; each column is a mean."""
    last, top = xs[-1] or 1, max(ys) or 1.0
    columns: list[list[float]] = [[] for _ in range(WIDTH)]
    for x, y in zip(xs, ys, strict=True):
        columns[min(WIDTH - 1, x * WIDTH // last)].append(y)
    heights, before = [], ys[0]
    for column in columns:  # a column without a step of its own shows the one before
        before = sum(column) / len(column) if column else before
        heights.append(round(before / top * HEIGHT * 8))
    lines = []
    for level in range(HEIGHT - 1, -1, -1):
        label = f"{top:.3g}" if level == HEIGHT - 1 else "0" if not level else ""
        lines.append(
            f"{label:>9} │" + "".join(BLOCKS[min(8, max(0, h - 8 * level))] for h in heights).rstrip()
        )
    return [f"{name} over samples", *lines, f"{'':9} └{'─' * WIDTH} {last:,}"]
