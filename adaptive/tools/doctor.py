"""This machine -> what it offers a run, what is in the way, and which file of accelerate_configs/ fits.

    python -m adaptive.tools.doctor                 # exit status 1 where a finding needs a remedy
    python -m adaptive.tools.doctor --handshake     # starts two processes that add up one number

It reads and changes nothing; device masks in particular are only read.
To add one: a function (Machine) -> findings, and its name in CHECKS.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptive import device_masks
from adaptive.tools.flags import Flags, leave

HANDSHAKE_SECONDS = 60


@dataclass(frozen=True)
class Finding:
    """One line; with a `remedy` it is a problem."""

    name: str
    told: str
    remedy: str = ""


@dataclass
class Machine:
    """What the checks look at: torch, the environment and the file system, or stand-ins of them."""

    torch: Any = torch
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    which: Any = shutil.which
    exists: Any = os.path.exists
    installed: Any = importlib.util.find_spec

    @property
    def n_gpus(self) -> int:
        return self.torch.cuda.device_count() if self.torch.cuda.is_available() else 0

    @property
    def vendor(self) -> str:
        if not self.n_gpus:
            return "CPU"
        return "AMD" if self.torch.version.hip else "NVIDIA"


def vendor(machine: Machine) -> Iterator[Finding]:
    """Who made the accelerators, and whether torch was built for them."""
    version, kind = machine.torch.__version__, machine.vendor
    names = [machine.torch.cuda.get_device_name(k) for k in range(machine.n_gpus)]
    told = f"{kind}, torch {version}" + (f", {len(names)} x {names[0]}" if names else "")
    nodes = {"NVIDIA": "/dev/nvidiactl", "AMD": "/dev/kfd"}
    there = [maker for maker, node in nodes.items() if machine.exists(node)]
    built = "AMD" if machine.torch.version.hip else "NVIDIA" if machine.torch.version.cuda else None
    if there and built not in there:
        yield Finding(
            "vendor", f"{told}: a {there[0]} device is here, this torch is built for {built or 'the CPU'}",
            f"install the build for {'ROCm' if there[0] == 'AMD' else 'CUDA'} that pytorch.org names",
        )  # fmt: skip
    elif there and not names:
        yield Finding(
            "vendor", f"{told}: a {there[0]} device is here and torch sees none",
            "look at the masks and the driver below, and that the container was given the device",
        )  # fmt: skip
    else:
        yield Finding("vendor", told)


def driver(machine: Machine) -> Iterator[Finding]:
    """Version of the kernel's driver."""
    if machine.which("nvidia-smi"):
        told = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if told:
            yield Finding("driver", f"NVIDIA {told}, torch is built for CUDA {machine.torch.version.cuda}")
        else:
            remedy = "install or reload the NVIDIA driver; after an update the machine must restart"
            yield Finding("driver", "nvidia-smi does not answer", remedy)
    amd = Path("/sys/module/amdgpu/version")
    if machine.exists("/dev/kfd"):
        told = amd.read_text().strip() if amd.is_file() else "of the kernel"
        yield Finding("driver", f"amdgpu {told}, torch is built for ROCm {machine.torch.version.hip}")
        if not os.access("/dev/kfd", os.W_OK):
            yield Finding(
                "driver", "/dev/kfd may not be opened", "add the user to the groups render and video"
            )


def _said(command: list[str]) -> str:
    """First line of a program's output, "" where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def masks(machine: Machine) -> Iterator[Finding]:
    """Variables that hide devices; each counts within what the one before left, so that two may hide all."""
    given = {name: machine.environment[name] for name in device_masks.NAMES if name in machine.environment}
    if not given:
        yield Finding("masks", "none set")
        return
    told = ", ".join(f"{name}={value!r}" for name, value in given.items())
    wrong = device_masks.problem(given)
    hiding = [name for name, value in given.items() if value.strip() == "-1"]
    if hiding:  # meant, as in our CPU layouts; here it answers why no device is seen
        wrong = f"{told}: every device is hidden", f"unset {hiding[0]} to use them"
    yield Finding("masks", *(wrong or (told,)))


def backends(machine: Machine) -> Iterator[Finding]:
    """What processes can talk through."""
    talk = machine.torch.distributed
    nccl = "rccl" if machine.torch.version.hip else "nccl"
    if not talk.is_available():
        yield Finding("backends", "none", "install a torch with distributed support")
        return
    found = [
        name
        for name, there in ((nccl, talk.is_nccl_available()), ("gloo", talk.is_gloo_available()))
        if there
    ]
    if machine.n_gpus and nccl not in found:
        yield Finding(
            "backends", ", ".join(found), f"install a torch with {nccl}; gloo alone is slow on GPUs"
        )
    elif "gloo" not in found:
        yield Finding(
            "backends", ", ".join(found), "install a torch with gloo: sizes are agreed on through it"
        )
    else:
        yield Finding("backends", ", ".join(found))


def compiler(machine: Machine) -> Iterator[Finding]:
    """DeepSpeed compiles its extensions at the first use."""
    compilers = [machine.environment["CXX"]] if machine.environment.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in compilers if (path := machine.which(name))), None)
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not found:
        yield Finding("compiler", f"no {' or '.join(compilers)}", "apt-get install g++ (DeepSpeed needs it)")
    elif not machine.exists(header):
        yield Finding(
            "compiler", f"{found}, but no {header}", "apt-get install python3-dev (DeepSpeed needs it)"
        )
    else:
        yield Finding("compiler", f"{found}, Python's headers are there")


def deepspeed(machine: Machine) -> Iterator[Finding]:
    """Version, and the operations it could build here."""
    if machine.installed("deepspeed") is None:
        yield Finding("deepspeed", "not installed", "pip install deepspeed, for ZeRO")
        return
    yield Finding("deepspeed", importlib.metadata.version("deepspeed"))
    ops = operations()
    good, bad = ([name for name, works in ops.items() if works is wanted] for wanted in (True, False))
    yield Finding("ops", f"can build: {', '.join(good) or 'none'}; cannot: {', '.join(bad) or 'none'}")
    if ops and not ops.get("cpu_adam", True):
        remedy = "see compiler above; ds_configs/ offload without it (zero_force_ds_cpu_optimizer)"
        yield Finding("ops", "cpu_adam, the faster optimizer on CPUs, cannot be built", remedy)


def operations() -> dict[str, bool]:
    """DeepSpeed's operations -> whether they can be built; its own warnings are left out."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        found = {}
        for name, builder in ALL_OPS.items():
            with contextlib.suppress(Exception):
                found[name] = bool(builder.is_compatible(verbose=False))
    return {name: works for name, works in sorted(found.items()) if name != "deepspeed_not_implemented"}


def precision(machine: Machine) -> Iterator[Finding]:
    """bf16, fp16 and flash attention."""
    if not machine.n_gpus:
        yield Finding("bf16", "works on the CPU, slowly")
        return
    if machine.torch.cuda.is_bf16_supported():
        yield Finding("bf16", "supported: --bf16")
    else:
        yield Finding("bf16", "not supported by this GPU", "write --fp16, or neither")
    own = machine.installed("flash_attn") is not None
    sdpa = machine.torch.backends.cuda.flash_sdp_enabled()
    told = "the flash_attn package" if own else "torch's own (sdpa)" if sdpa else ""
    if told:
        yield Finding("flash attention", told)
    else:
        yield Finding("flash attention", "off", "unset what turned torch's off, or pip install flash-attn")


def memory(machine: Machine) -> Iterator[Finding]:
    """Whether the device says how much memory is free, which schedules that watch memory read."""
    if not machine.n_gpus:
        if machine.installed("psutil") is None:
            yield Finding("memory", "unknown", "pip install psutil, or name no memory_usage in a schedule")
        else:
            import psutil

            whole = psutil.virtual_memory()
            yield Finding(
                "memory", f"{whole.available / 2**30:.1f} of {whole.total / 2**30:.1f} GiB are free"
            )
        return
    try:
        free, total = machine.torch.cuda.mem_get_info()
        yield Finding("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free on the first device")
    except RuntimeError as error:
        yield Finding(
            "memory", f"the device does not say what is free ({' '.join(str(error).split())})",
            "nothing to do: memory_usage then counts what torch reserved; other programs' share is not seen",
        )  # fmt: skip


def layout(machine: Machine) -> Iterator[Finding]:
    """Which file of accelerate_configs/ fits."""
    prefix, n = ("rocm_" if machine.vendor == "AMD" else ""), machine.n_gpus
    if not n:
        names = ["cpu", "cpu_ddp (2 processes)", "cpu_zero2 (DeepSpeed)"]
    elif n == 1:
        names = [f"{prefix}single" if prefix else "single_gpu"]
    else:
        names = [f"{prefix}ddp", f"{prefix}zero2", f"{prefix}zero3 (a model that does not fit one GPU)"]
    count = f", --num_processes {n} before train.py" if n > 1 else ""
    yield Finding("layout", f"accelerate_configs/: {', '.join(names)}{count}")


def handshake(machine: Machine) -> Iterator[Finding]:
    """Two processes through accelerate's launcher add up one number; each says what it got."""
    name = ("rocm_ddp" if machine.vendor == "AMD" else "ddp") if machine.n_gpus > 1 else "cpu_ddp"
    config = Path(__file__).parents[2] / "accelerate_configs" / f"{name}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "2", "--main_process_port", "0", "-m", "adaptive.tools.doctor", "--shake"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * HANDSHAKE_SECONDS, check=False,
            env=dict(machine.environment), cwd=Path(__file__).parents[2],
        )  # fmt: skip
        told = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
        reason = next(
            (line for line in reversed(done.stderr.splitlines()) if "Error" in line), "no reason given"
        )
    except subprocess.TimeoutExpired:
        told, reason = [], f"no answer within {2 * HANDSHAKE_SECONDS} seconds"
    if len(told) == 2:
        yield Finding("handshake", f"{name}: {'; '.join(sorted(told))}")
        return
    answered = f" ({'; '.join(told)})" if told else ""
    yield Finding(
        "handshake", f"{name}: {len(told)} of 2 processes answered{answered}: {reason.strip()[:200]}",
        "set NCCL_DEBUG=INFO (RCCL reads it too) and try NCCL_SOCKET_IFNAME, or NCCL_P2P_DISABLE=1",
    )  # fmt: skip


def shake() -> None:
    """One of the two processes: says its rank, device and sum, or fails within HANDSHAKE_SECONDS."""
    gpu, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=HANDSHAKE_SECONDS))
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}: sum {one.item():g}\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


CHECKS = (vendor, driver, masks, backends, compiler, deepspeed, precision, memory, layout)


def main(arguments: list[str] | None = None) -> int:
    parser = Flags(prog="python -m adaptive.tools.doctor", description="What this machine offers.")
    parser.add_argument("--handshake", action="store_true", help="also start two processes that talk")
    parser.add_argument("--shake", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.shake:
        shake()
        return 0
    machine, n_problems = Machine(), 0
    for check in (*CHECKS, handshake) if asked.handshake else CHECKS:
        for finding in check(machine):
            n_problems += bool(finding.remedy)
            print(f"{finding.name:<16}{finding.told}", flush=True)
            if finding.remedy:
                print(f"{'':<16}-> {finding.remedy}", flush=True)
    print(f"{n_problems} problem(s)")
    return int(n_problems > 0)


if __name__ == "__main__":
    leave(main)
