"""Each finding of the doctor, provoked by variables or a stand-in of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from launching import run_python

from adaptive.tools import doctor
from adaptive.tools.doctor import Machine


def torch_of(maker: str | None = None, gpus: int = 0, **cuda) -> SimpleNamespace:
    """A torch built for `maker` that sees `gpus` devices."""
    settings = {
        "is_available": lambda: gpus > 0, "device_count": lambda: gpus, "get_device_name": lambda k: "Device",
        "is_bf16_supported": lambda: True, "mem_get_info": lambda: (3 * 2**30, 4 * 2**30),
    } | cuda  # fmt: skip
    talk = SimpleNamespace(
        is_available=lambda: True, is_nccl_available=lambda: gpus > 0, is_gloo_available=lambda: True
    )
    version = SimpleNamespace(hip="7.0" if maker == "AMD" else None, cuda="13" if maker == "NVIDIA" else None)
    return SimpleNamespace(
        __version__="2.13.0", version=version, cuda=SimpleNamespace(**settings), distributed=talk,
        backends=SimpleNamespace(cuda=SimpleNamespace(flash_sdp_enabled=lambda: True)),
    )  # fmt: skip


def machine(
    maker=None, gpus=0, environment=None, nodes=(), programs=(), packages=("psutil",), **cuda
) -> Machine:
    return Machine(
        torch_of(maker, gpus, **cuda), environment or {}, lambda name: name if name in programs else None,
        lambda path: path in nodes, lambda name: name if name in packages else None,
    )  # fmt: skip


def only(check, given: Machine):
    (finding,) = check(given)
    return finding


@pytest.mark.parametrize(
    ("given", "told", "remedy"),
    [
        (machine(), "CPU, torch 2.13.0", ""),
        (machine("NVIDIA", 2, nodes=["/dev/nvidiactl"]), "NVIDIA, torch 2.13.0, 2 x Device", ""),
        (machine("AMD", 8, nodes=["/dev/kfd"]), "AMD, torch 2.13.0, 8 x Device", ""),
        (machine(nodes=["/dev/nvidiactl"]), "built for the CPU", "build for CUDA"),
        (machine("NVIDIA", nodes=["/dev/kfd"]), "built for NVIDIA", "build for ROCm"),
        (machine("AMD", nodes=["/dev/kfd"]), "torch sees none", "masks and the driver"),
    ],
)
def test_vendor(given, told, remedy):
    finding = only(doctor.vendor, given)
    assert told in finding.told and remedy in finding.remedy and bool(remedy) == bool(finding.remedy)


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "unset CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}, ""),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, "keep HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "4"}, "keep CUDA_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": " "}, "unset HIP_VISIBLE_DEVICES"),
    ],
)
def test_masks(environment, remedy):
    """Mutation: variables compared by name only: (ROCR=1, HIP=1) hides all although both say the same."""
    finding = only(doctor.masks, machine(environment=environment))
    assert remedy in finding.remedy and bool(remedy) == bool(finding.remedy)
    assert all(f"{name}={value!r}" in finding.told for name, value in environment.items())


def test_drivers():
    finding = only(doctor.driver, machine("NVIDIA", programs=["nvidia-smi"]))
    assert finding.told == "nvidia-smi does not answer" and "NVIDIA driver" in finding.remedy
    assert list(doctor.driver(machine())) == []
    amd = list(doctor.driver(machine("AMD", nodes=["/dev/kfd"])))
    assert "ROCm 7.0" in amd[0].told and "groups render and video" in amd[1].remedy


def test_backends():
    assert only(doctor.backends, machine("AMD", 1)).told == "rccl, gloo"
    assert only(doctor.backends, machine("NVIDIA", 1)).told == "nccl, gloo"
    without = machine("NVIDIA", 1)
    without.torch.distributed.is_nccl_available = lambda: False
    assert "with nccl" in only(doctor.backends, without).remedy
    without = machine()
    without.torch.distributed.is_gloo_available = lambda: False
    assert "with gloo" in only(doctor.backends, without).remedy
    without.torch.distributed.is_available = lambda: False
    assert "distributed" in only(doctor.backends, without).remedy


def test_compiler_and_headers():
    assert "g++" in only(doctor.compiler, machine()).remedy
    assert "python3-dev" in only(doctor.compiler, machine(programs=["g++"])).remedy
    named = only(doctor.compiler, machine(environment={"CXX": "nowhere"}, programs=["g++"]))
    assert named.told == "no nowhere" and named.remedy
    given = machine(programs=["g++"])
    given.exists = lambda path: path.endswith("Python.h")
    assert not only(doctor.compiler, given).remedy


def test_deepspeed(monkeypatch):
    assert "pip install deepspeed" in only(doctor.deepspeed, machine()).remedy
    monkeypatch.setattr(doctor, "operations", lambda: {"cpu_adam": False, "fused_adam": True})
    version, ops, problem = doctor.deepspeed(machine(packages=["deepspeed"]))
    assert ops.told == "can build: fused_adam; cannot: cpu_adam" and not ops.remedy
    assert "offload without it" in problem.remedy


def test_precision():
    assert only(doctor.precision, machine()).told == "works on the CPU, slowly"
    bf16, flash = doctor.precision(
        machine("NVIDIA", 1, is_bf16_supported=lambda: False, packages=["flash_attn"])
    )
    assert "--fp16" in bf16.remedy and flash.told == "the flash_attn package"
    off = machine("NVIDIA", 1)
    off.torch.backends.cuda.flash_sdp_enabled = lambda: False
    assert "flash-attn" in list(doctor.precision(off))[1].remedy


def test_memory():
    """R95. A query that raises, as on some ROCm versions, is a finding and no traceback."""

    def broken():
        raise RuntimeError("HIP error: invalid argument")

    finding = only(doctor.memory, machine("AMD", 1, mem_get_info=broken))
    assert "HIP error: invalid argument" in finding.told and "what torch reserved" in finding.remedy
    assert only(doctor.memory, machine("AMD", 1)).told == "3.0 of 4.0 GiB are free on the first device"
    assert "psutil" in only(doctor.memory, machine(packages=())).remedy


@pytest.mark.parametrize(
    ("maker", "gpus", "names"),
    [
        (None, 0, ["cpu", "cpu_ddp"]), ("NVIDIA", 1, ["single_gpu"]),
        ("NVIDIA", 4, ["ddp", "zero2", "zero3"]),
        ("AMD", 1, ["rocm_single"]), ("AMD", 8, ["rocm_ddp", "rocm_zero2", "rocm_zero3"]),
    ],
)  # fmt: skip
def test_the_layout_that_fits_is_there(maker, gpus, names):
    told = only(doctor.layout, machine(maker, gpus)).told
    for name in names:
        assert (
            name in told
            and (doctor.Path(doctor.__file__).parents[2] / f"accelerate_configs/{name}.yaml").exists()
        )
    assert (f"--num_processes {gpus}" in told) == (gpus > 1)


def test_a_wrong_flag_is_one_line():
    """Mutation: argparse's own answer, which lists every flag before it says which one is wrong."""
    done = run_python("-m", "adaptive.tools.doctor", "--handshke")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: unrecognized arguments: --handshke; see --help"]


@pytest.mark.slow
def test_on_this_machine_with_a_real_handshake():
    """R97. Two gloo processes add up 1 + 1; masks that hide every device are a problem, exit status 1."""
    done = run_python("-m", "adaptive.tools.doctor", "--handshake", CUDA_VISIBLE_DEVICES="", cold=True)
    assert done.returncode == 1, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 on cpu: sum 2" in done.stdout
    assert "unset CUDA_VISIBLE_DEVICES" in done.stdout and "cpu_adam" in done.stdout


@pytest.mark.slow
def test_a_handshake_that_fails_says_so(monkeypatch):
    """R97. No such network device: an answer in seconds, with a remedy."""
    monkeypatch.setattr(doctor, "HANDSHAKE_SECONDS", 20)
    import os

    finding = only(doctor.handshake, machine(environment=os.environ | {"GLOO_SOCKET_IFNAME": "nowhere0"}))
    assert "0 of 2 processes answered" in finding.told and "NCCL_SOCKET_IFNAME" in finding.remedy
