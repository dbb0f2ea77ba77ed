"""Real runs as W&B, TensorBoard and trackio keep them, and the sweep file as a W&B agent reads it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launching import ROOT, environment, records, run_python
from test_report import run_folders, wandb_records

from adaptive.config import parse

TASK = f"{Path(__file__).parent / 'quadratic.py'}:Small"
FLAGS = ["--task", TASK, "--optim", "sgd", "--learning_rate", "1e-3", "--batch_size", "2.5"]
FLAGS += ["--run_group", "seeds", "--run_tags", "small", "fast", "--run_notes", "why"]


def started(others) -> object:
    (found,) = [record for name, record in others if name == "run"]
    return found


@pytest.mark.slow
def test_a_wandb_run_stopped_and_resumed_is_one_run_without_a_gap(tmp_path):
    """R82, R85. SIGTERM in a run with 400 epochs, resumed for 20 steps more: two segments of the same id and
    group that hold the steps of metrics.jsonl once each, with name, tags, notes, config and every axis.

    Mutations: the id not stored in the checkpoint (two runs); `step=` given to W&B (rows dropped); without
    define_metric the axes are missing.
    """
    folder, log = (
        tmp_path / "run",
        ["--log_every", "1 steps", "--eval_every", "10 steps", "--report_to", "wandb"],
    )
    command = [
        sys.executable,
        "train.py",
        *FLAGS,
        *log,
        "--output_dir",
        str(folder),
        "--num_train_epochs",
        "400",
    ]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    deadline, metrics = time.monotonic() + 120, folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 15:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "wandb sync" in said
    at = records(folder)[-1]["step"]
    again = ["--config", str(folder / "config.yaml"), "--resume_from_checkpoint", "auto"]
    done = run_python("train.py", *again, "--max_steps", str(at + 20))
    assert done.returncode == 0, done.stderr

    segments = [wandb_records(segment) for segment in run_folders(folder)]
    assert len(segments) == 2
    first, second = (started(others) for _, others in segments)
    assert first.run_id == second.run_id and second.resume and not first.resume
    for run in (first, second):
        assert (run.run_group, list(run.tags), run.notes) == ("seeds", ["small", "fast"], "why")
        assert run.display_name == "run" and run.project == "adaptive-batch"
        kept = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert kept["batch_size"] == 2.5 and kept["run_group"] == "seeds" and "schedule" in kept
        assert kept["world_size"] == 1, "what a per-device size is multiplied by"
    history = [row for rows, _ in segments for row in rows]
    train = [row["step"] for row in history if "eval_loss" not in row]
    assert train == [record["step"] for record in records(folder)] == list(range(1, at + 21))
    assert [row["step"] for row in history if "eval_loss" in row] == [
        r["step"] for r in records(folder, "eval")
    ]
    named = {
        "loss",
        "learning_rate",
        "batch_size",
        "target_batch_size",
        "train_coverage",
        "epoch",
        "grad_norm",
    }
    assert named | {"step", "samples", "tokens", "seconds"} <= set(history[3])
    for _, others in segments:
        metrics = [record for name, record in others if name == "metric"]
        assert {m.name for m in metrics} >= {"step", "samples", "tokens", "seconds"}
        assert [m.step_metric for m in metrics if m.glob_name == "*"] == ["step"]


def test_trackio_keeps_a_run(tmp_path):
    """Every line of the log at its step, as trackio's own command tells them.

    Mutation: `step` left in what is logged, which trackio keeps for itself (it warns, and drops it).
    """
    folder, store = tmp_path / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = [*FLAGS, "--report_to", "trackio", "--output_dir", folder, "--max_steps", "12"]
    done = run_python("train.py", *flags, "--log_every", "1 steps", **store)
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr
    assert "trackio show --project adaptive-batch" in done.stdout
    lines = {"loss": records(folder), "samples": records(folder), "eval_loss": records(folder, "eval")}
    for metric, kept in lines.items():
        asked = ["get", "metric", "--project", "adaptive-batch", "--run", folder.name, "--metric", metric]
        told = run_python("-m", "trackio.cli", *asked, "--json", **store)
        assert told.returncode == 0, told.stderr
        values = {v["step"]: v["value"] for v in json.loads(told.stdout)["values"]}
        assert kept and values.items() >= {r["step"]: r[metric] for r in kept if r["step"] < 12}.items()
        assert values[12] == pytest.approx(kept[-1][metric])


def test_an_agent_can_run_the_sweep_file():
    """Every pair of values, written as W&B's agent writes ${args}, is a setting of train.py.

    Mutation: a name that train.py does not know, or a value it refuses.
    """
    sweep = yaml.safe_load((ROOT / "recipes" / "sweep_wandb.yaml").read_text())
    assert sweep["method"] == "grid" and sweep["metric"] == {"name": "eval_loss", "goal": "minimize"}
    assert (ROOT / sweep["program"]).is_file() and sweep["command"][:2] == ["accelerate", "launch"]
    n = max(len(p.get("values", [0])) for p in sweep["parameters"].values())
    for at in range(n):
        chosen = {k: p["value"] if "value" in p else p["values"][at % len(p["values"])]
                  for k, p in sweep["parameters"].items()}  # fmt: skip
        config = parse([f"--{name}={value}" for name, value in chosen.items()])
        assert {name: config.flat()[name] for name in chosen} == chosen


def test_the_sweep_file_is_what_wandb_reads():
    """In a process of its own: W&B's import changes what other tests find."""
    code = (
        "from wandb.sdk.launch.sweeps.utils import load_sweep_config; "
        "print(load_sweep_config('recipes/sweep_wandb.yaml')['name'])"
    )
    assert run_python("-c", code, cold=True).stdout.splitlines()[-1] == "batch size"


@pytest.mark.slow
def test_a_wandb_run_killed_twice_is_one_run_with_every_step_once(tmp_path):
    """R85. SIGKILL before the first checkpoint, then between two, W&B's last rows lost each time: segments of
    one id, and together they hold each line of metrics.jsonl once, evaluations and means of windows too.

    Mutations: the id in checkpoints only (another run); rows held not asked for (doubles); no `_catch_up`
    (a gap: what W&B had not written).
    """
    folder = tmp_path / "run"
    command = [sys.executable, "train.py", *FLAGS, "--report_to", "wandb", "--output_dir", str(folder)]
    command += ["--log_every", "2 steps", "--eval_every", "50 steps", "--save_every", "300 steps"]
    command += ["--max_steps", "700", "--num_train_epochs", "400", "--resume_from_checkpoint", "auto"]
    metrics = folder / "metrics.jsonl"
    for after in (150, 450):
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()
        time.sleep(1.1)  # W&B notices, and names folders by the second
    saved = [path.name for path in (folder / "checkpoints").glob("step_*")]
    assert saved == ["step_300"], "the first kill came before a checkpoint, the second after one"
    done = run_python(*command[1:])
    assert done.returncode == 0, done.stderr

    segments = [wandb_records(segment) for segment in run_folders(folder)]
    assert len(segments) == 3 and len({started(others).run_id for _, others in segments}) == 1
    history = [row for rows, _ in segments for row in rows]
    evals = sorted(row["step"] for row in history if "eval_loss" in row)
    assert evals == [record["step"] for record in records(folder, "eval")]
    rows = {row["step"]: row for row in history if "eval_loss" not in row}
    told = {record["step"]: record for record in records(folder)}
    assert sorted(row["step"] for row in history if "eval_loss" not in row) == list(range(2, 701, 2))
    for step, row in rows.items():
        sizes = [told[k]["batch_size"] for k in (step - 1, step)]
        losses = [told[k]["loss"] * n for k, n in zip((step - 1, step), sizes, strict=True)]
        assert row["loss"] == pytest.approx(sum(losses) / sum(sizes))
