"""Template and a plain loop in one process, in turns: train.main(config) -> seconds of both.

The real `train.main` runs from start to end. After every block of its steps, where it has just told about a
step, the plain loop runs a block of its own; both thus see the same machine, whatever else runs on it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import numpy as np  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402
from adaptive.config import parse  # noqa: E402

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
IS_MAIN = os.environ.get("RANK", "0") == "0"


def run(flags: list[str], plain_step: Callable, n_blocks: int, block_steps: int) -> tuple[list, list]:
    """(template, plain), n_blocks arrays (steps, 2) each: wall-clock and CPU seconds of this process.

    A first pair of blocks and each block's first step are left out. `flags` of train.py; `plain_step()` is
    one step of the other loop. Collective.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as accelerate_configs/cpu*.yaml do
    template, plain, block = [], [], []
    told, since = train.Report.train, [clocks()]

    def tell(report, record):
        told(report, record)
        if len(block) == block_steps - 1:
            settle()
        block.append(clocks() - since[0])
        if len(block) == block_steps:
            template.append(np.array(block[1:]))
            block.clear()
            last = [False] * (block_steps - 1) + [True]
            plain.append(np.array([timed(plain_step, ends_block) for ends_block in last][1:]))
        since[0] = clocks()

    folder = tempfile.mkdtemp()
    settings = [
        "--schedule", "constant()", "--max_steps", str((n_blocks + 1) * block_steps), "--output_dir", folder,
        "--report_to", "none", "--eval_every", "never", "--save_every", "never",
    ]  # fmt: skip
    train.Report.train = tell
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(parse(settings + flags + sys.argv[1:]))
    finally:
        train.Report.train = told
        shutil.rmtree(folder, ignore_errors=True)
    assert len(template) == n_blocks + 1, "the run was shorter than its blocks: more epochs are needed"
    return template[1:], plain[1:]


def clocks() -> np.ndarray:
    """Now, by the wall clock and by this process's CPU time; (2,) seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def timed(step: Callable, ends_block: bool) -> np.ndarray:
    start = clocks()
    step()
    if ends_block:
        settle()
    return clocks() - start


def settle() -> None:
    """Wait for what a GPU still has to do of the block."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
