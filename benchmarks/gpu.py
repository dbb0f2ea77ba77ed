"""Parts of gpu.sh: train.main on this machine's devices -> a JSON file for each part -> one table.

python benchmarks/gpu.py FOLDER alone       # one process: the reference, precisions, memory, host reads
accelerate launch --config_file ... benchmarks/gpu.py FOLDER NAME       # the reference's run on an engine
python benchmarks/gpu.py FOLDER             # the table of what lies in FOLDER
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout, uninstalled

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import train  # noqa: E402
from adaptive.config import parse  # noqa: E402
from adaptive.tasks.causal_lm import CausalLM  # noqa: E402

ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
STEPS, ROWS_THAT_FIT, WARM = 30, 2, 5
RUN = [  # from less than one sample a step to 18, in passes of 3
    "--schedule", "linear(interval=1, increment=0.6, max_size=18)", "--batch_size", "0.7",
    "--micro_batch_size", "3", "--max_steps", str(STEPS), "--optim", "sgd", "--learning_rate", "0.05",
    "--lr_scheduler_type", "constant", "--report_to", "none", "--eval_every", "never",
    "--save_every", "never", "--lr_scaling", "none",  # steady: a run at its edge blows rounding up
]  # fmt: skip
NO_GPU = "needs a GPU"


class Hungry(CausalLM):
    """The allocator refuses passes of more rows than fit."""

    def loss_sum(self, model, batch):
        losses = super().loss_sum(model, batch)
        if torch.is_grad_enabled() and len(losses) > ROWS_THAT_FIT:
            torch.empty(2**50, device=losses.device)
        return losses


def run(folder: Path, *flags: str) -> list[dict]:
    """The steps' records; the model stays in `folder`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    train.main(parse([*RUN, *flags, "--output_dir", str(folder)]))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def difference(folder: Path, other: Path) -> float:
    """Of the weights, a norm over a norm, of the worst tensor."""
    a, b = (load_file(path / "model" / "model.safetensors") for path in (folder, other))
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def peak_mib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def alone(folder: Path) -> dict:
    """One process: the reference and what can be seen on it."""
    told = {"reference": run(folder / "alone"), "peak": peak_mib()}
    told["bf16"] = run(folder / "bf16", "--bf16")
    told["fp16"] = run(folder / "fp16", "--fp16")
    told["memory"] = run(folder / "memory", "--task", f"{__file__}:Hungry")
    told["reads"] = host_reads(folder / "reads") if torch.cuda.is_available() else None
    return told


def host_reads(folder: Path) -> list[list[int]]:
    """Of each step after the first ones: how often the host waited for the device, in transformers (whose
    models look whether the rows of a pass are packed) and elsewhere.
    """
    counts, told = [], train.Report.train

    def count(report, record):
        told(report, record)
        waits = [w.filename for w in seen if "synchronizing CUDA" in str(w.message)]
        inside = sum("transformers" in Path(name).parts for name in waits)
        counts.append([inside, len(waits) - inside])
        seen.clear()

    train.Report.train = count
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(folder, "--log_every", "1000 steps", "--optim", "adamw_torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        train.Report.train = told
    return counts[WARM:]


def on_engine(folder: Path, name: str) -> dict:
    if name == "fsdp2" and os.environ["WORLD_SIZE"] == "1":  # without a group it would be the plain engine
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    records = run(folder / name)
    return {"reference": records, "peak": peak_mib(), "processes": int(os.environ.get("WORLD_SIZE", "1"))}


# The table


def rows(folder: Path):
    """(what, result, aim, whether it is reached; None where there is nothing to reach)."""
    one, lines = opened(folder, "alone"), {}
    for name, title in ENGINES.items():
        lines[name] = opened(folder, name)
        title = f"{title}, {(lines[name] or {}).get('processes', '?')} process(es)"
        what = f"weights after {STEPS} steps: {title} against one process"
        if one and lines[name]:
            apart = difference(folder / name, folder / "alone")
            yield what, f"{apart:.1e}", "1e-5", apart < 1e-5
        else:
            yield what, *failed(folder, name if one else "alone"), False
    if one:
        yield from of_one_process(folder, one)
    yield from speeds(folder)
    for title, told in {"one process": one, **{ENGINES[n]: line for n, line in lines.items()}}.items():
        if told:
            yield f"peak memory of rank 0, MiB: {title}", f"{told['peak']:,.0f}", "", None


def of_one_process(folder: Path, one: dict):
    losses = last_loss(one["reference"])
    for precision, least in (("bf16", 0.02), ("fp16", 0.05)):
        ratio = last_loss(one[precision]) / losses
        what = f"loss of the last 5 steps: {precision} over fp32"
        yield what, f"{ratio:.4f}", f"1 +- {least}", abs(ratio - 1) < least
    apart, left = difference(folder / "memory", folder / "alone"), one["memory"][-1]["micro_batch_size"]
    what = f"out of memory above {ROWS_THAT_FIT} rows: weights, rows of a pass at the end"
    yield what, f"{apart:.1e}, {left}", "1e-5", apart < 1e-5 and left <= ROWS_THAT_FIT
    reads = one["reads"]
    for at, what, aim in ((0, "in transformers' forward", ""), (1, "elsewhere", "1")):
        counts = sorted({step[at] for step in reads or []})
        told = NO_GPU if reads is None else " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
        right = None if reads is None or not aim else counts == [1]
        yield f"host reads of the device in a step: {what}", told, aim, right


def speeds(folder: Path):
    """What plain_loop.py and compare.py printed."""
    text = said(folder, "plain_loop")
    found = re.findall(r"^(template|plain loop), tokens/s +([\d,]+)|^(ratio) +([\d.]+)", text, re.MULTILINE)
    for name, speed, ratio, value in found:
        what = (
            f"tokens/s: {'train.py' if name == 'template' else name}" if name else "train.py over plain loop"
        )
        yield what, speed or value, "0.98" if ratio else "", float(value) >= 0.98 if ratio else None
    if not found:
        yield "tokens/s: plain loop", *failed(folder, "plain_loop"), False
    text = said(folder, "compare")
    found = re.findall(r"^(transformers.Trainer) +([\d,]+) +([\d.]+)", text, re.MULTILINE)
    for name, speed, ratio in found:
        yield f"tokens/s: {name}", speed, "", None
        yield f"train.py over {name}", f"{1 / float(ratio):.3f}", "1", float(ratio) <= 1
    if not found:
        yield "tokens/s: transformers.Trainer", *failed(folder, "compare"), False


def last_loss(records: list[dict]) -> float:
    return statistics.mean([record["loss"] for record in records if record["loss"] is not None][-5:])


def opened(folder: Path, name: str) -> dict | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def said(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text() if path.exists() else ""


def failed(folder: Path, name: str) -> tuple[str, str]:
    return "failed", f"see {name}.log"


def main() -> None:
    folder, *name = Path(sys.argv[1]), *sys.argv[2:]
    if name:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        told = alone(folder) if name == ["alone"] else on_engine(folder, name[0])
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{name[0]}.json").write_text(json.dumps(told))
        train.Engine.leave()
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    models = "llama-tiny (tokens/s: llama-125m)" if torch.cuda.is_available() else "llama-tiny"
    print(f"\n{device}, torch {torch.__version__}; {models}, fp32 where nothing else is said\n")
    missed = 0
    for what, result, aim, reached in rows(folder):
        missed += reached is False
        verdict = "" if reached is None else "ok" if reached else "MISSED"
        print(f"{what:72} {result:>12} {aim:>15}  {verdict}".rstrip())
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
