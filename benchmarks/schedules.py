"""Fixed sizes against schedules on the embedded task, same samples each -> loss, steps, CPU seconds.

    python benchmarks/schedules.py             # every candidate, 3 seeds, two at a time; half an hour
    python benchmarks/schedules.py --only "fixed 4" "seesaw" --seeds 1
    python benchmarks/schedules.py --tune learning_rate=1e-3,2e-3,4e-3 adam_beta2=0.99,0.999 --seeds 1

Each run is `python train.py` of its own, one thread, 8,000 samples of 128 bytes; two run side by side. The
seconds are the process's CPU time, its start included, which other programs do not change much. The
settings of CANDIDATES were chosen beforehand with --tune, on seed 1: for each candidate the best learning
rate and second moment of those tried. Results are kept in --out; a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 8000
SHARED = {  # of every run; the rate is that of 4 samples, other sizes follow by sqrt
    "max_samples": SAMPLES, "base_batch_size": 4, "lr_scheduler_type": "cosine", "report_to": "none",
    "eval_every": "never", "save_every": "never", "log_every": "never", "learning_rate": 2e-3,
    "adam_beta2": 0.999,
}  # fmt: skip
CANDIDATES: dict[str, dict] = {
    "fixed 1": {"schedule": "constant()", "batch_size": 1},
    "fixed 2": {"schedule": "constant()", "batch_size": 2},
    "fixed 4": {"schedule": "constant()", "batch_size": 4},
    "fixed 8": {"schedule": "constant()", "batch_size": 8},
    "fixed 16": {"schedule": "constant()", "batch_size": 16},
    "exponential 2 to 8": {"schedule": "exponential(2, 8, 8000)"},
    "exponential 4 to 16": {"schedule": "exponential(4, 16, 8000)"},
    "ramp 2 to 8": {"schedule": "ramp(2, 8, 8000)"},
    "seesaw from 2": {"schedule": "seesaw()", "batch_size": 2, "max_batch_size": 16},
    "seesaw from 4": {"schedule": "seesaw()", "batch_size": 4, "max_batch_size": 64},
    "seesaw_noise from 2": {"schedule": "seesaw_noise(largest=64)", "batch_size": 2},
    "noise_scale from 2": {"schedule": "noise_scale(smallest=2, largest=64)", "batch_size": 2},
}


def run(name: str, settings: dict, seed: int) -> dict:
    """One run of train.py -> what it reached."""
    flags = SHARED | CANDIDATES[name] | settings | {"seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--output_dir", f"{folder}/run"]
        command += [f"--{flag}={value}" for flag, value in flags.items()]
        alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        told = Path(folder, "told")
        with told.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | alone, stdout=file, stderr=file)
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name}, seed {seed}: {told.read_text()[-2000:]}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    return {
        "candidate": name, "settings": settings, "seed": seed, "eval_loss": lines[-1]["eval_loss"],
        "steps": train[-1]["step"], "samples": train[-1]["samples"], "seconds": used.ru_utime + used.ru_stime,
        "largest": max(line["batch_size"] for line in train),
    }  # fmt: skip


def grid(text: list[str]) -> list[dict]:
    """["a=1,2", "b=3"] -> [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]."""
    axes = [[(part.split("=")[0], value) for value in part.split("=", 1)[1].split(",")] for part in text]
    return [dict(point) for point in itertools.product(*axes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tune", nargs="+", default=[], help="setting=value,value ... instead of the chosen")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmark_schedules.json")
    chosen = parser.parse_args()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else []
    there = {key(r["candidate"], r["settings"], r["seed"]) for r in results}
    points = grid(chosen.tune)  # one point without a setting where nothing is tuned
    wanted = [(name, point, seed) for seed in chosen.seeds for name in chosen.only for point in points]
    missing = [job for job in wanted if key(*job) not in there]

    writing = threading.Lock()

    def work(job: tuple) -> None:
        result = run(*job)
        with writing:
            results.append(result)
            chosen.out.write_text(json.dumps(results, indent=1))
            told = f"{result['eval_loss']:.4f}, {result['steps']:,} steps, {result['seconds']:.0f} s"
            print(f"{name_of(result):48} seed {result['seed']}: {told}", flush=True)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(work, missing))
    keys = {key(*job) for job in wanted}
    show([r for r in results if key(r["candidate"], r["settings"], r["seed"]) in keys])


def key(*job) -> str:
    """(candidate, settings, seed) as a text to compare."""
    return json.dumps(job, sort_keys=True)


def name_of(result: dict) -> str:
    return " ".join([result["candidate"], *(f"{name}={value}" for name, value in result["settings"].items())])


def show(results: list[dict]) -> None:
    """One line for each candidate and setting: means over seeds, the spread from least to largest."""
    groups: dict[str, list[dict]] = {}
    for result in results:
        groups.setdefault(name_of(result), []).append(result)
    fixed = {k: v for k, v in groups.items() if k.startswith("fixed")} or groups
    best = min(fixed, key=lambda name: mean(groups[name], "eval_loss"))
    head = f"{'eval_loss':>9} {'spread':>8} {'steps':>7} {'fewer':>6} {'seconds':>8} {'over best':>9}"
    print(f"\n{'':48} {head}")
    for name in sorted(groups, key=lambda name: mean(groups[name], "eval_loss")):
        runs = groups[name]
        losses, steps = [r["eval_loss"] for r in runs], mean(runs, "steps")
        print(
            f"{name:48} {statistics.fmean(losses):9.4f} {max(losses) - min(losses):8.4f} {steps:7.0f} "
            f"{1 - steps / mean(groups[best], 'steps'):6.0%} {mean(runs, 'seconds'):8.0f} "
            f"{statistics.fmean(losses) - mean(groups[best], 'eval_loss'):+9.4f}"
        )
    print(f"best fixed size: {best}; {len({r['seed'] for r in results})} seed(s), {SAMPLES:,} samples each")


def mean(runs: list[dict], name: str) -> float:
    return statistics.fmean(r[name] for r in runs)


if __name__ == "__main__":
    main()
