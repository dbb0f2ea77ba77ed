"""The finder's flags -> the settings of one candidate, and how candidates are compared.

To add one: what several methods do to a candidate is a function here.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaptive.config import BadSetting, Config
from adaptive.tools import fit
from adaptive.tools.search import Candidate, bounds

CLEARLY = 10  # tolerances above the best: a candidate that has clearly lost


@dataclass
class Asked:
    """The finder's own flags, and the settings of its runs."""

    flags: argparse.Namespace
    config: Config
    given: list[str]  # train.py's flags

    @property
    def names(self) -> set[str]:
        """Of the flags that are given."""
        return set(map(flag_name, self.given))

    @property
    def loss_metric(self) -> bool:
        return self.flags.metric.endswith("loss")


def flag_name(flag: str) -> str:
    """--batch-size=4 -> batch_size; nothing of what is no flag."""
    return flag.split("=")[0][2:].replace("-", "_") if flag.startswith("--") else ""


def settings_of(asked: Asked, base: Config, size: float, seed: int, begin: int, total: int) -> Config:
    """A run of one size up to `total` samples; `begin` where it starts."""
    config = copy.deepcopy(base)
    run, batch, optim = config.run, config.batch, config.optim
    run.seed, run.max_samples, run.max_steps = int(seed), total, -1
    run.num_train_epochs = 1.0 if config.data.streaming else 1e6
    batch.batch_size, batch.per_device_train_batch_size, batch.max_batch_size = float(size), None, None
    batch.fraction, batch.schedule = "participate", f"candidate(size={float(size)!r})"
    optim.warmup_ratio, optim.warmup_samples = 0.0, None
    config.eval.eval_every = f"{max(1, (total - begin) // asked.flags.evaluations)} samples"
    config.output.save_every = f"{max(1, (total - begin) // 4)} samples"
    config.output.keep_last = 1
    config.output.run_group = config.output.run_group or Path(asked.flags.output_dir).name
    return config


def with_bounds(
    candidate: Candidate, asked: Asked, rivals: list[dict], begin: int, allowed: Callable[[float], float]
) -> Candidate:
    """The same candidate, which gives up where its loss is above what is `allowed` beside those that are
    over.
    """
    if asked.flags.give_up == "no" or not asked.loss_metric:
        return candidate
    config, over = copy.deepcopy(candidate.config), [r["curve"] for r in rivals if r["ended"] == "done"]
    limits = bounds(over, config.run.max_samples, begin, allowed)
    config.batch.schedule = f"candidate(size={config.batch.batch_size!r}, bounds={limits})"
    return Candidate(candidate.name, config, candidate.tags, candidate.origin)


def metric_of(asked: Asked, result: dict) -> float:
    """What a candidate ended with; the worst there is where it gave up or diverged."""
    worst, names = math.inf if asked.loss_metric else -math.inf, [k for k in result if k.startswith("eval_")]
    if result["ended"] == "done" and asked.flags.metric not in ("loss", *names):
        none = "" if names else " (without validation data there is none; --eval_dataset has some)"
        raise BadSetting(
            f"--metric {asked.flags.metric} is none of this run's; write {', '.join(['loss', *names])}{none}"
        )
    if asked.flags.metric == "loss" and result["losses"]:
        value = fit.smoothed(result["losses"], 0.5)
    else:
        value = result.get(asked.flags.metric)
    return worst if value is None or result["ended"] != "done" else value


def table_of(known: list[tuple[int, float]]) -> str | None:
    """[(samples, size)] -> the table that the schedule `steps` reads; the first size from the beginning."""
    entries: list[tuple[int, float]] = []
    for samples, size in known:
        if not entries or size != entries[-1][1]:
            entries.append((samples if entries else 0, size))
    return " ".join(f"{samples}:{size:g}" for samples, size in entries) or None
