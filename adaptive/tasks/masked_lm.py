"""Text -> the tokens that were hidden: packed sequences, loss over those (BERT; Devlin et al. 2018).

What is hidden is a function of (seed, position in the endless order, place in the row): another draw in each
epoch, the same for every number of processes, micro-batch and resume. In evaluation the row number stands for
the position, so that all evaluations of a run hide the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from adaptive.config import BadSetting, Config
from adaptive.corpus import fingerprint, is_stream, load_corpus
from adaptive.tasks import Loaded, build_model, build_tokenizer, token_loss_sum
from adaptive.tasks.causal_lm import CausalLM
from adaptive.tasks.classification import PRESETS
from adaptive.tasks.packing import pack

KEPT, SWAPPED = (
    0.1,
    0.1,
)  # shares of the chosen tokens that stay, and that become any other; the rest is hidden


class MaskedLM(CausalLM):
    """Rows have input_ids (length,) and position (), which `collate` draws from."""

    def load(self, config: Config) -> Loaded:
        corpus = load_corpus(config.data, config.run.seed, config.model.trust_remote_code)
        tokenizer, length = build_tokenizer(config, PRESETS), config.data.sequence_length
        if tokenizer.mask_token_id is None and type(tokenizer).__name__ == "ByT5Tokenizer":
            tokenizer.add_special_tokens({"mask_token": "<extra_id_0>"})  # of its vocabulary, in no text
        if tokenizer.mask_token_id is None:
            raise BadSetting("masked_lm needs a tokenizer with a mask token; write --tokenizer_name")
        self.seed, self.share = config.run.seed, config.data.mlm_probability
        self.settle(config)
        self.n_words, self.mask = len(tokenizer), tokenizer.mask_token_id
        self.special = np.array(tokenizer.all_special_ids)  # never chosen
        self.pad = self.pad | {"input_ids": tokenizer.pad_token_id or 0}
        rows = [
            None if rows is None else pack(rows, tokenizer, length) for rows in (corpus.train, corpus.eval)
        ]
        return Loaded(*map(numbered, rows), tokenizer, fingerprint(corpus.train))

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForMaskedLM

        return build_model(AutoModelForMaskedLM, config, PRESETS)

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        return super().collate([self.hide(row["input_ids"], int(row["position"])) for row in rows])

    def hide(self, tokens: np.ndarray, position: int) -> dict[str, np.ndarray]:
        """(length,) -> input_ids, and labels that are -100 but for the chosen tokens."""
        chance, fate, word = draws(self.seed, position, len(tokens))
        chosen = (chance < self.share) & ~np.isin(tokens, self.special)
        swapped = np.where(fate < KEPT + SWAPPED, (word * self.n_words).astype(np.int64), self.mask)
        inputs = np.where(chosen & (fate >= KEPT), swapped, tokens)
        return {"input_ids": inputs, "labels": np.where(chosen, tokens, -100)}

    def items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum(dim=1)

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        return token_loss_sum(logits, batch["labels"], self.label_smoothing if model.training else 0.0)


def numbered(dataset: Any) -> Any:
    """With a column `position`, the row number until data.py knows better; None stays None."""
    if dataset is None:
        return None
    if is_stream(dataset):
        return dataset.map(_numbered, batched=True)
    kept = dataset.format["type"]
    return dataset.add_column("position", np.arange(len(dataset))).with_format(kept)


def _numbered(rows: dict[str, list]) -> dict[str, list]:
    return {"position": [0] * len(rows["input_ids"])}


def draws(seed: int, position: int, length: int) -> np.ndarray:
    """(3, length) numbers in [0, 1), equal on every platform: Philox with the key (seed, position)."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(3 * length)
    return (bits >> np.uint64(11)).reshape(3, length) * 2.0**-53
