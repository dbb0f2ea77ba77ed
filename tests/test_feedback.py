"""Schedules that follow measurements: sizes by table, bounds and steps by property, memory by round trip."""

from __future__ import annotations

import copy
import inspect
import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules import SIGNALS

from adaptive.config import Batch
from adaptive.plan import Lengths
from adaptive.schedules import SCHEDULES, decide, feedback, parse_schedule
from adaptive.state import RunState

FEEDBACK = sorted(name for name, made in SCHEDULES.items() if made.__module__.endswith(".feedback"))
TABLE = [  # schedule, signals, size
    ("cabs(interval=1)", {"learning_rate": 0.5, "grad_variance": 40.0, "loss_ema": 2.0}, 10),
    ("cabs(interval=1)", {"learning_rate": 5.0, "grad_variance": 40.0, "loss_ema": 2.0}, 16),
    ("cabs(interval=1)", {"learning_rate": 0.01, "grad_variance": 40.0, "loss_ema": 2.0}, 4),
    ("cabs(interval=1, c=2)", {"learning_rate": 0.3, "grad_variance": 40.0, "loss_ema": 2.0}, 12),
    ("cabs(interval=1)", {"learning_rate": 0.5, "grad_variance": 34.0, "loss_ema": 2.0}, 8),  # in the margin
    ("cabs(interval=1)", {"learning_rate": 0.5, "grad_variance": 40.0, "loss_ema": 0.0}, 8),
    (
        "cabs(interval=1)",
        {"learning_rate": 0.5, "grad_variance": 40.0, "loss_ema": 1.0, "size_unit": 2.0},
        10,
    ),
    ("cabs(interval=2)", {"learning_rate": 0.5, "grad_variance": 40.0, "loss_ema": 2.0}, 8),
    ("seesaw_noise(interval=1)", {"initial_size": 4.0, "lr_decay": 0.4, "noise_scale": 30.0}, 10),
    ("seesaw_noise(interval=1)", {"initial_size": 4.0, "lr_decay": 0.4, "noise_scale": 9.0}, 9),
    ("seesaw_noise(interval=1)", {"initial_size": 4.0, "lr_decay": 0.4, "noise_scale": 3.0}, 8),
    ("seesaw_noise(interval=1, c=0.3)", {"initial_size": 4.0, "lr_decay": 0.1, "noise_scale": 30.0}, 9),
    ("seesaw_noise(interval=1)", {"initial_size": 4.0, "lr_decay": 0.01, "noise_scale": 99.0}, 16),
    ("seesaw_noise(interval=1, largest=9)", {"initial_size": 4.0, "lr_decay": 0.0, "noise_scale": 99.0}, 9),
    ("seesaw_noise(interval=1, largest=5)", {"initial_size": 4.0, "lr_decay": 0.1, "noise_scale": 99.0}, 8),
    ("seesaw_noise(interval=1)", {"initial_size": 4.0, "lr_decay": 0.4}, 8),  # nothing measured yet
    ("loss_plateau(patience=1)", {"loss_ema": 2.0}, 8),
    ("goodput(interval=1)", {"noise_scale": 50.0, "step_seconds": 0.1}, 10),  # explores
    ("goodput(interval=1)", {"step_seconds": 0.1}, 8),
    ("goodput(interval=2)", {"noise_scale": 50.0, "step_seconds": 0.1}, 8),
]


@pytest.mark.parametrize(("text", "signals", "size"), TABLE)
def test_sizes(text, signals, size):
    """From 8 samples, after step 1. Mutations: lr tr(S) without the loss; the larger of seesaw and noise."""
    seen = {"step": 1, "current_size": 8.0, **signals}
    assert parse_schedule(text, SIGNALS).call(seen, otherwise=8.0) == pytest.approx(size, rel=1e-12)


def test_every_schedule_is_in_a_table():
    """Mutation: one added to feedback.py and SCHEDULES, and to no test."""
    from test_noise_scale import TABLE as OTHER

    assert {row[0].split("(")[0] for row in [*TABLE, *OTHER]} == set(FEEDBACK)


def test_each_names_its_paper_or_what_it_is():
    """Mutation: a docstring without a source, where the idea has one."""
    told = {name: inspect.getdoc(SCHEDULES[name]) for name in FEEDBACK}
    papers = {"noise_scale": "2018", "seesaw_noise": "2025", "norm_test": "2024", "cosine_target": "2021",
              "cabs": "2017", "goodput": "2021"}  # fmt: skip
    assert all(year in told[name] for name, year in papers.items())


MEASURED = st.fixed_dictionaries({
    "noise_scale": st.floats(0, 1e9), "grad_variance": st.floats(0, 1e9), "grad_norm": st.floats(0, 1e9),
    "grad_cosine": st.floats(0, 1), "memory_usage": st.floats(0, 1), "learning_rate": st.floats(0, 10),
    "loss_ema": st.floats(-5, 100), "step_seconds": st.floats(0, 1e4), "lr_decay": st.floats(0, 1),
})  # fmt: skip


@pytest.mark.parametrize("name", FEEDBACK)
@settings(max_examples=40, deadline=None)
@given(seen=st.lists(MEASURED, min_size=1, max_size=12), first=st.floats(2, 200))
def test_bounds_and_steps(name, seen, first):
    """Whatever is measured: within the bounds, at most doubled or halved by a decision, judged as a number.

    Mutation: `bounded` left out of any of them; loss_plateau(factor=8) growing by 8.
    """
    quick = {"gradient_memory": "quiet=0, wait=1, ", "loss_plateau": "patience=1, factor=8, "}
    text = f"{name}({quick.get(name, 'interval=1, ')}largest=256)"
    schedule, batch = parse_schedule(text, SIGNALS), Batch(batch_size=first)
    state, lengths = RunState.fresh(["train"], 1, first), Lengths({"train": 10**6}, Fraction(1))
    for step, signals in enumerate(seen, 1):
        state.step, before = step, state.size
        told = {"step": step, "current_size": before, "initial_size": first, **signals}
        state.size = decide(schedule, state, told, batch, lengths, 0.0)["size"]
        assert before / 2 * (1 - 1e-12) <= state.size <= before * 2 * (1 + 1e-12)
        assert 1 <= state.size <= max(256, first)


@pytest.mark.parametrize("name", FEEDBACK)
def test_pure_or_with_a_memory_that_survives(name):
    """The same signals, the same size; with a memory, a copy restored from JSON goes on alike.

    Mutation: goodput's sums left out of state_dict.
    """
    draw = [
        {"noise_scale": 5.0 + 40 * math.sin(k) ** 2, "grad_variance": 30.0 + k % 7,
         "grad_norm": 0.05 * (k % 3), "grad_cosine": 0.5 + (k % 5) / 10, "memory_usage": (k % 10) / 10,
         "learning_rate": 0.3, "lr_decay": 1 / k, "loss_ema": 2.0 + 1 / min(k, 60), "initial_size": 8.0,
         "step_seconds": 0.1 + 0.01 * (k % 6)}
        for k in range(1, 400)
    ]  # fmt: skip
    one, sizes = parse_schedule(name, SIGNALS), [8.0]
    other = parse_schedule(name, SIGNALS)
    for step, signals in enumerate(draw, 1):
        told = {"step": step, "current_size": sizes[-1], **signals}
        if step == 200:
            other.load_state_dict(json.loads(json.dumps(copy.deepcopy(one.state_dict()))))
        size = one.call(told, otherwise=-1.0)
        if step >= 200 or one.state_dict() is None:
            assert other.call(told, otherwise=-1.0) == size
        sizes.append(size)
    assert one.state_dict() is None or other.function == one.function
    assert len(set(sizes)) > 1, "it never moved"


@pytest.mark.parametrize(
    ("start", "slope", "noise"), [(0.2, 0.01, 80.0), (0.05, 0.02, 500.0), (1.0, 0.001, 3.0)]
)
def test_goodput_finds_the_most_progress_per_second(start, slope, noise):
    """T = a + b m exactly: it settles at the maximum of m / T (B + m0) / (B + m), found by brute force.

    Mutations: efficiency left out (the largest size); sqrt(b B / a); the pause of an evaluation counted.
    """
    schedule, size, m0 = feedback.goodput(interval=5, margin=0.02, largest=2000), 8.0, 8.0
    for step in range(1, 400):
        pause = 60.0 if step % 50 == 0 else 0.0
        size = schedule(step, size, noise, start + slope * size + pause)

    def progress(m: float) -> float:
        return m / (start + slope * m) * (noise + m0) / (noise + m)

    best = max((m / 20 for m in range(40, 40_001)), key=progress)
    assert size == pytest.approx(best, rel=0.03) and schedule.best_size(noise) == pytest.approx(
        best, rel=0.01
    )
    free = feedback.goodput()
    free.sums = [2.0, 24.0, 320.0, 0.2, 2.4]  # a step of 8 and one of 16, both 0.1 s
    assert free.best_size(50.0) == math.inf


def test_hysteresis():
    """Measurements that jump by 8 % around the size leave it alone. Mutation: `margin` not asked."""
    for text, low, high in (
        ("noise_scale(interval=1)", {"noise_scale": 18.5}, {"noise_scale": 21.5}),
        ("cabs(interval=1)", {"grad_variance": 18.5}, {"grad_variance": 21.5}),
        ("cosine_target(interval=1)", {"grad_cosine": 0.785}, {"grad_cosine": 0.815}),
    ):  # fmt: skip
        schedule, size = parse_schedule(text, SIGNALS), 20.0
        for step in range(1, 40):
            told = {"step": step, "current_size": size, "learning_rate": 1.0, "loss_ema": 1.0}
            told |= (low, high)[step % 2]
            size = schedule.call(told, otherwise=-1.0)
        assert size == 20.0, text


def test_gradient_memory_is_the_manager_of_the_requirements():
    """Quiet start, one doubling or halving, wait, bounds 1 and 64, a history of every change.

    Mutations: both rules applied (a quarter); no `quiet`; history not kept.
    """
    manager, size, sizes = feedback.gradient_memory(), 8.0, []
    for step in range(1, 400):
        size = manager(step, size, grad_norm=20.0 if step < 200 else 0.01, memory_usage=0.6)
        sizes.append(size)
    assert sizes[98] == 8.0 and sizes[99] == 4.0 and sizes[108] == 4.0 and sizes[109] == 2.0
    assert min(sizes) == 1.0 and sizes[-1] == 64.0
    assert manager.history[:3] == [[100, 4.0], [110, 2.0], [120, 1.0]] and manager.history[-1][1] == 64.0
    both = feedback.gradient_memory(quiet=0)
    assert both(1, 16.0, grad_norm=99.0, memory_usage=0.95) == 8.0
