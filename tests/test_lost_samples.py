"""Rows that cannot be read, rows that are no numbers, and what the records say of them."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from launching import audits, records

import train
from adaptive import tasks
from adaptive.config import BadSetting, parse
from adaptive.data import Share
from adaptive.deepspeed_engine import DeepSpeedEngine
from adaptive.engine import Engine
from adaptive.signals import suspects
from adaptive.tasks import Loaded, Task
from adaptive.tools.inspect_run import main as inspect_run

RUN = [
    "--report_to", "none", "--batch_size", "8", "--schedule", "constant()", "--optim", "sgd", "--audit",
    "--learning_rate", "0.1", "--dtype", "float64", "--eval_every", "never", "--max_grad_norm", "0",
    "--lr_scheduler_type", "constant",
]  # fmt: skip
N, BROKEN, NAN = 40, 17, 23


class Rows:
    """40 rows of 3 numbers; one raises when it is read."""

    def __init__(self, broken):
        draw = torch.Generator().manual_seed(1)
        self.x, self.broken = torch.randn(N, 3, generator=draw, dtype=torch.float64), broken

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("cannot identify image file")
        return {"x": self.x[index].numpy(), "number": np.int64(index)}


class Squares(Task):
    """Sum of squares of a linear model; row NAN has none where `spoilt`."""

    broken, spoilt = BROKEN, False

    def load(self, config):
        return Loaded(train=Rows(self.broken))

    def model(self, config):
        return torch.nn.Linear(3, 2).double()

    def loss_sum(self, model, batch):
        losses = model(batch["x"]).square().sum(dim=1)
        return torch.where(batch["number"] == NAN, torch.nan, losses) if self.spoilt else losses

    def items(self, batch):
        return torch.full((len(batch["x"]),), 3)


def run(folder, *more, task=Squares):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_task", lambda name: task())
        state = train.main(parse([*RUN, "--output_dir", str(folder), *more]))
    return state, torch.load(folder / "model" / "weights.pt"), records(folder)


def by_hand(folder) -> torch.Tensor:
    """Weights after the run's steps, each the mean over the rows that it really used."""
    config = parse([*RUN, "--output_dir", str(folder / "hand")])
    engine = Engine.start(config)
    engine.seed(0, same_everywhere=True)
    model, rows = Squares().model(config), Rows(None)
    for line in audits(folder)[0]:
        good = line["indices"]
        loss = model(rows.x[good]).square().sum(dim=1).mean() / 3  # a mean over items
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, g in zip(model.parameters(), gradient, strict=True):
                parameter -= 0.1 * g
    return model.weight.detach()


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("mode", ["samples", "tokens"])
def test_a_broken_row_is_left_out_exactly(tmp_path, mode, workers):
    """fp64 to 1e-12: the step's mean is over the rows that could be read; positions go on; counted, recorded.

    Mutations: weight not raised to n/(n - bad) (1e-3); the row replaced by another; the worker dies.
    """
    folder = tmp_path / "run"
    state, weights, lines = run(
        folder, "--on_bad_sample", "skip", "--normalize_by", mode, "--micro_batch_size", "3",
        "--dataloader_num_workers", workers,
    )  # fmt: skip
    assert len(lines) == 5 and state.samples == N and state.bad_samples == 1
    used = sorted(k for line in audits(folder)[0] for k in line["indices"])
    assert used == [k for k in range(N) if k != BROKEN]
    assert lines[-1]["bad_samples"] == 1 and all(r["skipped"] is None for r in lines)
    assert float((weights["weight"] - by_hand(folder)).abs().max()) < 1e-12


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_broken_row_stops_with_its_name(tmp_path, workers):
    """Mutation: the dataset's own traceback."""
    with pytest.raises(
        BadSetting, match=f"row {BROKEN} of train cannot be read .OSError: cannot identify image"
    ):
        run(tmp_path / "run", "--dataloader_num_workers", workers)


def test_a_broken_validation_row_stops_with_its_name(tmp_path):
    """An evaluation leaves nothing out. Mutation: `fetch`, which raises the file's own error, a traceback."""

    class Evaluated(Squares):
        def load(self, config):
            return Loaded(train=Rows(None), eval=Rows(self.broken))

    with pytest.raises(BadSetting, match=r"row \d+ of the validation data cannot be read \(OSError: cannot"):
        run(tmp_path, "--on_bad_sample", "skip", task=Evaluated)


@pytest.mark.parametrize("micro_batch_size", ["4", "auto"])
def test_rows_of_which_none_can_be_read_are_one_line(tmp_path, micro_batch_size):
    """Mutation: `next` and `max` of what is empty: a StopIteration, a ValueError."""

    class Lost(Squares):
        broken = ANY

    with pytest.raises(BadSetting, match="no row of the training data .* can be read .*OSError"):
        run(tmp_path, "--on_bad_sample", "skip", "--micro_batch_size", micro_batch_size, task=Lost)


def test_an_idle_pass_teaches_nothing_whatever_its_row_holds():
    """The gradient of 2 rows with an idle pass of NaN, and of a NaN row's own loss: bit-identical without it.

    Mutations: 0 times the loss in place of zeros (NaN); the idle loss in the sum (NaN).
    """
    gradients = []
    for size in (2, 4):  # of 4 with only 2 left here: one idle pass of 2
        engine = Engine.start(parse([*RUN, "--output_dir", "unused", "--micro_batch_size", "2"]))
        engine.seed(0, same_everywhere=True)
        task, rows = Squares(), Rows(None)
        task.spoilt = True
        model = task.model(engine.config)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.config.batch.normalize_by = "samples"
        idle = {"x": np.full(3, np.nan), "number": np.int64(NAN)}
        own = Share.alike([rows[0], rows[1]], size, 0.5)
        measured = train.gradient(engine, task, own, lambda idle=idle: idle, engine.config.batch)
        assert measured.finite and measured.loss is not None
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(not p._backward_hooks for p in model.parameters()), "hooks of an idle pass are gone"


def test_the_record_names_the_spoilt_samples(tmp_path):
    """Step, position and loss of the row without a number; every other record has no such field.

    Mutations: the number within the share taken for the position; the largest losses named beside.
    """

    class Spoilt(Squares):
        broken, spoilt = None, True

    folder = tmp_path / "run"
    _, _, lines = run(folder, "--micro_batch_size", "3", task=Spoilt)
    (told,) = [line for line in lines if "worst_samples" in line]
    at = next(line for line in audits(folder)[0] if NAN in line["indices"])
    first = told["positions"][0][1]
    assert told["step"] == at["step"] and told["skipped"] == "nonfinite"
    assert told["worst_samples"] == [["train", first + at["indices"].index(NAN), "nan"]]
    assert "NaN" not in (folder / "metrics.jsonl").read_text()


def test_suspects_of_a_gradient_without_numbers_are_the_largest_losses():
    """Two passes of one process: the four largest, largest first. Mutation: the smallest."""
    engine = SimpleNamespace(rank=0, world_size=1, sum=lambda values: values)
    losses = [torch.tensor([1.0, 5.0, 2.0]), torch.tensor([4.0, 3.0, 0.5])]
    own = Share.alike([{}] * 6, 6, 1 / 6)
    assert suspects(engine, own, losses) == [(0, 1, 5.0), (0, 3, 4.0), (0, 4, 3.0), (0, 2, 2.0)]
    losses[1][2] = torch.inf
    assert suspects(engine, own, losses) == [(0, 5, float("inf"))]
    own.places = [0, 1, 2, 4, 6, 9]  # others could not be read
    assert suspects(engine, own, losses) == [(0, 9, float("inf"))]
    assert suspects(engine, Share.alike([], 6, 1 / 6), [torch.zeros(1)]) == []


def test_a_loss_scale_that_has_nowhere_to_go_is_no_search():
    """fp16: at a scale of 1 an overflow counts as non-finite, so that --max_skipped ends the run.

    Mutation: scales_loss true whatever the scale.
    """
    engine = Engine.start(parse([*RUN, "--output_dir", "unused"]))
    for scale, searching in ((2.0, True), (1.0, False), (0.5, False)):
        engine.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        engine.accelerator.scaler._lazy_init_scale_growth_tracker("cpu")
        assert engine.scales_loss is searching


@pytest.mark.parametrize("overflow", [True, False])
def test_a_step_that_deepspeed_left_out_is_told(overflow):
    """R27. Its fp16 optimizer finds an overflow of its own inside step(). Mutation: update returning True."""
    engine = object.__new__(DeepSpeedEngine)
    optimizer = SimpleNamespace(overflow=overflow, param_groups=[{}])
    engine.model, engine.optimizer = SimpleNamespace(step=lambda: None, optimizer=optimizer), optimizer
    engine.config = parse([*RUN, "--output_dir", "unused"])
    measured = SimpleNamespace(items=3, finite=True, grad_norm=1.0)
    assert train.update(engine, measured, 0.1) == ("overflow" if overflow else None)


def test_a_run_of_empty_steps_hears_a_signal(tmp_path):
    """SIGTERM before the first sample of G = 1e-3 is drawn: the run stops within a step, and is saved.

    Mutation: stop looked for in measured steps only.
    """

    class Asks(Squares):
        broken = None

    (tmp_path / "asks.py").write_text(
        "import signal\n\n\ndef small(step, current_size):\n"
        "    if step == 3:\n        signal.raise_signal(signal.SIGTERM)\n    return 1e-3\n"
    )
    before = (
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGUSR1),
    )
    folder = tmp_path / "run"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "load_task", lambda name: Asks())
            schedule = ["--batch_size", "0.001", "--schedule", f"{tmp_path}/asks.py:small"]
            state = train.main(parse([*RUN, *schedule, "--output_dir", str(folder)]))
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)
    assert state.samples == 0 and 3 <= state.step <= 5
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{state.step}"]


class Shaped(Squares):
    """Losses of another shape than one per row."""

    broken, shape = -1, None

    def loss_sum(self, model, batch):
        losses = model(batch["x"]).square()
        return {"element": losses.flatten(), "mean": losses.mean(), "column": losses.sum(1, keepdim=True)}[
            self.shape
        ]


@pytest.mark.parametrize(("shape", "said"), [
    ("element", r"\(16,\) for 8 rows"), ("mean", r"\(\) for 8 rows"), ("column", r"\(8, 1\) for 8 rows"),
])  # fmt: skip
def test_losses_that_are_not_one_per_row_are_refused(tmp_path, monkeypatch, shape, said):
    """Mutation: the first 8 of 16 numbers taken for the rows' losses, without a word."""
    monkeypatch.setattr(Shaped, "shape", shape)
    monkeypatch.setattr(train, "load_task", lambda name: Shaped())
    with pytest.raises(BadSetting, match=f"losses of shape {said}; return one sum per row, shape \\(8,\\)"):
        train.main(parse([*RUN, "--output_dir", str(tmp_path)]))


def test_evaluated_losses_that_are_not_one_per_row_are_refused(tmp_path, monkeypatch):
    """Mutation: `value[: len(items)]`."""

    class Measured(Squares):
        def load(self, config):
            return Loaded(train=Rows(-1), eval=Rows(-1))

        def measure(self, model, batch):
            return {"loss": model(batch["x"]).square().flatten()}

    monkeypatch.setattr(train, "load_task", lambda name: Measured())
    with pytest.raises(BadSetting, match=r"losses of shape \(80,\) for 40 rows"):
        train.main(parse([*RUN, "--max_steps", "1", "--output_dir", str(tmp_path)]))


def test_rows_that_were_skipped_do_not_make_a_run_wrong(tmp_path, monkeypatch, capsys):
    """inspect_run --verify: a step has as many rows less as bad_samples says, and no more.

    Mutation: the audit's rows and those of the positions compared as if all could be read.
    """
    monkeypatch.setattr(train, "load_task", lambda name: Squares())
    train.main(parse([*RUN, "--on_bad_sample", "skip", "--output_dir", str(tmp_path)]))
    monkeypatch.setattr(tasks, "load_task", lambda name: Squares())
    assert inspect_run([str(tmp_path), "--verify"]) == 0
    path = tmp_path / "audit" / "rank0.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    whole = next(line for line in lines if len(line["indices"]) == 8)
    whole["indices"].pop()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inspect_run([str(tmp_path), "--verify"]) == 1
    assert "the audit's 7 rows" in capsys.readouterr().out
