"""Faults of gradients, engines and agreement, on real processes; faults.py is what runs in them."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from by_hand import losses_of, n_supervised
from faults import BAD, EVALS, FAULTY, HERE, LIMITS, N_ROWS, QUIET, RATE, RUNS, STEPS, Net, make_rows
from launching import audits, launch, records

pytestmark = pytest.mark.slow
LAUNCHES = {
    "ddp2": ("cpu_ddp", 2, "steps clip bf16 evaluate initial schedules runs"),
    "ddp3": ("cpu_ddp", 3, "steps clip evaluate runs"),
    "zero0": ("cpu_zero0", 2, "steps clip bf16"),
    "zero1": ("cpu_zero1", 2, "steps clip bf16 evaluate"),
    "zero2": ("cpu_zero2", 2, "steps clip bf16 schedules"),
    "zero3": ("cpu_zero3", 2, "steps clip bf16 evaluate initial runs"),
    "fsdp2": ("cpu_fsdp2", 2, "steps clip bf16 evaluate initial runs"),
}
_launched: dict[str, tuple[Path, list[dict]] | None] = {}


@pytest.fixture
def ran(tmp_path_factory):
    """name of LAUNCHES -> (folder, what each rank saw); every launch happens once, and all its processes
    wrote.
    """

    def ran(name: str) -> tuple[Path, list[dict]]:
        if name not in _launched:
            _launched[name] = None  # once, also when it fails
            layout, processes, jobs = LAUNCHES[name]
            folder = tmp_path_factory.mktemp(name)
            launch(
                layout, processes, HERE, folder, *jobs.split(), ADAPTIVE_TIMEOUT_MINUTES="0.5", timeout=200
            )
            ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]
            assert [rank["world_size"] for rank in ranks] == [processes] * processes
            assert len(list(folder.glob("rank*.pt"))) == processes
            _launched[name] = folder, ranks
        assert _launched[name], f"the launch {name} failed before"
        return _launched[name]

    return ran


def having(job: str) -> list[str]:
    return [name for name, (_, _, jobs) in LAUNCHES.items() if job in jobs.split()]


# The same by hand, in one process and fp64


def mean_loss(model, rows: list[dict], mode: str, weight: float | None = None) -> tuple[torch.Tensor, float]:
    """(what is differentiated, what is recorded): with a weight per sample, by default 1/n."""
    losses, tokens = losses_of(model, rows), [n_supervised(row) for row in rows]
    weight = 1 / len(rows) if weight is None else weight
    if mode == "tokens":
        return sum(losses) * (len(rows) * weight / sum(tokens)), sum(losses).item() / sum(tokens)
    means = [loss / max(1, k) for loss, k in zip(losses, tokens, strict=True)]
    return sum(means) * weight, sum(means).item() / sum(k > 0 for k in tokens)


def norm(gradients) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def distance(weights: dict, right: dict) -> float:
    """Norm of the difference over the norm, of the worst tensor."""
    assert weights.keys() == right.keys()
    return max(float((weights[k].double() - right[k]).norm() / right[k].norm()) for k in right)


@pytest.mark.parametrize("name", having("steps"))
def test_steps_follow_the_reference(ran, name):
    """R01, R05, R07, R11, R12, R16, R17, R18, R20, R21, R31, R24, R27, R36, R38: 15 steps with momentum and
    weight decay.

    Every rank has the reference's loss, norm, items and decision; after every step the weights to 1e-6; a
    skipped step changes no bit of weights, masters and momentum. One reduction a step on DDP and FSDP2, one
    engine step on ZeRO, `no_sync` never entered there. Mutations: tokens summed on this rank only (R01,
    1e-1); `_boundary(True)` always (ZeRO-1, 2 keep the last pass, 1e-1); pass_ without no_sync, or with
    `set_requires_gradient_sync(True)` always (3 reductions);
    DeepSpeedEngine.discard that returns at once (ZeRO-0 keeps the NaN, ZeRO-3 stops; the boundary of this
    DeepSpeed's stages 1 and 2 overwrites what was left); fewer passes on the rank with the smaller share.
    """
    _, ranks = ran(name)
    rows, model = make_rows(), Net().double()
    optimizer = torch.optim.SGD(model.parameters(), RATE, faults.MOMENTUM, weight_decay=faults.DECAY)
    for number, (numbers, micro, mode) in enumerate(STEPS):
        step, told = [rows[n] for n in numbers], [rank["steps"][number] for rank in ranks]
        at = (number, numbers, micro, mode)
        items = sum(map(n_supervised, step))
        skipped = "nonfinite" if BAD in numbers else None if items else "unsupervised"
        assert {t["skipped"] for t in told} == {skipped}, at
        assert {t["items"] for t in told} == {items}, at
        assert {t["unchanged"] for t in told} == {skipped is not None}, at
        assert all(t["n_held"] for t in told), at  # "unchanged" compared something
        if told[0]["checks"] and skipped is None:
            assert all(t["checks"] == told[0]["checks"] for t in told), at  # gradients, before the step
        if name.startswith(("ddp", "fsdp")):
            assert {t["reductions"] for t in told} == {1}, at
        else:
            assert {t["engine_steps"] for t in told} == {int(skipped is None)}, at
        if skipped is None:
            optimizer.zero_grad()
            objective, recorded = mean_loss(model, step, mode)
            objective.backward()
            right = norm([p.grad for p in model.parameters()])
            for t in told:
                assert (t["loss"], t["grad_norm"]) == (
                    pytest.approx(recorded, rel=1e-6),
                    pytest.approx(right, rel=2e-6),
                )
            optimizer.step()
        else:
            assert {(t["loss"], t["grad_norm"]) for t in told} == {(None, None)}, at
        for t in told:
            if t["weights"]:  # on stage 3 rank 0 alone gathers them
                assert distance(t["weights"], model.state_dict()) < 1e-6, at
        assert told[0]["weights"]


@pytest.mark.parametrize("name", having("clip"))
def test_one_clip_setting_reaches_every_engine(ran, name):
    """R10, R25. Limits 0.5, 1.0 and none: the real length of the update, and the norm before clipping, for 1
    and more passes. Mutation: `gradient_clipping` not set in DeepSpeedEngine.prepare (the update is 27 times
    too long).
    """
    _, ranks = ran(name)
    for rank in ranks[:1]:
        told = rank["clip"]
        assert [t["limit"] for t in told] == [limit for limit in LIMITS for _ in range(2)]
        for t in told:
            assert t["skipped"] is None and t["grad_norm"] > 5
            assert t["length"] == pytest.approx(RATE * (t["limit"] or t["grad_norm"]), rel=1e-4)
    model = Net().double()
    right = norm(
        torch.autograd.grad(
            mean_loss(model, make_rows()[:5], "tokens", weight=3.0)[0], list(model.parameters())
        )
    )
    for rank in ranks:
        assert [t["grad_norm"] for t in rank["clip"][::2]] == pytest.approx([right] * 3, rel=1e-6)


@pytest.mark.parametrize("name", having("bf16"))
def test_bf16_takes_all_passes(ran, name):
    """R19. The update of 1, 4 and 8 passes against the fp32 gradient: bf16's rounding apart, the same.

    Mutation: `_boundary(True)` always (ZeRO-1, 2 keep the last pass).
    """
    _, ranks = ran(name)
    model, rows = Net().double(), make_rows()
    gradient = torch.autograd.grad(
        mean_loss(model, [rows[n] for n in faults.BF16_ROWS], "tokens")[0], list(model.parameters())
    )
    right = torch.cat([g.flatten() for g in gradient])
    for rank in ranks:
        assert {t["skipped"] for t in rank["bf16"]} == {None}
        for t in rank["bf16"]:
            error = float((t["moved"].double() - right).norm() / right.norm())
            assert error < 2e-2
            assert t["grad_norm"] == pytest.approx(float(right.norm()), rel=2e-2)


# Evaluation


def right_means(n: int, mode: str) -> dict:
    rows, model = make_rows()[:n], Net().double()
    numbers = [number for number, row in enumerate(rows) if n_supervised(row)]
    return {"eval_loss": mean_loss(model, rows, mode)[1], "eval_number": float(np.mean(numbers))}


@pytest.mark.parametrize("name", having("evaluate"))
def test_evaluation_does_not_depend_on_processes(ran, name):
    """R72, R88. 1, 7, 8, 9 rows, batch 2 and 4, by tokens and samples: each row once, on every rank the same
    value.

    `number` averages row numbers: a row that is missing or counted twice moves it. Mutations: a shard padded
    by repeats (9 rows, 3 processes); a mean of per-rank means; one pass less on a rank without rows (ZeRO-3
    hangs).
    """
    _, ranks = ran(name)
    for number, (n, _, mode) in enumerate(EVALS):
        for rank in ranks:
            means = rank["evaluate"][number]
            assert means == ranks[0]["evaluate"][number] and means == pytest.approx(
                right_means(n, mode), rel=1e-6
            ), EVALS[number]


def test_evaluation_on_one_process(tmp_path):
    """R72, R88 for W = 1, in this process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for (n, _, mode), means in zip(EVALS, faults.job_evaluate(tmp_path), strict=True):
        assert means == pytest.approx(right_means(n, mode), rel=1e-6)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_weights_begin_the_same_on_every_engine(ran):
    """Mutation: `weights_drawn_whole` left out of build_model (ZeRO-3 draws other weights)."""
    plain, sharded = (ran(name)[1][0]["initial"] for name in ("ddp2", "zero3"))
    assert plain.keys() >= sharded.keys() and len(sharded) > 10
    assert all(torch.equal(plain[name], sharded[name]) for name in sharded)


# Whole runs


@pytest.mark.parametrize("name", having("runs"))
@pytest.mark.parametrize("which", RUNS)
def test_runs_of_any_size(ran, name, which):
    """R31, R35, R38, R43. Steps of 1; of 4, 6, 5, 3; of 7.5, on 2 and 3 processes, two epochs, a row that is
    NaN.

    Each row once an epoch, shares differ by one at most, every rank the same decisions, and the weights are
    those of SGD by hand. Mutations: `drop_last` of a rank's share (rows missing); n rounded to a multiple of
    W (sizes differ).
    """
    folder, ranks = ran(name)
    lines, told = audits(folder / which), records(folder / which)
    assert list(lines) == list(range(len(ranks)))
    rows, model, order = make_rows(), Net().double(), []
    for number, record in enumerate(told):
        shares = [lines[rank][number] for rank in lines]
        assert {share["step"] for share in shares} == {record["step"]}
        counts = [len(share["indices"]) for share in shares]
        assert sum(counts) == record["batch_size"] and max(counts) - min(counts) <= 1
        own = [index for share in shares for index in share["indices"]]
        order += own
        assert record["skipped"] == (
            "nonfinite" if BAD in own else None if sum(n_supervised(rows[i]) for i in own) else "unsupervised"
        )
        if record["skipped"] is None:
            objective, recorded = mean_loss(model, [rows[i] for i in own], "tokens", record["weight"])
            assert record["loss"] == pytest.approx(recorded, rel=1e-5)
            for p, g in zip(
                model.parameters(), torch.autograd.grad(objective, list(model.parameters())), strict=True
            ):
                p.data -= RATE * g
    assert sorted(order) == sorted(list(range(N_ROWS)) * 2)
    asked = {"ones": [1] * 58, "cycle": ([4, 6, 5, 3] * 4)[:13], "seven": [7.5] * 8}[which]
    assert [r["target_batch_size"] for r in told] == asked
    assert distance(torch.load(folder / which / "model" / "weights.pt"), model.state_dict()) < 1e-6


# Schedules of users


@pytest.mark.parametrize("name", having("schedules"))
@pytest.mark.parametrize("schedule", FAULTY)
def test_faulty_schedule_is_one_word_on_every_rank(ran, name, schedule):
    """One message on all ranks, at once. Rank 0 alone is asked: what differs or fails elsewhere does not
    matter.

    Mutations: `except BadSetting` alone in from_rank0 (the others wait for the group's timeout); every rank
    asking its own schedule (`by_rank`: other sizes, a hang); a fixed message length (`at_length`,
    `long_memory`).
    """
    folder, ranks = ran(name)
    told = [rank["schedules"][schedule] for rank in ranks]
    assert all(t["seconds"] < 20 for t in told)
    if schedule in ("by_rank", "elsewhere", "long_memory"):
        assert all(t.get("ended") for t in told)
        assert [r["batch_size"] for r in records(folder / schedule)] == [3] * 4
        return
    if schedule == "memory":  # rank 0 has its traceback, the others hear of it
        assert all("not JSON serializable" in t["line"] for t in told)
        return
    assert {t["kind"] for t in told} == {"BadSetting"} and len({t["line"] for t in told}) == 1
    line = told[0]["line"]
    assert "\n" not in line and re.search(r"the schedule \w+ (failed|returned .+) at step [23]", line)
    value = {
        "nan": "nan",
        "inf": "inf",
        "zero": "0",
        "minus": "-1",
        "text": "'x'",
        "none": "None",
        "list": "[3]",
        "yes": "True",
    }
    assert f"returned {value[schedule]} at step 2" in line if schedule in value else "Error" in line


def test_faulty_schedule_ends_the_launch(tmp_path):
    """Through train.py and the launcher, two processes: our line once, before any traceback, well within 30 s
    of the start of training. Mutation: the exception not broadcast (rank 1 dies of a closed connection, with
    its own traceback).
    """
    started = time.monotonic()
    done = launch(
        "cpu_ddp",
        2,
        "train.py",
        *QUIET,
        "--schedule",
        f"{HERE}:fails",
        "--batch_size",
        "3",
        "--output_dir",
        tmp_path / "run",
        check=False,
        timeout=90,
        ADAPTIVE_TIMEOUT_MINUTES="0.5",
    )
    assert done.returncode != 0 and time.monotonic() - started < 60
    said = done.stdout + done.stderr
    line = "the schedule fails failed at step 3: KeyError: 'no such idea' (faults.py:"
    assert said.count(f"] error: {line}") == 1 and f"\nerror: {line}" in "\n" + done.stderr
    assert done.stderr.index(line) < done.stderr.index("Traceback") and len(records(tmp_path / "run")) == 2
    assert "Connection closed" not in said
