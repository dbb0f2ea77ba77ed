"""Every file of benchmarks/ runs and tells what it is for, at a tiny size: what they use may change."""

from __future__ import annotations

import json

import pytest
from fork_benchmarks import SMALL
from launching import ROOT, run_python

FILES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
TELLS = {  # words of the last lines, which only a whole run prints
    "checkpoints": ["load / plain load"],
    "compare": ["train.py", "Accelerate loop", "transformers.Trainer"],
    "gpu": ["weights after 6 steps: DDP, 1 process(es)", "peak memory of rank 0, MiB: DDP"],
    "interleave": ["[[1], [1]]"],
    "order": ["process:"],
    "packing": ["none", "documents", "stream"],
    "plain_loop": ["ratio in CPU time"],
    "planning": ["16384"],
    "resume": ["extrapolated from", "stream"],
    "schedules": ["best fixed size: fixed 4; 1 seed(s)"],
    "signal_cost": ["nothing, again", "all"],
    "step_overhead": ["ADDED", "goal for ADDED"],
}


@pytest.fixture(scope="module")
def told() -> dict[str, list]:
    """{name: [exit status, output]} of all, from one process that imports the libraries once."""
    done = run_python("tests/fork_benchmarks.py", *SMALL, timeout=500, cold=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_benchmark_runs(told, name):
    """Mutation: `Data.share` or any other function that a benchmark calls gets another name."""
    assert name in SMALL, f"benchmarks/{name}.py is not in tests/fork_benchmarks.py"
    status, text = told[name]
    assert status == 0, text[-3000:]
    assert all(word in text for word in TELLS[name]), text[-3000:]
