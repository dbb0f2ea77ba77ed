"""Text or conversations -> next-token prediction: loss over every token but the first of a row, or over
answers alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from adaptive.config import BadSetting, Config
from adaptive.corpus import fingerprint, load_corpus
from adaptive.tasks import Loaded, Task, build_model, build_tokenizer, chat, token_loss_sum
from adaptive.tasks.packing import bundle, pack, split

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
    """Rows have input_ids (length,), labels where not every token is supervised, position_ids where several
    documents share one.
    """

    normalize_by = "tokens"

    def load(self, config: Config) -> Loaded:
        corpus = load_corpus(config.data, config.run.seed, config.model.trust_remote_code, messages=True)
        tokenizer = build_tokenizer(config, PRESETS)
        self.settle(config)
        plain = replace(config, data=replace(config.data, difficulty_column=None))
        rows = [
            self.rows(corpus.train, tokenizer, config),
            None if corpus.eval is None else self.rows(corpus.eval, tokenizer, plain),
        ]
        return Loaded(*rows, tokenizer, fingerprint(corpus.train))

    def rows(self, dataset: Any, tokenizer: Any, config: Config) -> Any:
        """Texts or conversations -> rows as --packing wants them."""
        length, talks = config.data.sequence_length, "messages" in dataset.column_names
        packing = config.data.packing = config.data.packing or ("none" if talks else "stream")
        if packing == "stream" and not talks:
            return pack(dataset, tokenizer, length, config.data.difficulty_column)
        if packing == "stream":
            raise BadSetting("--packing stream is for texts; write documents or none for conversations")
        documents = chat.encode(dataset, tokenizer, length) if talks else split(dataset, tokenizer, length)
        return bundle(documents, length) if packing == "documents" else documents

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        return build_model(AutoModelForCausalLM, config, PRESETS)

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = super().collate(rows)
        lengths, longest = [len(row["input_ids"]) for row in rows], batch["input_ids"].shape[1]
        if "attention_mask" not in batch and min(lengths) < longest:
            batch["attention_mask"] = torch.from_numpy(
                (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
            )
        if "labels" not in batch:
            mask = batch.get("attention_mask")
            batch["labels"] = (
                batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
            )
        return batch

    def items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels, first = batch["labels"], 1  # the first token has nothing to be predicted from
        if labels is batch["input_ids"]:  # full rows
            return torch.full((len(labels),), labels.shape[1] - first)
        return (labels[:, first:] != -100).sum(dim=1)

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, positions, mask = batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask")
        # Models find documents packed into a row by their positions, and only where no mask is given.
        more = {"attention_mask": mask} if positions is None else {"position_ids": positions}
        if positions is not None and len(tokens) > 1 and uses_flash_attention(model):  # there in one row only
            tokens, more = tokens.view(1, -1), {"position_ids": positions.view(1, -1)}
        logits = model(input_ids=tokens, use_cache=False, **more).logits
        # The labels are shifted, not the logits, and both flattened: cross_entropy then copies nothing.
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # (rows, length)
        smoothing = self.label_smoothing if model.training else 0.0
        return token_loss_sum(logits.view(*labels.shape, -1), labels, smoothing)


def uses_flash_attention(model: torch.nn.Module) -> bool:
    config = getattr(getattr(model, "module", model), "config", None)
    return "flash" in str(getattr(config, "_attn_implementation", ""))
