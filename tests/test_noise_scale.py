"""The noise scale against a closed form, through the real loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launching import records

import train
from adaptive import noise_scale
from adaptive.config import parse
from adaptive.noise_scale import PassNorms, squared_norm
from adaptive.schedules import feedback, parse_schedule
from adaptive.signals import KNOWN
from adaptive.tasks import Loaded, Task

DIMENSIONS, MEAN, DEVIATION = 20, 0.8, 1.5
TRUE = DIMENSIONS * DEVIATION**2 / (DIMENSIONS * MEAN**2)  # tr(S) / |G|^2, 3.5 samples


class Known(Task):
    """loss_i = theta . x_i, so the gradient of sample i is x_i, drawn with known mean and variance."""

    def load(self, config):
        draw = np.random.default_rng(1)
        return Loaded(train=[{"x": draw.normal(MEAN, DEVIATION, DIMENSIONS)} for _ in range(20_000)])

    def model(self, config):
        model = torch.nn.Linear(DIMENSIONS, 1, bias=False).double()
        return model

    def loss_sum(self, model, batch):
        return model(batch["x"])[:, 0]


RUN = [
    "--task",
    f"{__file__}:Known",
    "--optim",
    "sgd",
    "--learning_rate",
    "0",
    "--report_to",
    "none",
    "--eval_every",
    "never",
    "--log_every",
    "1000 steps",
    "--save_every",
    "never",
    "--track",
    "noise_scale",
    "grad_cosine",
    "grad_variance",
]


def run(folder: Path, *arguments: str) -> list[dict]:
    train.main(parse([*RUN, "--output_dir", str(folder), *arguments]))
    return records(folder)


@pytest.mark.slow
@pytest.mark.parametrize("micro", ["2", "64"])
def test_known_covariance(tmp_path, micro):
    """Within 5 % after 2,000 steps of 4.5 or 9.5 samples, passes of unequal sizes.

    Mutations: M/n left in the norm of the step (28 % off at G = 4.5); ratios averaged instead of parts (far
    off).
    """
    size = "4.5" if micro == "2" else "9.5"
    told = run(
        tmp_path / "run",
        "--batch_size",
        size,
        "--schedule",
        "constant()",
        "--max_steps",
        "2000",
        "--micro_batch_size",
        micro,
        "--noise_half_life",
        "1e9",
    )
    drawn = np.stack([row["x"] for row in Known().load(None).train])
    exact = drawn.var(axis=0).sum() / (drawn.mean(axis=0) ** 2).sum()
    assert exact == pytest.approx(TRUE, rel=0.03)
    assert told[-1]["noise_scale"] == pytest.approx(exact, rel=0.05)
    assert told[-1]["grad_variance"] == pytest.approx(drawn.var(axis=0).sum(), rel=0.02)
    assert all(record["passes"] >= 2 for record in told)


class Regression(Task):
    """y = x . w + e with five x of covariance I and e of variance 1, from the distance 1 in each weight."""

    def load(self, config):
        draw = np.random.default_rng(2)
        xs, errors = draw.normal(size=(20_000, 5)), draw.normal(size=20_000)
        return Loaded(train=[{"x": x, "y": x.sum() + e} for x, e in zip(xs, errors, strict=True)])

    def model(self, config):
        model = torch.nn.Linear(5, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        return model

    def loss_sum(self, model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2 / 2


@pytest.mark.slow
def test_linear_regression(tmp_path):
    """R91. With d the distance to w, the gradient x (x . d - e) of a sample has the mean d and the covariance
    (|d|^2 + 1) I + d d', so tr(S) / |G|^2 = (5 x 6 + 5) / 5; within 5 % over 2,000 steps of 16 or 17.

    Mutations: the ratios of single steps averaged, in place of their parts (far off); the step's own squared
    norm for the signal (30 % off).
    """
    task = ["--task", f"{__file__}:Regression", "--batch_size", "16.5", "--micro_batch_size", "6"]
    more = ["--schedule", "constant()", "--max_steps", "2000", "--noise_half_life", "1e9"]
    told = run(tmp_path / "run", *task, *more, "--num_train_epochs", "2")[-1]
    assert told["noise_scale"] == pytest.approx(7, rel=0.05)
    assert told["grad_variance"] == pytest.approx(35, rel=0.05)
    n = told["batch_size"]  # halves of n/2 samples: |G|^2 over |G|^2 + tr(S) / (n/2)
    assert told["grad_cosine"] == pytest.approx(5 / (5 + 35 * 2 / n), rel=0.05)


def test_a_measured_step_has_the_same_gradient(tmp_path):
    """Splitting the pass in two changes neither norm nor loss; no signal, no split, no measurement."""
    fixed = ["--batch_size", "7", "--schedule", "constant()", "--max_steps", "6"]
    told = run(tmp_path / "measured", *fixed, "--noise_every", "2")
    arguments = [*RUN[: RUN.index("--track")], "--output_dir", str(tmp_path / "plain"), *fixed]
    train.main(parse(arguments))
    plain = records(tmp_path / "plain")
    assert [r["passes"] for r in told] == [1, 2, 1, 2, 1, 2] and {r["passes"] for r in plain} == {1}
    assert [r["grad_norm"] for r in told] == pytest.approx([r["grad_norm"] for r in plain], rel=1e-12)
    assert told[0]["noise_scale"] is None and "noise_scale" not in plain[0]


def test_an_invalid_measurement_is_counted_and_changes_nothing(tmp_path):
    """R90. Steps of one sample have no second size to compare with: counted, no value, the size stays.

    Mutation: counted among the averages (a NaN that stays for ever).
    """
    schedule = ["--schedule", "noise_scale(interval=1, smallest=1)"]
    told = run(tmp_path / "run", "--batch_size", "1", *schedule, "--max_steps", "6")
    assert [record["invalid_measurements"] for record in told] == [1, 2, 3, 4, 5, 6]
    assert {record["noise_scale"] for record in told} == {None}
    assert {record["batch_size"] for record in told} == {1}
    sound = run(tmp_path / "sound", "--batch_size", "4", "--schedule", "constant()", "--max_steps", "3")
    assert sound[-1]["invalid_measurements"] == 0


@pytest.mark.parametrize("n_passes", [2, 16])
def test_norms_of_passes_keep_no_gradients(n_passes):
    """R92. Of 16 passes as of 2 a scalar each is kept. Mutation: `self.squares.append(gradient)`."""
    model = torch.nn.Linear(DIMENSIONS, 50)
    norms = noise_scale.PassNorms(model.parameters(), wanted=True)
    norms.on, engine = True, SimpleNamespace(world_size=1, loss_scale=1.0)
    for _ in range(n_passes):
        model(torch.ones(3, DIMENSIONS)).sum().backward()
        norms.close_pass([1, 1, 1], torch.full((3,), 1 / 3), engine)
    assert len(norms.squares) == n_passes and norms._square is None
    assert {square.untyped_storage().nbytes() for square in norms.squares} == {8}


def test_a_step_without_numbers_is_not_averaged(tmp_path, monkeypatch):
    """R92. The third step's loss is inf, which all ranks hear of in one sum: skipped, and both parts of the
    noise scale stay as they were; counted as a measurement that was none. Mutations: `skipped` not asked for
    in `_learn_noise` (a norm of None is squared); skipped steps left out of the count.
    """
    loss_sum = Known.loss_sum
    calls = iter(range(99))
    spoilt = {4, 5}  # the passes of step 3
    monkeypatch.setattr(
        Known, "loss_sum", lambda s, m, b: loss_sum(s, m, b) * (math.inf if next(calls) in spoilt else 1)
    )
    monkeypatch.setattr(train, "load_task", lambda name: Known())
    told = run(tmp_path / "run", "--batch_size", "4", "--schedule", "constant()", "--max_steps", "5")
    assert [r["skipped"] for r in told] == [None, None, "nonfinite", None, None]
    assert [r["invalid_measurements"] for r in told] == [0, 0, 1, 1, 1]
    variances = [r["grad_variance"] for r in told]
    assert variances[2] == variances[1] and len(set(variances)) == 4
    assert all(math.isfinite(v) for v in variances)


def test_no_estimate_from_one_pass_or_nothing_finite():
    """R90. One pass as large as the step, sizes of 1, and NaN give None, never a division by zero."""
    assert noise_scale.estimate(1.0, 1.0, 1 / 8, 8) is None
    assert noise_scale.estimate(1.0, 1.0, 1.0, 1) is None
    assert noise_scale.estimate(math.nan, 1.0, 0.5, 8) is None
    assert noise_scale.noise_scale(None) is None
    assert noise_scale.noise_scale({"signal": -1.0, "noise": 2.0, "weight": 1.0}) is None


def test_equation_for_unequal_passes():
    """E|g_k|^2 = |G|^2 + tr(S)/b_k for b = 1, 3, 4 of n = 8: the parts come back exactly."""
    signal, trace, sizes = 0.7, 5.0, [1, 3, 4]
    pass_square = sum(signal + trace / b for b in sizes) / 3
    inverse = sum(1 / b for b in sizes) / 3
    assert noise_scale.estimate(signal + trace / 8, pass_square, inverse, 8) == pytest.approx(
        (signal, trace), rel=1e-12
    )


def test_steps_are_weighed_by_samples():
    """After one half-life in samples the first measurement weighs half of the second: (10/2 + 30) / 1.5.

    Mutation: half_life counted in steps (30 and nothing of the first).
    """
    memory = noise_scale.averaged(None, (1.0, 10.0), 1000, half_life=1000)
    assert noise_scale.noise_scale(memory) == pytest.approx(10.0)
    memory = noise_scale.averaged(memory, (1.0, 30.0), 1000, half_life=1000)
    assert noise_scale.noise_scale(memory) == pytest.approx((10 / 2 + 30) / 1.5, rel=1e-12)


TABLE = [  # schedule, signals, size
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 11.0}, 4),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 0.05}, 16),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 1.0}, 8),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 0.05, "memory_usage": 0.9}, 4),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 1.0, "memory_usage": 0.3}, 16),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 11.0, "memory_usage": 0.3}, 16),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "grad_norm": 0.05, "memory_usage": 0.6}, 16),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 8, "memory_usage": 0.9}, 4),
    ("gradient_memory(quiet=0, smallest=0.5)", {"step": 1, "current_size": 0.9, "grad_norm": 99.0}, 0.5),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 64, "grad_norm": 0.01}, 64),
    ("gradient_memory(quiet=0)", {"step": 1, "current_size": 1, "grad_norm": 99.0}, 1),
    ("gradient_memory(quiet=5)", {"step": 4, "current_size": 8, "grad_norm": 99.0}, 8),
    ("noise_scale(interval=1)", {"step": 1, "current_size": 8, "noise_scale": 12.0}, 12),
    ("noise_scale(interval=1)", {"step": 1, "current_size": 8, "noise_scale": 500.0}, 16),
    ("noise_scale(interval=1)", {"step": 1, "current_size": 8, "noise_scale": 8.5}, 8),
    ("noise_scale(interval=4)", {"step": 3, "current_size": 8, "noise_scale": 12.0}, 8),
    ("noise_scale(interval=1, largest=10)", {"step": 1, "current_size": 8, "noise_scale": 99.0}, 10),
    ("norm_test(interval=1)", {"step": 1, "current_size": 8, "grad_variance": 40.0, "grad_norm": 2.0}, 10),
    ("norm_test(interval=1)", {"step": 1, "current_size": 8, "grad_variance": 4.0, "grad_norm": 2.0}, 8),
    ("norm_test(interval=1)", {"step": 1, "current_size": 8, "grad_variance": 4.0, "grad_norm": 0.0}, 8),
    ("noise_scale(interval=1)", {"step": 1, "current_size": 4, "noise_scale": 12.0, "size_unit": 2.0}, 6),
    (
        "norm_test(interval=1)",
        {"step": 1, "current_size": 3, "grad_variance": 40.0, "grad_norm": 2.0, "size_unit": 2.0},
        5,
    ),
    ("cosine_target(interval=1)", {"step": 1, "current_size": 10, "grad_cosine": 0.81}, 10),
    ("cosine_target(interval=1)", {"step": 1, "current_size": 10, "grad_cosine": 0.5}, 11),
    ("cosine_target(interval=1)", {"step": 1, "current_size": 11, "grad_cosine": 0.9}, 10),
]


@pytest.mark.parametrize(("text", "signals", "size"), TABLE)
def test_sizes_of_feedback_schedules(text, signals, size):
    """Signals in, size out. Mutation: memory and gradient rules in the other order (4 becomes 16)."""
    assert parse_schedule(text, set(KNOWN)).call(signals, otherwise=0.0) == pytest.approx(size)


def test_feedback_without_a_measurement_keeps_the_size():
    assert (
        parse_schedule("noise_scale(interval=1)", set(KNOWN)).call(
            {"step": 1, "current_size": 8}, otherwise=8.0
        )
        == 8.0
    )


@pytest.mark.parametrize("make", [feedback.gradient_memory, feedback.loss_plateau])
def test_memory_of_schedules_survives(make):
    """state_dict, as JSON, and load_state_dict: the copy decides like the original."""
    names = {"grad_norm": 99.0} if make is feedback.gradient_memory else {"loss_ema": 2.0}
    one, other = make(), make()
    sizes, size = [], 64.0
    for step in range(1, 150):
        size = one(step=step, current_size=size, **names)
        sizes.append(size)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for step in range(150, 400):
        a, b = (schedule(step=step, current_size=size, **names) for schedule in (one, other))
        assert a == b
        size = a
    assert len(set(sizes)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        "noise_scale(interval=2)",
        "norm_test(interval=2)",
        "cosine_target(interval=2)",
        "loss_plateau(patience=4)",
        "gradient_memory(quiet=2, wait=1)",
        "cabs(interval=2, c=30)",
        "goodput(interval=2)",
        "seesaw_noise(interval=2)",
    ],
)
def test_a_real_run_of_each(tmp_path, schedule):
    """On the embedded task each changes the size within its bounds and records what it saw."""
    arguments = [
        "--schedule",
        schedule,
        "--batch_size",
        "4",
        "--max_steps",
        "14",
        "--report_to",
        "none",
        "--sequence_length",
        "32",
        "--output_dir",
        str(tmp_path / "run"),
        "--eval_every",
        "never",
        "--save_every",
        "never",
    ]
    train.main(parse(arguments))
    sizes = [record["target_batch_size"] for record in records(tmp_path / "run")]
    assert len(set(sizes)) > 1 or schedule.startswith(("loss_plateau", "norm_test", "seesaw_noise"))
    assert all(b <= 2 * a and 1 <= b <= 1024 for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_long_tensor_is_right_on_a_cpu(dtype):
    """Of 3 10^6 equal numbers and of a small tensor beside them; so is the norm of a pass.

    Mutation: the long tensor at once, whose fp32 sum of squares is rounded at each number (2e-3 off).
    """
    long, short = torch.full((3 * 10**6,), 1.1, dtype=dtype), torch.full((10,), 2.0, dtype=dtype)
    right = 3 * 10**6 * float(long[0].double()) ** 2 + 40
    assert float(squared_norm([long, short], torch.device("cpu"))) == pytest.approx(right, rel=2e-5)
    norms = PassNorms([], wanted=True)
    norms.on = True
    for tensor in (long, short):
        norms._add(tensor)
    assert float(norms._square) == pytest.approx(right, rel=2e-5)
