"""This template against what people use: one constant size -> tokens per second, start-up time and memory.

    python benchmarks/compare.py

Contenders: train.py, a plain Accelerate loop, transformers.Trainer, and Lightning where it is installed. Each
trains llama-tiny on the same packed rows of the embedded data with AdamW, clipping to 1 and 16 samples of 128
tokens a step (on a GPU llama-125m and 1024 tokens), in a process of its own, in turns. Start-up is from the
interpreter's start to the end of the first step, the data being in the cache; tokens per second are of the
last STEPS - WARM steps; memory is the process's peak, or its tensors' on a GPU. Trackers, checkpoints and
evaluations are off, log lines every 10 steps where there are any.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout, uninstalled

ROWS, STEPS, WARM = 16, 100, 20
ROUNDS = int(os.environ.get("ROUNDS", "5"))
RATE = 3e-3
ends: list[float] = []  # of each step, this process's clock


def what() -> tuple[str, int]:
    """Model and tokens of a row: on a GPU a small model would measure how fast kernels are started."""
    import torch

    return ("llama-125m", 1024) if torch.cuda.is_available() else ("llama-tiny", 128)


def flags_of(model: str, tokens: int) -> list[str]:
    return [f"--model_name_or_path={model}", f"--sequence_length={tokens}"]


def step_ended() -> None:
    if len(ends) + 1 in (WARM, STEPS) and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.synchronize()
    ends.append(time.perf_counter())


def template() -> None:
    import train
    from adaptive.config import parse

    update = train.update

    def watched(*arguments):
        done = update(*arguments)
        step_ended()
        return done

    train.update = watched
    flags = {
        "batch_size": ROWS, "schedule": "constant()", "max_steps": STEPS, "lr_scheduler_type": "constant",
        "save_every": "never", "report_to": "none", "learning_rate": RATE, "output_dir": tempfile.mkdtemp(),
    }  # fmt: skip
    # An empty validation set: the run would else evaluate once at its end.
    train.tell_evaluation = lambda *arguments: True
    train.main(parse([*flags_of(*what()), *(f"--{name}={value}" for name, value in flags.items())]))


def material() -> tuple:
    """(model, rows in torch's format): what the others train."""
    from adaptive.config import parse
    from adaptive.data import load
    from adaptive.tasks import load_task

    config, task = parse(["--output_dir", "unused", *flags_of(*what())]), load_task("causal_lm")
    rows = load(task, config).train["train"].with_format("torch")
    return task.model(config), rows.select(range(len(rows) - 1))  # the last row is shorter


def loss_of(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss


def accelerate() -> None:
    import torch
    from accelerate import Accelerator

    model, rows = material()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    while len(ends) < STEPS:
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step_ended()
            if len(ends) == STEPS:
                return


def trainer() -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, *arguments, **settings):
            step_ended()

    model, rows = material()
    told = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", logging_steps=10, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), dataloader_drop_last=True,
    )  # fmt: skip

    def collate(batch):
        tokens = torch.stack([row["input_ids"] for row in batch])
        return {"input_ids": tokens, "labels": tokens}

    Trainer(model, told, train_dataset=rows, data_collator=collate, callbacks=[Watch()]).train()


def lightning() -> None:
    import lightning as pl
    import torch

    model, rows = material()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, at):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0)

        def on_train_batch_end(self, *arguments):
            step_ended()

    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_steps=STEPS, gradient_clip_val=1.0, enable_model_summary=False, **quiet).fit(
        Module(), loader
    )


CONTENDERS = {"train.py": template, "Accelerate loop": accelerate, "transformers.Trainer": trainer}
if importlib.util.find_spec("lightning"):
    CONTENDERS["Lightning"] = lightning


def contend(name: str, started: float) -> None:
    """Run one, and say what it took; `started`: the wall clock when its process was started."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    born = time.time() - time.perf_counter()
    CONTENDERS[name]()
    assert len(ends) == STEPS, f"{name} ran {len(ends)} steps"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    speed = ROWS * what()[1] * (STEPS - WARM) / (ends[-1] - ends[WARM - 1])
    print(json.dumps({"tokens/s": speed, "start-up, s": born + ends[0] - started, "memory, MiB": peak}))


def main() -> None:
    if len(sys.argv) > 1:
        contend(sys.argv[1], float(sys.argv[2]))
        return
    settings = {"OMP_NUM_THREADS": "1"} | os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    found: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for turn in range(ROUNDS + 1):  # the first one fills the caches
        for name in CONTENDERS:
            command = [sys.executable, __file__, name, repr(time.time())]
            done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            found[name] += [json.loads(done.stdout.splitlines()[-1])] if turn else []
    show(found, settings["OMP_NUM_THREADS"])


def show(found: dict[str, list[dict]], threads: str) -> None:
    """One line for each contender."""
    model, tokens = what()
    print(f"{model}, {ROWS} samples of {tokens} tokens, {threads} thread(s), medians of {ROUNDS}")
    print(f"{'':22}{'tokens/s':>12}{'of train.py':>13}{'start-up, s':>13}{'memory, MiB':>13}")
    ours = found["train.py"]
    for name, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        pairs = statistics.median(a["tokens/s"] / b["tokens/s"] for a, b in zip(runs, ours, strict=True))
        speed, start, memory = middle.values()
        print(f"{name:22}{speed:12,.0f}{pairs:13.3f}{start:13.1f}{memory:13,.0f}")


if __name__ == "__main__":
    main()
