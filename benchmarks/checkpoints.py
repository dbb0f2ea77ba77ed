"""What stopping and resuming costs: (a) milliseconds to the first plan at sample 10^9, (b) saving and loading
against plain `accelerator.save_state` and `load_state`.

    python benchmarks/checkpoints.py [SCRATCH_FOLDER]

(a) from the manifest to the rows of the first step: state, source, decision, plan, indices. (b) the same
model and AdamW in turns, once per round; the disk is slower for the second, who is first in the next round.
Ours is on the disk when it counts (fsync); accelerate's is not, so it is also timed with an fsync of each of
its files. Wall clock, and the processor's time, which neither disk nor neighbours lengthen. Older checkpoints
are removed by neither.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, uninstalled

import numpy as np  # noqa: E402
import torch  # noqa: E402

from adaptive.checkpoint import Checkpoints  # noqa: E402
from adaptive.config import parse  # noqa: E402
from adaptive.data import Data  # noqa: E402
from adaptive.engine import Engine  # noqa: E402
from adaptive.participation import plan_with  # noqa: E402
from adaptive.plan import Lengths, exact  # noqa: E402
from adaptive.schedules import decide, load_schedule  # noqa: E402
from adaptive.signals import KNOWN, before_step  # noqa: E402
from adaptive.state import RunState  # noqa: E402

POSITION, ROUNDS = 10**9, 20
WIDTH, LAYERS = 1024, 8  # 8.4 million parameters, 100 MB with AdamW's moments


class Numbers:
    """As many rows as asked for, without holding them."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict:
        return {"number": index}


def first_plan(n_rows: int, folder: Path) -> float:
    """Seconds from a manifest at POSITION to the first step's rows."""
    config = parse(["--batch_size", "24.5", "--num_train_epochs", str(1 + 2 * POSITION // n_rows)])
    schedule = load_schedule(config, set(KNOWN))
    state = RunState.fresh(["train"], 1, 24.5)
    state.step, state.samples, state.cursor = POSITION // 24, POSITION, {"train": POSITION}
    (folder / "manifest.json").write_text(json.dumps({"state": state.to_json()}))
    start = time.perf_counter()
    state = RunState.from_json(json.loads((folder / "manifest.json").read_text())["state"])
    data = Data({"train": Numbers(n_rows)}, config, 0, 1)
    lengths = Lengths(data.lengths, exact(config.run.num_train_epochs), None, -1)
    decision = decide(schedule, state, before_step(state, 1, 1.0), config.batch, lengths, 0.0)
    plan = plan_with(config, decision, state, lengths)
    rows = data.share(plan, {"train": 1.0}).rows
    spent = time.perf_counter() - start
    assert plan.intervals[0].start == POSITION and len(rows) == plan.size
    return spent


def prepared(folder: Path) -> tuple[Engine, Checkpoints]:
    """An engine whose model has been trained for a step."""
    flags = ["--output_dir", str(folder), "--resume_from_checkpoint", "auto", "--keep_last", str(ROUNDS)]
    engine = Engine.start(config := parse(flags))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine.prepare(model, torch.optim.AdamW(model.parameters()))
    engine.backward(engine.model(torch.ones(1, WIDTH)).sum())
    engine.update(1.0)
    return engine, Checkpoints(config, engine, "")


def flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def timed(work, *arguments) -> np.ndarray:
    """Seconds of the clock, seconds of the processor."""
    start = time.perf_counter(), time.process_time()
    work(*arguments)
    return np.subtract((time.perf_counter(), time.process_time()), start)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        for n_rows in (10**12, 12_737):
            ms = statistics.median(1e3 * first_plan(n_rows, folder) for _ in range(21))
            print(f"first plan at sample 10^9 of {n_rows:>17,} rows: {ms:6.2f} ms (aim 10)")
        engine, checkpoints = prepared(folder)
        state, report, theirs = RunState(), SimpleNamespace(wandb_run_id=None, warn=print), folder / "theirs"
        seconds: dict[str, list[np.ndarray]] = {}

        def ours() -> None:
            took["save"] = timed(checkpoints.save, state, report)
            took["load"] = timed(checkpoints.resume, RunState())

        def plain() -> None:
            took["plain save"] = timed(engine.accelerator.save_state, str(theirs))
            took["plain save, fsync"] = took["plain save"] + timed(flush, theirs)
            took["plain load"] = timed(engine.accelerator.load_state, str(theirs))

        for k in range(ROUNDS):
            state.step += 1
            shutil.rmtree(theirs, ignore_errors=True)
            took: dict[str, np.ndarray] = {}
            for work in (ours, plain) if k % 2 else (plain, ours):  # the disk is slower for the second
                os.sync()  # nobody pays for what the others left to be written
                work()
            assert checkpoints.saved_step == state.step
            for name, value in took.items():
                seconds.setdefault(name, []).append(value)
        show(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(seconds: dict[str, list[np.ndarray]]) -> None:
    size = WIDTH * (WIDTH + 1) * LAYERS * 12 / 1e6
    print(f"{size:.0f} MB of weights and moments, medians of {ROUNDS} rounds: milliseconds, of the processor")
    medians = {name: np.median(values, axis=0) for name, values in seconds.items()}
    for name, (wall, processor) in medians.items():
        print(f"{name:20} {1e3 * wall:8.1f} {1e3 * processor:8.1f}")
    for ours, other in (("save", "plain save"), ("save", "plain save, fsync"), ("load", "plain load")):
        wall, processor = medians[ours] / medians[other]
        print(f"{ours} / {other:20} {wall:6.2f} {processor:6.2f} (aim 1.1)")


if __name__ == "__main__":
    main()
