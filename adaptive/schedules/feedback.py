"""Functions of measurements: sizes that follow gradients, noise, memory, time or loss.

What a schedule names is measured, and nothing else. Those that read noise, memory or time see numbers that
depend on the cut or the machine, and may decide other sizes there. Measured sizes are in samples over all
processes: divided by `size_unit` they are in the unit of the schedule's own.
To add one: a function or a class whose call names signals (adaptive/signals.py), and a line in SCHEDULES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def bounded(size: float, current_size: float, smallest: float, largest: float, factor: float = 2.0) -> float:
    """`size` within [smallest, largest] and at most `factor` times up or down from the current one."""
    size = min(max(size, current_size / factor), current_size * factor)
    return min(max(size, smallest), largest)


def settled(size: float, current_size: float, margin: float) -> float:
    """`size`, or the current one where the change is at most `margin` of it: no flapping."""
    return size if abs(size - current_size) > margin * current_size else current_size


KEPT = 100


@dataclass
class gradient_memory:  # noqa: N801 (named as it is written on the command line)
    """Halve when the gradient norm or the memory in use is high, double when it is low; memory wins.

    The batch-size manager for large models: gradient norm above 10 halves, below 0.1 doubles; memory above
    0.8 of the device halves, below 0.4 doubles. Where both rules speak, memory decides. The first `quiet`
    decisions change nothing, and after a change `wait` pass.
    """

    smallest: float = 1
    largest: float = 64
    high_norm: float = 10.0
    low_norm: float = 0.1
    high_memory: float = 0.8
    low_memory: float = 0.4
    quiet: int = 100
    wait: int = 10
    history: list = field(default_factory=list)  # [step, size] of the last KEPT changes

    def __call__(self, step, current_size, grad_norm=None, memory_usage=None):
        if step < self.quiet or (self.history and step - self.history[-1][0] < self.wait):
            return current_size
        by_norm = _halve_or_double(grad_norm, self.low_norm, self.high_norm)
        by_memory = _halve_or_double(memory_usage, self.low_memory, self.high_memory)
        factor = by_memory if by_memory != 1 else by_norm
        size = min(max(current_size * factor, self.smallest), self.largest)
        if size != current_size:
            self.history = [*self.history, [step, size]][-KEPT:]  # it travels with every decision
        return size

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


def _halve_or_double(value: float | None, low: float, high: float) -> float:
    if value is None:
        return 1.0
    return 0.5 if value > high else 2.0 if value < low else 1.0


def noise_scale(
    step, current_size, noise_scale, size_unit=1.0, c=1.0, smallest=2, largest=1024, interval=20, margin=0.1
):
    """Follow `c` times the measured noise scale (McCandlish et al. 2018), at most x2 every `interval`
    decisions.

    A step of one sample has no noise to measure, hence `smallest`. Changes below `margin` of the size are
    left alone, so that it does not flap.
    """
    if step % interval:
        return current_size
    size = bounded(c * noise_scale / size_unit, current_size, smallest, largest)
    return settled(size, current_size, margin)


def seesaw_noise(
    step, current_size, initial_size, lr_decay, noise_scale, size_unit=1.0, c=1.0, largest=1024, interval=20
):
    """`seesaw` that waits: no larger than `c` times the measured noise scale, and never shrinking.

    Growing the size in place of letting the learning rate fall is a fair trade only while the size is small
    against the noise scale (Meterez et al. 2025). Where it waits, the rate falls in full. Needs --lr_scaling
    sqrt, like `seesaw`.
    """
    if step % interval:
        return current_size
    size = min(initial_size / max(lr_decay, 1e-12), c * noise_scale / size_unit)
    return bounded(size, current_size, current_size, max(largest, current_size))


seesaw_noise.needs = {"lr_scaling": "sqrt"}


def norm_test(
    step, current_size, grad_variance, grad_norm, size_unit=1.0, eta=1.0, largest=1024, interval=20
):
    """Grow until the gradient's variance is at most eta^2 of its squared norm; never shrink.

    The norm test (Byrd et al. 2012; Lau et al. 2024, "AdAdaGrad"): size >= tr(S) / (eta |g|)^2.
    """
    signal = (eta * grad_norm) ** 2
    if step % interval or not signal:
        return current_size
    size = grad_variance / signal / size_unit
    return bounded(size, current_size, current_size, max(largest, current_size))


def cosine_target(
    step, current_size, grad_cosine, target=0.8, smallest=2, largest=1024, interval=20, factor=1.1,
    margin=0.02,
):  # fmt: skip
    """Grow where two halves of a step agree less than `target`, else shrink (SimiGrad, Qin et al. 2021).

    Within `margin` of the target the size stays.
    """
    if step % interval or abs(grad_cosine - target) <= margin:
        return current_size
    change = factor if grad_cosine < target else 1 / factor
    return bounded(current_size * change, current_size, smallest, largest)


def cabs(
    step, current_size, learning_rate, grad_variance, loss_ema, size_unit=1.0, c=1.0, smallest=2,
    largest=1024, interval=20, margin=0.1,
):  # fmt: skip
    """Size `c` lr tr(S) / loss (Balles et al. 2017, "Coupling Adaptive Batch Sizes with Learning Rates").

    The rate and the size are coupled by it, so it wants --lr_scaling none. Derived for SGD and a loss whose
    least value is 0; for Adam, whose steps do not shrink with the gradient, `c` has to be found.
    """
    if step % interval or loss_ema <= 0:
        return current_size
    size = c * learning_rate * grad_variance / loss_ema / size_unit
    return settled(bounded(size, current_size, smallest, largest), current_size, margin)


@dataclass
class goodput:  # noqa: N801
    """The size that learns most per second (Qiao et al. 2021, "Pollux"): throughput times efficiency.

    A step of m samples takes T = a + b m seconds, fitted to the steps so far, and a sample is worth
    (B + m0) / (B + m) of one at the initial size m0, B the noise scale. Their product,
    m / T * (B + m0) / (B + m), is largest at m = sqrt(a B / b). Until the sizes seen differ enough for a fit,
    the size grows by `explore`. Old steps fade with a half-life of `memory` steps; the first steps, and
    pauses (an evaluation, a checkpoint), are left out.
    """

    smallest: float = 2
    largest: float = 1024
    interval: int = 20
    margin: float = 0.1
    explore: float = 1.25
    memory: float = 500
    sums: list = field(default_factory=lambda: [0.0] * 5)  # of 1, m, m^2, T, m T, fading

    def __call__(self, step, current_size, noise_scale=None, step_seconds=None, size_unit=1.0):
        m, keep = current_size * size_unit, 0.5 ** (1 / self.memory)
        n, _, _, seconds, _ = self.sums
        if step > 3 and step_seconds and not (n > 5 and step_seconds > 5 * seconds / n):
            seen = (1.0, m, m * m, step_seconds, m * step_seconds)
            self.sums = [keep * old + new for old, new in zip(self.sums, seen, strict=True)]
        if step % self.interval or noise_scale is None:
            return current_size
        best = self.best_size(noise_scale)
        size = current_size * self.explore if best is None else best / size_unit
        return settled(bounded(size, current_size, self.smallest, self.largest), current_size, self.margin)

    def best_size(self, noise_scale: float) -> float | None:
        """sqrt(a B / b) in samples, of the least-squares line; None where the sizes seen are too alike."""
        n, m, squares, seconds, products = self.sums
        spread = squares / n - (m / n) ** 2 if n else 0.0
        if not n or spread < 0.01 * (m / n) ** 2:  # sizes within 10 % of each other
            return None
        slope = (products / n - m / n * seconds / n) / spread
        start = seconds / n - slope * m / n
        if slope <= 0:  # a larger step takes no longer
            return math.inf
        return math.sqrt(max(start, 0.0) * noise_scale / slope)

    def state_dict(self):
        return {"sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"]


@dataclass
class loss_plateau:  # noqa: N801
    """Multiply the size by `factor` when the averaged loss has not fallen by `threshold` for `patience`
    decisions.
    """

    patience: int = 100
    factor: float = 2.0
    threshold: float = 1e-3
    largest: float = 1024
    best: float | None = None
    since: int = 0

    def __call__(self, step, current_size, loss_ema):
        if self.best is None or loss_ema < self.best - self.threshold:
            self.best, self.since = loss_ema, step
        if step - self.since < self.patience:
            return current_size
        self.since = step
        largest = max(self.largest, current_size)
        return bounded(current_size * self.factor, current_size, 0, largest, min(self.factor, 2.0))

    def state_dict(self):
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state):
        self.best, self.since = state["best"], state["since"]
