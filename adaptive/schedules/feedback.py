"""Functions of measurements: sizes that follow gradients, noise, memory or loss.

What a schedule names is measured, and nothing else. Those that read noise, memory or time see numbers that
depend on the cut or the machine, and may decide other sizes there.
To add one: a function or a class whose call names signals (adaptive/signals.py), and a line in SCHEDULES.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def bounded(size: float, current_size: float, smallest: float, largest: float, factor: float = 2.0) -> float:
    """`size` within [smallest, largest] and at most `factor` times up or down from the current one."""
    size = min(max(size, current_size / factor), current_size * factor)
    return min(max(size, smallest), largest)


@dataclass
class gradient_memory:  # noqa: N801 (named as it is written on the command line)
    """Halve when the gradient norm or the memory in use is high, double when it is low; memory wins.

    The batch-size manager for large models: gradient norm above 10 halves, below 0.1 doubles; memory above
    0.8 of the device halves, below 0.4 doubles. The first `quiet` decisions change nothing, and after a
    change `wait` pass.
    """

    smallest: float = 1
    largest: float = 64
    high_norm: float = 10.0
    low_norm: float = 0.1
    high_memory: float = 0.8
    low_memory: float = 0.4
    quiet: int = 100
    wait: int = 10
    history: list = field(default_factory=list)  # [step, size] of every change

    def __call__(self, step, current_size, grad_norm, memory_usage=None):
        if step < self.quiet or (self.history and step - self.history[-1][0] < self.wait):
            return current_size
        size = current_size
        if grad_norm > self.high_norm:
            size = current_size / 2
        elif grad_norm < self.low_norm:
            size = current_size * 2
        if memory_usage is not None and memory_usage > self.high_memory:
            size = current_size / 2
        elif memory_usage is not None and memory_usage < self.low_memory and grad_norm <= self.high_norm:
            size = current_size * 2
        size = bounded(size, current_size, self.smallest, self.largest)
        if size != current_size:
            self.history.append([step, size])
        return size

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


def noise_scale(step, current_size, noise_scale, c=1.0, smallest=2, largest=1024, interval=20, margin=0.1):
    """Follow `c` times the measured noise scale (McCandlish et al. 2018), at most x2 every `interval`
    decisions.

    A step of one sample has no noise to measure, hence `smallest`. Changes below `margin` of the size are
    left alone, so that it does not flap.
    """
    size = bounded(c * noise_scale, current_size, smallest, largest)
    return size if step % interval == 0 and abs(size - current_size) > margin * current_size else current_size


def norm_test(step, current_size, grad_variance, grad_norm, eta=1.0, largest=1024, interval=20):
    """Grow until the gradient's variance is at most eta^2 of its squared norm; never shrink.

    The norm test (Byrd et al. 2012; Lau et al. 2024, "AdAdaGrad"): size >= tr(S) / (eta |g|)^2.
    """
    if step % interval or grad_norm <= 0:
        return current_size
    return bounded(
        grad_variance / (eta * grad_norm) ** 2, current_size, current_size, max(largest, current_size)
    )


def cosine_target(
    step, current_size, grad_cosine, target=0.8, smallest=2, largest=1024, interval=20, factor=1.1
):
    """Grow where two halves of a step agree less than `target`, else shrink (SimiGrad, Qin et al. 2021)."""
    if step % interval:
        return current_size
    return bounded(
        current_size * (factor if grad_cosine < target else 1 / factor), current_size, smallest, largest
    )


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
        return bounded(
            current_size * self.factor, current_size, 0, max(self.largest, current_size), self.factor
        )

    def state_dict(self):
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state):
        self.best, self.since = state["best"], state["since"]
