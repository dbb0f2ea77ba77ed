"""Gradients of single passes -> the gradient noise scale (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A).

The mean gradient of b samples has the expected squared norm |G|^2 + tr(S)/b. Passes with b_k samples and the
whole step with n give two sizes, hence two equations:

    |G|^2 = (n |g|^2 - b |g_b|^2) / (n - b)          tr(S) = (|g_b|^2 - |g|^2) / (1/b - 1/n)          (1)

with |g_b|^2 the mean of |g_k|^2 over the passes and 1/b the mean of 1/b_k, which is right for unequal passes.
One step is far too noisy, and the mean of ratios is biased: both parts are averaged over samples, and then
divided. The noise scale tr(S) / |G|^2 is the batch size, in samples, at which the noise of a step equals its
signal.

|g_k| comes from hooks on the parameters, which see this process's gradient of this backward before any
reduction: on one process, DDP, ZeRO 1 to 3 and FSDP2 alike. Nothing is copied: each hook adds one squared
norm to a scalar on the device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from adaptive.config import Batch

NORM_OF = 2**13  # numbers whose norm a CPU takes at once in fp32: to 5e-6 of equal ones, 1e-8 of random ones
SIGNALS = {"noise_scale", "grad_cosine", "grad_variance"}  # those that need the norms of single passes


class PassNorms:
    """Squared norms of the mean gradient of each pass of one step, summed over this process's passes."""

    def __init__(self, parameters: list[torch.nn.Parameter], wanted: bool):
        """Hooks are set only where a signal is `wanted`, on `parameters`, the trainable ones."""
        self.wanted, self.on = wanted, False
        self._clear()
        for parameter in parameters if wanted else ():
            parameter.register_hook(self._add)

    def prepare(self, batch: Batch, step: int, size: int, world_size: int) -> Batch:
        """Before a step of `size` samples: its settings, with passes split in two where it is measured.

        Two passes are needed over all processes; how many there are does not change the gradient.
        """
        self._clear()
        self.on = self.wanted and step % batch.noise_every == 0
        if not self.on or world_size > 1 or size < 2:
            return batch
        return replace(batch, micro_batch_size=min(batch.micro_batch_size, -(-size // 2)))

    def _clear(self) -> None:
        self.squares: list[torch.Tensor] = []
        self._square: torch.Tensor | None = None
        self._scale: float | None = None
        self.sums = [0.0, 0, 0, 0.0]  # of 1/b_k, passes, samples, weight; this process's

    def _add(self, gradient: torch.Tensor) -> None:
        if not self.on:
            return
        kind = torch.promote_types(gradient.dtype, torch.float32)  # squares of bf16 would lose too much
        norms = [torch.linalg.vector_norm(part, dtype=kind) for part in _parts(gradient.detach())]
        square = sum(norm.double().square() for norm in norms)
        self._square = square if self._square is None else self._square + square

    def close_pass(self, items: list[int], scales: torch.Tensor, engine: Any) -> None:
        """After a backward; `items` (rows,) supervised, none in an idle pass; `scales` (rows,) on their
        losses.
        """
        if not self.on:
            return
        samples, square = sum(n > 0 for n in items), self._square
        self._square = None
        scaled = sum(scale * n for scale, n in zip(scales.tolist(), items, strict=False))
        weight = scaled / engine.world_size
        self._scale = self._scale or engine.loss_scale  # once a step: in fp16 it is a host read
        factor = engine.world_size * self._scale  # what the loss was multiplied by beside
        if square is not None and weight:
            self.squares.append(square / (weight * factor) ** 2)
            passed = (1 / samples, 1, samples, weight)
            self.sums = [a + b for a, b in zip(self.sums, passed, strict=True)]

    def total(self) -> list[torch.Tensor]:
        """[sum of |g_k|^2 over this process's passes], an fp64 scalar on the device; [] without one."""
        return [torch.stack(self.squares).sum()] if self.squares else []


def squared_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares as an fp64 scalar; norms per tensor in one fused call, no host read."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In their own type the norms of halves would overflow, or have 3 digits.
    kind = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    gradients = [part for g in gradients for part in _parts(g)]
    norms = torch._foreach_norm(gradients, dtype=kind)
    norms = torch.stack([n.to(device) for n in norms]).double()
    return norms.dot(norms)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A CPU adds one by one: the fp32 norm of 10^8 numbers comes out 1 % too small."""
    whole = (
        tensor.numel() <= 8 * NORM_OF or tensor.device.type != "cpu"
    )  # few pieces cost more than they mend
    return (tensor,) if whole else tensor.reshape(-1).split(NORM_OF)


def estimate(square: float, pass_square: float, inverse_size: float, n: int) -> tuple[float, float] | None:
    """(|G|^2, tr(S)) of equation (1), None where no estimate is possible (one pass only, or nothing finite).

    square: |g|^2 of the step's mean gradient; pass_square: mean of |g_k|^2; inverse_size: mean of 1/b_k; n:
    samples.
    """
    if not (math.isfinite(square) and math.isfinite(pass_square)) or inverse_size * n <= 1 + 1e-9:
        return None
    b = 1 / inverse_size
    return (n * square - b * pass_square) / (n - b), (pass_square - square) / (1 / b - 1 / n)


def averaged(
    memory: dict[str, float] | None, parts: tuple[float, float], n: int, half_life: float
) -> dict[str, float]:
    """Fold one step's parts into the running means, weighing steps by their samples; bias-corrected by
    `weight`.

    memory: {"signal", "noise", "weight"} so far; half_life: in samples.
    """
    keep = 0.5 ** (n / half_life)
    memory = memory or {"signal": 0.0, "noise": 0.0, "weight": 0.0}
    fresh = dict(zip(("signal", "noise"), parts, strict=True)) | {"weight": 1.0}
    return {name: keep * memory[name] + (1 - keep) * fresh[name] for name in memory}


def noise_scale(memory: dict[str, Any] | None) -> float | None:
    """tr(S) / |G|^2 in samples; None while there is no estimate or the signal is not positive."""
    if not memory or memory["signal"] <= 0:
        return None
    return max(memory["noise"], 0.0) / memory["signal"]
