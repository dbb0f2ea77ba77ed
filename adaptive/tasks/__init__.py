"""A task: rows, a model, and the loss of each sample of one pass.

To add one: a class with `load`, `model` and `loss_sum` in any file, --task "my_task.py:MyTask"; or a line in
TASKS. The loop asks for sums over a sample's supervised items (tokens, or the sample itself), never for
means: how they weigh in the step's gradient is scaling.py's business, which no task needs to know.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from adaptive.config import BadSetting, Config
from adaptive.engine import attention, weights_drawn_whole
from adaptive.schedules import described, from_file


@dataclass
class Loaded:
    """What `Task.load` returns; datasets have len() and rows that are dictionaries."""

    train: Any
    eval: Any = None
    tokenizer: Any = None
    fingerprint: str = ""  # of the training data's content


class Task:
    """Defaults for everything but `load`, `model` and `loss_sum`.

    Rows with a column `position` get there, while training, their place in the endless order (in evaluation
    it stays as loaded): a task whose rows are drawn (masked_lm) draws from it, so that no draw depends on who
    computes the row.
    """

    normalize_by = "samples"  # what weighs equally inside a step, unless --normalize_by says otherwise
    pooled: tuple[str, ...] = ()  # what `measure_pool` gets of `measure`, of the whole validation set
    label_smoothing = 0.0  # --label_smoothing_factor
    widths: dict[str, int] = {}  # noqa: RUF012 (column -> least padded length)
    pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}  # noqa: RUF012 (column -> value of padding)

    def settle(self, config: Config) -> None:
        """What the losses and shapes of token tasks need to know; their `load` calls it."""
        self.label_smoothing = config.optim.label_smoothing_factor
        if config.hardware.torch_compile:  # one length for all passes, else each compiles anew
            names = ("input_ids", "attention_mask", "position_ids", "labels")
            self.widths = dict.fromkeys(names, config.data.sequence_length)

    def load(self, config: Config) -> Loaded:
        """Datasets and tokenizer; rank 0 of each machine goes first, so that caches are written once."""
        raise TypeError(f"{type(self).__name__} has no load(config); see adaptive/tasks/causal_lm.py")

    def model(self, config: Config) -> torch.nn.Module:
        """The network, after `load`; every process at once, with the same seed."""
        raise TypeError(f"{type(self).__name__} has no model(config); see adaptive/tasks/causal_lm.py")

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows,) loss of each sample, summed over its supervised items."""
        raise TypeError(
            f"{type(self).__name__} has no loss_sum(model, batch); see adaptive/tasks/causal_lm.py"
        )

    def before_passes(self, engine: Any, batches: list[dict], own: Any) -> list[dict]:
        """The step's passes on this process, collated, with columns added that follow from all samples of the
        step over all processes. For losses that couple samples (contrastive.py); every process at once.
        """
        return batches

    def items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows,) int64: supervised items of each sample; by default the sample itself is the only one."""
        return torch.ones(len(next(iter(batch.values()))), dtype=torch.int64)

    def measure(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{"loss": (rows,), metric: (rows,)} of an evaluation pass; metrics are averaged over samples."""
        return {"loss": self.loss_sum(model, batch)}

    def measure_pool(self, values: dict[str, torch.Tensor]) -> dict[str, tuple[float, int]]:
        """{metric: (sum, count)} of the `pooled` values (all rows, ...) in the data's order; rank 0 only."""
        return {}

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Rows -> tensors (rows, ...); sequences are padded to the longest of the pass."""
        return {
            name: _stack([row[name] for row in rows], self.pad.get(name, 0), self.widths.get(name, 0))
            for name in rows[0]
        }

    def token_counts(self, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
        """(tokens that are not padding, padded positions) of one pass."""
        if "input_ids" not in batch:
            return 0, 0
        positions = batch["input_ids"].numel()
        inputs = int(batch["attention_mask"].sum()) if "attention_mask" in batch else positions
        return inputs, positions - inputs

    def signals(self) -> dict[str, float | None]:
        """Numbers of the task's own that a schedule may name; equal on all processes, None before `load`."""
        return {}


def one_per_row(losses: torch.Tensor, rows: int, padded: int) -> torch.Tensor:
    """(rows,) of what a task returned for a pass of `rows`, which is filled up to `padded` if it is compiled.

    BadSetting where it is not one number per row: no reader could tell a sum over the wrong ones from a loss.
    """
    shape = tuple(getattr(losses, "shape", ()))
    if shape == (rows,):
        return losses
    if shape == (padded,) and padded > rows:
        return losses[:rows]
    raise BadSetting(
        f"the task returned losses of shape {shape} for {rows} rows; return one sum per row, shape ({rows},)"
    )


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """(rows, length, words), (rows, length) -> (rows,) cross-entropy summed over labels other than -100.

    With smoothing e a token's loss is (1 - e) nll + e (mean of -log p over all words), as in transformers.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # as transformers' own losses
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none", label_smoothing=smoothing
    )
    return losses.view(labels.shape).sum(dim=1)


def load_task(name: str) -> Task:
    """--task -> Task; BadSetting for an unknown name or file."""
    found = re.match(r"(.+\.py):(\w+)$", name)
    if found:
        made = from_file(Path(found[1]), found[2], "--task")
        try:
            task = made()
        except Exception as error:
            raise BadSetting(f"--task {name}: {described(error)}") from error
        if not isinstance(task, Task):
            raise BadSetting(
                f"--task {name} makes a {type(task).__name__}; write a class of adaptive.tasks.Task"
            )
        return task
    if name not in TASKS:
        raise BadSetting(f"--task is {name!r}; write one of {', '.join(TASKS)}, or FILE.py:CLASS")
    module, attribute = TASKS[name].split(":")
    return getattr(importlib.import_module(module), attribute)()


def build_model(
    auto_class: Any, config: Config, presets: dict[str, dict], **settings: Any
) -> torch.nn.Module:
    """--model_name_or_path -> model: a preset from scratch, or `from_pretrained`; fills in the learning rate.

    `settings` go to the model's config (num_labels, ...).
    """
    from transformers import AutoConfig

    name = config.model.model_name_or_path = config.model.model_name_or_path or next(iter(presets))
    dtype, attention_name = getattr(torch, config.model.dtype), attention(config)
    try:
        if name in presets:
            of_preset = AutoConfig.for_model(**presets[name], **settings)
            with weights_drawn_whole():
                model = auto_class.from_config(of_preset, attn_implementation=attention_name).to(dtype)
        else:
            settings |= {"trust_remote_code": config.model.trust_remote_code}
            settings["ignore_mismatched_sizes"] = "id2label" in settings  # other classes: a new head
            model = auto_class.from_pretrained(
                name, dtype=dtype, attn_implementation=attention_name, **settings
            )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        if attention_name and "ttention" in reason:
            raise BadSetting(
                f"--attn_implementation {config.model.attn_implementation}: {reason}; write sdpa or auto"
            ) from None
        if name in presets:
            raise
        raise BadSetting(
            f"--model_name_or_path {name!r} is no preset ({', '.join(presets)}), and could not be "
            f"opened as a folder or hub name: {reason}"
        ) from None
    if config.optim.learning_rate is None:
        config.optim.learning_rate = 3e-3 if name in presets else 5e-5
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted(model, config, auto_class.__name__, name in presets)


def adapted(model: torch.nn.Module, config: Config, kind: str, from_scratch: bool) -> torch.nn.Module:
    """--peft lora: adapters beside the frozen weights, through the package peft; else the model itself."""
    told = config.model
    if told.peft == "none":
        return model
    if from_scratch:
        raise BadSetting(
            "--peft lora adapts a pretrained model; write a folder or name as --model_name_or_path"
        )
    try:
        import peft
    except ImportError:
        raise BadSetting("--peft lora needs a package; pip install peft") from None
    targets = list(told.lora_target_modules)
    task_type = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
                 "AutoModelForSequenceClassification": "SEQ_CLS"}.get(kind)  # fmt: skip
    lora = peft.LoraConfig(
        r=told.lora_r, lora_alpha=told.lora_alpha, lora_dropout=told.lora_dropout, task_type=task_type,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )  # fmt: skip
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise BadSetting(f"--lora_target_modules {' '.join(targets)}: {str(error)[:300]}") from None


def build_tokenizer(config: Config, presets: dict[str, dict]) -> Any:
    """--tokenizer_name, or the model's own; for a preset ByT5's bytes, which need no vocabulary file."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = config.model.tokenizer_name or config.model.model_name_or_path
    if name is None or name in presets:
        return ByT5Tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        named = "--tokenizer_name" if config.model.tokenizer_name else "--model_name_or_path"
        raise BadSetting(
            f"no tokenizer could be opened from {named} {name!r}; write a preset ({', '.join(presets)}), a "
            f"folder or a hub name, and --tokenizer_name where a model's folder has none: {reason}"
        ) from None


def _stack(values: list[Any], padding: float, width: int = 0) -> torch.Tensor:
    """Arrays of one length or of several (padded on the right, at least to `width`), or scalars -> tensor
    (rows, ...).
    """
    arrays = [np.asarray(value) for value in values]
    lengths = list(map(len, arrays)) if arrays[0].ndim else []
    longest = max(*lengths, width) if any(lengths) else 0
    if lengths and min(lengths) < longest:
        arrays = [
            np.concatenate([a, np.full((longest - len(a), *a.shape[1:]), padding, a.dtype)]) for a in arrays
        ]
    return torch.from_numpy(np.array(arrays))  # all of one shape now; faster than np.stack


TASKS = {
    "causal_lm": "adaptive.tasks.causal_lm:CausalLM",
    "masked_lm": "adaptive.tasks.masked_lm:MaskedLM",
    "seq2seq": "adaptive.tasks.seq2seq:Seq2Seq",
    "classification": "adaptive.tasks.classification:Classification",
    "contrastive": "adaptive.tasks.contrastive:Contrastive",
}
