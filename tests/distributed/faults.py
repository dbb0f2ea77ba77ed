"""What test_faults.py launches: one process group, many faults; rank r writes what it saw to OUT/rank{r}.pt.

    accelerate launch ... faults.py OUT JOB [JOB ...]

Steps are given as rows of a small fixed table, so that the test can follow them by hand in one process.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

import train
from adaptive.config import BadSetting, parse
from adaptive.data import Share
from adaptive.engine import Engine
from adaptive.evaluate import evaluate
from adaptive.tasks import Loaded
from adaptive.tasks.causal_lm import CausalLM

HERE = str(Path(__file__).resolve())
WORDS, N_ROWS = 11, 29
BLIND, BAD = 5, 6  # rows: nothing supervised; loss not a number
QUIET = [
    "--task",
    f"{HERE}:Table",
    "--report_to",
    "none",
    "--lr_scaling",
    "none",
    "--lr_scheduler_type",
    "constant",
    "--optim",
    "sgd",
    "--learning_rate",
    "0.1",
    "--eval_every",
    "never",
    "--audit",
    "--max_grad_norm",
    "0",
]
# (rows of the step, micro-batch, mode); position j of a step belongs to rank j mod W
STEPS = [
    ([0, 1], 64, "tokens"),  # R01: 3 tokens on rank 0, 13 on rank 1
    ([0, 1], 64, "samples"),
    (
        [0, BLIND, 2, BLIND, 3, BLIND],
        1,
        "tokens",
    ),  # R07: every other sample without supervision; one rank has none
    ([0, BLIND, 2, BLIND, 3, BLIND], 2, "samples"),
    ([7, 8, 9, 10, 11, 12, 13, 14], 1, "tokens"),  # R18: passes of 1, 2, 4, 8 tokens a row
    ([BLIND, BLIND, BLIND], 1, "tokens"),  # nothing to learn from
    ([1, BAD, 2], 1, "tokens"),  # NaN in one pass of one rank
    ([BAD], 4, "samples"),
    ([3, 4, 7, 9, 11, 13], 1, "tokens"),  # R17: 3, 1, 4, 2 passes on two processes
    ([4, 15], 1, "samples"),
    ([16, 17, 18, 19, 20, 21, 22], 1, "tokens"),
    ([0, 1, 2], 1, "tokens"),
    ([23], 1, "tokens"),  # R31, R36: fewer samples than processes
    ([24, 25, 26, 27, 28], 1, "tokens"),  # shares of 3 and 2; of 2, 2 and 1
    ([15, 16, 17, 18, 19, 20, 21, 22], 3, "samples"),  # R38: 8 on three processes
]
RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.05
BF16_ROWS = list(range(7, 23))
LIMITS = (0.5, 1.0, 0.0)
EVALS = [(n, size, mode) for n in (1, 7, 8, 9) for size in (2, 4) for mode in ("tokens", "samples")]


class Net(torch.nn.Module):
    """Embedding, tanh, logits; weights from a generator of its own."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.embed, self.inner = torch.nn.Embedding(WORDS, 6), torch.nn.Linear(6, 5)
        self.head = torch.nn.Linear(5, WORDS)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=draw)

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        logits = self.head(torch.tanh(self.inner(self.embed(input_ids))))
        return CausalLMOutput(logits=logits)


def make_rows() -> list[dict]:
    """29 rows; row 0 has 3 supervised tokens, row 1 has 13, rows 7 to 14 have 1, 1, 2, 2, 4, 4, 8, 8."""
    draw = np.random.default_rng(3)
    counts = {0: 3, 1: 13, BLIND: 0} | {7 + k: 2 ** (k // 2) for k in range(8)}
    rows = []
    for number in range(N_ROWS):
        count = counts.get(number, int(draw.integers(1, 9)))
        tokens = draw.integers(0, WORDS, count + 1 + int(draw.integers(0, 4)))
        labels = tokens.copy()
        labels[: len(tokens) - count] = -100
        rows.append(
            {
                "input_ids": tokens,
                "labels": labels,
                "number": np.int64(number),
                "bad": np.int64(number == BAD),
            }
        )
    return rows


class Table(CausalLM):
    def load(self, config):
        return Loaded(train=make_rows(), eval=make_rows()[:BAD])

    def model(self, config):
        return Net()

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * torch.where(batch["bad"] > 0, torch.nan, 1.0)

    def measure(self, model, batch):
        return {"loss": super().loss_sum(model, batch), "number": batch["number"].double()}


# Schedules of users


def by_rank(step, current_size):
    """Another answer on every rank."""
    return 3 + (dist.get_rank() if dist.is_initialized() else 0)


def fails_elsewhere(step, current_size):
    """Raises on every rank but the one that decides."""
    if dist.get_rank():
        raise RuntimeError("never called here")
    return 3


def fails(step, current_size):
    if step == 2:
        raise KeyError("no such idea")
    return 3


def fails_at_length(step, current_size):
    raise ValueError("x" * 40_000)


def answers(step, value):
    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "zero": 0,
        "minus": -1,
        "text": "x",
        "none": None,
        "list": [3],
        "yes": True,
    }[value]


class Remembers:
    """State of its own: of `length` numbers, or of what JSON does not know."""

    def __init__(self, length: int = 0):
        self.length = length

    def __call__(self, step, current_size):
        return 3

    def state_dict(self):
        return list(range(self.length)) if self.length else {1, 2}

    def load_state_dict(self, state):
        pass


FAULTY = {
    "by_rank": f"{HERE}:by_rank",
    "elsewhere": f"{HERE}:fails_elsewhere",
    "long_memory": f"{HERE}:Remembers(length=9000)",
    "fails": f"{HERE}:fails",
    "at_length": f"{HERE}:fails_at_length",
    "memory": f"{HERE}:Remembers()",
} | {
    name: f"{HERE}:answers(value='{name}')"
    for name in ("nan", "inf", "zero", "minus", "text", "none", "list", "yes")
}


# Jobs: engine-level


def start(*arguments: str, momentum: float = MOMENTUM, decay: float = DECAY) -> tuple[Engine, Table]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    engine, task = Engine.start(parse([*QUIET, *arguments])), Table()
    model = task.model(engine.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum, weight_decay=decay)
    engine.prepare(model, optimizer)
    return engine, task


def one_step(engine, task, numbers, micro, mode, weight=None):
    """train.gradient on this rank's part of the step."""
    rows = make_rows()
    batch = copy.copy(engine.config.batch)
    batch.micro_batch_size, batch.normalize_by = micro, mode
    own = [rows[number] for number in numbers[engine.rank :: engine.world_size]]
    weight = 1 / len(numbers) if weight is None else weight
    part = Share.alike(own, len(numbers), weight)
    return train.gradient(engine, task, part, lambda: rows[0], batch)


def whole(engine) -> dict[str, torch.Tensor]:
    """Every weight, gathered (on stage 3 the other ranks have their parts: the sums suffice there)."""
    return {name: tensor.detach().float().clone() for name, tensor in engine.whole_state().items()}


def held(engine) -> list[torch.Tensor]:
    """Everything this rank's optimizer keeps: master weights (on ZeRO its part of them) and momentum."""
    wrapper = getattr(engine.model, "optimizer", None)
    if wrapper is None or isinstance(wrapper, torch.optim.Optimizer):
        masters, inner = [], wrapper or engine.optimizer
    elif hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        masters, inner = wrapper.fp32_partitioned_groups_flat, wrapper.optimizer
    else:
        masters, inner = wrapper.single_partition_of_fp32_groups, wrapper.optimizer
    momenta = [state["momentum_buffer"] for state in inner.state.values() if "momentum_buffer" in state]
    return [local(tensor).detach().clone() for tensor in [*masters, *momenta]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it under FSDP2, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def masters(engine) -> torch.Tensor:
    """All weights as the optimizer has them, in fp32, in one vector."""
    tensors = engine.module.parameters()
    if hasattr(getattr(engine.model, "optimizer", None), "fp32_groups"):  # stage 0
        tensors = [p for group in engine.model.optimizer.fp32_groups for p in group]
    elif hasattr(engine.model, "backward"):
        from deepspeed.utils import safe_get_full_fp32_param

        tensors = map(safe_get_full_fp32_param, tensors)
    if isinstance(engine.model, FSDPModule):
        tensors = [p.full_tensor() for p in tensors]
    return torch.cat([p.detach().flatten().clone() for p in tensors])


def job_steps(out: Path) -> list[dict]:
    """STEPS in a row; what was measured, whether ranks agree, how often gradients were reduced, and the
    weights.
    """
    engine, task = start("--max_grad_norm", "0")
    calls, hooked, seen = [], not hasattr(engine.model, "backward"), []
    if isinstance(engine.model, FSDPModule):
        reduce = dist.reduce_scatter_single
        dist.reduce_scatter_single = lambda *a, **k: (calls.append(1), reduce(*a, **k))[1]
    elif hooked and engine.world_size > 1:
        engine.overlaps, engine.proven = True, 10**9  # as on GPUs: the last backward reduces
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        engine.model.register_comm_hook(
            None, lambda state, bucket: (calls.append(1), allreduce_hook(state, bucket))[1]
        )
    engine_steps = []
    if not hooked:
        plain = engine.model.step
        engine.model.step = lambda *a, **k: (engine_steps.append(1), plain(*a, **k))[1]
        engine.model.no_sync = None  # R16: whoever enters it fails
    for numbers, micro, mode in STEPS:
        del calls[:], engine_steps[:]
        before, memory = whole(engine), held(engine)
        measured = one_step(engine, task, numbers, micro, mode)
        checks = [
            float(g.double().sum()) if g is not None else 0.0
            for g in (engine.full_gradient() if hooked else ())
        ]
        skipped = train.update(engine, measured, RATE)
        after, kept = whole(engine), held(engine)
        same = all(torch.equal(before[k], after[k]) for k in before) and all(map(torch.equal, memory, kept))
        seen.append(
            {
                "loss": measured.loss,
                "grad_norm": measured.grad_norm,
                "items": measured.items,
                "skipped": skipped,
                "checks": checks if hooked else None,
                "reductions": len(calls),
                "engine_steps": len(engine_steps),
                "unchanged": same and len(memory) == len(kept),
                "n_held": len(kept),
                "weights": after,
            }
        )
    return seen


def job_clip(out: Path) -> list[dict]:
    """One step with a large gradient at each limit: norm before clipping and the real length of the
    update.
    """
    seen = []
    for limit in LIMITS:
        engine, task = start("--max_grad_norm", str(limit), momentum=0.0, decay=0.0)
        before = whole(engine)
        for micro in (64, 1):
            measured = one_step(engine, task, [0, 1, 2, 3, 4], micro, "tokens", weight=3.0)
            skipped = train.update(engine, measured, RATE)
            after = whole(engine)
            length = sum(float((after[k] - before[k]).double().square().sum()) for k in after) ** 0.5
            seen.append(
                {"limit": limit, "grad_norm": measured.grad_norm, "length": length, "skipped": skipped}
            )
            before = after
    return seen


def job_bf16(out: Path) -> list[dict]:
    """R19. The update of 16 rows in bf16, cut into 1, 4 and 8 passes."""
    seen = []
    for micro in (64, 2, 1):
        engine, task = start("--bf16", momentum=0.0, decay=0.0)
        before = masters(engine)
        measured = one_step(engine, task, BF16_ROWS, micro, "tokens")
        skipped = train.update(engine, measured, 1.0)
        seen.append({"moved": before - masters(engine), "grad_norm": measured.grad_norm, "skipped": skipped})
    return seen


def job_evaluate(out: Path) -> list[dict]:
    engine, task = start()
    return [evaluate(engine, task, make_rows()[:n], size, mode) for n, size, mode in EVALS]


def job_initial(out: Path) -> dict:
    """Weights of a preset before the first step."""
    engine, task = start()
    engine.seed(0, same_everywhere=True)
    config = parse([*QUIET, "--model", "llama-tiny"])
    model = CausalLM().model(config)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return whole(engine)


# Jobs: whole runs


def job_schedules(out: Path) -> dict:
    """Each faulty schedule: the exception of this rank, how long it took, or the sizes that were run."""
    said = {}
    for name, text in FAULTY.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        started = time.monotonic()
        try:
            train.main(
                parse(
                    [
                        *QUIET,
                        "--output_dir",
                        str(out / name),
                        "--schedule",
                        text,
                        "--batch_size",
                        "3",
                        "--max_steps",
                        "4",
                        "--save_every",
                        "2 steps",
                    ]
                )
            )
            said[name] = {"ended": True}
        except (BadSetting, RuntimeError, TypeError) as error:
            said[name] = {"kind": type(error).__name__, "line": str(error)}
        said[name]["seconds"] = time.monotonic() - started
    return said


def job_runs(out: Path) -> None:
    """Sizes of R31, R35, R38 over an epoch of 29 rows, one of which is NaN."""
    for name, (size, schedule, micro) in RUNS.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        train.main(
            parse(
                [
                    *QUIET,
                    "--output_dir",
                    str(out / name),
                    "--schedule",
                    schedule,
                    "--batch_size",
                    size,
                    "--micro_batch_size",
                    micro,
                    "--num_train_epochs",
                    "2",
                    "--check_agreement",
                    "--epoch_end",
                    "wrap",
                ]
            )
        )


def cycle(step, current_size):
    return [4, 6, 5, 3][step % 4]


RUNS = {
    "ones": ("1", "constant", "1"),
    "cycle": ("4", f"{HERE}:cycle", "1"),
    "seven": ("7.5", "constant", "3"),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    results = {}
    for job in sys.argv[2:]:
        began = time.monotonic()
        results[job] = globals()[f"job_{job}"](folder)
        results[f"{job} seconds"] = time.monotonic() - began
    rank = dist.get_rank()
    torch.save({"world_size": dist.get_world_size(), **results}, folder / f"rank{rank}.pt")
    Engine.leave()
