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
    second_model_name_or_path: str | None = None
    """Second encoder of contrastive; by default the same as the first, beside images llama-tiny (name)."""
    tokenizer_name: str | None = None
    """Tokenizer folder or hub name; by default the model's own, for a preset ByT5's bytes (name)."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters; float64 is for exactness tests (dtype)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory (yes/no)."""
    attn_implementation: str | None = None
    """Attention, e.g. sdpa, eager, flash_attention_2; auto: flash attention where this machine has it; by
    default the model's own choice, sdpa as a rule (name).
    """
    peft: Literal["none", "lora"] = "none"
    """Train all of a pretrained model, or low-rank adapters beside its frozen weights (method)."""
    lora_r: int = 16
    """Rank of the adapters (integer)."""
    lora_alpha: float = 32.0
    """Adapters are multiplied by this over the rank (factor)."""
    lora_dropout: float = 0.0
    """Dropout before the adapters (share)."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules with adapters, by the end of their names, or all-linear (names)."""
    trust_remote_code: bool = False
    """Run the Python code that a hub model brings along (yes/no)."""


@dataclass
class Data:
    """What it is trained on."""

    task: str = "causal_lm"
    """causal_lm, masked_lm, seq2seq, classification, contrastive, or your own class as "my_task.py:MyTask"
    (name).
    """
    dataset_name: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--dataset"])] = ("stdlib",)
    """stdlib, stdlib_topics, a hub name, a save_to_disk folder, a csv, json, jsonl, parquet or text file, or
    (contrastive) a folder of images; several, as NAME=DATASET, are trained on together (names).
    """
    dataset_config_name: str | None = None
    """Configuration of a hub dataset (name)."""
    text_column: str | None = None
    """Column with the text; by default "text", or the only text column (name)."""
    target_column: str | None = None
    """Column with the text to write (seq2seq); by default "target", or the only other text column (name)."""
    source_prefix: str = ""
    """Put before every text of seq2seq, e.g. "translate English to German: " (text)."""
    label_column: str | None = None
    """Column with the class; by default "label" (name)."""
    streaming: bool = False
    """Read --dataset_name in its own order and as it comes, without knowing its length: for what is too large
    to be prepared (yes/no).
    """
    shuffle_buffer: int = 1000
    """A stream is shuffled within blocks of so many; 0: not at all (samples)."""
    dataset_is_sharded: bool = False
    """Each process streams files of its own: on its own disk, or with {rank} in --dataset_name (yes/no)."""
    eval_dataset: tuple[str, ...] = ()
    """Validation data, like --dataset_name with the same names; by default its own split, else a share
    (names).
    """
    eval_share: float = 0.1
    """Held out for validation where the dataset has no split of its own (share of rows or files)."""
    new_sources: tuple[str, ...] = ()
    """Sources of --dataset_name whose share is the signal new_data_ratio (names)."""
    difficulty_column: str | None = None
    """Column with each sample's difficulty, a number; by default it follows from the loss (name)."""
    sequence_length: int = 128
    """Longest sample (tokens)."""
    max_target_length: int | None = None
    """Longest text to write (seq2seq); by default --sequence_length (tokens)."""
    packing: Literal["stream", "documents", "none"] | None = None
    """A row of causal_lm: texts joined and cut at --sequence_length; whole documents that do not see each
    other; or one document. By default stream for texts, none for conversations (policy).
    """
    mlm_probability: float = 0.15
    """Tokens that masked_lm hides and asks for (share of tokens)."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """A row that raises when it is read: stop and name it, or go on without it, exactly (policy)."""
    contrastive_scale: float = 0.1
    """What the contrastive loss of a pair counts beside the losses of its texts or images (factor)."""
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
    self_check: int = 0
    """Every so many steps one process recomputes the gradient by itself; the difference is recorded; 0: never
    (steps).
    """
    dry_run: bool = False
    """Print sizes, steps and learning rates of the run, and stop; for schedules that measure nothing
    (yes/no).
    """


@dataclass
class Batch:
    """The batch size: a scheduled variable."""

    batch_size: float | None = None
    """Initial global size, any number > 0, default 8 (samples over all processes)."""
    per_device_train_batch_size: float | None = None
    """Initial size of one device instead, any number > 0 (samples per device)."""
    source_sizes: tuple[float, ...] = ()
    """Initial size of each source, or with --batch_size their proportions; by default by rows (samples, in
    the unit of the initial size).
    """
    source_weights: tuple[float, ...] = ()
    """Share of each source in the step's mean; by default every sample weighs alike (proportions)."""
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
    participation: Literal["carry", "bernoulli", "reservoir"] = "carry"
    """How a fraction becomes whole samples: carried over, drawn, or from slots; adaptive/participation.py
    (policy).
    """
    usage_correction: float = 0.1
    """With --participation reservoir a sample weighs less by this for each use above the mean (per use)."""
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
    """Factor that follows the batch size: none, linear, sqrt, power(p) or adascale, whose gain is measured
    (rule).
    """
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
    """Decay of Adam's second moment (per update; of the base size with --beta_scaling half_life)."""
    beta_scaling: Literal["none", "half_life"] = "none"
    """half_life: the second moment forgets by samples, whatever the size; AdamW only (policy)."""
    adam_epsilon: float = 1e-8
    """Adam's denominator offset (gradient units)."""
    max_grad_norm: float = 1.0
    """Clip the step's gradient to this norm on every engine; 0: no clipping (gradient norm)."""
    max_skipped: int = 10
    """Stop with an error after more non-finite steps in a row than this (steps)."""
    layer_lr_decay: float = 1.0
    """Factor of the learning rate from each layer to the one below; 1: all alike (per layer)."""
    grad_anomaly: float = 1e5
    """Steps with a larger gradient norm before clipping are reported (gradient norm)."""
    label_smoothing_factor: float = 0.0
    """Share of the target that goes to all words alike, in training only (share, 0 to 1)."""


@dataclass
class Hardware:
    """How the arithmetic is done; where it runs is the accelerate config's matter."""

    bf16: bool = False
    """Mixed precision in bfloat16 (yes/no)."""
    fp16: bool = False
    """Mixed precision in float16 with a loss scaler; slow on a CPU (yes/no)."""
    torch_compile: Annotated[bool, tyro.conf.arg(aliases=["--compile"])] = False
    """Compile the model; passes are padded to one shape, which changes no result (yes/no)."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile (name)."""
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
    """Trackers: wandb, tensorboard, trackio or none; the last two are extras to be installed (names)."""
    project_name: str = "adaptive-batch"
    """Project of the trackers (name)."""
    run_name: str | None = None
    """Name of the run in the trackers; by default the output folder's (name)."""
    run_group: str | None = None
    """Runs that belong together in the trackers, such as the seeds of one experiment (name)."""
    run_tags: tuple[str, ...] = ()
    """Words to find the run by in the trackers (words)."""
    run_notes: str | None = None
    """What the run is about, in the trackers (text)."""
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

    @property
    def searched(self) -> bool:
        """Whether this run is a candidate of tools/critical_batch.py, which speaks for it."""
        return self.batch.schedule.startswith("candidate(")

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
    "keep_last", "lora_r", "lora_alpha", "max_target_length", "layer_lr_decay", "grad_anomaly",
    "noise_every", "noise_half_life",
}  # fmt: skip
AT_LEAST_ZERO = {
    "dataloader_num_workers", "max_grad_norm", "weight_decay", "learning_rate", "max_skipped",
    "warmup_samples", "warmup_ratio", "seed", "self_check", "usage_correction",
    "keep_best", "contrastive_scale", "shuffle_buffer", "adam_epsilon",
}  # fmt: skip
ALIASES = {"model": "model_name_or_path", "dataset": "dataset_name", "compile": "torch_compile"}
REPEATABLE = {
    "dataset_name", "eval_dataset", "new_sources", "source_sizes", "source_weights",
}  # fmt: skip
# A source's keys in a recipe's `sources:`, and the flags that hold them.
SOURCE_KEYS = {
    "dataset_name": "dataset_name", "dataset": "dataset_name", "eval_dataset": "eval_dataset",
    "batch_size": "source_sizes", "size": "source_sizes", "weight": "source_weights", "new": "new_sources",
}  # fmt: skip
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
    argv = _recipe_arguments(argv) + _joined(argv)
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
    for judge in (_check_arithmetic, _check_alone, _check_task, _check_sources, _check_stream):
        judge(config)
    if run.max_steps != -1 and run.max_steps < 1:
        raise BadSetting(
            f"--max_steps is {run.max_steps}; write a number of steps, or -1 to be bounded by the data"
        )
    if not 0 < data.eval_share < 1:
        raise BadSetting(f"--eval_share is {data.eval_share}; write a share between 0 and 1, such as 0.1")
    for name in ("mlm_probability", "label_smoothing_factor", "lora_dropout", "adam_beta1", "adam_beta2"):
        if not 0 <= settings[name] < 1:
            raise BadSetting(f"--{name} is {settings[name]}; write a share of at least 0 and below 1")
    if optim.warmup_ratio > 1:
        raise BadSetting(f"--warmup_ratio is {optim.warmup_ratio}; write a share of the run between 0 and 1")
    if optim.warmup_samples is not None and optim.warmup_ratio:
        raise BadSetting("--warmup_samples and --warmup_ratio are both given; write one of them")
    if config.hardware.bf16 and config.hardware.fp16:
        raise BadSetting("--bf16 and --fp16 are both given; write one of them")
    unknown = set(config.output.report_to) - {"wandb", "tensorboard", "trackio", "none"}
    if unknown:
        raise BadSetting(f"--report_to has {sorted(unknown)[0]!r}; write wandb, tensorboard, trackio or none")
    for flag in ("eval_every", "log_every", "save_every", "micro_batch_regrow"):
        Every.parse(settings[flag], flag)
    if run.resume_from_checkpoint and not run.output_dir:
        if run.resume_from_checkpoint == "auto":
            raise BadSetting(
                "--resume_from_checkpoint auto needs the run's folder; write --output_dir RUN, or "
                "--config RUN/config.yaml"
            )
        run.output_dir = str(Path(run.resume_from_checkpoint).resolve().parent.parent)
    task = Path(data.task.split(":")[0]).stem
    run.output_dir = run.output_dir or f"runs/{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config


def _check_arithmetic(config: Config) -> None:
    if config.run.num_train_epochs > 1e9:
        raise BadSetting(f"--num_train_epochs is {config.run.num_train_epochs:g}; write at most 1e9")
    if config.run.seed >= 2**63:
        raise BadSetting(f"--seed is {config.run.seed}; write an integer below 2^63")
    if config.optim.beta_scaling == "half_life" and not config.optim.optim.startswith("adamw_torch"):
        raise BadSetting(
            "--beta_scaling half_life knows the bias correction of --optim adamw_torch and its fused form; "
            f"it is {config.optim.optim}"
        )
    if config.optim.beta_scaling == "half_life" and config.hardware.find_unused_parameters:
        raise BadSetting(
            "--beta_scaling half_life needs a gradient of every parameter in every step, and "
            "--find_unused_parameters says that some have none; leave one of them out"
        )
    if config.run.self_check and config.hardware.fp16:
        raise BadSetting("--self_check would disturb the loss scaler of --fp16; write --bf16, or neither")


def _check_alone(config: Config) -> None:
    """Settings that do nothing without another."""
    if config.run.weights_only and not config.run.resume_from_checkpoint:
        raise BadSetting("--weights_only is for --resume_from_checkpoint; write that too, or neither")
    if config.data.dataset_is_sharded and not config.data.streaming:
        raise BadSetting("--dataset_is_sharded is for streams; write --streaming as well")


def _check_stream(config: Config) -> None:
    """Data of unknown length."""
    for wrong, line in _beyond_streams(config) if config.data.streaming else ():
        if wrong:
            raise BadSetting(line)


def _beyond_streams(config: Config) -> tuple[tuple[Any, str], ...]:
    """(whether it is asked for, what to write instead) of all that a stream cannot do."""
    data, run, batch, optim = config.data, config.run, config.batch, config.optim
    bounded = bool(run.max_samples) or run.max_steps > 0
    decays = optim.lr_scheduler_type not in ("constant", "constant_with_warmup")
    return (
        (len(data.dataset_name) > 1, "--streaming reads one source; write one --dataset_name"),
        (data.task == "contrastive", "--streaming is not for contrastive, which numbers its pairs "
         "beforehand; leave it out"),
        (run.num_train_epochs != 1, f"--num_train_epochs {run.num_train_epochs:g}: --streaming reads the "
         "data once, and does not know its length; write --max_samples or --max_steps"),
        (data.eval_share != Data.eval_share, f"--eval_share {data.eval_share:g}: of a stream no share can be "
         "held out; write --eval_dataset"),
        (batch.epoch_end != "keep", f"--epoch_end {batch.epoch_end}: a stream has no epochs; write keep"),
        (decays and not bounded, f"--lr_scheduler_type {optim.lr_scheduler_type} follows the share of the "
         "run, and a stream's length is unknown; write --max_samples or --max_steps, or --lr_scheduler_type "
         "constant"),
        (optim.warmup_ratio and not run.max_samples, f"--warmup_ratio {optim.warmup_ratio:g} is a share of a "
         "stream of unknown length; write --warmup_samples, or --max_samples as well"),
        (run.dry_run and not bounded, "--dry_run of a stream has no end; write --max_samples or --max_steps"),
        (batch.participation == "reservoir", "--participation reservoir looks rows up again, which a stream "
         "cannot; write carry or bernoulli"),
        (data.difficulty_column, "--difficulty_column is not for streams; leave it out, and difficulty "
         "follows from the loss"),
        (data.on_bad_sample == "skip", "--on_bad_sample skip: a stream ends where it cannot be read; "
         "write stop"),
        (data.dataloader_num_workers, f"--dataloader_num_workers {data.dataloader_num_workers}: a stream is "
         "read in the loop, in its order; write 0"),
        (data.dataset_is_sharded and run.self_check, "--self_check needs all rows of a step on one process, "
         "and --dataset_is_sharded keeps them apart; leave one of them out"),
    )  # fmt: skip


def _check_task(config: Config) -> None:
    """Settings that a task would pass over."""
    task, data = config.data.task, config.data
    if data.packing and task in ("masked_lm", "seq2seq", "classification", "contrastive"):
        raise BadSetting(f"--packing {data.packing} is for causal_lm; leave it out with --task {task}")
    if config.optim.label_smoothing_factor and task == "contrastive":
        raise BadSetting("--label_smoothing_factor is not for contrastive; leave it out")


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


def sources(data: Data) -> dict[str, str]:
    """{source: dataset} of --dataset_name; the only one is called "train" unless it is named."""
    named = [_source(text) for text in data.dataset_name]
    if len(named) == 1:
        return {named[0][0] or "train": named[0][1]}
    names = [name or Path(dataset.rstrip("/")).stem for name, dataset in named]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadSetting(f"--dataset_name has two sources {twice[0]}; write NAME=DATASET with other names")
    return dict(zip(names, (dataset for _, dataset in named), strict=True))


def eval_datasets(data: Data) -> dict[str, str]:
    """{source: dataset} of --eval_dataset."""
    names = list(sources(data))
    named = [_source(text) for text in data.eval_dataset]
    found = {name or (names[0] if len(names) == 1 else ""): dataset for name, dataset in named}
    unknown = [name for name in found if name not in names]
    if unknown or len(found) < len(named):
        raise BadSetting(
            f"--eval_dataset {' '.join(data.eval_dataset)}; write NAME=DATASET, each NAME once, one of "
            f"{', '.join(names)}"
        )
    return found


def _source(text: str) -> tuple[str | None, str]:
    """ "NAME=DATASET" -> (NAME, DATASET); the name is None where there is none."""
    found = None if Path(text).exists() else re.fullmatch(r"(\w[\w.-]*)=(.+)", text, re.DOTALL)
    return (found[1], found[2]) if found else (None, text)


def _check_sources(config: Config) -> None:
    data, batch = config.data, config.batch
    if not data.dataset_name:
        raise BadSetting("--dataset_name has no name; write one, such as stdlib")
    names = list(sources(data))
    eval_datasets(data)
    for flag, values in (("source_sizes", batch.source_sizes), ("source_weights", batch.source_weights)):
        if values and (len(values) != len(names) or not all(0 < value < float("inf") for value in values)):
            raise BadSetting(
                f"--{flag} is {' '.join(f'{value:g}' for value in values)}; write a number above 0 for each "
                f"of {', '.join(names)}"
            )
    unknown = [name for name in data.new_sources if name not in names]
    if unknown:
        raise BadSetting(f"--new_sources {unknown[0]} is no source; write some of {', '.join(names)}")


def save(config: Config, path: Path) -> None:
    """Write every resolved setting; `--config PATH` reads it back."""
    whole = path.with_name(f".{path.name}.partial")  # a kill must not leave half of what a resume reads
    whole.write_text(yaml.safe_dump(config.flat(), sort_keys=False))
    os.replace(whole, path)


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
        settings |= _source_settings(settings.pop("sources", None), path)
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


def _source_settings(sources: Any, path: Path) -> dict[str, list]:
    """A recipe's `sources:`, {name: {dataset_name, batch_size, weight, new, eval_dataset}}, as flags."""
    flags: dict[str, list] = {}
    if sources is not None and not isinstance(sources, dict):
        raise BadSetting(
            f"--config {path}: sources is no table; write lines such as 'code: {{dataset: stdlib}}'"
        )
    for name, source in (sources or {}).items():
        source = {"dataset_name": source} if isinstance(source, str) else source or {}
        unknown = [key for key in source if key not in SOURCE_KEYS]
        if unknown or not {"dataset", "dataset_name"} & set(source):
            what = f"has {unknown[0]}" if unknown else "has no dataset_name"
            raise BadSetting(f"--config {path}: the source {name} {what}; write {', '.join(SOURCE_KEYS)}")
        for key, value in source.items():
            is_name = SOURCE_KEYS[key] in ("dataset_name", "eval_dataset")
            if key != "new" or value:
                held = f"{name}={value}" if is_name else name if key == "new" else value
                flags.setdefault(SOURCE_KEYS[key], []).append(held)
    return flags


def _joined(argv: list[str]) -> list[str]:
    """Repeated flags of several values as one: --dataset_name a --dataset_name b is --dataset_name a b."""
    kept: list[str] = []
    gathered: dict[str, list[str]] = {}
    flag = None
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = ALIASES.get(name, name).replace("-", "_")
            flag = name if name in REPEATABLE else None
            if flag:
                gathered.setdefault(flag, []).extend([value] if value else [])
                continue
        (gathered[flag] if flag else kept).append(word)
    return kept + [part for name, values in gathered.items() for part in (f"--{name}", *values)]


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
