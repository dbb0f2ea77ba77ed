"""Seconds to continue a run after so many samples: this template against `accelerate.skip_first_batches`.

    python benchmarks/resume.py

From what a checkpoint holds to the rows of the next step, of a dataset of twice as many rows (rows are free
to read here: only finding them is timed).

table    Ours: the state, the plan, the indices, measured at both sizes. Theirs: the same prepared DataLoader
         (shuffle=True), `skip_first_batches`, its first batch; it draws and throws away the indices before,
         so its time grows linearly, and so does its memory (a permutation of all rows). It is measured up to
         MEASURED samples; beyond, the line says that it is extrapolated from there.
stream   A `datasets.IterableDataset` over json files. Ours: `load_state_dict` of the newest mark, and the
         rows after it (--streaming). Theirs: every row before is read again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import checkpoints  # noqa: E402
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate import skip_first_batches as skip  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from adaptive.config import parse  # noqa: E402
from adaptive.stream import Stream  # noqa: E402

SAMPLES = (10**6, 10**9)
MEASURED, BATCH, ROUNDS = 10**7, 32, 5
STREAMED, FILES = 10**6, 4


def theirs(loader: DataLoader, samples: int) -> float:
    start = time.perf_counter()
    next(iter(skip(loader, samples // BATCH)))
    return time.perf_counter() - start


def of_table(folder: Path, accelerator: Accelerator) -> None:
    for samples in SAMPLES:
        checkpoints.POSITION = samples
        ours = statistics.median(checkpoints.first_plan(2 * samples, folder) for _ in range(ROUNDS))
        measured = min(samples, MEASURED)
        loader = accelerator.prepare(
            DataLoader(checkpoints.Numbers(2 * measured), batch_size=BATCH, shuffle=True)
        )
        seconds = statistics.median(theirs(loader, measured) for _ in range(min(3, ROUNDS)))
        how = "" if measured == samples else f" (extrapolated from {seconds:.2f} s at {measured:,})"
        show("table", samples, ours, seconds * samples / measured, how)


def of_stream(folder: Path, accelerator: Accelerator) -> None:
    """Two streams of the same files, read to STREAMED rows and continued from there."""
    for part in range(FILES):
        rows = range(part, 2 * STREAMED, FILES)
        text = "".join(f'{{"number": {number}}}\n' for number in rows)
        (folder / f"part_{part}.jsonl").write_text(text)
    names = sorted(map(str, folder.glob("part_*.jsonl")))
    config = parse(["--streaming", "--max_steps", "1", "--shuffle_buffer", "0"])

    def opened() -> datasets.IterableDataset:
        return datasets.load_dataset("json", data_files=names, streaming=True, split="train")

    first = Stream("train", opened(), config, 0, 1)
    for at in range(0, STREAMED, BATCH):
        stop = first.reach(at, min(at + BATCH, STREAMED))
        first.read(np.arange(at, stop))
    mark, seconds = json.dumps(first.mark_before(STREAMED)), []
    for _ in range(ROUNDS):
        fresh, start = opened(), time.perf_counter()
        again = Stream("train", fresh, config, 0, 1)
        again.seek(json.loads(mark))
        again.reach(STREAMED, STREAMED + BATCH)
        (row, *_), _ = again.read(np.arange(STREAMED, STREAMED + BATCH))
        seconds.append(time.perf_counter() - start)
    loader = accelerator.prepare(DataLoader(opened(), batch_size=BATCH))
    start = time.perf_counter()
    batch = next(iter(skip(loader, STREAMED // BATCH)))
    spent = time.perf_counter() - start
    assert int(batch["number"][0]) == row["number"], "the two do not continue with the same row"
    show("stream", STREAMED, statistics.median(seconds), spent, "")


def show(what: str, samples: int, ours: float, other: float, how: str) -> None:
    print(
        f"{what:8}{samples:>15,}{1e3 * ours:12.1f}{1e3 * other:16,.0f}{other / ours:12,.0f}{how}", flush=True
    )


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    print(f"{'data':8}{'samples':>15}{'ours, ms':>12}{'skip_first, ms':>16}{'ratio':>12}")
    with tempfile.TemporaryDirectory() as folder:
        of_table(Path(folder), accelerator)
        of_stream(Path(folder), accelerator)


if __name__ == "__main__":
    main()
