"""What test_chaos.py trains: steps of a few milliseconds, so that a kill lands anywhere in a run."""

from __future__ import annotations

import os
import signal

import torch

from adaptive.tasks import Loaded, Task

ROWS = 448


class Bits(Task):
    """The parity of eight bits, with dropout."""

    dropout = 0.1

    def load(self, config):
        bits = torch.randint(0, 2, (ROWS + 64, 8), generator=torch.Generator().manual_seed(0)).float()
        rows = [{"bits": row.numpy(), "label": int(row.sum()) % 2} for row in bits]
        return Loaded(train=rows[64:], eval=rows[:64], fingerprint="bits")

    def model(self, config):
        inner = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(self.dropout)
        return torch.nn.Sequential(*inner, torch.nn.Linear(32, 2))

    def loss_sum(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch["bits"]), batch["label"], reduction="none")


class Dry(Bits):
    """Without dropout, whose masks depend on the number of processes; in fp64: rounding hides nothing."""

    dropout = 0.0

    def model(self, config):
        return super().model(config).double()

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch | {"bits": batch["bits"].double()})


class Signalled(Bits):
    """SIGTERM to this very process in the SIGNAL_AT-th pass, of training or evaluation."""

    calls = 0

    def loss_sum(self, model, batch):
        type(self).calls += 1
        if self.calls == int(os.environ.get("SIGNAL_AT", "0")):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss_sum(model, batch)


class Grows:
    """A schedule with a memory of its own: it counts how often the loss fell, and grows with that."""

    def __init__(self, largest: float = 9.0):
        self.largest, self.last, self.fell = largest, None, 0

    def __call__(self, step, current_size, loss):
        self.fell += self.last is not None and loss < self.last
        self.last = loss
        return min(0.6 + self.fell / 8, self.largest)

    def state_dict(self):
        return {"last": self.last, "fell": self.fell}

    def load_state_dict(self, state):
        if state:
            self.last, self.fell = state["last"], state["fell"]


class Few(Dry):
    """5 rows, or 29 of the source b: some steps reach over an epoch's edge."""

    def load(self, config):
        rows = super().load(config)
        return Loaded(train=rows.train[: 29 if config.data.dataset_name == "b" else 5], eval=rows.eval[:5])
