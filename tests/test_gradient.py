"""One process, the real loop: the step's gradient and every way a step may go wrong.

The reference is written naively below: one backward of `sum_i w_i l_i` over the step's rows, weights by hand.
"""

from __future__ import annotations

import copy
import math
import random
import signal
import weakref
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from by_hand import losses_of, n_supervised
from launching import audits, records

import train
from adaptive import scaling
from adaptive.config import BadSetting, parse
from adaptive.data import Share, Source
from adaptive.engine import Engine
from adaptive.evaluate import evaluate
from adaptive.order import Order
from adaptive.plan import Lengths, exact, plan_step, share
from adaptive.tasks import Loaded, Task
from adaptive.tasks.causal_lm import CausalLM

WORDS, N_ROWS = 17, 23
QUIET = [
    "--report_to",
    "none",
    "--eval_every",
    "never",
    "--lr_scaling",
    "none",
    "--lr_scheduler_type",
    "constant",
    "--max_grad_norm",
    "0",
    "--dtype",
    "float64",
    "--learning_rate",
    "0.1",
    "--optim",
    "sgd",
    "--audit",
]


# What is trained: in this file, by path, as a user would


class Net(torch.nn.Module):
    """Embedding, tanh, logits; fp64, weights from a generator of its own."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.embed = torch.nn.Embedding(WORDS, 6)
        self.inner, self.head = torch.nn.Linear(6, 5), torch.nn.Linear(5, WORDS)
        self.dropout = torch.nn.Dropout(dropout)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=draw)

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        logits = self.head(torch.tanh(self.inner(self.dropout(self.embed(input_ids)))))
        return type("Output", (), {"logits": logits})


def make_rows(n: int, shortest: int = 2) -> list[dict]:
    """Rows of 2 to 9 tokens, the first labels of which are not supervised; in every fifth none is."""
    draw = np.random.default_rng(n)
    rows = []
    for number in range(n):
        tokens = draw.integers(0, WORDS, int(draw.integers(shortest, 10)))
        labels = tokens.copy()
        labels[: len(tokens) if number % 5 == 3 else int(draw.integers(0, len(tokens)))] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Tiny(CausalLM):
    rows, dropout = N_ROWS, 0.0

    def load(self, config):
        return Loaded(train=make_rows(self.rows), eval=make_rows(9))

    def model(self, config):
        return Net(self.dropout)


class Ten(Tiny):
    rows = 10


class PoisonedEval(Tiny):
    """Validation rows whose loss is not a number."""

    def load(self, config):
        train_rows = [{**row, "bad": np.float64(0)} for row in make_rows(N_ROWS)]
        return Loaded(train=train_rows, eval=[{**row, "bad": np.float64(1)} for row in make_rows(9)])

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) + torch.where(batch["bad"] > 0, torch.nan, 0.0)


class Two(Tiny):
    rows = 2


class Nothing(Tiny):
    rows = 0


class NoEval(Tiny):
    def load(self, config):
        return Loaded(train=make_rows(N_ROWS), eval=[])


class Unsupervised(Tiny):
    def load(self, config):
        rows = make_rows(N_ROWS)
        return Loaded(train=[{**row, "labels": np.full_like(row["labels"], -100)} for row in rows])


class Dropout(Tiny):
    """As `from_pretrained` gives it: in eval mode."""

    dropout = 0.5

    def model(self, config):
        return Net(0.5).eval()


class Poisoned(Tiny):
    """Row 4 has a loss that is not a number."""

    def load(self, config):
        rows = make_rows(N_ROWS)
        return Loaded(train=[{**row, "bad": np.float64(number == 4)} for number, row in enumerate(rows)])

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) + torch.where(batch["bad"] > 0, torch.nan, 0.0)


class AllPoisoned(Poisoned):
    def load(self, config):
        return Loaded(train=[{**row, "bad": np.float64(1)} for row in make_rows(N_ROWS)])


def jumping(step, current_size):
    """Passes of 3 with micro-batch 3: 3, 1, 4, 2; then 8, 9, 11.5, 13."""
    return [8, 2, 11, 5, 8, 9, 11.5, 13][step % 8]


def primes(step, current_size):
    return [2, 3, 5, 7][step % 4]


def growing(step, current_size):
    return 4.0 + 3 * step


# Harness


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def alone():
    """A fresh accelerate, one thread, and the signal handlers of before."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    reset()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    reset()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(folder: Path, task: str, *arguments: str) -> tuple:
    """(state, final weights) of train.main on a task of this file."""
    reset()
    state = train.main(
        parse(["--task", f"{__file__}:{task}", "--output_dir", str(folder), *QUIET, *arguments])
    )
    return state, torch.load(folder / "model" / "weights.pt")


def prepared(*arguments: str, task: Task | None = None, optimizer=None, **settings) -> tuple[Engine, Task]:
    """An engine with the tiny model; `optimizer(parameters)`, by default SGD with lr 1."""
    reset()
    task = task or Tiny()
    engine = Engine.start(parse([*QUIET, *arguments]))
    model = task.model(engine.config)
    engine.prepare(
        model, optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=1.0)
    )
    return engine, task


def as_rank(engine: Engine, rank: int, world_size: int, all_tokens: int) -> Engine:
    """The engine as one of `world_size` processes; sums over ranks are known beforehand or its own."""
    one = copy.copy(engine)
    one.rank, one.world_size = rank, world_size
    one.start_sum, one.sum = (lambda values: lambda: [all_tokens]), (lambda values: values)
    one.repeats, one.moving = False, []  # as where nothing is agreed on between the passes and the step
    return one


def reference(model, rows: list[dict], weight: float, by_tokens: bool) -> list[torch.Tensor]:
    """Gradient of `sum_i w_i l_i`: w the mean over a row's tokens; or n w / T for every token."""
    losses, tokens = losses_of(model, rows), [n_supervised(row) for row in rows]
    if by_tokens:
        total = sum(loss * (len(rows) * weight / sum(tokens)) for loss in losses)
    else:
        total = sum(loss / max(1, k) * weight for loss, k in zip(losses, tokens, strict=True))
    return torch.autograd.grad(total, list(model.parameters()))


def gradients(engine: Engine) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in engine.module.parameters()]


def distance(one, other) -> float:
    """Norm of the difference over the norm, all tensors together."""
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (one, other))
    return float((one - other).norm() / other.norm())


def step(engine: Engine, task: Task, rows: list[dict], weight: float | None = None, **batch):
    """train.gradient of `rows` as one whole step."""
    settings = copy.copy(engine.config.batch)
    settings.normalize_by = batch.pop("normalize_by", "tokens")
    settings.micro_batch_size = batch.pop("micro_batch_size", 64)
    weight = 1 / len(rows) if weight is None else weight
    own = Share.alike(rows, len(rows), weight)
    return train.gradient(engine, task, own, lambda: make_rows(N_ROWS)[0], settings)


# The gradient


@pytest.mark.parametrize("by_tokens", [True, False])
@pytest.mark.parametrize("policy", ["target", "realized", "ceil"])
def test_gradient_is_the_weighted_sum_for_every_cut(by_tokens, policy):
    """1e-12 in fp64 for W in 1, 2, 3, 5, micro-batches 1, 3, 5, 64, sizes below 1, fractional, whole and cut.

    Mutations: mean of the micro-batch in train.gradient (`losses.mean()`: 1e-1); `world_size *` dropped in
    loss_scale (1e-1 for W > 1); tokens counted on this rank only (1e-1); weight 1/n for `target` (0.2 at G =
    2.5).
    """
    engine, task = prepared()
    dataset = make_rows(N_ROWS)
    by_hand = {
        "target": lambda size, n, w: 1 / max(size, Fraction(1)),
        "realized": lambda size, n, w: Fraction(1, n),
        "ceil": lambda size, n, w: Fraction(1, w * math.ceil(size / w)),
    }[policy]
    engine.config.batch.fractional_scaling = policy
    tried = 0
    for size, carry in [(0.4, "3/5"), (1, "0"), (2.5, "0"), (2.5, "1/2"), (7, "0"), (11.5, "1/2"), (40, "0")]:
        plan = plan_step(
            {"train": exact(size)},
            {"train": 0},
            {"train": Fraction(carry)},
            Lengths({"train": N_ROWS}, Fraction(1)),
            "keep",
            0,
        )
        rows = dataset[: plan.size]
        assert plan.size == min((Fraction(carry) + exact(size)) // 1, N_ROWS)
        for world_size in (1, 2, 3, 5):
            weight = by_hand(Fraction(N_ROWS) if plan.cut else exact(size), plan.size, world_size)
            right = reference(engine.module, rows, float(weight), by_tokens)
            for micro in (1, 3, 5, 64):
                added = [torch.zeros_like(g) for g in right]
                engine.config.batch.micro_batch_size = micro
                engine.config.batch.normalize_by = "tokens" if by_tokens else "samples"
                for rank in range(world_size):
                    one = as_rank(engine, rank, world_size, sum(map(n_supervised, rows)))
                    own = [dataset[at] for _, positions in share(plan, rank, world_size) for at in positions]
                    weighed = scaling.sample_weight(engine.config.batch, plan, world_size)
                    part = Share.alike(own, plan.size, weighed)
                    train.gradient(one, task, part, lambda: dataset[0], engine.config.batch)
                    # The engine's average over ranks.
                    torch._foreach_add_(added, gradients(engine), alpha=1 / world_size)
                    engine.discard()
                assert distance(added, right) < 1e-12, (size, world_size, micro)
                tried += 1
    assert tried == 7 * 4 * 4


def test_norm_and_loss_are_the_same_for_every_split():
    """R02. 12 samples as 1 x 12, 2 x 6, 3 x 4 (5 + 5 + 2), 12 x 1: norm, loss and counts, to 1e-13.

    Mutation: `total + loss / len(rows)` of each pass (a mean of means): the loss differs by 1e-2.
    """
    engine, task = prepared()
    rows, seen = make_rows(12), {}
    for micro in (12, 6, 5, 4, 1):
        measured = step(engine, task, rows, micro_batch_size=micro)
        assert measured.grad_norm == pytest.approx(
            math.sqrt(sum(float(g.square().sum()) for g in gradients(engine))), rel=1e-13
        )
        seen[micro] = (measured.loss, measured.grad_norm, measured.items)
        engine.discard()
    tokens = sum(map(n_supervised, rows))
    mean = sum(losses_of(engine.module, rows)).item() / tokens
    for loss, norm, items in seen.values():
        assert (loss, norm, items) == (
            pytest.approx(mean, rel=1e-13),
            pytest.approx(seen[12][1], rel=1e-13),
            tokens,
        )


def naive_run(
    folder: Path, rows: list[dict], by_tokens: bool = True, rate: float = 0.1
) -> dict[str, torch.Tensor]:
    """SGD by hand over the audited rows, with the weights 1/n or 1/G that the record must have had."""
    model = Net()
    lines = {line["step"]: line for line in audits(folder)[0]}
    for record in records(folder):
        own = [rows[index] for index in lines[record["step"]]["indices"]]
        assert len(own) == record["batch_size"]
        if record["skipped"] is None:
            for p, g in zip(
                model.parameters(), reference(model, own, record["weight"], by_tokens), strict=True
            ):
                p.data -= rate * g
    return model.state_dict()


@pytest.mark.parametrize("policy", ["keep", "drop", "wrap"])
def test_short_last_step_is_divided_by_what_it_has(tmp_path, policy):
    """R03. 10 rows, size 4, micro-batch 1, two epochs: the tail of 2 is a mean over 2, dropped, or made
    whole.

    Mutation: `mean_size` without `plan.cut` (the tail's weight is 1/4; weights differ by 1e-2).
    """
    _, weights = run(
        tmp_path / "run",
        "Ten",
        "--batch_size",
        "4",
        "--schedule",
        "constant",
        "--micro_batch_size",
        "1",
        "--num_train_epochs",
        "2",
        "--epoch_end",
        policy,
    )
    told = [(r["batch_size"], r["weight"]) for r in records(tmp_path / "run")]
    whole, tail = (4, 0.25), (2, 0.5)
    assert told == {"keep": [whole, whole, tail] * 2, "drop": [whole] * 4, "wrap": [whole] * 5}[policy]
    right = naive_run(tmp_path / "run", make_rows(10))
    assert distance(weights.values(), right.values()) < 1e-12


def test_one_optimizer_step_for_each_plan(tmp_path, monkeypatch):
    """R20, R33. 3, 1, 4, 2 passes, then sizes 8, 9, 11.5, 13, over two epochs: the weights are those of SGD
    by hand.

    Mutation: a second `engine.update` at an epoch's end, or a step per pass: steps differ from records at
    once.
    """
    steps = []
    plain = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a, **k: (steps.append(1), plain(self, *a, **k))[1]
    )
    state, weights = run(
        tmp_path / "run",
        "Tiny",
        "--batch_size",
        "8",
        "--schedule",
        f"{__file__}:jumping",
        "--micro_batch_size",
        "3",
        "--num_train_epochs",
        "4.5",
    )
    told = records(tmp_path / "run")
    assert [r["passes"] for r in told[:4]] == [3, 1, 4, 1] and sum(r["batch_size"] for r in told) == 104
    assert {r["passes"] for r in told} >= {1, 2, 3, 4}
    assert len(steps) == len([r for r in told if not r["skipped"]]) == state.updates
    assert [r["target_batch_size"] for r in told[4:8]] == [8, 9, 11.5, 13]
    assert distance(weights.values(), naive_run(tmp_path / "run", make_rows(N_ROWS)).values()) < 1e-12


def test_accumulation_is_one_whatever_the_environment_says(monkeypatch):
    """R04. Mutation: Accelerator() without the plugin reads 4 from the environment: the gradient is a
    quarter.
    """
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    engine, task = prepared()
    assert engine.accelerator.gradient_accumulation_steps == 1
    rows = make_rows(12)
    step(engine, task, rows, micro_batch_size=5)
    assert distance(gradients(engine), reference(engine.module, rows, 1 / 12, True)) < 1e-12


def test_activations_do_not_grow_with_the_passes():
    """R06. Mutation: one backward of the added losses after the passes: live saved tensors grow 16-fold."""
    engine, task = prepared()
    peaks = {}
    for n_passes in (2, 16):
        alive, peak = weakref.WeakSet(), [0]

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor
                alive.add(self)  # noqa: B023
                peak[0] = max(peak[0], len(alive))  # noqa: B023

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            step(engine, task, make_rows(3 * n_passes), micro_batch_size=3)
        peaks[n_passes] = peak[0]
    assert 0 < peaks[16] <= peaks[2]


def test_pass_without_supervision_counts_for_nothing():
    """R07. One micro-batch all -100: exactly the gradient without it. Mutation: `count.clamp` left out (0/0,
    NaN).
    """
    engine, task = prepared()
    rows = make_rows(9)
    for row in rows[3:6]:
        row["labels"][:] = -100
    for mode in ("tokens", "samples"):
        measured = step(engine, task, rows, 1 / 9, micro_batch_size=3, normalize_by=mode)
        assert measured.finite and measured.items == sum(map(n_supervised, rows))
        assert distance(gradients(engine), reference(engine.module, rows, 1 / 9, mode == "tokens")) < 1e-12
        supervised = [row for row in rows if n_supervised(row)]
        means = [
            x.item() / n_supervised(r)
            for x, r in zip(losses_of(engine.module, supervised), supervised, strict=True)
        ]
        if mode == "samples":
            assert measured.loss == pytest.approx(sum(means) / len(means), rel=1e-12)
        engine.discard()


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("why", ["unsupervised", "nonfinite"])
def test_skipped_step_is_as_if_it_had_not_been(why):
    """R07, R61. Weights, momentum and weight decay are bit-equal after it; the next step is the right one.

    Mutation: `engine.discard` keeping the gradient, or an `optimizer.step` on zeros (momentum moves the
    weights).
    """
    task = Poisoned()
    engine, _ = prepared(task=task, optimizer=momentum)
    rows = task.load(None).train
    good, bad = rows[5:9], (rows[3:6] if why == "nonfinite" else rows[3:4] + rows[8:9])
    step(engine, task, good)
    assert train.update(engine, step(engine, task, good), 0.1) is None
    before = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
    for micro in (64, 1):
        measured = step(engine, task, bad, micro_batch_size=micro)
        assert measured.loss is None if why == "nonfinite" else measured.items == 0
        assert train.update(engine, measured, 0.1) == why
    after = (engine.module.state_dict(), engine.optimizer.state_dict())
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    held = zip(before[1]["state"].values(), after[1]["state"].values(), strict=True)
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in held)
    step(engine, task, good)
    assert distance(gradients(engine), reference(engine.module, good, 1 / 4, True)) < 1e-12


def test_skips_are_told_and_counted(tmp_path):
    """R27, R61. A NaN row: samples and the rate go on, `updates` does not; loss null; weights are those
    without the step.

    Mutation: `self.samples += plan.size` only where not skipped (the record falls behind its positions).
    """
    flags = [
        "--lr_scheduler_type",
        "linear",
        "--batch_size",
        "4",
        "--schedule",
        "constant",
        "--num_train_epochs",
        "2",
    ]
    state, weights = run(tmp_path / "run", "Poisoned", *flags)
    told = records(tmp_path / "run")
    bad = [r for r in told if r["skipped"]]
    assert {r["skipped"] for r in bad} == {"nonfinite"} and len(bad) == 2 == state.skipped["nonfinite"]
    assert all(r["loss"] is None and r["grad_norm"] is None for r in bad)
    assert (
        state.updates == len(told) - 2 == told[-1]["updates"]
        and state.samples == 2 * N_ROWS == told[-1]["samples"]
    )
    assert all(torch.isfinite(value).all() for value in weights.values())
    for before, after in zip(told, told[1:], strict=False):
        assert after["learning_rate"] == pytest.approx(
            0.1 * (1 - before["samples"] / (2 * N_ROWS)), rel=1e-12
        )


def test_non_finite_steps_in_a_row_end_the_run(tmp_path):
    """R27. Mutation: the count reset by every step: the run ends with success and random weights."""
    with pytest.raises(RuntimeError, match="4 non-finite steps in a row"):
        run(
            tmp_path / "run",
            "AllPoisoned",
            "--batch_size",
            "2",
            "--schedule",
            "constant",
            "--max_skipped",
            "3",
        )
    assert [r["updates"] for r in records(tmp_path / "run")] == [0] * 4


def test_run_without_an_update_says_why(tmp_path):
    """R37. Nothing supervised anywhere: an error that names the reason. Mutation: a silent success."""
    with pytest.raises(BadSetting, match="unsupervised"):
        run(tmp_path / "run", "Unsupervised", "--batch_size", "4", "--schedule", "constant")


@pytest.mark.parametrize("limit", [0.5, 1.0, 0.0])
def test_clipping_follows_normalisation(limit):
    """R10. 16 samples as 1 x 16, 4 x 4, 16 x 1: norm before clipping and the length of the update are the
    same.

    Mutation: clipping inside engine.backward, pass by pass (the update is up to 4 times too long).
    """
    for micro in (16, 4, 1):
        engine, task = prepared("--max_grad_norm", str(limit))
        before = [p.detach().clone() for p in engine.module.parameters()]
        rows = make_rows(16)
        right = reference(engine.module, rows, 4.0, True)  # a weight of 4: a large gradient
        measured = step(engine, task, rows, 4.0, micro_batch_size=micro)
        norm = math.sqrt(sum(float(g.square().sum()) for g in right))
        assert norm > 2 and measured.grad_norm == pytest.approx(norm, rel=1e-12)
        assert train.update(engine, measured, 0.1) is None
        moved = [a - b.detach() for a, b in zip(before, engine.module.parameters(), strict=True)]
        length = math.sqrt(sum(float(d.square().sum()) for d in moved))
        assert length == pytest.approx(0.1 * (limit or norm), rel=1e-5)
        assert distance(moved, right) == pytest.approx(abs(length / norm - 1), rel=1e-6)  # only shorter


def test_three_token_counters(tmp_path):
    """R15. Lengths 3, 5, 2 in one pass: 7 supervised, 10 that are not padding, 5 of padding; one by one no
    padding.

    Mutation: `items` over `input_ids.numel()` (15), or padding counted per step.
    """
    engine, task = prepared()
    rows = [{"input_ids": np.arange(k), "labels": np.arange(k)} for k in (3, 5, 2)]
    for micro, padding in ((3, 5), (2, 2), (1, 0)):
        measured = step(engine, task, rows, micro_batch_size=micro)
        assert (measured.items, measured.input_tokens, measured.padding_tokens) == (7, 10, padding)
        engine.discard()
    empty = [{"input_ids": np.arange(4), "labels": np.array([1, -100, 2, -100])}]
    assert step(engine, task, empty).items == 1  # the first label has nothing to be predicted from


# The loss scaler (a real one, on the CPU)


def with_scaler(engine: Engine, **settings) -> torch.amp.GradScaler:
    """fp16's scaler in an engine that accelerate refuses to build without a GPU."""
    scaler = torch.amp.GradScaler("cpu", **settings)
    engine.accelerator.scaler = engine.optimizer.scaler = scaler
    engine.optimizer.__setstate__({})  # patches the optimizer's step, as its constructor does with a scaler
    engine.accelerator.native_amp = True
    engine.accelerator.state._mixed_precision = "fp16"
    return scaler


def test_scaler_unscales_once_and_clips_what_is_unscaled():
    """R62. Norm and gradient are those without a scaler. Mutation: squared_norm without unscale_gradients
    (65536).
    """
    engine, task = prepared()
    with_scaler(engine)
    rows = make_rows(7)
    measured = step(engine, task, rows, micro_batch_size=2)
    right = reference(engine.module, rows, 1 / 7, True)
    assert distance(gradients(engine), right) < 1e-12
    assert measured.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in right)), rel=1e-12
    )
    assert train.update(engine, measured, 1.0) is None


def test_unsupervised_and_nonfinite_under_a_scaler():
    """R07, R61. No step on zeros, no step on a NaN loss, an overflow only lowers the scale.

    Mutation: `optimizer.step()` in discard whatever the reason (weight decay and momentum move the weights).
    """
    task = Poisoned()
    engine, _ = prepared(task=task, optimizer=momentum)
    scaler = with_scaler(engine, init_scale=2.0**10)
    rows = task.load(None).train
    assert train.update(engine, step(engine, task, rows[5:9]), 0.1) is None
    before = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))

    def unmoved():
        held = zip(before[1]["state"].values(), engine.optimizer.state_dict()["state"].values(), strict=True)
        return all(torch.equal(engine.module.state_dict()[k], v) for k, v in before[0].items()) and all(
            torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in held
        )

    assert train.update(engine, step(engine, task, rows[3:4]), 0.1) == "unsupervised" and unmoved()
    assert scaler.get_scale() == 2.0**10
    assert train.update(engine, step(engine, task, rows[3:6]), 0.1) == "nonfinite" and unmoved()
    scaler._scale.fill_(2.0**120)
    # Beyond fp64 while scaled, as fp16 overflows.
    engine.module.head.weight.register_hook(lambda g: g * 2.0**1000)
    measured = step(engine, task, rows[5:9])
    assert train.update(engine, measured, 0.1) == "overflow" and unmoved()
    assert scaler.get_scale() == 2.0**119 and measured.grad_norm is None


# Data and sizes


@pytest.mark.parametrize("workers", [0, 2])
def test_size_decided_is_size_run(tmp_path, workers):
    """R39. 2, 3, 5, 7 step by step, over an epoch's end. Mutation: a batch sampler read one step ahead."""
    run(
        tmp_path / "run",
        "Tiny",
        "--batch_size",
        "2",
        "--schedule",
        f"{__file__}:primes",
        "--epoch_end",
        "wrap",
        "--num_train_epochs",
        "3",
        "--dataloader_num_workers",
        str(workers),
    )
    told = records(tmp_path / "run")
    sizes = [r["batch_size"] for r in told]
    assert len(told) == 17 and [r["target_batch_size"] for r in told] == ([2, 3, 5, 7] * 5)[:17]
    assert sizes[:-1] == ([2, 3, 5, 7] * 5)[:16] and sum(sizes) == 3 * N_ROWS
    assert [len(line["indices"]) for line in audits(tmp_path / "run")[0]] == sizes


def test_epochs_have_orders_of_their_own_with_workers(tmp_path):
    """R41. Three epochs, each row once in each, in three orders, the same with 0 and 2 workers (which see the
    rows).

    Mutation: `position % N` given to the workers (one order for ever; weights differ from those without
    workers).
    """
    orders, finals = [], []
    for workers in ("0", "2"):
        _, weights = run(
            tmp_path / workers,
            "Tiny",
            "--batch_size",
            "5",
            "--schedule",
            "constant",
            "--num_train_epochs",
            "3",
            "--dataloader_num_workers",
            workers,
        )
        rows = [index for line in audits(tmp_path / workers)[0] for index in line["indices"]]
        epochs = [rows[at : at + N_ROWS] for at in range(0, len(rows), N_ROWS)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(N_ROWS))] * 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        orders.append(rows)
        finals.append(weights)
    assert orders[0] == orders[1] and all(torch.equal(finals[0][k], finals[1][k]) for k in finals[0])


@pytest.mark.parametrize("policy", ["keep", "drop", "wrap"])
def test_dataset_smaller_than_a_step(tmp_path, policy, capsys):
    """R36, R37. Two rows, size 32: held at 2, said once, with updates. Mutation: `drop` ends with none."""
    state, weights = run(
        tmp_path / "run",
        "Two",
        "--batch_size",
        "32",
        "--schedule",
        "constant",
        "--num_train_epochs",
        "3",
        "--epoch_end",
        policy,
    )
    assert [r["batch_size"] for r in records(tmp_path / "run")] == [2, 2, 2] and state.updates == 3
    assert capsys.readouterr().out.count("held at the dataset's 2 rows") == 1
    assert distance(weights.values(), naive_run(tmp_path / "run", make_rows(2)).values()) < 1e-12


def test_empty_dataset_is_one_line(tmp_path):
    """R36. Mutation: no check: a traceback about `size=0`."""
    with pytest.raises(BadSetting, match="no rows") as said:
        run(tmp_path / "run", "Nothing")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("stream", [iter([{}]), range(3).__iter__(), map(dict, [])])
def test_a_stream_is_refused_in_one_line(stream):
    """R42. Mutation: no check: TypeError, object of type 'generator' has no len()."""
    with pytest.raises(BadSetting, match="is a stream .*save_to_disk") as said:
        Source("train", stream, 0, 0, 1, 0)
    assert "\n" not in str(said.value)


def test_empty_validation_set_is_none(tmp_path):
    """R72. Mutation: `dataset is None` alone: unpacking an empty sum fails after the first epoch."""
    run(tmp_path / "run", "NoEval", "--eval_every", "2 steps", "--batch_size", "8")
    assert records(tmp_path / "run", "eval") == []


def heeding(step, current_size, eval_loss):
    return 2 * eval_loss


def test_evaluation_that_is_no_number_changes_no_size(tmp_path):
    """An invalid measurement is none. Mutation: NaN handed on: the schedule returns NaN, the run ends."""
    state, _ = run(
        tmp_path / "run",
        "PoisonedEval",
        "--eval_every",
        "2 steps",
        "--batch_size",
        "4",
        "--schedule",
        f"{__file__}:heeding",
    )
    assert {r["target_batch_size"] for r in records(tmp_path / "run")} == {4} and state.updates == 6
    assert [r["eval_loss"] for r in records(tmp_path / "run", "eval")] == [None] * 3


def test_growth_past_the_dataset(tmp_path):
    """R37. 4, 7, 10, ... over 23 rows: held there, once; every step of `drop` is whole."""
    run(
        tmp_path / "run",
        "Tiny",
        "--batch_size",
        "4",
        "--schedule",
        f"{__file__}:growing",
        "--num_train_epochs",
        "9",
        "--epoch_end",
        "drop",
    )
    told = records(tmp_path / "run")
    assert told[-1]["batch_size"] == told[-1]["target_batch_size"] == N_ROWS
    assert all(r["batch_size"] == r["target_batch_size"] for r in told)


# The learning rate


def test_rate_is_a_function_of_samples(tmp_path):
    """R60, R63. Sizes 4 to 16 and constant 2 over 207 samples: each rate is the cosine at the samples before
    it.

    Mutation: progress by steps: the two traces part; the end of the curve is missed.
    """
    ends = []
    for name, flags in {
        "grow": ["4", "--schedule", "ramp(start=4, end=16, over=100)"],
        "flat": ["2", "--schedule", "constant"],
    }.items():
        run(
            tmp_path / name,
            "Tiny",
            "--lr_scheduler_type",
            "cosine",
            "--num_train_epochs",
            "9",
            "--epoch_end",
            "wrap",
            "--warmup_samples",
            "20",
            "--batch_size",
            *flags,
        )
        before = 0
        for record in records(tmp_path / name):
            warm = min(1.0, (before + record["batch_size"]) / 20)
            right = 0.1 * warm * 0.5 * (1 + math.cos(math.pi * before / 207))
            assert record["learning_rate"] == pytest.approx(right, rel=1e-9, abs=1e-15)
            before = record["samples"]
        assert before == 207
        ends.append(record["learning_rate"])
    assert ends[1] < ends[0] < 0.1 * 0.02


def test_rate_by_steps_when_steps_are_the_budget(tmp_path):
    """R63. 10 steps of a dataset that would last longer: the curve ends with the steps. Mutation: samples
    only.
    """
    run(
        tmp_path / "run",
        "Tiny",
        "--lr_scheduler_type",
        "linear",
        "--max_steps",
        "10",
        "--batch_size",
        "2",
        "--schedule",
        "constant",
        "--num_train_epochs",
        "9",
    )
    rates = [r["learning_rate"] for r in records(tmp_path / "run")]
    assert rates == pytest.approx([0.1 * (1 - k / 10) for k in range(10)], rel=1e-12)


# Evaluation and draws


def test_evaluation_leaves_training_bit_identical(tmp_path):
    """Every 3 steps against never, with dropout and a model that arrives in eval mode: same weights, losses,
    order.

    Mutations: `engine.model.train()` left out of prepare (dropout begins at the first evaluation);
    `engine.seed` only at the start (evaluation's draws move training's).
    """
    finals = {}
    for name, every in {"never": "never", "often": "3 steps"}.items():
        _, weights = run(
            tmp_path / name,
            "Dropout",
            "--batch_size",
            "4.5",
            "--schedule",
            "constant",
            "--num_train_epochs",
            "3",
            "--eval_every",
            every,
        )
        told = [{k: v for k, v in r.items() if k != "seconds"} for r in records(tmp_path / name)]
        finals[name] = (weights, told, audits(tmp_path / name))
    assert len(records(tmp_path / "often", "eval")) >= 6
    assert finals["never"][1:] == finals["often"][1:]
    assert all(torch.equal(finals["never"][0][k], value) for k, value in finals["often"][0].items())


def test_dropout_differs_by_step_and_not_by_run():
    """Mutation: the step left out of Engine.seed (equal masks at each step)."""
    engine, task = prepared(task=Dropout())
    seen = []
    for number in (1, 2, 1):
        engine.seed(number)
        step(engine, task, make_rows(6))
        seen.append(gradients(engine))
        engine.discard()
    assert distance(seen[0], seen[1]) > 1e-2 and all(map(torch.equal, seen[0], seen[2]))


def test_draws_are_of_a_process_and_a_step():
    """R55, R57. Torch, NumPy and Python draw a function of (seed, rank, step): nothing to save or to lose,
    and a process that is new has draws of its own. Those for the initial weights are the same on all.

    Mutation: the rank left out of Engine.seed (every process drops the same units).
    """
    engine, _ = prepared()

    def drawn(rank: int, number: int, **how) -> tuple:
        engine.rank = rank
        engine.seed(number, **how)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    places = [(rank, number) for rank in range(4) for number in range(3)]
    for draws in zip(*(drawn(*place) for place in places), strict=True):
        assert len(set(draws)) == len(places)
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]
    assert len({drawn(rank, 0, same_everywhere=True) for rank in range(4)}) == 1


class Twenty(Tiny):
    rows, dropout = 20, 0.5


def by_threes(step, current_size):
    return [3, 5, 8][step % 3]


def test_counters_by_hand_and_after_stops(tmp_path):
    """R40, R45 to R47, R54. 20 rows in sizes 3, 5, 8 and passes of 2, three epochs, workers that read 16
    ahead, a model that draws: every counter, and the rows of the order, a function of seed and position.
    Stopped in the first and in the third epoch, and started again at its last step: the same, to the bit.

    Mutations: the cursor at a resume moved on by what was read ahead; `step` counting passes; torch.randperm.
    """
    flags = ["--batch_size", "3", "--schedule", f"{__file__}:by_threes", "--micro_batch_size", "2"]
    flags += ["--num_train_epochs", "3", "--dataloader_num_workers", "2"]
    _, weights = run(tmp_path / "whole", "Twenty", *flags)
    told, used = records(tmp_path / "whole"), audits(tmp_path / "whole")[0]
    samples = updates = 0
    for k, record in enumerate(told):
        n = min([3, 5, 8][k % 3], 20 - samples % 20)
        samples, updates = samples + n, updates + (record["skipped"] is None)
        counters = [record[name] for name in ("step", "updates", "samples", "batch_size", "passes")]
        assert counters == [k + 1, updates, samples, n, -(-n // 2)]
        assert record["epoch"] == samples / 20 and record["train_coverage"] == (samples % 20 or 20) / 20
    assert samples == 60 and len(told) == 14
    order = Order(parse([]).run.seed, "train", 20)
    assert [i for line in used for i in line["indices"]] == order.indices(np.arange(60)).tolist()

    again = [*flags, "--resume_from_checkpoint", "auto"]
    for stop in ("3", "3", "12", "-1"):
        _, same = run(tmp_path / "cut", "Twenty", *again, "--max_steps", stop)
    for record in (*told, *(cut := records(tmp_path / "cut"))):
        del record["seconds"]
    assert told[11]["epoch"] > 2 and cut == told and audits(tmp_path / "cut")[0] == used
    assert all(torch.equal(same[name], weights[name]) for name in weights)


class AfterTheEngine(Tiny):
    """A model that must not be built before the engine: ZeRO-3 splits weights as they are made."""

    def model(self, config):
        assert AcceleratorState._shared_state, "the model came before the engine"
        return super().model(config)


def test_the_engine_comes_before_the_model(tmp_path):
    """R22. Mutation: task.model(config) above Engine.start in main."""
    assert run(tmp_path / "run", "AfterTheEngine", "--max_steps", "1")[0].updates == 1


class WithMetric(Tiny):
    """A metric that is not a number where nothing is supervised."""

    def measure(self, model, batch):
        items = self.items(batch)
        return {"loss": self.loss_sum(model, batch), "per_token": self.loss_sum(model, batch) / items}


def test_evaluation_is_a_plain_mean():
    """R72. Any batch size: mean over tokens, over samples, and a metric over the samples with something to
    measure.

    Mutation: means of means over passes (1e-2); metrics summed over all rows and divided by the supervised.
    """
    engine, task = prepared(task=WithMetric())
    rows = make_rows(9)
    supervised = [row for row in rows if n_supervised(row)]
    sums = [x.item() for x in losses_of(engine.module, supervised)]
    tokens = [n_supervised(row) for row in supervised]
    per_row = np.mean([s / k for s, k in zip(sums, tokens, strict=True)])
    for size in (1, 2, 4, 64):
        for mode, right in (("tokens", sum(sums) / sum(tokens)), ("samples", per_row)):
            means = evaluate(engine, task, rows, size, mode)
            assert means["eval_loss"] == pytest.approx(right, rel=1e-12)
            assert means["eval_per_token"] == pytest.approx(per_row, rel=1e-12)
    assert engine.model.training
