"""Flags and YAML -> every number of a run, with its unit.

One dataclass per group of `--help`; a field's docstring is its help text and ends with its unit. A recipe is
a YAML file whose keys are the flag names; flags after it win. Knows no hardware and imports no torch, so that
a bad setting is answered before any process group or model exists.
To add one: a field with a docstring; if it has limits, a line in `check`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml


class BadSetting(ValueError):
    """A setting the user can correct: printed as one line, exit status 2."""


@dataclass
class Model:
    """Which network is trained."""

    model_name_or_path: Annotated[str | None, tyro.conf.arg(aliases=["--model"])] = None
    """Preset (see adaptive/tasks), local folder or hub name; by default the task's own preset (name)."""
    tokenizer_name: str | None = None
    """Tokenizer folder or hub name; by default the model's own, for a preset ByT5's bytes (name)."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters; float64 is for exactness tests (dtype)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory (yes/no)."""
    trust_remote_code: bool = False
    """Run the Python code that a hub model brings along (yes/no)."""


@dataclass
class Data:
    """What it is trained on."""

    task: str = "causal_lm"
    """causal_lm, classification, or your own class as "my_task.py:MyTask" (name)."""
    dataset_name: Annotated[str, tyro.conf.arg(aliases=["--dataset"])] = "stdlib"
    """stdlib, a hub name, a save_to_disk folder, or a csv, json, jsonl, parquet or text file (name)."""
    dataset_config_name: str | None = None
    """Configuration of a hub dataset (name)."""
    text_column: str | None = None
    """Column with the text; by default "text", or the only text column (name)."""
    label_column: str | None = None
    """Column with the class; by default "label" (name)."""
    eval_dataset: str | None = None
    """Validation data, named like --dataset_name; by default its own split, else a share (name)."""
    eval_share: float = 0.1
    """Held out for validation where the dataset has no split of its own (share of rows or files)."""
    sequence_length: int = 128
    """Longest sample (tokens)."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """A row that raises when it is read: stop and name it, or go on without it, exactly (policy)."""
    dataloader_num_workers: int = 0
    """Worker processes that read this process's next samples ahead; 0 reads in the loop (processes)."""


@dataclass
class Run:
    """How long, and from where."""

    num_train_epochs: float = 1.0
    """Length of the run, may be a fraction (epochs)."""
    max_steps: int = -1
    """Stop after this many decisions; -1: bounded by data (steps)."""
    max_samples: int | None = None
    """Stop after this many samples (samples over all processes)."""
    seed: int = 42
    """Of the weights, the order of the data and dropout (integer)."""
    output_dir: str | None = None
    """Folder of the run; by default runs/TASK-TIME, always a new one (path)."""
    resume_from_checkpoint: str | None = None
    """Go on from the newest whole checkpoint of --output_dir (auto) or from this one (auto or path)."""
    weights_only: bool = False
    """Resume weights and counters but start the optimizer afresh, e.g. under another engine (yes/no)."""
    allow_dataset_change: bool = False
    """Resume although the training data is not what it was (yes/no)."""


@dataclass
class Batch:
    """The batch size: a scheduled variable."""

    batch_size: float | None = None
    """Initial global size, any number > 0, default 8 (samples over all processes)."""
    per_device_train_batch_size: float | None = None
    """Initial size of one device instead, any number > 0 (samples per device)."""
    schedule: str = "linear(interval=100, max_size=32, increment=2)"
    """NAME(settings) or FILE.py:NAME(settings): decides each step's size (in the unit of the initial
    size).
    """
    max_batch_size: float | None = None
    """Larger sizes are clamped to this (samples, in the unit of the initial size)."""
    micro_batch_size: Literal["auto"] | int = 32
    """Most samples one process sends through the model at once, auto: what fits; memory only (samples per
    process).
    """
    micro_batch_regrow: str = "never"
    """Double it so long after running out of memory halved it: "5000 steps" (steps, samples or minutes)."""
    fraction: Literal["participate", "accumulate"] = "participate"
    """A per-device size b below 1: b samples a step on average, or the share of an update one pass is
    (policy).
    """
    samples_per_pass: int = 1
    """Samples in the pass that --fraction accumulate speaks of (samples per device)."""
    fractional_scaling: Literal["target", "realized", "ceil"] = "target"
    """Weight of a sample: 1/max(G,1), 1/n or 1/(W ceil(G/W)); derivation in adaptive/scaling.py (policy)."""
    epoch_end: Literal["keep", "wrap", "drop"] = "keep"
    """Last step of an epoch: keep it short, borrow from the next epoch, or discard the rest (policy)."""
    normalize_by: Literal["samples", "tokens"] | None = None
    """What weighs equally inside a step; by default what the task says: causal_lm tokens (policy)."""
    noise_every: int = 1
    """The noise scale, where a schedule or --track names it, is measured at every so manieth step (steps)."""
    noise_half_life: float = 2000.0
    """After so many samples a measurement counts half in the noise scale's averages (samples)."""
    check_agreement: bool = False
    """Every process compares a hash of its plan with rank 0's, at every step (yes/no)."""


@dataclass
class Optim:
    """The update."""

    optim: str = "adamw_torch"
    """Optimizer, a name of adaptive/optim.py (name)."""
    optim_args: str = ""
    """Further arguments of the optimizer, e.g. "momentum=0.9" (name=value, ...)."""
    learning_rate: float | None = None
    """Peak at --base_batch_size; default 3e-3 for a preset from scratch, 5e-5 for a pretrained model (per
    update).
    """
    lr_scheduler_type: str = "cosine"
    """Decay over the run's samples, a name of adaptive/scaling.py (name)."""
    lr_scheduler_kwargs: str = ""
    """Settings of the decay, e.g. "num_cycles=2" or "decay_share=0.2" (name=value, ...)."""
    lr_scaling: str = "sqrt"
    """Factor that follows the batch size: none, linear, sqrt or power(p) (rule)."""
    base_batch_size: float | None = None
    """Size at which the factor is 1; by default the initial size (samples, in its unit)."""
    warmup_samples: int | None = None
    """Length of the linear warmup (samples over all processes)."""
    warmup_ratio: float = 0.0
    """Length of the linear warmup instead (share of the run, 0 to 1)."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; biases and norms have none (per unit of learning rate)."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment (per update)."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment (per update)."""
    adam_epsilon: float = 1e-8
    """Adam's denominator offset (gradient units)."""
    max_grad_norm: float = 1.0
    """Clip the step's gradient to this norm on every engine; 0: no clipping (gradient norm)."""
    max_skipped: int = 10
    """Stop with an error after more non-finite steps in a row than this (steps)."""


@dataclass
class Hardware:
    """How the arithmetic is done; where it runs is the accelerate config's matter."""

    bf16: bool = False
    """Mixed precision in bfloat16 (yes/no)."""
    fp16: bool = False
    """Mixed precision in float16 with a loss scaler (yes/no)."""
    find_unused_parameters: bool = False
    """For models that leave parameters unused in some passes; DDP only (yes/no)."""


@dataclass
class Eval:
    """Exact evaluation: every validation sample once, training untouched."""

    eval_every: str = "500 steps"
    """"50 steps", "10000 samples", "10 minutes" or "never"; always once at the end (steps, samples or
    minutes).
    """
    per_device_eval_batch_size: int = 64
    """Samples of one evaluation pass; never changes the result (samples per process)."""


@dataclass
class Output:
    """What is told and kept."""

    log_every: str = "10 steps"
    """Console and tracker lines; metrics.jsonl has every step (steps, samples or minutes)."""
    save_every: str = "1000 steps"
    """Checkpoints; always one at the end and when a signal stops the run (steps, samples or minutes)."""
    keep_last: int = 2
    """Checkpoints that are kept, the newest (checkpoints)."""
    keep_best: int = 0
    """Checkpoints that are kept beside, of the lowest eval_loss; each new best is saved (checkpoints)."""
    report_to: tuple[str, ...] = ("wandb",)
    """Trackers: wandb, tensorboard or none (names)."""
    project_name: str = "adaptive-batch"
    """Project of the trackers (name)."""
    run_name: str | None = None
    """Name of the run in the trackers; by default the output folder's (name)."""
    track: tuple[str, ...] = ()
    """Signals to measure and record although no schedule names them, see adaptive/signals.py (names)."""
    audit: bool = False
    """Write the rows and weights every process trained on to audit/rankR.jsonl (yes/no)."""


@dataclass
class Config:
    """Every setting of a run, by group; `flat` has them by flag name."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    run: Run = field(default_factory=Run)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=Optim)
    hardware: Hardware = field(default_factory=Hardware)
    eval: Eval = field(default_factory=Eval)
    output: Output = field(default_factory=Output)

    def flat(self) -> dict[str, Any]:
        """{flag name: value} of all groups; what config.yaml holds."""
        values = {}
        for group in dataclasses.fields(self):
            values |= dataclasses.asdict(getattr(self, group.name))
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


# Names people know from transformers.TrainingArguments and TRL that have no meaning here: what to write
# instead.
INSTEAD = {
    "gradient_accumulation_steps": "--batch_size (global) and --micro_batch_size (what fits in memory): "
    "the number of passes follows",
    "auto_find_batch_size": "--micro_batch_size: the global batch size is the schedule's",
    "warmup_steps": "--warmup_samples or --warmup_ratio: steps have no fixed size here",
    "logging_steps": '--log_every "10 steps"',
    "eval_steps": '--eval_every "50 steps"',
    "eval_strategy": '--eval_every "50 steps", "10000 samples", "10 minutes" or "never"',
    "save_steps": '--save_every "50 steps"',
    "save_strategy": '--save_every "50 steps", "10000 samples", "10 minutes" or "never"',
    "save_total_limit": "--keep_last",
    "dataloader_drop_last": "--epoch_end drop (or keep, wrap)",
    "dataloader_prefetch_factor": "--dataloader_num_workers: read-ahead is by sample",
    "split_batches": "nothing: --batch_size is global, --per_device_train_batch_size is per device",
    "dispatch_batches": "nothing: every process reads its own samples",
    "data_seed": "--seed",
    "block_size": "--sequence_length",
    "max_seq_length": "--sequence_length",
    "max_length": "--sequence_length",
    "deepspeed": "accelerate launch --config_file accelerate_configs/zero2.yaml train.py",
    "fsdp": "accelerate launch --config_file with one of accelerate_configs/",
    "num_processes": "it before train.py: accelerate launch --num_processes N train.py",
    "lr": "--learning_rate",
    "epochs": "--num_train_epochs",
    "train_batch_size": "--batch_size",
}
ABOVE_ZERO = {
    "batch_size", "per_device_train_batch_size", "max_batch_size", "base_batch_size", "micro_batch_size",
    "samples_per_pass", "num_train_epochs", "max_samples", "sequence_length", "per_device_eval_batch_size",
    "keep_last",
}  # fmt: skip
AT_LEAST_ZERO = {
    "dataloader_num_workers", "max_grad_norm", "weight_decay", "learning_rate", "max_skipped",
    "warmup_samples", "warmup_ratio", "seed", "keep_best",
}  # fmt: skip
ALIASES = {"model": "model_name_or_path", "dataset": "dataset_name"}
UNITS = {"step": 1, "sample": 1, "minute": 60}


@dataclass(frozen=True)
class Every:
    """An interval of steps, samples or seconds; `due` says whether a multiple of it was passed."""

    count: float
    unit: str  # "step", "sample" or "minute"

    @classmethod
    def parse(cls, text: str, flag: str) -> Every:
        """Text such as "50 steps" -> Every(50, "step"); a bare number means steps, "never" nothing."""
        if text.strip() in ("never", "0", "none"):
            return cls(0, "step")
        found = re.fullmatch(r"\s*([0-9.]+)\s*(steps?|samples?|minutes?)?\s*", text)
        count = float(found[1]) if found and found[1].count(".") < 2 and found[1] != "." else 0.0
        if count <= 0:
            raise BadSetting(
                f'--{flag} is "{text}"; write "50 steps", "10000 samples", "10 minutes" or "never"'
            )
        return cls(count * UNITS[(found[2] or "step").rstrip("s")], (found[2] or "step").rstrip("s"))

    def due(self, before: dict, after: dict) -> bool:
        """Whether a multiple lies in (before, after], both {"step", "samples", "seconds"}."""
        if not self.count:
            return False
        name = {"step": "step", "sample": "samples", "minute": "seconds"}[self.unit]
        return int(after[name] // self.count) > int(before[name] // self.count)


def parse(argv: list[str] | None = None) -> Config:
    """Command line (and the YAML file after --config) -> checked Config.

    Raises BadSetting with one line that says what to write instead.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = _recipe_arguments(argv) + argv
    known = [
        f.name for group in dataclasses.fields(Config) for f in dataclasses.fields(group.default_factory)
    ]
    for word in argv:
        if word.startswith("--"):
            _check_name(word[2:].split("=")[0].replace("-", "_"), known)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config = tyro.cli(
                Config,
                args=argv,
                prog="train.py",
                description="Train with a batch size that is a scheduled variable. "
                "--config FILE.yaml reads settings first.",
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise BadSetting(_one_line(printed.getvalue())) from None
    return check(config)


def check(config: Config) -> Config:
    """Refuse what no run can mean, fill in what follows from other settings."""
    optim, run, data, settings = config.optim, config.run, config.data, config.flat()
    for name, value in settings.items():
        if name in ABOVE_ZERO and value not in (None, "auto") and not 0 < value < float("inf"):
            raise BadSetting(f"--{name} is {value}; write a number above 0")
        if name in AT_LEAST_ZERO and value is not None and not 0 <= value < float("inf"):
            raise BadSetting(f"--{name} is {value}; write 0 or more")
    _check_batch(config.batch)
    if run.max_steps != -1 and run.max_steps < 1:
        raise BadSetting(
            f"--max_steps is {run.max_steps}; write a number of steps, or -1 to be bounded by the data"
        )
    if not 0 < data.eval_share < 1:
        raise BadSetting(f"--eval_share is {data.eval_share}; write a share between 0 and 1, such as 0.1")
    if optim.warmup_ratio > 1:
        raise BadSetting(f"--warmup_ratio is {optim.warmup_ratio}; write a share of the run between 0 and 1")
    if optim.warmup_samples is not None and optim.warmup_ratio:
        raise BadSetting("--warmup_samples and --warmup_ratio are both given; write one of them")
    if config.hardware.bf16 and config.hardware.fp16:
        raise BadSetting("--bf16 and --fp16 are both given; write one of them")
    unknown = set(config.output.report_to) - {"wandb", "tensorboard", "none"}
    if unknown:
        raise BadSetting(f"--report_to has {sorted(unknown)[0]!r}; write wandb, tensorboard or none")
    for flag in ("eval_every", "log_every", "save_every", "micro_batch_regrow"):
        Every.parse(settings[flag], flag)
    if run.resume_from_checkpoint and not run.output_dir:
        if run.resume_from_checkpoint == "auto":
            raise BadSetting(
                "--resume_from_checkpoint auto needs the run's folder; write --output_dir RUN, or "
                "--config RUN/config.yaml"
            )
        run.output_dir = str(Path(run.resume_from_checkpoint).resolve().parents[1])
    task = Path(data.task.split(":")[0]).stem
    run.output_dir = run.output_dir or f"runs/{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config


def _check_batch(batch: Batch) -> None:
    share = batch.per_device_train_batch_size
    if batch.batch_size is not None and share is not None:
        raise BadSetting("--batch_size and --per_device_train_batch_size are both given; write one of them")
    if batch.fraction == "accumulate" and share is None:
        raise BadSetting(
            "--fraction accumulate needs --per_device_train_batch_size, the share of an update "
            "that one pass is; --batch_size has no such reading"
        )
    if batch.fraction == "accumulate" and share > 1:
        raise BadSetting(
            f"--fraction accumulate with --per_device_train_batch_size {share:g}; "
            "write a share of at most 1, or --fraction participate"
        )


def save(config: Config, path: Path) -> None:
    """Write every resolved setting; `--config PATH` reads it back."""
    path.write_text(yaml.safe_dump(config.flat(), sort_keys=False))


def _recipe_arguments(argv: list[str]) -> list[str]:
    """Take "--config FILE" out of argv and return FILE's settings as arguments."""
    arguments: list[str] = []
    argv[:] = [
        part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    while "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise BadSetting("--config needs a YAML file after it")
        path = Path(argv[at + 1])
        del argv[at : at + 2]
        try:
            settings = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise BadSetting(f"--config {path}: {error.strerror}; write the path of a YAML file") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadSetting(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise BadSetting(f"--config {path} holds no settings; write lines such as 'batch_size: 8'")
        for name, value in settings.items():
            if value is True or value is False:
                arguments.append(f"--{'' if value else 'no_'}{name}")
            elif isinstance(value, list):
                arguments += [f"--{name}", *map(str, value)]
            elif isinstance(value, str) and value.startswith("-"):
                arguments.append(f"--{name}={value}")
            else:
                arguments += [f"--{name}", str(value)]
    return arguments


def _check_name(name: str, known: list[str]) -> None:
    if name in known or name in ALIASES or name == "help" or name.removeprefix("no_") in known:
        return
    if name in INSTEAD:
        raise BadSetting(f"--{name} has no meaning here; write {INSTEAD[name]}")
    close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    raise BadSetting(
        f"--{name} is not a setting; " + (f"did you mean --{close[0]}?" if close else "see --help")
    )


def _one_line(box: str) -> str:
    """The message inside tyro's framed error, as one line."""
    lines = [line.strip("│╭╮╰╯─ ").strip() for line in box.splitlines()[1:]]
    message = []
    for line in lines:
        if not line:
            break
        message.append(line)
    return " ".join(message) + "; see --help"


def warn(line: str) -> None:
    """A line on stderr, once for all processes of a launch."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def exit_with(error: BadSetting) -> None:
    """One line on stderr and exit status 2."""
    rank = os.environ.get("RANK", "0")
    print(f"error: {error}" if rank == "0" else f"[rank {rank}] error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_or_exit() -> Config:
    """`parse` for a program's first lines: --help and bad settings are answered before torch is imported."""
    try:
        return parse()
    except BadSetting as error:
        exit_with(error)
