"""What packing saves: the same documents in rows of their own, side by side, or joined -> waste and tokens/s.

    python benchmarks/packing.py

The documented functions of Python's standard library (the embedded data of seq2seq), one document each, with
llama-tiny and ROWS rows of at most LENGTH tokens in a pass: `--packing none` pads them to the longest of the
pass, `documents` lays whole ones side by side that do not see each other, `stream` joins and cuts them. The
waste is the share of a pass's positions that hold padding. Tokens are those that are supervised, none of them
padding, and a step is train.py's `gradient` and `update` on rows drawn by the order of a run. The three take
turns in one process, a block of steps each; ratios are of the blocks of one round.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import numpy as np  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402
from adaptive.config import Config, Data, parse  # noqa: E402
from adaptive.corpus import load_pairs  # noqa: E402
from adaptive.data import Share, Source, load  # noqa: E402
from adaptive.optim import build_optimizer  # noqa: E402
from adaptive.tasks import load_task  # noqa: E402

ROWS, LENGTH = 8, 512  # of a step, which is one pass; tokens
ROUNDS, STEPS = 9, 2
PACKINGS = ("none", "documents", "stream")


class Packed:
    """The rows of one --packing, and what they were worth so far."""

    def __init__(self, config: Config):
        self.task = load_task("causal_lm")
        self.rows = Source("train", load(self.task, config).train["train"], 1, 0, 1, 0)
        self.at, self.padding, self.inputs = 0, 0, 0
        self.speeds: list[float] = []  # tokens per second of each block

    def block(self, engine: train.Engine, config: Config) -> None:
        tokens, start = 0, time.perf_counter()
        for _ in range(STEPS):
            rows, _ = self.rows.read(np.arange(self.at, self.at + ROWS))
            own = Share.alike(rows, ROWS, 1 / ROWS)
            measured = train.gradient(engine, self.task, own, self.rows.first, config.batch)
            train.update(engine, measured, 1e-4)
            self.at, tokens = self.at + ROWS, tokens + measured.items
            self.padding += measured.padding_tokens
            self.inputs += measured.input_tokens
        self.speeds.append(tokens / (time.perf_counter() - start))


def settings(documents: str, packing: str) -> Config:
    flags = {
        "dataset_name": documents, "packing": packing, "sequence_length": LENGTH, "micro_batch_size": ROWS,
        "normalize_by": "tokens", "output_dir": "unused", "report_to": "none", "learning_rate": 1e-4,
    }  # fmt: skip
    return parse([f"--{name}={value}" for name, value in flags.items()])


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as accelerate_configs/cpu*.yaml do
    with tempfile.TemporaryDirectory() as folder:
        documents = f"{folder}/functions"
        load_pairs(Data(dataset_name="stdlib"), 1).train.select_columns("text").save_to_disk(documents)
        configs = {packing: settings(documents, packing) for packing in PACKINGS}
        engine = train.Engine.start(configs["none"])
        packed = {packing: Packed(config) for packing, config in configs.items()}
        model = packed["none"].task.model(configs["none"])
        engine.prepare(model, build_optimizer(model, configs["none"].optim), frozenset())
        for turn in range(ROUNDS + 1):  # the first one warms up
            for packing in PACKINGS[turn % 3 :] + PACKINGS[: turn % 3]:
                packed[packing].block(engine, configs[packing])
        show(packed)
    train.Engine.leave()


def show(packed: dict[str, Packed]) -> None:
    """One line for each packing; the ratio of a round is to `none` in that round."""
    print(f"passes of {ROWS} rows, at most {LENGTH} tokens; {ROUNDS} rounds of {STEPS} steps: medians")
    print(f"{'--packing':12}{'rows':>8}{'padding':>10}{'tokens/s':>12}{'of none':>10}{'quartiles':>18}")
    base = packed["none"].speeds[1:]
    for name, one in packed.items():
        ratios = [a / b for a, b in zip(one.speeds[1:], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        waste = one.padding / (one.padding + one.inputs)
        speed = statistics.median(one.speeds[1:])
        told = f"{name:12}{one.rows.length:8,}{waste:10.1%}{speed:12,.0f}{middle:10.2f}"
        print(f"{told}{f'{low:.2f} to {high:.2f}':>18}")


if __name__ == "__main__":
    main()
