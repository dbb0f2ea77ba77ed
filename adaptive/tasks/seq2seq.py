"""Text -> text: translation, summaries, and by default the docstring of a function from its source.

Encoder-decoders of `AutoModelForSeq2SeqLM`; the loss is over every token of the text to write, its end too.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive.config import Config
from adaptive.corpus import fingerprint, load_pairs
from adaptive.tasks import Loaded, Task, build_model, build_tokenizer, token_loss_sum
from adaptive.tasks.packing import arrays

_BYTES = {"model_type": "t5", "vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1,
          "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
PRESETS = {
    "t5-tiny": _BYTES | {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4},
    "t5-small": _BYTES | {"d_model": 256, "d_kv": 32, "d_ff": 704, "num_layers": 4, "num_heads": 8},
}


class Seq2Seq(Task):
    """Rows have input_ids, attention_mask (length,) and labels (target length,)."""

    normalize_by = "tokens"

    def load(self, config: Config) -> Loaded:
        data = config.data
        corpus = load_pairs(data, config.run.seed, config.model.trust_remote_code)
        tokenizer = build_tokenizer(config, PRESETS)
        self.settle(config)
        self.pad = self.pad | {"input_ids": tokenizer.pad_token_id or 0}
        lengths = (data.sequence_length, data.max_target_length or data.sequence_length)
        self.widths |= {"labels": lengths[1]} if self.widths else {}
        rows = [
            None if rows is None else encode(rows, tokenizer, data.source_prefix, *lengths)
            for rows in (corpus.train, corpus.eval)
        ]
        return Loaded(*rows, tokenizer, fingerprint(corpus.train))

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForSeq2SeqLM

        model = build_model(AutoModelForSeq2SeqLM, config, PRESETS)
        # What the decoder reads is its target, shifted as each architecture has it.
        self.shifted = model.prepare_decoder_input_ids_from_labels
        return model

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = super().collate(rows)
        return batch | {"decoder_input_ids": self.shifted(labels=batch["labels"])}

    def items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum(dim=1)

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        read = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**read, use_cache=False).logits
        return token_loss_sum(logits, batch["labels"], self.label_smoothing if model.training else 0.0)


def encode(dataset: Any, tokenizer: Any, prefix: str, length: int, target_length: int) -> Any:
    """Columns text, target -> input_ids, attention_mask, labels; what is longer is cut. Cached on disk."""
    settings = {"tokenizer": tokenizer, "prefix": prefix, "length": length, "target_length": target_length}
    dataset = dataset.map(_encoded, batched=True, fn_kwargs=settings, remove_columns=dataset.column_names)
    return arrays(dataset)


def _encoded(rows: dict[str, list], tokenizer: Any, prefix: str, length: int, target_length: int) -> dict:
    read = tokenizer([prefix + text for text in rows["text"]], truncation=True, max_length=length)
    written = tokenizer(text_target=rows["target"], truncation=True, max_length=target_length)
    kept = {name: read[name] for name in ("input_ids", "attention_mask")}
    return kept | {"labels": written["input_ids"]}
