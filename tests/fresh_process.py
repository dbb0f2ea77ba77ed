"""train.main in children of a process that has imported everything and trained nothing: a fresh start in a
fraction of a second, and one that can be made to die, or to fail, at any file operation.

    python tests/fresh_process.py JOB FOLDER     writes FOLDER/JOB.json; test_checkpoint_faults.py reads it
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import forking
import torch
import torch._dynamo  # the first optimizer imports it: here once, not in every child

import train
from adaptive.config import parse

DIED = 41  # exit status of a child that was made to die
TASKS = Path(__file__).parent / "distributed" / "chaos.py"
COMMON = ["--report_to", "none", "--audit", "--learning_rate", "1e-2", "--eval_every", "2 steps"]
CRASHED = [
    *COMMON, "--task", f"{TASKS}:Bits", "--batch_size", "2.5", "--schedule", f"{TASKS}:Grows()",
    "--save_every", "1 steps", "--max_steps", "3", "--keep_last", "1", "--resume_from_checkpoint", "auto",
]  # fmt: skip
SCENARIOS = {  # runs that are saved after every step
    "feedback": ["--task", f"{TASKS}:Few", "--schedule", f"{TASKS}:Grows()", "--batch_size", "0.6"],
    "dropout": ["--task", f"{TASKS}:Bits", "--schedule", "noise_scale(c=1)", "--batch_size", "4"]
    + ["--micro_batch_size", "2", "--beta_scaling", "half_life", "--lr_scaling", "adascale"],
    "sources": ["--task", f"{TASKS}:Few", "--dataset_name", "a", "b", "--source_sizes", "0.7", "1.6"],
    "reservoir": ["--task", f"{TASKS}:Few", "--participation", "reservoir"]
    + ["--per_device_train_batch_size", "0.7", "--schedule", "constant()"],
    "bernoulli": ["--task", f"{TASKS}:Few", "--participation", "bernoulli", "--batch_size", "1.4"],
}
N_STEPS = 12


def child(arguments: list, said: Path, arm: Callable[[], None] = lambda: None) -> int:
    """Exit status of train.main(arguments) in a process of its own; `arm` is called in it before the run."""

    def work() -> None:
        config = parse([str(word) for word in arguments])
        arm()
        train.main(config)

    return forking.run(work, said)


class Operations:
    """File operations of a process that change something in `folder`, counted by Python's own audit events,
    which leave none out; writes of whole files count twice, before and half-way.

    At number `at` the process dies as by SIGKILL, or the operation fails with `error`.
    """

    def __init__(self, folder: Path, listing: Path, at: int | None = None, error: int | None = None):
        self.folder, self.listing, self.at, self.error = str(folder), listing, at, error
        self.count, self.own = 0, False

    def __call__(self) -> None:
        sys.addaudithook(self.hook)
        fsync, write_text, save = os.fsync, Path.write_text, torch.save
        os.fsync = lambda handle: (
            self.passed("fsync", os.readlink(f"/proc/self/fd/{handle}")),
            fsync(handle),
        )[1]

        def half_written(path: Path) -> None:
            data = path.read_bytes()
            os.truncate(path, len(data) // 2)
            self.own = False
            self.passed("half of", str(path))
            self.own = True
            path.write_bytes(data)

        def tearing(write: Callable, place: int) -> Callable:
            def torn(*arguments, **named):
                path = Path(arguments[place])
                self.passed("write", str(path))
                self.own = True  # the operations below are this one
                try:
                    result = write(*arguments, **named)
                    half_written(path)
                finally:
                    self.own = False
                return result

            return torn

        Path.write_text, torch.save = tearing(write_text, 0), tearing(save, 1)

    def hook(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            path = arguments[0]
            if event in ("os.remove", "os.rmdir") and arguments[-1] != -1:  # in a folder that is open
                path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), os.fsdecode(path))
        else:
            return
        if isinstance(path, (str, bytes, os.PathLike)):
            self.passed(event, os.fsdecode(path))

    def passed(self, what: str, path: str) -> None:
        if self.own or not f"{os.path.abspath(path)}/".startswith(f"{self.folder}/"):
            return
        self.count += 1
        if self.at is None:
            self.own = True
            with self.listing.open("a") as file:
                file.write(f"{what} {os.path.relpath(path, self.folder)}\n")
            self.own = False
        elif self.count == self.at:
            if self.error is None:
                os._exit(DIED)
            raise OSError(self.error, os.strerror(self.error), path)


def outcome(run: Path) -> dict:
    """What two runs must have in common."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    audit = [json.loads(line) for line in (run / "audit" / "rank0.jsonl").read_text().splitlines()]
    weights = torch.load(run / "model" / "weights.pt", weights_only=True)
    state = json.loads((newest(run) / "manifest.json").read_text())["state"]
    for one in (*lines, state, state["signals"]):  # the clock
        for name in ("seconds", "step_seconds", "samples_per_second"):
            one.pop(name, None)
    for name in ("evaluated_at", "evaluation_owed"):  # the last evaluation may come after the last checkpoint
        state.pop(name)
    state["signals"].pop("eval_loss", None)
    return {
        "lines": lines, "audit": audit, "state": state,
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
    }  # fmt: skip


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))


def hidden(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob(".*"))


def job_crashes(folder: Path, error: int | None = None, prepared: Path | None = None) -> list[dict]:
    """A run that dies (or is failed) at each of its file operations in turn, then the same command again."""
    calm, listing, cases = folder / "calm", folder / "operations.txt", []

    def begin(run: Path) -> list:
        if prepared:
            shutil.copytree(prepared, run)
        return [*CRASHED, "--output_dir", run]

    assert child(begin(calm), folder / "calm.txt", Operations(calm, listing)) == 0, (
        folder / "calm.txt"
    ).read_text()
    right, operations = outcome(calm), listing.read_text().splitlines()
    if prepared:  # until its first checkpoint: the rest is as in any run
        operations = operations[: operations.index("os.rename checkpoints/.step_2.partial") + 1]
    for number, operation in enumerate(operations, 1):
        if error and not operation.split(" ", 1)[1].removeprefix("of ").startswith("checkpoints"):
            continue
        run, said = folder / f"run{number}", folder / f"run{number}.txt"
        status = child(begin(run), said, Operations(run, listing, number, error))
        case = {"operation": operation, "status": status, "first": said.read_text()}
        case |= {"whole": len(list((run / "checkpoints").glob("step_*"))), "hidden": hidden(run)}
        resume = ["--config", run / "config.yaml"] if (run / "config.yaml").exists() else CRASHED
        case["again"] = child([*resume, "--output_dir", run, "--resume_from_checkpoint", "auto"], said)
        case |= {"said": said.read_text(), "left": hidden(run)}
        case["same"] = case["again"] == 0 and outcome(run) == right
        cases.append(case)
        shutil.rmtree(run)
    return cases


def job_errors(folder: Path) -> list[dict]:
    """The same with an operation on a checkpoint that fails, as on a disk that is full."""
    return job_crashes(folder, errno.ENOSPC)


def job_resumes(folder: Path) -> list[dict]:
    """Deaths of a *resumed* start, whose run died in a save and has a damaged checkpoint of a later step."""
    run, listing = folder / "prepared", folder / "first.txt"
    child(
        [*CRASHED, "--output_dir", folder / "whole"],
        folder / "said.txt",
        Operations(folder / "whole", listing),
    )
    renames = [
        n
        for n, line in enumerate(listing.read_text().splitlines(), 1)
        if "os.rename checkpoints/.step_2" in line
    ]
    assert (
        child([*CRASHED, "--output_dir", run], folder / "said.txt", Operations(run, listing, renames[0]))
        == DIED
    )
    shutil.copytree(newest(run), run / "checkpoints" / "step_9")
    os.truncate(run / "checkpoints" / "step_9" / "training.pt", 100)
    return job_crashes(folder, prepared=run)


def job_signals(folder: Path) -> dict:
    """SIGTERM in each pass of a short run in turn, of training and of its three evaluations."""
    always = [
        *COMMON,
        "--task",
        f"{TASKS}:Signalled",
        "--batch_size",
        "0.8",
        "--schedule",
        f"{TASKS}:Grows()",
    ]
    always += ["--max_steps", "5", "--per_device_eval_batch_size", "16", "--save_every", "2 steps"]
    always += ["--resume_from_checkpoint", "auto"]
    assert child([*always, "--output_dir", folder / "calm"], folder / "calm.txt") == 0
    cases = []
    for at in range(1, 40):
        run, said = folder / f"run{at}", folder / f"run{at}.txt"
        command = [*always, "--output_dir", run]
        case = {"at": at, "status": child(command, said, lambda at=at: os.environ.update(SIGNAL_AT=str(at)))}
        case |= {"first": said.read_text(), "again": child(command, said), "said": said.read_text()}
        cases.append(case | {"outcome": outcome(run)})
        if "stopped by a signal" not in case["first"]:
            break  # the run has fewer passes
    return {"whole": outcome(folder / "calm"), "cases": cases}


def job_every_step(folder: Path) -> dict:
    """Each scenario saved after every step; each checkpoint continued to the end by a fresh process."""
    results = {}
    for name, settings in SCENARIOS.items():
        run, said = folder / name, folder / f"{name}.txt"
        always = [*COMMON, *settings, "--max_steps", N_STEPS, "--num_train_epochs", "9"]
        always += ["--save_every", "1 steps", "--keep_last", N_STEPS]
        status = child([*always, "--output_dir", run], said)
        result = results[name] = {"status": status, "said": said.read_text(), "cases": []}
        if status:
            continue
        result["whole"] = outcome(run)
        for step in range(1, N_STEPS):
            rest = folder / f"{name}-{step}"
            how = ["--output_dir", rest, "--resume_from_checkpoint", run / "checkpoints" / f"step_{step}"]
            status = child([*always, *how], said)
            case = {"step": step, "status": status, "said": said.read_text()}
            result["cases"].append(case | ({} if status else outcome(rest)))
            shutil.rmtree(rest, ignore_errors=True)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = globals()[f"job_{sys.argv[1]}"](Path(sys.argv[2]).resolve())
    Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(result))
