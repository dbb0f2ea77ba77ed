"""Throughput of the template against a plain Accelerate loop: constant size -> ratio of tokens per second.

    python benchmarks/plain_loop.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml benchmarks/plain_loop.py

The plain loop is `accelerator.prepare(model, optimizer, DataLoader)` and nothing else: the same llama-tiny
(on a GPU llama-125m), the same packed rows of the embedded data, AdamW, clipping to 1, 16 samples of 128
tokens (on a GPU 1024) per process and step, the loss that transformers computes. It never reads a loss,
writes no record and evaluates nothing. Both loops are in the same processes and take turns (interleave.py);
ratios are of neighbouring blocks. Trackers are off; flags of train.py after the command win, such as
`--report_to wandb`. The ratio in CPU time is rank 0's; it says the same where other programs take turns on
the cores, if less noisily.
"""

from __future__ import annotations

import os
import statistics

import compare
import interleave
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import train
from adaptive.config import parse
from adaptive.data import load
from adaptive.optim import build_optimizer
from adaptive.tasks import load_task

ROWS = 16  # per process and step
MODEL, TOKENS = compare.what()
WHAT = compare.flags_of(MODEL, TOKENS)
N_BLOCKS, BLOCK_STEPS = int(os.environ.get("BLOCKS", "80")), 5  # short: a change of clock falls on both


class Plain:
    """What one would write with Accelerate alone; built at the first step, when the processes are there."""

    def __init__(self):
        self.rows = None

    def build(self) -> None:
        config, task = parse(["--output_dir", "unused", *WHAT]), load_task("causal_lm")
        rows = load(task, config).train["train"].with_format("torch")
        rows = rows.select(range(len(rows) - 1))  # the last is shorter, which default_collate cannot take
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        model = task.model(config)
        optimizer = build_optimizer(model, config.optim)
        loader = DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.rows = self.epochs()

    def epochs(self):
        while True:
            yield from self.loader

    def step(self) -> None:
        if self.rows is None:
            self.build()
        batch = next(self.rows)
        loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    flags = ["--batch_size", str(ROWS * interleave.WORLD_SIZE), "--lr_scheduler_type", "constant",
             "--max_grad_norm", "1.0", "--num_train_epochs", "100", *WHAT]  # fmt: skip
    blocks = interleave.run(flags, Plain().step, N_BLOCKS, BLOCK_STEPS)
    if interleave.IS_MAIN:
        show(*blocks)
    train.Engine.leave()


def show(template: list, plain: list) -> None:
    """One table: tokens per second of both, and the ratio of each pair of blocks."""
    tokens, threads = ROWS * TOKENS * interleave.WORLD_SIZE, torch.get_num_threads()
    print(f"W = {interleave.WORLD_SIZE}, {ROWS} samples of {TOKENS} tokens, {threads} thread(s) per process")
    print(f"{N_BLOCKS} pairs of {BLOCK_STEPS} steps: median [quartiles]")
    for name, blocks in (("template, tokens/s", template), ("plain loop, tokens/s", plain)):
        row(name, [tokens / block[:, 0].mean() for block in blocks], ",.0f")
    for name, clock in (("ratio", 0), ("ratio in CPU time", 1)):
        pairs = zip(template, plain, strict=True)
        row(name, [b[:, clock].sum() / a[:, clock].sum() for a, b in pairs], ".4f")
    print(f"{'goal for the ratio':24} {0.98:10.4f}")


def row(name: str, values: list[float], form: str) -> None:
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name:24} {middle:10{form}} [{low:{form}}, {high:{form}}]")


if __name__ == "__main__":
    main()
