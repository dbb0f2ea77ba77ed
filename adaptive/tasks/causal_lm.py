"""Text -> next-token prediction: packed sequences, loss over every token but the first of each."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from adaptive.config import BadSetting, Config
from adaptive.corpus import fingerprint, load_corpus
from adaptive.tasks import Loaded, Task, build_model, build_tokenizer

_BYTES = {
    "vocab_size": 384,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}  # ByT5's 259 + 125 extra
PRESETS = {
    "llama-tiny": _BYTES | {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
                            "num_hidden_layers": 2, "num_attention_heads": 4,
                            "max_position_embeddings": 2048},
    "llama-small": _BYTES | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
                             "num_hidden_layers": 6, "num_attention_heads": 8,
                             "max_position_embeddings": 2048},
    "llama-125m": _BYTES | {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
                            "num_hidden_layers": 12, "num_attention_heads": 12,
                            "max_position_embeddings": 4096},
}  # fmt: skip


class CausalLM(Task):
    """Rows have input_ids (length,), and labels where not every token is supervised."""

    normalize_by = "tokens"

    def load(self, config: Config) -> Loaded:
        corpus = load_corpus(config.data, config.run.seed, config.model.trust_remote_code)
        tokenizer = build_tokenizer(config, PRESETS)
        length = config.data.sequence_length
        return Loaded(
            pack(corpus.train, tokenizer, length, config.data.difficulty_column),
            None if corpus.eval is None else pack(corpus.eval, tokenizer, length),
            tokenizer,
            fingerprint(corpus.train),
        )

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        return build_model(AutoModelForCausalLM, config, PRESETS)

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = super().collate(rows)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        if "attention_mask" not in batch and lengths.min() < lengths.max():
            batch["attention_mask"] = torch.from_numpy(
                (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
            )
        if "labels" not in batch:
            mask = batch.get("attention_mask")
            batch["labels"] = (
                batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
            )
        return batch

    def items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum(dim=1)  # the first token has nothing to be predicted from

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False
        ).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # as transformers' own losses
        # The labels are shifted, not the logits, and both flattened: cross_entropy then copies nothing.
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # (rows, length)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return losses.view(labels.shape).sum(dim=1)


def pack(dataset: Any, tokenizer: Any, length: int, averaged: str | None = None) -> Any:
    """Column "text" -> rows of `length` tokens, documents joined by the end token; the last row may be
    shorter.

    Rows that already have input_ids stay as they are. Cached on disk by `datasets`. averaged: a column of
    numbers to keep, as the mean over a row's tokens.
    """
    if averaged and not isinstance(dataset[0].get(averaged), Real):
        raise BadSetting(
            f"--difficulty_column {averaged} is no column of numbers; the data has the columns "
            f"{', '.join(dataset.column_names)}"
        )
    if "input_ids" not in dataset.column_names:
        dataset = dataset.map(
            _packed,
            batched=True,
            batch_size=1000,
            fn_kwargs={"tokenizer": tokenizer, "length": length}
            | ({"averaged": averaged} if averaged else {}),
            remove_columns=dataset.column_names,
        )
    known = ("input_ids", "labels", "attention_mask", averaged)
    columns = [name for name in known if name in dataset.column_names]
    return dataset.select_columns(columns).with_format("numpy")


def _packed(
    texts: dict[str, list], tokenizer: Any, length: int, averaged: str | None = None
) -> dict[str, list]:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    encoded = tokenizer(texts["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)
    tokens: list[int] = []
    for document in encoded["input_ids"]:
        tokens += document if end is None else [*document, end]
    starts = [
        at for at in range(0, len(tokens), length) if len(tokens) - at > 1
    ]  # one alone predicts nothing
    rows: dict[str, list] = {"input_ids": [tokens[at : at + length] for at in starts]}
    if averaged:
        lengths = [len(document) + (end is not None) for document in encoded["input_ids"]]
        each = np.repeat(np.array(texts[averaged], dtype=np.float64), lengths)
        rows[averaged] = [float(each[at : at + length].mean()) for at in starts]
    return rows
