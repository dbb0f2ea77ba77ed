"""What differs between backends and devices -> the few verbs that the loop uses.

`Engine.start(config)` returns what `accelerate launch` asked for: `Engine` here (one process, or
DistributedDataParallel), `DeepSpeedEngine` of deepspeed_engine.py (ZeRO 0 to 3) or `FSDPEngine` of
fsdp_engine.py (FSDP2). No other file knows how Accelerate, DDP, DeepSpeed, FSDP, NVIDIA, AMD and CPU differ.
All offer the same verbs, so the loop has no `if` about hardware:

    engine.open_step(batches, tokens)
    with engine.passes():               # ends where memory runs out
        with engine.pass_(last):        # around each forward and backward
            engine.backward(loss)
    engine.reduce_gradient()            # over ranks; False, and nothing is left, where one ran out of memory
    engine.squared_norm()               # of the reduced gradient, before clipping, on the device
    engine.update(norm)  |  engine.discard()

What all processes must know alike goes through agreement.py.
To add a backend: a subclass with these verbs, and a file in accelerate_configs/.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import weakref
import zipfile
from collections.abc import Callable, Iterator, Set
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    patch_environment,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.serialization import config as serialization

from adaptive import device_masks, noise_scale
from adaptive.agreement import Agreement
from adaptive.config import BadSetting, Config
from adaptive.memory import ran_out
from adaptive.noise_scale import PassNorms, squared_norm
from adaptive.optim import set_step
from adaptive.scaling import SecondMoment

TIMEOUT_MINUTES = float(os.environ.get("ADAPTIVE_TIMEOUT_MINUTES", "30"))
LEAST_SCALE = 1.0  # of fp16 losses: where even this overflows, the gradient itself is at fault
BUCKET_BYTES = 2**25  # of gradients that are reduced at once
TIGHT = 0.9  # of a device's memory: above, a pass may run out although one of its shape did not
LESS_STATE = (
    "smaller passes do not help, as they are over: write an --optim that keeps less, such as adamw_8bit or "
    "sgd, or start with accelerate_configs/fsdp2.yaml or zero3.yaml, which share its state among processes "
    "(and --weights_only where another optimizer, or an engine of another kind, saved the checkpoint)"
)
LAST_WORD, LINGER_SECONDS = "adaptive/last_word", 3.0  # why this run stops, told beside the collectives


class Engine(Agreement):
    """One process, or DistributedDataParallel."""

    deepspeed, stage = False, 0  # of ZeRO
    sharded = False  # whether squared_norm() is this rank's part of a sum over ranks
    _told = False  # this process has said why the run stops
    _watcher: threading.Thread | None = None  # by which it hears why
    _leaving = threading.Event()
    step, _silence_told = 0, 0.0  # the last one begun; when processes had last met, of the last word on it
    repeats = True  # whether a step that ran out of memory on one rank can be dropped and run again

    @classmethod
    def start(cls, config: Config) -> Engine:
        """The engine that `accelerate launch` asked for."""
        wrong = device_masks.problem(os.environ)
        if wrong:
            print(f"warning: {wrong[0]}; {wrong[1]}", file=sys.stderr)
        if not gpu():
            # Else whatever imports DeepSpeed warns that it is so.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            _compute_undisturbed()
        if is_true("ACCELERATE_USE_DEEPSPEED"):
            from adaptive.deepspeed_engine import DeepSpeedEngine as cls
        elif is_true("ACCELERATE_USE_FSDP") and (  # one process shards nothing, and may have no group
            os.environ.get("WORLD_SIZE", "1") != "1" or dist.is_initialized()
        ):
            from adaptive.fsdp_engine import FSDPEngine as cls
        return cls(config)

    def __init__(self, config: Config):
        self.config = config
        plain = not self.deepspeed
        self.accelerator = _accelerator(config, plain)
        self.is_main, self.device = self.accelerator.is_main_process, self.accelerator.device
        group, world_size = None, self.accelerator.num_processes
        if world_size > 1 and dist.get_backend() != "gloo":
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=TIMEOUT_MINUTES))
        Agreement.__init__(self, self.accelerator.process_index, world_size, group)
        config.run.output_dir = self.from_rank0(lambda: config.run.output_dir)
        # On a CPU reducing in the last backward gains nothing: there is no second device to work beside.
        self.overlaps = plain and self.repeats and self.world_size > 1 and self.device.type != "cpu"
        self.proven = 0  # elements of the largest pass that did not run out of memory
        self.starved: str | None = None  # why this rank's passes ended early
        self.stop_asked = False  # by a signal, on this process
        self._started = time.monotonic()

    def stop_asked_anywhere(self) -> bool:
        """Whether a signal asked some process to stop; a step that measures tells it by itself."""
        return self.sum_integers([self.stop_asked])[0] > 0

    def main_first(self):
        """Context in which rank 0 of each machine goes first, so that caches are written once."""
        return self.accelerator.local_main_process_first()

    # The model

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, wanted: Set[str] = frozenset()
    ) -> None:
        """Move and wrap both; self.model and self.optimizer are what the loop uses from here on.

        `wanted`: names of the signals in use; what they need is measured.
        """
        self.wanted = wanted
        self.module = model
        self.model, self.optimizer = self._wrap(model, optimizer)
        self.parameters = list(self.module.parameters())  # as wrapped; walking the modules takes longer
        self.norms = PassNorms(self.local_parameters(), bool(noise_scale.SIGNALS & wanted))
        kept = model.state_dict(keep_vars=True)
        self.moving = [b for name, b in model.named_buffers() if name in kept]  # those that training changes
        self.model.train()  # from_pretrained leaves a model in eval mode; evaluation comes back to this one

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        backend = self.config.hardware.torch_compile_backend
        if self.config.hardware.torch_compile:
            known = torch.compiler.list_backends()
            if backend not in torch.compiler.list_backends(None):
                raise BadSetting(f"--torch_compile_backend is {backend!r}; write one of {', '.join(known)}")
            model.compile(backend=backend, dynamic=False)
        model, optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.broadcast_buffers = False  # a collective inside forward; see reduce_gradient
        return model, optimizer

    def local_parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters as a pass sees them: hooks on them get this process's gradient, unreduced."""
        return [p for p in self.parameters if p.requires_grad]

    def seed(self, step: int, same_everywhere: bool = False) -> None:
        """Dropout and every other draw inside a step: a function of (seed, rank, step), so nothing need be
        saved.

        `same_everywhere` leaves the rank out: for the initial weights.
        """
        self.step = step
        text = f"{self.config.run.seed} {'all' if same_everywhere else self.rank} {step}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        # Without devices only the CPU's: torch.manual_seed formats the call stack for those that may be
        # opened later.
        (torch.default_generator if self.device.type == "cpu" else torch).manual_seed(number)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)

    def seconds(self) -> float:
        """Wall clock of the run, resumes added up, setting up left out."""
        return time.monotonic() - self._started

    def read(self, *scalars: torch.Tensor) -> list[float]:
        """Scalars on the device -> floats, with one host read for all."""
        return torch.stack([s.double() for s in scalars]).tolist()

    def to_device(self, batch: dict[str, torch.Tensor], rows: int = 0) -> dict[str, torch.Tensor]:
        """The batch on the device; for a compiled model with copies of its last row up to `rows`."""
        missing = rows - len(next(iter(batch.values()))) if self.config.hardware.torch_compile else 0
        if missing > 0:
            batch = {k: torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for k, t in batch.items()}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def gather(self, *own: torch.Tensor) -> list[list[torch.Tensor]]:
        """Collective: each of `own` (k, ...) on the device -> [of every rank], whose k may differ.

        MemoryError, on every rank, where some rank ran out of memory in `passes` before it came here.
        """
        counts = [len(own[0]) * (rank == self.rank) for rank in range(self.world_size)]
        *counts, starved = self.sum_integers([*counts, self.starved is not None])
        if starved:
            raise MemoryError(self.starved or "another process ran out of memory")
        if self.world_size == 1:
            return [[tensor] for tensor in own]
        gathered = []
        for tensor in own:
            padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(parts, padded)
            gathered.append([part[:n] for part, n in zip(parts, counts, strict=True)])
        return gathered

    # The passes of a step

    def open_step(
        self, batches: list[dict[str, torch.Tensor]], totals: list[int] | None = None
    ) -> Callable[[], list[int] | None]:
        """Before the passes of `batches`; returns what waits for the sums of `totals` over ranks, if any.

        A rank that runs out of memory inside a backward that reduces would leave the others waiting. So the
        gradient is reduced after the passes, once all ranks have said that theirs is whole: always where
        that costs nothing, else at the first step of a new largest shape and where memory is tight.
        """
        self.starved, self._shape = None, max(sum(t.numel() for t in b.values()) for b in batches)
        self.rows = max(len(next(iter(b.values()))) for b in batches)
        self.length = max((t.shape[1] for b in batches for t in b.values() if t.ndim > 1), default=1)
        self._before = [buffer.clone() for buffer in self.moving]
        self.apart = self.repeats
        if not self.overlaps:
            return self.start_sum(totals) if totals else lambda: None  # on its way during the first forward
        risky = self._shape > self.proven or self._is_tight()
        *summed, risks = self.sum_integers([*(totals or []), risky])
        self.apart = risks > 0
        return lambda: summed or None

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Around all passes of a step: running out of memory ends them; `reduce_gradient` then says so.

        BadSetting, on every rank, where the step cannot be dropped and run again.
        """
        try:
            yield
        except Exception as error:
            self.starved = self._why_starved(error)
        if self.starved and not (self.apart or self.world_size == 1 and self.repeats):
            raise self.stop_all(
                f"rank {self.rank} ran out of memory, and a step of {self.name} cannot be run again "
                f"({self.starved}); restart with --micro_batch_size {max(1, self.rows // 2)} "
                "--resume_from_checkpoint auto"
            )

    def _why_starved(self, error: Exception) -> str:
        """Why memory ran out, where `error` says so; else raises it, or what another rank said before it
        stopped.
        """
        word = self._last_word()
        if word is not None:
            raise word from None
        if not ran_out(error):
            raise error
        return " ".join(str(error).split())[:200]

    @contextlib.contextmanager
    def only_once(self, what: str, remedy: str) -> Iterator[None]:
        """Around work outside of the passes. BadSetting, on every rank, where memory runs out in it: a rank
        may have done half of it, so none goes on, or saves anything.
        """
        try:
            yield
            return
        except Exception as error:
            why = self._why_starved(error)
        raise self.stop_all(
            f"rank {self.rank} ran out of memory in {what} of step {self.step} ({why}); {remedy}; the last "
            "checkpoint is as it was: --resume_from_checkpoint auto"
        )

    @contextlib.contextmanager
    def pass_(self, last: bool, idle: bool = False) -> Iterator[None]:
        """Around forward *and* backward of one pass. An `idle` one, for a rank without a sample left, leaves
        a gradient of zeros whatever its row holds: 0 times a loss that is no number would be none.
        """
        learning = self.local_parameters() if idle else []
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in learning]  # before any reduction
        try:
            with self._pass(last):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _pass(self, last: bool) -> contextlib.AbstractContextManager:
        if last and not self.apart or self.model is self.module:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def reduce_gradient(self) -> bool:
        """After the passes: average the gradient over ranks. False where one of them ran out of memory:
        every rank is then as it was before the step.
        """
        self._finish()  # a sum of totals that a starved rank did not ask for any more
        with self.only_once("the reduction", LESS_STATE):
            whole = not self.apart or self._reduce(self.starved is not None)
        if not whole:
            self.drop()
            return False
        self.proven = max(self.proven, self._shape)
        if self.moving and self.world_size > 1:  # running means, as DDP does, but not inside a pass
            dist._broadcast_coalesced(dist.group.WORLD, self.moving, BUCKET_BYTES, 0)
        return True

    def drop(self) -> None:
        """Forget an attempt: its gradient, what it moved in the model, and the memory it took."""
        self._forget()
        self.proven = 0
        for buffer, before in zip(self.moving, self._before, strict=True):
            buffer.copy_(before)
        gc.collect()  # an exception and its frames hold on to each other, and to activations
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler._per_optimizer_states.clear()  # nothing was unscaled
        self.optimizer.zero_grad(set_to_none=True)

    def _reduce(self, starved: bool) -> bool:
        if self.world_size == 1:
            return not starved
        if self.device.type != "cpu":  # told apart: a device that ran out has no room for the buffers below
            if self.sum_integers([starved])[0]:
                return False
            starved = None
        return _average(self.local_parameters(), self.world_size, starved)

    def stop_all(self, line: str) -> BadSetting:
        """Leave word for the other ranks, which wait in a collective, and give them time to read it."""
        Engine._told = True
        if self.world_size > 1:
            dist.distributed_c10d._get_default_store().set(LAST_WORD, line)
            time.sleep(LINGER_SECONDS)
        return BadSetting(line)

    def _last_word(self) -> BadSetting | None:
        """What another rank said before it stopped."""
        if self.world_size == 1 or self._told:
            return None
        store = dist.distributed_c10d._get_default_store()
        return BadSetting(store.get(LAST_WORD).decode()) if store.check([LAST_WORD]) else None

    def _watch(self) -> None:
        """A rank that waits for one that ran out of memory ends soon, with its line, on every backend; and
        where a rank hangs each says what it is doing.
        """
        while not self._leaving.wait(1):
            self._tell_silence()
            try:
                word = self._last_word()
            except Exception:  # the store went with the run
                return
            if word is not None:
                print(f"[rank {self.rank}] error: {word}", file=sys.stderr, flush=True)
                time.sleep(2 * LINGER_SECONDS)  # where the collective fails by itself, the end is a tidy one
                os._exit(2)

    def _tell_silence(self) -> None:
        """Once for each time that processes have not met for half of the timeout: the step, and where this
        one stands. Who hangs stands elsewhere than the others.
        """
        silent = time.monotonic() - self.met_at
        if silent < 30 * TIMEOUT_MINUTES or self._silence_told == self.met_at:
            return
        self._silence_told = self.met_at
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        line = f"[rank {self.rank}] no word between processes for {silent:.0f} seconds, in step {self.step}"
        print(f"{line}; this one stands here:\n{''.join(stack[-8:])}", file=sys.stderr, flush=True)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def squared_norm(self) -> torch.Tensor:
        """Squared norm of the step's reduced gradient, fp64 scalar on the device; sum over ranks if
        `sharded`.
        """
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients(self.optimizer)
        return squared_norm(self._gradients(), self.device)

    def update(self, norm: float) -> bool:
        """Clip to --max_grad_norm by the norm that was measured, and step. False when the loss scaler
        refused.
        """
        with self.only_once("the optimizer's update", LESS_STATE):
            return self._update(norm)

    def _update(self, norm: float) -> bool:
        limit = self.config.optim.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return not self.optimizer.step_was_skipped

    def _gradients(self) -> list[torch.Tensor]:
        """This process's part of the reduced gradient."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def discard(self, overflow: bool = False) -> None:
        """Forget the step's gradient, as if it had not been; an `overflow` lowers the loss scale."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # squared_norm told it of an overflow: it lowers the scale
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def scales_loss(self) -> bool:
        """Whether non-finite gradients may be the loss scaler's own search: it has somewhere to go."""
        return self.accelerator.scaler is not None and self.loss_scale > LEAST_SCALE

    @property
    def loss_scale(self) -> float:
        """What backward multiplies the loss by, beside what the loop does."""
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler is not None else 1.0

    def full_gradient(self) -> Iterator[torch.Tensor | None]:
        """Collective: the reduced gradient of each trainable parameter, whole, in the model's order."""
        yield from (p.grad for p in self.parameters if p.requires_grad)

    partitions_weights = False  # whether a process cannot run the model alone

    # Memory

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """The most memory that `work` holds at once, beside what was held before."""
        if self.device.type == "cpu":
            with _Holding() as holding:
                work()
            return holding.peak
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self) -> int:
        """What this process may still take for the passes of a step, without what its optimizer will."""
        if self.device.type == "cpu":
            free = _free_bytes_of_machine() // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        else:
            free = self._free_and_total()[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if not self.optimizer.state:  # Adam's two moments come with the first step
            free -= 2 * self._held_bytes()
        return max(free, 0)

    def _held_bytes(self) -> int:
        """Of this process's part of the weights that train."""
        return sum(p.nbytes for p in self.parameters if p.requires_grad)

    def memory_usage(self) -> float:
        """Share of the device's memory that is taken, in [0, 1]; of the machine's memory on a CPU.

        What the allocator has reserved counts as taken: a step that needed it once will need it again.
        """
        if self.device.type != "cuda":
            import psutil

            return psutil.virtual_memory().percent / 100
        free, total = self._free_and_total()
        return 1 - free / total

    def _is_tight(self) -> bool:
        """Whether the device may run out: what the allocator has reserved and does not use is free here."""
        if self.device.type != "cuda":
            return self.memory_usage() > TIGHT
        free, total = self._free_and_total()
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return 1 - (free + cached) / total > TIGHT

    def _free_and_total(self) -> tuple[int, int]:
        """Bytes of the device; what the allocator has reserved is not free."""
        try:
            return torch.cuda.mem_get_info(self.device)
        except RuntimeError:  # as on some ROCm versions: what we reserved, over what the device has
            total = torch.cuda.get_device_properties(self.device).total_memory
            return total - torch.cuda.memory_reserved(self.device), total

    def set_step(self, rate: float, moment: SecondMoment | None = None) -> None:
        """Learning rate of the coming step, and Adam's second moment where it is not the configured one."""
        set_step(self.optimizer.param_groups, self.config.optim, rate, moment)

    def save_model(self, folder: os.PathLike, tokenizer: Any) -> None:
        """Collective, but rank 0 writes: the weights as `from_pretrained` opens them."""
        state = self.whole_state()
        if self.is_main:
            if hasattr(self.module, "save_pretrained"):
                from transformers.utils import logging

                logging.disable_progress_bar()
                self.module.save_pretrained(folder, state_dict=state)
            else:
                os.makedirs(folder, exist_ok=True)
                torch.save(state, os.path.join(folder, "weights.pt"))
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Collective: every weight by name, on rank 0 at least."""
        return self.module.state_dict()

    def describe(self) -> str:
        """One line: engine, processes, device."""
        vendor = "AMD" if torch.version.hip else "NVIDIA" if torch.cuda.is_available() else "CPU"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        precision = self.accelerator.mixed_precision
        return f"{self.name}, {self.world_size} process(es), {name} ({vendor}), precision {precision}"

    @property
    def name(self) -> str:
        return "one process" if self.world_size == 1 else "DDP"

    kind = "plain"  # checkpoints of one kind open on any number of processes

    def save_state(self, folder: Path) -> None:
        """Collective: what this engine needs to go on, into an existing folder."""
        held = {"model": self.whole_state(), "optimizer": self._whole_optimizer()}
        if self.is_main:
            if self.accelerator.scaler is not None:
                held["scaler"] = self.accelerator.scaler.state_dict()
            with serialization.patch({"save.compute_crc32": False}):  # half of the time; no loader reads it
                torch.save(held, folder / "training.pt")

    def load_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Inverse of `save_state`, on any number of processes."""
        self._same_kind(folder, manifest)
        held = _opened(folder / "training.pt")
        self._put(held["model"])
        self.optimizer.load_state_dict(self._own_part(held["optimizer"]))
        if self.accelerator.scaler is not None and "scaler" in held:
            self.accelerator.scaler.load_state_dict(held["scaler"])

    def _whole_optimizer(self) -> dict[str, Any]:
        """Collective: the state of one process's optimizer, on rank 0 at least."""
        return self.optimizer.state_dict()

    def _own_part(self, whole: dict[str, Any]) -> dict[str, Any]:
        """What this process keeps of `_whole_optimizer`; a copy: the file that holds it will be pruned."""
        return tree_map_only(torch.Tensor, torch.clone, whole)

    @contextlib.contextmanager
    def own_settings(self) -> Iterator[None]:
        """Around `load_state`: settings such as --weight_decay stay this start's, not the checkpoint's, and
        each group's its own: ZeRO-3's universal checkpoint copies the first group's into all.
        """
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        yield
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group.pop("own_weight_decay", None)  # see set_step
            group.update(own)

    def _same_kind(self, folder: Path, manifest: dict[str, Any]) -> None:
        if manifest["engine"] != self.kind:
            raise BadSetting(
                f"{folder} was saved by the engine {manifest['engine']} and this is {self.kind}, which "
                "cannot read its optimizer's state; start with the accelerate config of the first start, or "
                "write --weights_only to start the optimizer afresh"
            )

    def load_weights(self, folder: Path, manifest: dict[str, Any]) -> None:
        """The model alone, from a checkpoint of any engine, on any number of processes."""
        self._put(_saved_weights(folder, manifest["engine"]))

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        missing, unexpected = self._fill(weights)
        lacking = set(missing) - self._tied()
        if lacking or unexpected:
            names = ", ".join(sorted(lacking | set(unexpected))[:3])
            raise BadSetting(f"the checkpoint is of another model ({names}); write the --model of its run")

    def _fill(self, weights: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
        """Copy `weights` into the model; names that it misses, and names that it does not know."""
        return self.module.load_state_dict(weights, strict=False)

    def _tied(self) -> set[str]:
        """Names of weights that are another one's too."""
        once = {name for name, _ in self.module.named_parameters()}
        return {name for name, _ in self.module.named_parameters(remove_duplicate=False)} - once

    def listen(self) -> None:
        """SIGTERM, SIGINT and SIGUSR1 ask to stop after the step; a second one leaves at once."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._asked)
        if self.world_size > 1 and Engine._watcher is None:
            Engine._leaving.clear()
            Engine._watcher = threading.Thread(target=self._watch, daemon=True)
            Engine._watcher.start()
            atexit.register(Engine._rest)  # a thread that the interpreter ends inside the store aborts it

    def _asked(self, number: int, frame: Any) -> None:
        self.stop_asked = True
        signal.signal(number, signal.SIG_DFL)

    def clock_from(self, seconds: float) -> None:
        """Count from `seconds`, those of the run so far: 0, or more where it is resumed."""
        self._started = time.monotonic() - seconds

    @staticmethod
    def _rest() -> None:
        if Engine._watcher is not None:
            Engine._leaving.set()
            Engine._watcher.join(LINGER_SECONDS)
            Engine._watcher = None

    @staticmethod
    def leave() -> None:
        """Close the process group, at the end of the program."""
        Engine._rest()
        if dist.is_initialized():
            dist.destroy_process_group()


def _accelerator(config: Config, plain: bool) -> Accelerator:
    """As this run needs it; `plain`: without DeepSpeed."""
    group = {"timeout": timedelta(minutes=TIMEOUT_MINUTES)} | ({} if gpu() or plain else {"backend": "gloo"})
    precision = "bf16" if config.hardware.bf16 else "fp16" if config.hardware.fp16 else None
    find_unused = config.hardware.find_unused_parameters
    try:
        with patch_environment(ACCELERATE_USE_FSDP="false"):  # fsdp_engine.py does it by itself
            accelerator = Accelerator(
                cpu=not gpu() and plain,  # cpu=True would turn DeepSpeed off
                mixed_precision=precision,
                # num_steps by plugin: a number in the YAML or the environment must not scale the loss a
                # second time
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=1, sync_with_dataloader=False
                ),
                kwargs_handlers=[
                    InitProcessGroupKwargs(**group),
                    DistributedDataParallelKwargs(find_unused_parameters=find_unused),
                ],
            )
    except ValueError as error:
        if "precision" not in str(error):
            raise
        raise BadSetting(f"--{precision}: {error}") from None
    # accelerate would compute in fp32 there, without a word.
    if plain and precision == "fp16" and accelerator.device.type == "cpu":
        accelerator.scaler = torch.amp.GradScaler("cpu")
        accelerator.native_amp = True
    return accelerator


def _opened(file: Path) -> dict[str, Any]:
    """Tensors and plain values; BadSetting where `file` would run code of its own."""
    try:
        mapped = zipfile.is_zipfile(file)  # as torch writes them: read as needed, without a second copy
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise BadSetting(f"{file} holds more than tensors and is not opened ({reason})") from None


def _saved_weights(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Whole weights, on the CPU, of a checkpoint that the engine `kind` wrote."""
    if kind == "plain":
        return _opened(folder / "training.pt")["model"]
    if kind == "zero0":
        file = folder / "engine" / "mp_rank_00_model_states.pt"
        return torch.load(file, map_location="cpu", weights_only=False)["module"]  # DeepSpeed's own objects
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="engine")


def attention(config: Config) -> str | None:
    """--attn_implementation; "auto" is flash attention in half precision on a GPU that has it."""
    asked = config.model.attn_implementation
    if asked != "auto":
        return asked
    from transformers.utils import is_flash_attn_2_available

    half = config.hardware.bf16 or config.hardware.fp16 or config.model.dtype == "bfloat16"
    return "flash_attention_2" if half and gpu() and is_flash_attn_2_available() else None


@contextlib.contextmanager
def weights_drawn_whole() -> Iterator[None]:
    """Under ZeRO-3 transformers splits weights while it draws them, and draws others; here it does not.

    For models from scratch, so that they begin the same on every engine.
    """
    plugin = AcceleratorState().deepspeed_plugin if AcceleratorState._shared_state else None
    if plugin is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.dschf)


def _average(parameters: list[torch.nn.Parameter], world_size: int, starved: bool | None) -> bool:
    """Mean of the gradients over ranks, as DDP's own. A parameter that no rank used keeps none.

    False, after the first bucket, where some rank is `starved`, has no whole gradient; None: none is.
    """
    used = [p.grad is not None for p in parameters]
    first = parameters[0]
    told = torch.tensor([bool(starved), *used], dtype=first.dtype, device=first.device)
    for number, bucket in enumerate(_buckets(parameters)):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        tensors = [told] * (not number) + [parameter.grad for parameter in bucket]
        flat = torch._utils._flatten_dense_tensors(tensors)
        flat /= world_size
        dist.all_reduce(flat)
        torch._foreach_copy_(tensors, list(torch._utils._unflatten_dense_tensors(flat, tensors)))
        if not number and starved is not None and told[0] > 0:
            return False
    if not all(used):
        for parameter, share in zip(parameters, told[1:].tolist(), strict=True):
            if not share:
                parameter.grad = None
    return True


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, about BUCKET_BYTES together."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        full = sum(t.nbytes for t in bucket) >= BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


class _Holding(TorchDispatchMode):
    """Bytes of the tensors that are alive of those made inside; a process's own size hides what it reuses."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakKeyDictionary()  # storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if torch.is_tensor(tensor):  # from before, or counted when it was made
                self._known[tensor.untyped_storage()] = True
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor) and tensor.untyped_storage() not in self._known:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known[storage] = True
        self._change(storage.nbytes())
        weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, n: int) -> None:
        self.now += n
        self.peak = max(self.peak, self.now)


def _free_bytes_of_machine() -> int:
    """Of the machine, or of the container, whichever is less."""
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free


def _compute_undisturbed() -> None:
    """Linux: this thread, and those it will start, in the class for computing without a break (SCHED_BATCH).

    A thread of gloo's that wakes waits for a free core and interrupts none that computes; with as many
    processes as cores the interruptions cost more than the messages (benchmarks/step_overhead.py).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def gpu() -> bool:
    """Whether torch sees one, of NVIDIA or AMD."""
    return torch.cuda.is_available()


def is_true(name: str) -> bool:
    """Whether the environment's variable `name` says so, as accelerate's launcher writes it."""
    return os.environ.get(name, "false").lower() in ("true", "1")
