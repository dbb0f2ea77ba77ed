"""The engine of FSDP2 (torch's `fully_shard`), with the verbs of engine.py.

Of every weight a process keeps a share of the rows, its gradient and its optimizer state; each layer is
gathered when a pass comes to it. The gradient of a step is averaged over the processes once, in the backward
of the last pass: `set_requires_gradient_sync`. Until then a process holds the whole gradient of its passes.

The sharding is done here and not by accelerate, which does it on GPUs only: with one road for all devices,
what the tests try on CPUs is what runs. A checkpoint holds whole tensors, gathered one by one, in the format
of one process and DDP: any number of processes opens it, with or without FSDP2.
"""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from adaptive.config import BadSetting, Config
from adaptive.engine import BUCKET_BYTES, Engine, is_true
from adaptive.optim import layer_stacks

# The step of a row needs that row only, and torch's optimizers know sharded tensors.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")


class FSDPEngine(Engine):
    """FSDP2, where there is a process group."""

    sharded, repeats, partitions_weights = True, False, True
    name = "FSDP2"

    def __init__(self, config: Config):
        refuse(config)
        # Else transformers reads a pretrained model on rank 0 only, and leaves the others without.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        super().__init__(config)

    def _wrap(self, model, optimizer):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        grouped = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # else they would keep the whole weights alive
        self._mesh = init_device_mesh(self.device.type, (self.world_size,))
        try:
            for layer in chain.from_iterable(layer_stacks(model).values()):
                self._shard(layer)
            self._shard(model)
            self._whole = [parameter for module in model.modules() for parameter in _gathered(module)]
        except ValueError as error:  # a scalar parameter, or one that two layers share
            raise BadSetting(
                f"FSDP2 cannot shard this model ({error}); start with accelerate_configs/zero3.yaml"
            ) from None
        parameters = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, grouped, strict=True):
            group["params"] = [parameters[name] for name in own]
        return model, self.accelerator.prepare(optimizer)

    def _shard(self, module: torch.nn.Module) -> None:
        """In place; what is not sharded yet, with the values of rank 0, as DDP begins."""
        states = chain(module.parameters(), module.buffers())
        own = [t for t in states if not isinstance(t, DTensor)]
        for tensor in own:
            tensor.data = tensor.data.to(self.device)
        if own:
            dist._broadcast_coalesced(dist.group.WORLD, [t.data for t in own], BUCKET_BYTES, 0)
        policy = MixedPrecisionPolicy()
        if self.config.hardware.bf16:  # sums over processes in fp32; logits too, as accelerate hands them out
            out = torch.float32 if module is self.module else None
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, out)
        # What no layer has is needed at once when a backward begins.
        again = is_true("FSDP_RESHARD_AFTER_FORWARD") and module is not self.module
        fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=again)

    def local_parameters(self):
        return self._whole

    def _pass(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def reduce_gradient(self):
        if not self._gradients():  # FSDP2 did not see that a backward began
            raise BadSetting(
                "FSDP2 finds no tensor in what the model returns; return tensors, or tuples, dictionaries or "
                "dataclasses of them"
            )
        return super().reduce_gradient()

    def _forget(self):
        self.model.reset_iter_state()  # drops what the passes before the last one left
        self.discard()

    def _held_bytes(self):
        return sum(p.to_local().nbytes for p in self.parameters if p.requires_grad)

    def _gradients(self):
        return [p.grad.to_local() for p in self.parameters if p.grad is not None]

    def full_gradient(self):
        for parameter in self.parameters:
            if parameter.requires_grad:
                yield None if parameter.grad is None else parameter.grad.full_tensor()

    def whole_state(self):
        state = self.module.state_dict(keep_vars=True)
        once = {id(tensor): tensor for tensor in state.values()}  # tied weights stay one tensor
        whole = {key: self._gather(tensor.detach()) for key, tensor in once.items()}
        return {name: whole[id(tensor)] for name, tensor in state.items()} if self.is_main else {}

    def _whole_optimizer(self):
        told = self.optimizer.state_dict()
        gathered = {
            at: {name: self._gather(value) for name, value in state.items()}
            for at, state in told["state"].items()
        }
        return told | {"state": gathered}

    def _gather(self, value: Any) -> Any:
        """Collective: a sharded tensor, whole and on the CPU of rank 0; anything else as it is."""
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self.is_main else None

    def _own_part(self, whole):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        told = whole | {"state": {}}
        for at, state in whole["state"].items():
            like = parameters[at]
            told["state"][at] = {
                name: self._part(value, like) if getattr(value, "shape", None) == like.shape else value
                for name, value in state.items()
            }
        return told

    def _part(self, whole: torch.Tensor, like: DTensor) -> DTensor:
        """This process's rows of `whole`, sharded as `like` is."""
        shares = whole.chunk(self.world_size)
        own = shares[self.rank] if self.rank < len(shares) else whole[:0]
        own = own.to(self.device, copy=True)  # from a file that may be pruned
        return DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    @torch.no_grad()
    def _fill(self, weights):
        state = self.module.state_dict(keep_vars=True)
        found = {n for n, tensor in state.items() if n in weights and weights[n].shape == tensor.shape}
        for name in found:
            tensor, given = state[name], weights[name]
            tensor.copy_(self._part(given, tensor) if isinstance(tensor, DTensor) else given)
        return sorted(state.keys() - found), sorted(weights.keys() - state.keys())


def _gathered(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trainable parameters that `module` gathers for a pass: the same objects in every pass."""
    if not isinstance(module, FSDPModule):
        return []
    module.unshard()
    whole = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    module.reshard()
    return whole


def refuse(config: Config) -> None:
    """BadSetting for what FSDP2 cannot do here, before any model is built."""
    hardware, optim, other = config.hardware, config.optim.optim, "start with accelerate_configs/zero3.yaml"
    known = ", ".join(OPTIMIZERS)
    refused = [
        (os.environ.get("FSDP_VERSION") != "2", "fsdp_version is 1; write fsdp_version: 2"),
        (is_true("FSDP_OFFLOAD_PARAMS"), "fsdp_offload_params: start with zero3_offload.yaml instead"),
        (is_true("FSDP_ACTIVATION_CHECKPOINTING"), "write --gradient_checkpointing instead of fsdp's own"),
        (hardware.fp16, "--fp16 has no loss scaler under FSDP2; write --bf16"),
        (hardware.torch_compile, "--compile is not tried under FSDP2; leave it out"),
        (hardware.find_unused_parameters, f"--find_unused_parameters is not exact under FSDP2; {other}"),
        (optim not in OPTIMIZERS, f"--optim {optim} under FSDP2; write one of {known}, or {other}"),
    ]
    for is_so, line in refused:
        if is_so:
            raise BadSetting(line)
