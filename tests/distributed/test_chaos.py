"""Killed at random moments until it completes: the same run. Real commands, real signals, seeded draws."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from launching import ROOT, audits, environment, records

from adaptive.checkpoint import problem

pytestmark = pytest.mark.slow
TASKS = Path(__file__).with_name("chaos.py")
COMMON = [
    "--max_steps", "240", "--num_train_epochs", "99", "--save_every", "3 steps", "--eval_every", "25 steps",
    "--report_to", "none", "--audit", "--learning_rate", "1e-2", "--micro_batch_size", "4",
]  # fmt: skip
BITS = ["--task", f"{TASKS}:Bits", "--schedule", f"{TASKS}:Grows()", "--batch_size", "0.6"]
DRY = ["--task", f"{TASKS}:Dry", "--optim", "sgd", "--batch_size", "2.6", "--schedule", "linear(interval=9)"]


class Attempt:
    """One start of the real command, that goes on where the last one was stopped."""

    def __init__(self, folder: Path, processes: int, flags: list[str]):
        self.folder, self.processes, self.said_in = folder, processes, folder.with_suffix(".out")
        before = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]
        before += ["--num_processes", str(processes), "--main_process_port", "0"]
        how = ["train.py", *COMMON, *flags, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        self.seen = self.folders()
        with self.said_in.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *(before if processes > 1 else []), *how], cwd=ROOT,
                env=environment(ADAPTIVE_TIMEOUT_MINUTES="0.5"), stdout=out, stderr=out,
            )  # fmt: skip

    def folders(self) -> set:
        """(name, inode) of what lies in checkpoints/."""
        found = set()
        for path in (self.folder / "checkpoints").glob("*"):
            try:
                found.add((path.name, path.stat().st_ino))
            except FileNotFoundError:
                continue  # renamed in between
        return found

    def wait_for(self, prefix: str) -> bool:
        """Until a folder of that name is made by this attempt; False when the run ended before."""
        deadline = time.monotonic() + 120
        while not any(name.startswith(prefix) for name, _ in self.folders() - self.seen):
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.0005)
        return True

    def workers(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        if self.processes == 1:
            return [psutil.Process(self.process.pid)]
        ranks = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.ppid() == self.process.pid:
                ranks[int(child.environ()["RANK"])] = child
        return [ranks[rank] for rank in sorted(ranks)]

    def kill(self) -> None:
        """SIGKILL to all of them: the launcher gives its workers sessions of their own."""
        tree = [psutil.Process(self.process.pid)]
        tree += tree[0].children(recursive=True)
        for one in tree:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(tree[1:], timeout=20)
        self.process.wait(timeout=20)

    def said(self) -> str:
        return self.said_in.read_text()

    def finish(self) -> str:
        """To the end, which must be good."""
        assert self.process.wait(timeout=150) == 0, self.said()[-3000:]
        return self.said()


def killed(folder: Path, processes: int, flags: list[str], moment: str, draw: random.Random) -> bool:
    """One attempt, killed; whether it was still running. A whole checkpoint is there as soon as one was."""
    had = len(whole(folder))
    attempt = Attempt(folder, processes, flags)
    if moment == "start":  # while it sets up: imports, the model, reading the checkpoint
        time.sleep(draw.uniform(1.0, 4.0) * processes)
    else:
        prefix, longest = {"save": (".step_", 0.03), "sealed": ("step_", 0.003), "any": ("step_", 0.3)}[
            moment
        ]
        if attempt.wait_for(prefix):
            time.sleep(draw.uniform(0, longest))
    running = attempt.process.poll() is None
    attempt.kill()
    assert running or attempt.process.returncode == 0, attempt.said()[-3000:]
    assert len(whole(folder)) >= min(had, 1)
    return running


def stopped(folder: Path, processes: int, flags: list[str], draw: random.Random) -> None:
    """SIGTERM to one rank, whichever: all save the last step, and the launcher too ends with 0."""
    attempt = Attempt(folder, processes, flags)
    assert attempt.wait_for("step_"), attempt.said()[-3000:]
    time.sleep(draw.uniform(0, 0.1))
    workers = attempt.workers()
    assert len(workers) == processes
    draw.choice(workers).send_signal(signal.SIGTERM)
    said = attempt.finish()
    assert said.count("stopped by a signal after step") == 1 and "--resume_from_checkpoint auto" in said
    assert max(whole(folder)) == told(folder)[-1]["step"]


def whole(folder: Path) -> list[int]:
    """Steps of the whole checkpoints."""
    paths = (folder / "checkpoints").glob("step_*")
    return [int(path.name.removeprefix("step_")) for path in paths if problem(path) is None]


def told(folder: Path) -> list[dict]:
    """metrics.jsonl without the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def processes_of(folder: Path) -> list[int]:
    """How many processes ran in each start that came as far as training."""
    return [json.loads(line)["world_size"] for line in (folder / "starts.jsonl").read_text().splitlines()]


# name: processes, the moments of the kills, how many runs are stopped by SIGTERM in between
PLANS = {
    "one": (1, ["start"] * 2 + ["save"] * 6 + ["sealed"] * 2 + ["any"] * 4, 1),
    "two": (2, ["start"] + ["save"] * 3 + ["sealed"] + ["any"], 1),
}


@pytest.mark.parametrize("name", PLANS)
def test_killed_until_it_completes(name, tmp_path):
    """R29, R74. 14 SIGKILLs of one process and 6 of a launch of two, before, during and after saves and
    while starting, with SIGTERM to a random rank among them: rows, records and weights are bit-identical to
    the undisturbed run's, with dropout, empty steps and a schedule that remembers.

    Mutations: the rename before the files are written; Engine.seed in the first step only (other masks). What
    depends on the very moment of a kill is in test_checkpoint_faults.py.
    """
    processes, moments, n_stops = PLANS[name]
    draw, folder, calm = random.Random(7), tmp_path / "run", tmp_path / "calm"
    Attempt(calm, processes, BITS).finish()
    draw.shuffle(moments := list(moments))
    hits = []
    for number, moment in enumerate(moments):
        assert killed(folder, processes, BITS, moment, draw), f"it completed after {number} kills"
        hits.append(any((folder / "checkpoints").glob(".step_*.partial")))
        if number == len(moments) // 2:
            for _ in range(n_stops):
                stopped(folder, processes, BITS, draw)
    assert sum(hits) >= 2, "some kills were inside a save"
    Attempt(folder, processes, BITS).finish()

    assert set(processes_of(folder)) == set(processes_of(calm)) == {processes}
    assert told(folder) == told(calm) and len(records(folder)) == 240
    assert audits(folder) == audits(calm) and list(audits(folder)) == list(range(processes))
    mine, theirs = weights(folder), weights(calm)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left >= {"step_237", "step_240"} and len(left) <= 3, "two, and the one resumed from"


def test_killed_while_the_number_of_processes_changes(tmp_path):
    """R49, R74. 2 processes killed, 1 killed, 2 stopped by SIGTERM to one of them, 1 to the end: the same
    rows, sizes and rates as one process undisturbed, weights to 1e-11 (SGD, fp64).

    Mutation: audit of a rank that is gone not cut back (rows twice).
    """
    draw, folder, calm = random.Random(11), tmp_path / "run", tmp_path / "calm"
    Attempt(calm, 1, DRY).finish()
    assert killed(folder, 2, DRY, "any", draw)
    assert killed(folder, 1, DRY, "save", draw)
    stopped(folder, 2, DRY, draw)
    Attempt(folder, 1, DRY).finish()
    assert processes_of(folder) == [2, 1, 2, 1]

    exact = (
        "step",
        "kind",
        "positions",
        "batch_size",
        "samples",
        "updates",
        "carry",
        "learning_rate",
        "skipped",
    )
    mine, theirs = told(folder), told(calm)
    assert [[r.get(k) for k in exact] for r in mine] == [[r.get(k) for k in exact] for r in theirs]
    losses = [[r.get("loss", r.get("eval_loss")) for r in run] for run in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)
    assert trained(folder) == trained(calm) and set(audits(folder)) == {0, 1}
    mine, theirs = weights(folder), weights(calm)
    for name in theirs:
        assert float((mine[name] - theirs[name]).norm() / theirs[name].norm()) < 1e-11


def trained(folder: Path) -> dict[int, list[int]]:
    """step -> rows that any process trained on, sorted."""
    rows: dict[int, list[int]] = {}
    for lines in audits(folder).values():
        assert len({line["step"] for line in lines}) == len(lines)
        for line in lines:
            rows[line["step"]] = sorted(rows.get(line["step"], []) + line["indices"])
    return rows


def ended(attempt: Attempt, seconds: float) -> str:
    """What was said by a launch that fails, within `seconds` from now, with no process left."""
    tree = psutil.Process(attempt.process.pid).children(recursive=True)
    assert attempt.process.wait(timeout=seconds) != 0
    assert not psutil.wait_procs(tree, timeout=10)[1]
    return attempt.said()


def test_a_killed_data_worker_and_a_killed_rank_end_the_run(tmp_path):
    """SIGKILL to a data worker of rank 1: its error first, on the others one that points to it, no hang. The
    next start goes on; SIGKILL to rank 1 itself: the others end, and the launcher names rank and signal.

    Mutation: the error of a lost peer not explained (`Connection closed by peer` alone).
    """
    folder = tmp_path / "run"
    attempt = Attempt(folder, 2, [*DRY, "--dataloader_num_workers", "2"])
    assert attempt.wait_for("step_"), attempt.said()
    rank1 = attempt.workers()[1]
    readers = [child for child in rank1.children() if child.ppid() == rank1.pid]
    assert len(readers) >= 2, "rank 1 has data workers"
    max(readers, key=lambda child: child.create_time()).kill()
    said = ended(attempt, 40)
    assert "a data worker of rank 1 was killed" in said and "lost another process" in said, said[-5000:]
    assert said.index("a data worker of rank 1 was killed") < said.index("lost another process")

    before = max(whole(folder))
    attempt = Attempt(folder, 2, DRY)
    assert attempt.wait_for("step_"), attempt.said()
    attempt.workers()[1].kill()
    said = ended(attempt, 40)
    assert "lost another process" in said and "SIGKILL" in said and max(whole(folder)) > before, said[-5000:]
