"""What the template adds to a step: train.main on a model that costs nothing -> milliseconds per step, by part.

    python benchmarks/step_overhead.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml benchmarks/step_overhead.py

64 rows of 128 tokens of the embedded data per process and step, in one pass. The model is one number per token id; a
plain loop's forward, backward, clipping and optimizer step on a batch that lies ready are measured in the same run
and subtracted. What stays is the template's: decide, agree, plan, fetch, collate, scale, the fused reduction of what
was measured, and the record in metrics.jsonl. Times are rank 0's; trackers are off. Parts are medians of time spent
inside the named function without the parts named below it, so they do not add up exactly.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path

import interleave
import torch
import train
from accelerate import Accelerator

from adaptive.tasks import Loaded
from adaptive.tasks.causal_lm import CausalLM

ROWS, TOKENS = 64, 128  # per process and step
N_BLOCKS, BLOCK_STEPS = 12, 40
LIMIT_MS = {1: 1.5, 2: 4.0}  # the goals


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


class Plain:
    """The part of a step that any loop has: forward, backward, clip, optimizer; built at the first step."""

    def __init__(self):
        self.ready = False

    def build(self) -> None:
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        model = torch.nn.Embedding(384, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batch = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=self.accelerator.device)}
        self.ready = True

    def step(self) -> None:
        if not self.ready:
            self.build()
        loss = NoModel().loss_sum(self.model, self.batch).sum()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Parts:
    """Seconds inside named functions, without those inside other named functions, per call of `close`."""

    def __init__(self):
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.inner = [0.0]

    def time(self, owner, name: str, part: str) -> None:
        """Replace owner.name by a function that counts its seconds as `part`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments, **settings):
            self.inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **settings)
            finally:
                spent = time.perf_counter() - start
                self.now[part] = self.now.get(part, 0.0) + spent - self.inner.pop()
                self.inner[-1] += spent

        setattr(owner, name, timed)

    def close(self, report, record) -> None:
        self.told(report, record)
        self.steps.append(self.now)
        self.now = {}

    def watch(self) -> None:
        """Wrap what train.main calls; the product code knows nothing of it."""
        for owner, name, part in (
            (train, "decide", "decide"), (train.Engine, "from_rank0", "agree"), (train, "plan_step", "plan"),
            (train.signals, "before_step", "decide"), (train.Engine, "seed", "seed"), (train.Data, "share", "fetch"),
            (CausalLM, "collate", "collate"), (CausalLM, "items", "count"), (CausalLM, "token_counts", "count"),
            (train.Engine, "sum_integers", "count tokens over ranks"), (train, "update", "clip, optimizer"),
            (train.Engine, "squared_norm", "gradient norm"), (train.Engine, "backward", "backward"),
            (train.Engine, "sum", "fused reduction"), (train, "train_record", "record"),
            (train.signals, "after_step", "record"), (train.Report, "train", "write"), (train, "gradient", "gradient, rest"),
        ):  # fmt: skip
            self.time(owner, name, part)
        self.told = train.Report.train
        train.Report.train = self.close


def main() -> None:
    plain, parts = Plain(), Parts()
    parts.watch()
    flags = ["--task", f"{Path(__file__)}:NoModel", "--batch_size", str(ROWS * interleave.WORLD_SIZE),
             "--micro_batch_size", str(ROWS), "--num_train_epochs", "100", "--lr_scaling", "none"]  # fmt: skip
    blocks = interleave.run(flags, plain.step, N_BLOCKS, BLOCK_STEPS)
    if interleave.IS_MAIN:
        show(*blocks, parts.steps[BLOCK_STEPS:])
    train.Engine.leave()


def show(template: list, plain: list, steps: list[dict[str, float]]) -> None:
    """One table: the whole, then the parts."""
    template, plain = ([1e3 * statistics.median(block) for block in blocks] for blocks in (template, plain))
    added = [a - b for a, b in zip(template, plain, strict=True)]
    print(f"W = {interleave.WORLD_SIZE}, {ROWS} rows of {TOKENS} tokens per process, milliseconds per step, "
          f"median [lowest, highest] of {N_BLOCKS} blocks of {BLOCK_STEPS} steps")  # fmt: skip
    for name, values in (("train.main", template), ("plain model step", plain), ("added", added)):
        print(f"{name:24} {statistics.median(values):7.3f} [{min(values):.3f}, {max(values):.3f}]")
    print(f"{'goal':24} {LIMIT_MS.get(interleave.WORLD_SIZE, float('nan')):7.3f}")
    medians = {part: 1e3 * statistics.median(step.get(part, 0.0) for step in steps) for part in steps[-1]}
    for part, value in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"  {part:22} {value:7.3f}")


if __name__ == "__main__":
    main()
