"""A task that runs out of memory where --run_name says: "where-rank-pass-rows".

On that rank, from the training pass of that number on, a pass of more rows than that runs out: in its
forward, with all activations alive, or in the middle of its backward, with half of the gradients there.
"measure": in the evaluation.
"step": in SGD's update, counted by groups of parameters; an even number has changed half of the weights.
"disk": from that pass on no file that this rank writes may be larger than so many kB.
"""

from __future__ import annotations

import os
import resource
import sys
from unittest import mock

import torch
from material import Uneven
from torch.optim.sgd import sgd

MESSAGES = {  # where -> what is raised there
    "forward": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "backward": RuntimeError("HIP error: out of memory"),
    "measure": RuntimeError("std::bad_alloc"),
    "step": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
}


class Hungry(Uneven):
    passes, updates, armed = 0, 0, False

    def load(self, config):
        where, *numbers = (config.output.run_name or "never-0-0-0").split("-")
        self.where, (self.rank, self.first, self.rows) = where, map(int, numbers)
        return super().load(config)

    def model(self, config):
        model = super().model(config)
        first_layer = next(p for name, p in model.named_parameters() if ".0." in name)
        first_layer.register_hook(lambda gradient: self._run_out("backward"))
        if self.where == "step":
            mock.patch.object(sys.modules[sgd.__module__], "sgd", self._update).start()
        return model

    def _update(self, *tensors, **settings):
        self.updates += 1
        self.armed = int(os.environ.get("RANK", "0")) == self.rank and self.updates == self.first
        self._run_out("step")
        sgd(*tensors, **settings)

    def loss_sum(self, model, batch):
        losses = super().loss_sum(model, batch)
        if torch.is_grad_enabled():
            self.passes += 1
            here = int(os.environ.get("RANK", "0")) == self.rank
            if here and self.where == "disk" and self.passes == self.first:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 * self.rows, resource.RLIM_INFINITY))
            self.armed = here and self.passes >= self.first and len(losses) > self.rows
            self._run_out("forward")
        return losses

    def measure(self, model, batch):
        self.armed = int(os.environ.get("RANK", "0")) == self.rank
        self._run_out("measure")
        return super().measure(model, batch)

    def _run_out(self, where):
        if self.armed and self.where == where:
            raise MESSAGES[where]
