"""benchmarks/gpu.sh, as far as it can be tried without running all of it (DEVICE=cpu does)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import ROOT, launch, run_python

sys.path.insert(0, str(ROOT / "benchmarks"))


def test_it_parses():
    assert subprocess.run(["bash", "-n", ROOT / "benchmarks" / "gpu.sh"], check=False).returncode == 0


def test_what_failed_is_in_the_table(tmp_path):
    """Every part failed: the table is there, each line names the part's output, and the status is 1.

    Mutation: a log that is not there, read.
    """
    done = run_python("benchmarks/gpu.py", tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.endswith("MISSED")]
    assert done.returncode == 1 and len(lines) == 7, done.stderr[-2000:]
    assert all("failed" in line and ".log" in line for line in lines)


def test_a_wrong_engine_is_seen(tmp_path):
    """Weights 2e-5 away miss the aim, 5e-6 reach it. Mutation: the norm of all tensors together."""
    import gpu
    import torch
    from safetensors.torch import save_file

    for name, off in (("alone", 0.0), ("ddp", 2e-5), ("zero1", 5e-6)):
        (tmp_path / name / "model").mkdir(parents=True)
        weights = {"large": torch.full((9,), 1e4), "small": torch.ones(9) * (1 + off)}
        save_file(weights, tmp_path / name / "model" / "model.safetensors")
        told = {"processes": 2, "peak": 1.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    gpu.of_one_process = lambda *arguments: ()
    reached = {
        what.split(": ")[1].split(",")[0]: ok for what, _, _, ok in gpu.rows(tmp_path) if "weights" in what
    }
    assert (reached["DDP"], reached["ZeRO-1"], reached["ZeRO-2"]) == (False, True, False)


@pytest.mark.slow
def test_fsdp2_of_one_process_is_fsdp2(tmp_path):
    """As on a machine with one GPU. Mutation: no group beforehand (the plain engine runs, and says so)."""
    done = launch("cpu_fsdp2", 1, "benchmarks/gpu.py", tmp_path, "fsdp2")
    assert "FSDP2, 1 process(es)" in done.stdout
    assert json.loads((tmp_path / "fsdp2.json").read_text())["processes"] == 1
