"""A quadratic model whose gradient noise scale is the same at every point: a task by path.

    l_i(theta) = 1/2 sum_j a_ij theta_j^2        a_ij = 1 + 8 or 1 - 8, each as often

The mean gradient is theta and one sample's variance is 64 |theta|^2: the noise scale is NOISE = 64 samples,
whatever theta is. A step of B samples and learning rate r multiplies the expected loss by

    (1 - r)^2 + r^2 NOISE / B                                                                       (1)

which is least at r = 1 / (1 + NOISE / B) (McCandlish et al. 2018, equation 2.6). The learning rate is ETA
times that unless --learning_rate says otherwise; each step then multiplies the loss by
1 - ETA (2 - ETA) / (1 + NOISE / B), so the steps to any loss are S_min (1 + NOISE / B) up to O(ETA).
"""

from __future__ import annotations

import numpy as np
import torch

from adaptive.tasks import Loaded, Task

NOISE, ETA, DIMENSIONS, ROWS = 64, 0.05, 256, 40_000


class Rows:
    """Signs of the noise, one byte each."""

    def __init__(self, n: int, noise: bool = True):
        signs = np.random.default_rng(n).integers(0, 2, (n, DIMENSIONS), dtype=np.int8)
        self.factors = signs * 16 - 7 if noise else np.ones_like(signs)  # 9 or -7

    def __len__(self):
        return len(self.factors)

    def __getitems__(self, indices):
        return [{"factors": row} for row in self.factors[indices]]

    def __getitem__(self, index):
        return {"factors": self.factors[index]}


class Bowl(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.full((DIMENSIONS,), (2 / DIMENSIONS) ** 0.5))  # loss 1

    def forward(self, factors):  # (rows, DIMENSIONS) -> (rows,)
        return 0.5 * (factors * self.theta.square()).sum(dim=1)


class Quadratic(Task):
    rows = ROWS

    def load(self, config):
        return Loaded(train=Rows(self.rows), eval=Rows(1, noise=False), fingerprint=f"{self.rows} rows")

    def model(self, config):
        size = config.batch.batch_size or 8
        config.optim.learning_rate = config.optim.learning_rate or ETA / (1 + NOISE / size)
        return Bowl()

    def loss_sum(self, model, batch):
        return model(batch["factors"].float())


class Small(Quadratic):
    """Few rows, so that a run sees several epochs."""

    rows = 97


def clipped(step, current_size, grad_norm, loss_ema, grad_variance=1.0):
    """A schedule that reads measurements, for records that must hold what it saw."""
    return 2.2 + 7.3 * (grad_norm * 1e3 % 1) + (loss_ema * 1e3 % 1) + (grad_variance * 1e3 % 1)
