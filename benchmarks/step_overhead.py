"""What the template adds to a step: train.main with a model that costs nothing -> milliseconds, by part.

    python benchmarks/step_overhead.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml benchmarks/step_overhead.py

64 rows of 128 tokens of the embedded data per process and step, in one pass. The model is one number per
token id; what it costs all the same (its forward, the backward and the gradient's all-reduce, the optimizer's
step) is timed where it happens and subtracted. What stays is the template's: decide, agree, plan, fetch,
collate, scale, the gradient's norm, the fused reduction, the record in metrics.jsonl. Trackers are off.
Times are rank 0's. Each part is the time inside functions of that name without the parts inside them;
waiting for the other process counts where it happens. With --cpu all times are CPU time of the main thread,
without any waiting: for machines whose cores other programs share.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import torch  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

import train  # noqa: E402
from adaptive.config import parse  # noqa: E402
from adaptive.tasks import Loaded  # noqa: E402
from adaptive.tasks.causal_lm import CausalLM  # noqa: E402

ROWS, TOKENS = 64, 128  # per process and step
STEPS, LEFT_OUT = 600, 50  # the first ones warm up
GOAL_MS = {1: 1.5, 2: 4.0}  # median, by processes
MODEL = ("forward", "backward", "optimizer")
CLOCK = time.thread_time if "--cpu" in sys.argv else time.perf_counter


class NoModel(CausalLM):
    """The rows and the collation of causal_lm, with a model that costs nothing."""

    def load(self, config):
        loaded = super().load(config)
        config.optim.learning_rate = 1e-3
        return Loaded(loaded.train, None, None, loaded.fingerprint)

    def model(self, config):
        return torch.nn.Embedding(384, 1)

    def loss_sum(self, model, batch):
        return model(batch["input_ids"][:, 0])[:, 0]  # (rows,)


class Parts:
    """Seconds of each step inside named functions, without those inside other named functions."""

    def __init__(self):
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.inner, self.since = [0.0], CLOCK()

    def watch(self, owner, name: str, part: str) -> None:
        """Replace owner.name by a function that counts its seconds as `part`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments, **settings):
            self.inner.append(0.0)
            start = CLOCK()
            try:
                return function(*arguments, **settings)
            finally:
                spent = CLOCK() - start
                self.now[part] = self.now.get(part, 0.0) + spent - self.inner.pop()
                self.inner[-1] += spent

        setattr(owner, name, timed)

    def watch_all(self) -> None:
        """What train.main calls, and the end of a step; the product code knows nothing of it."""
        engine = train.Engine
        for owner, name, part in (
            (train, "decide", "decide"), (train.signals, "before_step", "decide"),
            (engine, "from_rank0", "agree"), (train, "plan_with", "plan"), (engine, "seed", "seed"),
            (train.Data, "share", "fetch"),
            (CausalLM, "collate", "collate"), (CausalLM, "items", "count"),
            (CausalLM, "token_counts", "count"),
            (engine, "open_step", "agree on tokens"),
            (engine, "backward", "backward"), (engine, "_reduce", "backward"),
            (AcceleratedOptimizer, "step", "optimizer"),
            (AcceleratedOptimizer, "zero_grad", "optimizer"), (engine, "squared_norm", "gradient norm"),
            (engine, "sum", "fused reduction"), (train, "train_record", "record"),
            (train.signals, "after_step", "record"), (train.Report, "train", "write"),
        ):  # fmt: skip
            self.watch(owner, name, part)
        told, load_task = train.Report.train, train.load_task

        def load(name):  # from this file, but another module than the one that runs
            task = load_task(name)
            self.watch(task, "loss_sum", "forward")
            return task

        def tell(report, record):
            told(report, record)
            now = CLOCK()
            self.steps.append(self.now | {"whole step": now - self.since})
            self.now, self.since = {}, now

        train.Report.train, train.load_task = tell, load


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as accelerate_configs/cpu*.yaml do
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    parts, folder = Parts(), tempfile.mkdtemp()
    parts.watch_all()
    flags = {
        "task": f"{__file__}:NoModel", "batch_size": ROWS * world_size, "micro_batch_size": ROWS,
        "schedule": "constant()", "max_steps": STEPS, "num_train_epochs": 100, "save_every": "never",
        "log_every": "never", "report_to": "none", "output_dir": folder,
    }  # fmt: skip
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(parse([f"--{name}={value}" for name, value in flags.items()]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        show(parts.steps[LEFT_OUT:], world_size)
    train.Engine.leave()


def show(steps: list[dict[str, float]], world_size: int) -> None:
    """One table: what the template adds, and its parts."""
    for step in steps:
        step["the model's own"] = sum(step.get(part, 0.0) for part in MODEL)
        step["ADDED"] = step["whole step"] - step["the model's own"]
        named = sum(v for part, v in step.items() if part not in ("whole step", "the model's own", "ADDED"))
        step["everything else"] = step["whole step"] - named
    table = {part: sorted(1e3 * step.get(part, 0.0) for step in steps) for part in steps[-1]}
    unit = "milliseconds" if CLOCK is time.perf_counter else "milliseconds of CPU time"
    print(f"W = {world_size}, {ROWS} rows of {TOKENS} tokens per process, {len(steps)} steps: {unit}")
    print(f"{'':18} {'median':>8} {'p10':>8} {'p90':>8} {'mean':>8}")
    for part, values in sorted(table.items(), key=lambda item: -statistics.median(item[1])):
        tenth = len(values) // 10
        numbers = (statistics.median(values), values[tenth], values[-1 - tenth], statistics.fmean(values))
        print(f"{part:18} " + " ".join(f"{number:8.3f}" for number in numbers))
    print(f"{'goal for ADDED':18} {GOAL_MS.get(world_size, float('nan')):8.3f}")


if __name__ == "__main__":
    main()
