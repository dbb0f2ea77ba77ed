"""A task that runs out of memory where --run_name says: "where-rank-pass-rows".

On that rank, from the training pass of that number on, a pass of more rows than that runs out: in its
forward, with all activations alive, or in the middle of its backward, with half of the gradients there.
"""

from __future__ import annotations

import os

import torch
from material import Uneven

MESSAGES = {  # where -> what is raised there
    "forward": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "backward": RuntimeError("HIP error: out of memory"),
}


class Hungry(Uneven):
    passes, armed = 0, False

    def load(self, config):
        where, *numbers = (config.output.run_name or "never-0-0-0").split("-")
        self.where, (self.rank, self.first, self.rows) = where, map(int, numbers)
        return super().load(config)

    def model(self, config):
        model = super().model(config)
        first_layer = next(p for name, p in model.named_parameters() if ".0." in name)
        first_layer.register_hook(lambda gradient: self._run_out("backward"))
        return model

    def loss_sum(self, model, batch):
        losses = super().loss_sum(model, batch)
        if torch.is_grad_enabled():
            self.passes += 1
            here = int(os.environ.get("RANK", "0")) == self.rank
            self.armed = here and self.passes >= self.first and len(losses) > self.rows
            self._run_out("forward")
        return losses

    def _run_out(self, where):
        if self.armed and self.where == where:
            raise MESSAGES[where]
