"""The engine of DeepSpeed: ZeRO 0 to 3, with the verbs of engine.py.

The loop steps the engine itself: accelerator.backward would step before anything is checked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from adaptive.config import BadSetting, Config
from adaptive.engine import LEAST_SCALE, Engine, squared_norm


class DeepSpeedEngine(Engine):
    """ZeRO 0 to 3."""

    deepspeed = True

    def __init__(self, config: Config):
        import deepspeed.ops

        warnings.filterwarnings(
            "ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning
        )
        if not torch.cuda.is_available():
            # Its shared-memory collectives take two minutes to compile and gain nothing on a small CPU run.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # Its launcher leaves the number of threads open.
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _refuse_precision(config)
        super().__init__(config)
        self.stage = self.accelerator.state.deepspeed_plugin.zero_stage
        self.repeats = self.stage < 2  # stages 2 and 3 reduce in every backward, 3 gathers in every forward

    def prepare(self, model, optimizer, wanted=frozenset()):
        settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = 1  # must be an integer, has no meaning here
        settings.pop("train_batch_size", None)
        settings["gradient_accumulation_steps"] = 1  # the loop owns the scale
        settings["gradient_clipping"] = self.config.optim.max_grad_norm
        if self.repeats:  # nothing to overlap with: the reduction waits until every rank's gradient is whole
            settings.setdefault("zero_optimization", {})["overlap_comm"] = False
        super().prepare(model, optimizer, wanted)
        self.sharded = self.stage > 0 and not self._full_gradient()

    def _pass(self, last):
        # Without the flag ZeRO-1 and 2 silently keep the gradient of the last pass only.
        self.model.set_gradient_accumulation_boundary(last and not self.apart)
        return contextlib.nullcontext()

    def _reduce(self, starved):
        if self.sum_integers([starved])[0]:
            return False
        self.model.set_gradient_accumulation_boundary(True)
        self.model.allreduce_gradients()
        return True

    def _forget(self):
        self.discard()
        optimizer = self.model.optimizer
        if hasattr(optimizer, "clear_backward_seen_flag"):  # an interrupted backward left it open
            optimizer._backward_active_depth = 0
            optimizer.clear_backward_seen_flag()

    def backward(self, loss):
        # Without ZeRO its step divides by a scale that its backward does not multiply by.
        self.model.backward(loss if self.stage else loss * self._loss_scale())

    def squared_norm(self):
        scale = self._loss_scale()
        return squared_norm(self._reduced_gradient(), self.device) / scale**2

    def _update(self, norm):
        self.model.step()
        return not getattr(self.model.optimizer, "overflow", False)

    def discard(self, overflow=False):
        optimizer = self.model.optimizer
        if overflow:
            self.model.step()  # finds the overflow itself, lowers the scale and drops the gradient
            return
        self.model.zero_grad()  # p.grad first: stage 3's zero_grad refuses what is left there on a CPU
        if hasattr(optimizer, "all_grad_tensors"):  # stages 1, 2
            optimizer.zero_grad(set_to_none=True)
            optimizer._release_preflattened_grad_buffers()
            for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                kept.update(dict.fromkeys(kept))  # in place: parameters look their gradient up in it
            optimizer.micro_step_id = -1  # above, an offloaded gradient would be added to the next step's
        elif hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3
            optimizer.zero_grad(set_to_none=True)
            optimizer.averaged_gradients = {}
            optimizer.grad_partitions_flat_buffer.zero_()
        elif self._full_gradient():
            optimizer.zero_grad(set_to_none=True)
        if self._offloads():
            optimizer.reset_cpu_buffers()
            if self.stage < 3:
                optimizer._offload_accumulated_param_ids = set()

    def full_gradient(self):
        from deepspeed.utils import safe_get_full_grad

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                yield safe_get_full_grad(parameter)

    @property
    def partitions_weights(self):
        return self.stage == 3

    @property
    def scales_loss(self):
        searches = getattr(self.model.optimizer, "dynamic_loss_scale", True)
        return self.model.fp16_enabled() and searches and self.loss_scale > LEAST_SCALE

    @property
    def name(self):
        return f"DeepSpeed ZeRO-{self.stage}"

    @property
    def kind(self):
        return f"zero{self.stage}"

    def save_state(self, folder):
        engine, files = self.model, self.model.checkpoint_engine
        with _raised_at_the_end(files.makedirs, files.save, engine._copy_recovery_script):  # barriers between
            engine.save_checkpoint(str(folder), tag="engine", save_latest=False)

    def load_state(self, folder, manifest):
        self._same_kind(folder, manifest)
        if manifest["world_size"] != self.world_size and self.stage:
            self._load_universal(folder, manifest["world_size"])
        else:
            self.model.load_checkpoint(str(folder), tag="engine")

    def _load_universal(self, folder: Path, saved: int) -> None:
        """Shards of another number of processes, through DeepSpeed's universal format, made and removed here.

        BadSetting where it knows no such conversion: Adam-type optimizers in fp32 only.
        """
        universal = folder.with_name(f".{folder.name}.universal")
        by = f"{saved} process(es), which are {self.world_size} now"
        self.from_rank0(lambda: _convert(folder / "engine", universal / "engine", by))
        self.model._config.load_universal_checkpoint = True
        try:
            self.model.load_checkpoint(str(universal), tag="engine")
        finally:
            self.model._config.load_universal_checkpoint = False
        for state in self.model.optimizer.optimizer.state.values():
            # Stage 3 hands all groups one tensor, which each of them would count up.
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        self.wait()
        if self.is_main:
            shutil.rmtree(universal)

    def whole_state(self):
        if self.stage < 3:
            return self.module.state_dict()
        # Gathers on rank 0, and forgets which weights are tied.
        state = self.accelerator.get_state_dict(self.model) or {}
        return {name: tensor for name, tensor in state.items() if name not in self._tied()}

    def _put(self, weights):
        if self.stage < 3:
            super()._put(weights)
        else:
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            for name, parameter in self.module.named_parameters():
                with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                    if self.is_main:
                        parameter.copy_(weights[name])
            for name, buffer in self.module.named_buffers():
                if name in weights:
                    buffer.copy_(weights[name])
        if hasattr(self.model.optimizer, "refresh_fp32_params"):  # its own copy, which the next step writes
            self.model.optimizer.refresh_fp32_params()

    @property
    def loss_scale(self):
        return self._loss_scale()

    def _full_gradient(self) -> bool:
        return type(self.model.optimizer).__name__ in (
            "BF16_Optimizer",
            "FP16_Optimizer",
            "FP16_UnfusedOptimizer",
        )

    def _loss_scale(self) -> float:
        return float(
            getattr(self.model.optimizer, "cur_scale", None) or getattr(self.model.optimizer, "loss_scale", 1)
        )

    def _held_bytes(self):
        if self._offloads():
            return 0
        numbers = sum(getattr(p, "ds_numel", p.numel()) for p in self.parameters if p.requires_grad)
        return 4 * numbers // (self.world_size if self.stage else 1)

    def _offloads(self) -> bool:
        """Whether the optimizer's state, and with it the reduced gradient, is in CPU memory or on NVMe."""
        optimizer = self.model.optimizer
        return bool(
            getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
        )

    def _reduced_gradient(self) -> list[torch.Tensor]:
        """Tensors whose norm is that of this rank's part of the reduced gradient, after the last backward:
        the part itself, or each parameter's norm where it is offloaded, as its copy may be on its way.
        """
        optimizer = self.model.optimizer
        if hasattr(optimizer, "get_grads_for_norm"):  # BF16_Optimizer: fp32 sums, whole on every rank
            return optimizer.get_grads_for_norm(for_clipping=True)
        if self._offloads():
            return list(optimizer.norm_for_param_grads.values())
        if hasattr(optimizer, "averaged_gradients"):  # stages 1, 2, 3
            groups = [gs for gs in optimizer.averaged_gradients.values() if gs is not None]
            return [g for gs in groups for g in gs if g is not None]
        return [p.grad for p in self.parameters if p.grad is not None]


def _refuse_precision(config: Config) -> None:
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    for asked, known, name, other in (
        (config.hardware.fp16, device.is_fp16_supported, "fp16", "bf16"),
        (config.hardware.bf16, device.is_bf16_supported, "bf16", "fp16"),
    ):
        if asked and not known():
            raise BadSetting(
                f"--{name}: DeepSpeed has none on this device; write --{other} or neither, or start with "
                "accelerate_configs/ddp.yaml (cpu_ddp.yaml without a GPU)"
            )


@contextlib.contextmanager
def _raised_at_the_end(*methods: Callable) -> Iterator[None]:
    """The first error of one of these methods waits until the block is done, as other ranks wait in it."""
    errors: list[Exception] = []

    def guarded(method: Callable) -> Callable:
        def call(*arguments, **settings):
            try:
                return method(*arguments, **settings)
            except Exception as error:
                errors.append(error)

        return call

    for method in methods:
        setattr(method.__self__, method.__name__, guarded(method))
    try:
        yield
    finally:
        for method in methods:
            delattr(method.__self__, method.__name__)
    if errors:
        raise errors[0]


def _convert(source: Path, target: Path, by: str) -> None:
    """DeepSpeed's checkpoint `source` -> universal `target`; BadSetting when its optimizer has no
    conversion.
    """
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    # Not in the launcher's name: the child is no rank of this run.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--input_folder", str(source), "--output_folder", str(target)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(target.parent, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BadSetting(
            f"{source.parent} was saved by {by}, and DeepSpeed cannot convert its "
            f"optimizer's state ({reason}); start with as many processes as before, "
            "train with AdamW, or write --weights_only to start the optimizer afresh"
        )
