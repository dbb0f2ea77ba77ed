"""One size for a whole run that gives up when it has clearly lost: a candidate of tools/critical_batch.py."""

from __future__ import annotations

import signal


class candidate:  # noqa: N801 (named as it is written on the command line)
    """`size` for ever; asks the run to stop, as a signal from outside would, when an evaluation is above its
    bound.

    bounds: [[samples, eval_loss], ...] in rising order; an evaluation is held to the last one not after it.
    """

    def __init__(self, size: float, bounds: list | tuple = ()):
        self.size, self.bounds = float(size), list(bounds)
        self.seen: float | None = None  # the evaluation that was judged last
        self.lost = False

    def __call__(self, samples, eval_loss=None):
        fresh, self.seen = eval_loss != self.seen, eval_loss
        if fresh and eval_loss is not None and not self.lost:
            self.lost = eval_loss > self.bound(samples)
            if self.lost and signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:  # the loop listens
                signal.raise_signal(signal.SIGUSR1)  # all processes finish the step, save and leave
        return self.size

    def bound(self, samples: int) -> float:
        return next((most for at, most in reversed(self.bounds) if at <= samples), float("inf"))

    @property
    def start(self):
        return self.size

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state.get("seen")  # a branch comes from a run that had another schedule
