"""recipes/slurm.sh, run by a shell with stand-ins for slurm's own two commands: one machine, 2 processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, audits, environment, records

SCRIPT = ROOT / "recipes" / "slurm.sh"
SLURM = {  # what slurm would do on one machine; what is asked of it is kept in ASKED
    "srun": 'SLURM_NODEID=0 exec "$@"\n',
    "scontrol": 'echo "$@" >>"$ASKED"\n[ "$1" = show ] && echo localhost\nexit 0\n',
}


def test_it_parses_and_asks_for_the_signal_early():
    """Mutation: `--signal=USR1@120`, which goes to accelerate's launchers and ends them at once."""
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    assert "#SBATCH --signal=B:USR1@120" in SCRIPT.read_text().splitlines()


@pytest.mark.slow
def test_the_signal_saves_and_queues_again(tmp_path):
    """USR1 to the script: all processes finish the step and save, status 0, one requeue; a start goes on.

    Mutations: the signal handed to the launcher (status 138); `wait` once (the job ends before the save).
    """
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    folder, asked = tmp_path / "run", tmp_path / "asked"
    settings = environment(
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", LAYOUT="cpu_ddp",
        PROCESSES_PER_NODE="2", PORT="0", OUTPUT_DIR=str(folder), ASKED=str(asked), SLURM_NNODES="1",
        SLURM_JOB_ID="7", SLURM_JOB_NODELIST="localhost",
    )  # fmt: skip
    flags = ["--batch_size", "3", "--schedule", "constant()", "--report_to", "none", "--audit"]
    flags += ["--eval_every", "never"]
    job = subprocess.Popen(["bash", SCRIPT, *flags, "--max_steps", "5000"], cwd=ROOT, env=settings)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(records(folder)) < 5:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 0
    assert asked.read_text().splitlines() == ["show hostnames localhost", "requeue 7"]
    at = len(records(folder))
    assert 5 <= at < 5000 and (folder / "checkpoints" / f"step_{at}" / "manifest.json").exists()
    assert not (ROOT / ".launcher_7").exists()

    flags += ["--max_steps", str(at + 3)]
    done = subprocess.run(["bash", SCRIPT, *flags], cwd=ROOT, env=settings, timeout=120, check=False)
    assert done.returncode == 0 and asked.read_text().count("requeue") == 1
    assert [record["step"] for record in records(folder)] == list(range(1, at + 4))
    assert set(audits(folder)) == {0, 1}
