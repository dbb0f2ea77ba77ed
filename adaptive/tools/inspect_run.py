"""The folder of a run -> what it did, the very samples of a step, and whether its records hold together.

    python -m adaptive.tools.inspect_run RUN
    python -m adaptive.tools.inspect_run RUN --step 17
    python -m adaptive.tools.inspect_run RUN --verify        # exit status 1 where something is wrong

To add one: a line of `summary`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.config import BadSetting, sources
from adaptive.console import encodable
from adaptive.order import Order
from adaptive.plan import ENDLESS, share
from adaptive.tools.flags import Flags, leave
from adaptive.tools.runs import Run

MOST_STRETCHES = 12  # lines of the table of sizes
SHOWN_CHARACTERS = 400  # of a decoded sample


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 when --verify found something wrong."""
    parser = Flags(
        prog="python -m adaptive.tools.inspect_run", description="What a run did, from its records."
    )
    parser.add_argument("run", type=Path, help="output folder of the run")
    parser.add_argument("--step", type=int, help="show the samples of this step, decoded")
    parser.add_argument("--verify", action="store_true", help="check that nothing was lost or seen twice")
    asked = parser.parse_args(arguments)
    run = Run(asked.run)
    if asked.verify:
        return told_verify(run)
    print(encodable("\n".join(summary(run) if asked.step is None else samples(run, asked.step))))
    return 0


def summary(run: Run) -> list[str]:
    """Sizes, steps, epochs, skips, resumes and speed."""
    if not run.train:
        return [f"{run.folder}: no step yet"]
    settings, last, train = run.config.flat(), run.train[-1], run.train
    asked, ran = [r["target_batch_size"] for r in train], [r["batch_size"] for r in train]
    reasons = Counter(r["skipped"] for r in train if r["skipped"])
    skips = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    data = ", ".join(settings["dataset_name"])
    ended = "finished" if (run.folder / "model").is_dir() else "not finished"
    seconds = max(last["seconds"], 1e-9)
    speeds = [f"{last[name] / seconds:,.1f} {name}/s" for name in ("samples", "tokens")]
    speeds.append(f"{1e3 * seconds / len(train):.1f} ms a step")
    rows = f" over {run.n_rows:,} rows" if run.n_rows else ""
    epochs = "of a stream" if last["epoch"] is None else f"{last['epoch']:.3f} epochs"
    told = [
        f"run       {run.folder}, {ended}",
        f"task      {settings['task']} on {data}, {settings['model_name_or_path']}",
        f"schedule  {settings['schedule']}",
        f"sizes     asked {min(asked):g} to {max(asked):g}, mean {sum(asked) / len(asked):.4g}; "
        f"run {min(ran)} to {max(ran)}, mean {sum(ran) / len(ran):.4g}",
        f"steps     {last['step']:,}, of which {last['updates']:,} changed the weights; skipped: {skips}",
        f"samples   {last['samples']:,}, {epochs}{rows}; {last['tokens']:,} tokens",
        f"loss      {_ends([r['loss'] for r in train])}",
        f"speed     {last['seconds']:,.1f} s, {', '.join(speeds)}",
    ]
    if run.evals:
        losses = [e["eval_loss"] for e in run.evals if e.get("eval_loss") is not None]
        told.insert(7, f"eval      eval_loss {_ends(losses)}, best {min(losses, default=float('nan')):.4f}")
    return [*told, *starts(run), "", *stretches(run)]


def _ends(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{known[0]:.4f} at first, {known[-1]:.4f} at last" if known else "none measured"


def starts(run: Run) -> list[str]:
    """When and on how many processes it was started and resumed."""
    return [
        f"{'resume' if at else 'start':10}after step {start['step']}, {start['engine']}"
        for at, start in enumerate(run.starts)
    ]


def stretches(run: Run) -> list[str]:
    """A table of sizes: where the size asked for changed, at most MOST_STRETCHES of them."""
    found: list[list] = []  # [first record, last record, samples]
    for record in run.train:
        if not found or record["target_batch_size"] != found[-1][0]["target_batch_size"]:
            found.append([record, record, 0])
        found[-1][1:] = [record, found[-1][2] + record["batch_size"]]
    told = [f"{'steps':>15}{'asked':>10}{'samples':>12}{'loss':>10}"]
    for first, last, n in found[:MOST_STRETCHES]:
        steps = f"{first['step']} to {last['step']}"
        loss = "-" if last["loss"] is None else f"{last['loss']:.4f}"
        told.append(f"{steps:>15}{first['target_batch_size']:>10.5g}{n:>12,}{loss:>10}")
    more = len(found) - MOST_STRETCHES
    return told + ([f"... and {more} more changes of the size"] if more > 0 else [])


def load(run: Run) -> tuple[Any, Any, dict[str, Any]]:
    """The run's task, tokenizer and datasets; BadSetting where the data is not what it was."""
    from adaptive import data
    from adaptive.tasks import load_task

    if run.config.data.streaming:
        raise BadSetting(
            f"{run.folder} read a stream, whose rows cannot be looked up again; leave out --step"
        )
    task = load_task(run.config.data.task)
    loaded = data.load(task, run.config)
    datasets = loaded.train
    n_rows = sum(len(dataset) for dataset in datasets.values())
    if run.n_rows not in (None, n_rows):
        raise BadSetting(
            f"{', '.join(run.config.data.dataset_name)} has {n_rows:,} rows and had {run.n_rows:,} in the "
            "run; inspect it where its data is"
        )
    return task, loaded.tokenizer, datasets


def samples(run: Run, step: int) -> list[str]:
    """The step's samples, process by process: position, row, weight, content."""
    from adaptive.data import fetch_each

    found = [record for record in run.train if record["step"] == step]
    if not found:
        raise BadSetting(f"--step {step}: the run has steps 1 to {len(run.train)}")
    (record,), world_size = found, run.world_size(step) or 1
    _, tokenizer, datasets = load(run)
    skipped = f", skipped: {record['skipped']}" if record["skipped"] else ""
    told = [
        f"step {step}: {record['batch_size']} samples, {record['target_batch_size']:g} asked for, loss "
        f"{record['loss']}, weight of a sample {record['weight']}{skipped}"
    ]
    for rank in range(world_size):
        told.append(f"process {rank} of {world_size}")
        for source, positions in share(run.plan(record), rank, world_size):
            order = Order(run.config.run.seed, source, len(datasets[source]))
            indices = order.indices(positions).tolist()
            audited = run.audits.get(rank, {}).get(step, {}).get("indices", [])
            if len(record["positions"]) == 1 and len(audited) == len(indices):
                indices = audited  # what it really trained on
            rows = fetch_each(datasets[source], np.array(indices, dtype=np.int64))
            for position, index, row in zip(positions.tolist(), indices, rows, strict=True):
                told.append(f"  {source} position {position}, row {index}: {decoded(row, tokenizer)}")
    return told


def decoded(row: Any, tokenizer: Any) -> str:
    """A row as a person reads it: its text where it has tokens, else its columns; cut at SHOWN_CHARACTERS."""
    if not isinstance(row, dict):
        return f"cannot be read ({row.why})"
    parts = []
    for name, value in row.items():
        if name in ("input_ids", "labels") and tokenizer is not None:
            parts.append(f"{name} ({len(value)}) {tokenizer.decode([int(v) for v in value if v >= 0])!r}")
        elif name != "attention_mask":
            parts.append(f"{name} {value.tolist() if hasattr(value, 'tolist') else value!r}")
    text = ", ".join(" ".join(part.split()) for part in parts)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def told_verify(run: Run) -> int:
    """Print what holds, or the first thing that does not."""
    from adaptive.tasks import load_task
    from adaptive.tools.verify import Wrong, verify

    task, n_rows = load_task(run.config.data.task), dict.fromkeys(sources(run.config.data), ENDLESS)
    if not run.config.data.streaming:
        task, _, datasets = load(run)
        n_rows = {source: len(dataset) for source, dataset in datasets.items()}
    try:
        told = verify(run, task, n_rows)
    except Wrong as wrong:
        print(f"wrong: {run.folder}: {wrong}")
        return 1
    print("\n".join([f"right: {run.folder}", *(f"  {line}" for line in told)]))
    return 0


if __name__ == "__main__":
    leave(main)
