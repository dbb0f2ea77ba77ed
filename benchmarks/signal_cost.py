"""What a signal costs: train.main whose signals in use change every few steps -> ratios of step times.

    python benchmarks/signal_cost.py                                # 16 samples in two passes
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml benchmarks/signal_cost.py

One run of the embedded task; every block of steps uses one of VARIANTS, in an order drawn anew for each
round, so that all see the same machine. A ratio is the median over rounds of a block's time over that of the
block without signals in the same round. "nothing, again" is that block a second time: what the method itself
resolves. Hooks are set and removed with each block, as `Engine.prepare` sets them once for a run.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import torch  # noqa: E402

import train  # noqa: E402
from adaptive.config import parse  # noqa: E402
from adaptive.noise_scale import SIGNALS, PassNorms  # noqa: E402

ROUNDS, STEPS = 40, 2  # of every variant; steps of a block
VARIANTS = {  # name -> signals in use
    "nothing": set(),
    "nothing, again": set(),
    "noise_scale (and the others of its passes)": SIGNALS,
    "noise_scale, at a step not measured": SIGNALS,
    "memory_usage": {"memory_usage"},
    "difficulty": {"difficulty"},
    "all": SIGNALS | {"memory_usage", "difficulty"},
}


class Switch:
    """Sets the signals in use of the engine that runs, and times the steps between."""

    def __init__(self):
        self.engine, self.handles, self.took = None, [], {name: [] for name in VARIANTS}
        draw = random.Random(0)  # the same order on every process
        rounds = [draw.sample(list(VARIANTS), len(VARIANTS)) for _ in range(ROUNDS + 1)]
        self.order = [name for one in rounds for name in one]
        self.block, self.now = [], None

    def use(self, name: str) -> None:
        """As `prepare` would have, with only these signals wanted."""
        for handle in self.handles:
            handle.remove()
        registered, self.handles = torch.Tensor.register_hook, []

        def keep(tensor, hook):
            self.handles.append(registered(tensor, hook))
            return self.handles[-1]

        torch.Tensor.register_hook = keep
        try:
            self.engine.norms = PassNorms(self.engine.local_parameters(), bool(SIGNALS & VARIANTS[name]))
        finally:
            torch.Tensor.register_hook = registered
        if "not measured" in name:
            self.engine.norms.wanted = False  # as at a step that --noise_every leaves out
        self.engine.wanted, self.now = frozenset(VARIANTS[name]), name

    def told(self) -> None:
        """A step is over."""
        self.block.append(time.perf_counter() - self.since)
        if len(self.block) == STEPS:
            self.took[self.now].append(sum(self.block) / STEPS)
            self.block.clear()
            if self.order:
                self.use(self.order.pop(0))
        self.since = time.perf_counter()

    def start(self, engine) -> None:
        self.engine = engine
        self.use(self.order.pop(0))
        self.since = time.perf_counter()


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as accelerate_configs/cpu*.yaml do
    world_size, folder, switch = int(os.environ.get("WORLD_SIZE", "1")), tempfile.mkdtemp(), Switch()
    told, listen = train.Report.train, train.Engine.listen

    def tell(report, record):
        told(report, record)
        switch.told()

    def begin(engine):
        listen(engine)
        switch.start(engine)

    train.Report.train, train.Engine.listen = tell, begin
    flags = {
        "batch_size": 16 * world_size, "micro_batch_size": 8, "schedule": "constant()", "num_train_epochs": 9,
        "max_steps": (ROUNDS + 1) * len(VARIANTS) * STEPS, "save_every": "never", "eval_every": "never",
        "log_every": "never", "report_to": "none", "output_dir": folder,
    }  # fmt: skip
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(parse([f"--{name}={value}" for name, value in flags.items()] + sys.argv[1:]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if os.environ.get("RANK", "0") == "0":
        show(switch.took, world_size)
    train.Engine.leave()


def show(took: dict[str, list[float]], world_size: int) -> None:
    """One line for each variant; the first round warms up."""
    base = took["nothing"][1:]
    usual = 1e3 * statistics.median(base)
    print(f"W = {world_size}, {len(base)} rounds; a step without signals takes {usual:.1f} ms")
    print(f"{'':46} {'ratio':>7} {'quartiles':>16}")
    for name, blocks in took.items():
        ratios = sorted(a / b for a, b in zip(blocks[1:], base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(f"{name:46} {statistics.median(ratios):7.3f} {low:7.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
