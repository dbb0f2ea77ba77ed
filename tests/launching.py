"""Start real processes: `accelerate launch` of a script with a file of accelerate_configs/, and check how
many ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).parents[1]
LEAKS = ("ACCELERATE_", "FSDP_", "WANDB_SERVICE")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


def environment(**more: str) -> dict[str, str]:
    """The caller's, without the variables of accelerate and W&B, which would leak from one launch into
    another: a run told of the caller's W&B service writes no file of its own.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LEAKS)}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), kept.get("PYTHONPATH", "")])
    return kept | SETTINGS | more


def launch(
    layout: str,
    processes: int,
    script: str | Path,
    *arguments: str,
    check: bool = True,
    **settings,
) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file accelerate_configs/LAYOUT.yaml --num_processes N SCRIPT arguments`.

    `settings` as for run_python. AssertionError with the end of its output when it fails.
    """
    config = f"accelerate_configs/{layout}.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", str(processes)]
    done = run_python(*command, "--main_process_port", "0", script, *arguments, **settings)
    if check:
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def run_python(
    *arguments: str | Path, timeout: float = 300, cold: bool = False, **env: str
) -> subprocess.CompletedProcess:
    """`python arguments` in the repository root; TimeoutExpired when it hangs.

    cold: with interpreters of their own, also for the processes that it launches (see warm.py).
    """
    python = sys.executable if cold else warm.folder() / "python"
    return subprocess.run(
        [python, *map(str, arguments)],
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def unread(*arguments: str | Path, timeout: float = 120) -> tuple[int, str]:
    """(exit status, stderr) of `python arguments | head` when head has left, buffered as usual."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment(PYTHONUNBUFFERED=""),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )
    os.close(writer)
    return done.returncode, done.stderr


def records(folder: Path, kind: str = "train") -> list[dict]:
    """Lines of metrics.jsonl of one kind."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def decisions(lines: list[dict]) -> list[list]:
    """What each step was, without what it measured: equal however a run is cut."""
    fields = "step updates samples tokens positions batch_size weight skipped carry".split()
    return [[line[name] for name in fields] for line in lines]


def audits(folder: Path) -> dict[int, list[dict]]:
    """rank -> its audit lines; which ranks wrote one says how many processes ran."""
    files = {int(p.stem.removeprefix("rank")): p for p in (folder / "audit").glob("rank*.jsonl")}
    return {
        rank: [json.loads(line) for line in p.read_text().splitlines()] for rank, p in sorted(files.items())
    }
