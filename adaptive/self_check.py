"""A step's plan -> the relative difference between its gradient here and on one process alone (--self_check).

Every k steps, before the step itself, its gradient is computed twice and thrown away: as the run does it, by
all processes through the engine, and by rank 0 alone through the bare model, all samples of the step in
passes of its own. Their difference, a norm over a norm, is recorded as `self_check`: rounding where all is
right, and more where an engine, a driver or a fork of the loop scales, drops or repeats something.

Both are computed without dropout (the masks of other processes cannot be drawn here), so that the check sees
the same gradient on any number of processes. Training is left as it was: no weight, buffer, draw or counter
moves. It costs rank 0 a pass over the whole step and a second gradient in memory; under ZeRO-3 and FSDP2,
whose bare model cannot run alone, also a whole copy of the model. Layers that couple the samples of a pass
(BatchNorm in training mode) are beyond it, as they are beyond the loop; with fp16 the loss scaler would
notice, so it is refused there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from adaptive.config import Config
from adaptive.data import Data, Share
from adaptive.engine import weights_drawn_whole
from adaptive.noise_scale import PassNorms
from adaptive.plan import StepPlan

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}  # by the type of the arithmetic


def check_step(
    config: Config, micro_batch: Any, task: Any, data: Data, plan: StepPlan, gradient: Callable,
    weights: dict[str, float], own: Share,
) -> dict[str, float | None]:  # fmt: skip
    """{"self_check": relative difference} at every --self_check steps, else {}; collective.

    `micro_batch`: memory.MicroBatch. `gradient` is train.gradient; `own`: this process's rows of the step.
    Warns above the tolerance.
    """
    engine, report, step = micro_batch.engine, micro_batch.report, micro_batch.state.step + 1
    every = config.run.self_check
    if not every or step % every or not plan.size:
        return {}
    batch = micro_batch.settings()
    with _untouched(engine, step):
        model = _bare_model(config, engine, task)
        alone, every_row = Alone(engine, model), data.share(plan, weights, whole=True)
        every_row = every_row.without_bad(every_row.bad_by_group(), batch.normalize_by == "samples")
        engine.from_rank0(lambda: gradient(alone, task, every_row, data.idle_row, batch) and None)
        if gradient(engine, task, own, data.idle_row, batch) is None:
            return {}  # out of memory, which the step itself will deal with
        squares = [(0.0, 0.0)]
        for at, reduced in enumerate(engine.full_gradient()):
            if engine.is_main:
                squares.append(_compared(alone.sums[at], reduced))
        engine.discard()
    apart, whole = engine.sum([sum(parts) for parts in zip(*squares, strict=True)])
    difference = math.sqrt(apart / whole) if whole else math.sqrt(apart)
    dtype = torch.bfloat16 if config.hardware.bf16 else getattr(torch, config.model.dtype)
    if not difference <= TOLERANCE[dtype]:  # NaN too
        report.warn(
            f"self check of step {step}: the gradient of {engine.world_size} process(es) differs from that "
            f"of one by {difference:.1e} of its norm, more than the {TOLERANCE[dtype]:g} of rounding"
        )
    return {"self_check": difference}


class Alone:
    """The verbs of an engine that train.gradient uses, for one process and the bare model."""

    sharded, rank, world_size, stop_asked, wanted, loss_scale = False, 0, 1, False, frozenset(), 1.0

    def __init__(self, engine: Any, model: torch.nn.Module):
        self.model, self.device = model, engine.device
        self.read, self.to_device = engine.read, engine.to_device
        self.norms = PassNorms([], wanted=False)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sums: list[torch.Tensor | None] = [None] * len(self.parameters)

    def open_step(self, batches: list, totals: list[int] | None) -> Callable[[], list[int] | None]:
        return lambda: totals

    def passes(self):
        return contextlib.nullcontext()

    def pass_(self, last: bool, idle: bool = False):
        return contextlib.nullcontext()

    def reduce_gradient(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor) -> None:
        """Into `sums`: p.grad, and the hooks of DDP and ZeRO on it, are not touched."""
        fresh = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.sums, fresh, strict=True)
        self.sums = [old if new is None else new if old is None else old + new for old, new in pairs]

    def gather(self, *own: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[tensor] for tensor in own]

    def squared_norm(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def seconds(self) -> float:
        return 0.0

    def sum(self, values: list[float]) -> list[float]:
        return list(map(float, values))


def _compared(own: torch.Tensor | None, reduced: torch.Tensor | None) -> tuple[float, float]:
    """Squared norms of the difference and of `own`; a gradient that is None is 0."""
    if own is None and reduced is None:
        return 0.0, 0.0
    own = torch.zeros_like(reduced) if own is None else own
    reduced = torch.zeros_like(own) if reduced is None else reduced
    apart = reduced.to(own.device).double() - own.double()
    return float(apart.square().sum()), float(own.double().square().sum())


def _bare_model(config: Config, engine: Any, task: Any) -> torch.nn.Module:
    """What rank 0 can run without the others; under ZeRO-3 and FSDP2 a copy, which only rank 0 fills."""
    if not engine.partitions_weights:
        return engine.module
    state = engine.whole_state()
    if not engine.is_main:
        return torch.nn.Module()
    with weights_drawn_whole():
        model = task.model(config).to(next(iter(state.values())).dtype).to(engine.device)
    model.load_state_dict(state, strict=False)  # tied weights come once
    return model.eval()


@contextlib.contextmanager
def _untouched(engine: Any, step: int):
    """Evaluation mode, no noise measured; buffers and draws as they were when it ends."""
    measuring, engine.norms.on = engine.norms.on, False
    buffers = [buffer.clone() for buffer in engine.module.buffers()]
    engine.model.eval()
    try:
        yield
    finally:
        engine.model.train()
        with torch.no_grad():
            for buffer, kept in zip(engine.module.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        engine.norms.on = measuring
        engine.seed(step)
