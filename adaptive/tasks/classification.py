"""Text -> one of several classes (`AutoModelForSequenceClassification`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from adaptive.config import BadSetting, Config
from adaptive.corpus import fingerprint, load_corpus, stdlib_pieces
from adaptive.tasks import Loaded, Task, build_model, build_tokenizer
from adaptive.tasks.packing import arrays

PRESETS = {
    "bert-tiny": {"model_type": "bert", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 256,
                  "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048,
                  "pad_token_id": 0},
    "bert-small": {"model_type": "bert", "vocab_size": 384, "hidden_size": 256, "intermediate_size": 1024,
                   "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 2048,
                   "pad_token_id": 0},
}  # fmt: skip


class Classification(Task):
    """Rows have input_ids (length,), attention_mask (length,) and label (); the sample is the supervised
    item.
    """

    def load(self, config: Config) -> Loaded:
        length = config.data.sequence_length
        self.settle(config)
        corpus = load_corpus(config.data, config.run.seed, config.model.trust_remote_code, need_labels=True)
        if config.data.dataset_name == "stdlib":
            corpus = stdlib_pieces(corpus, length)
        if corpus.label_names != getattr(self, "names", corpus.label_names):
            raise BadSetting(
                f"dataset {config.data.dataset_name} has the classes {', '.join(corpus.label_names[:10])}, "
                f"another source {', '.join(self.names[:10])}; sources of one run need the same"
            )
        self.names = corpus.label_names
        self.tokenizer = build_tokenizer(config, PRESETS)
        if self.tokenizer.pad_token_id is None and self.tokenizer.eos_token is not None:
            self.tokenizer.pad_token = self.tokenizer.eos_token  # as for models that were not padded before
        self.pad = self.pad | {"input_ids": self.tokenizer.pad_token_id or 0}
        return Loaded(
            encode(corpus.train, self.tokenizer, length, config.data.difficulty_column),
            None if corpus.eval is None else encode(corpus.eval, self.tokenizer, length),
            self.tokenizer,
            fingerprint(corpus.train),
        )

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        model = build_model(
            AutoModelForSequenceClassification,
            config,
            PRESETS,
            id2label=dict(enumerate(self.names)),
            label2id={name: at for at, name in enumerate(self.names)},
        )
        if model.config.pad_token_id is None:
            if self.tokenizer.pad_token_id is None:
                raise BadSetting(
                    "the model looks for padding, and its tokenizer has none, nor a token that ends a text; "
                    "write a --tokenizer_name with one"
                )
            model.config.pad_token_id = self.tokenizer.pad_token_id
        return model

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.measure(model, batch)["loss"]

    def measure(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits  # (rows, classes)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        smoothing = self.label_smoothing if model.training else 0.0
        loss = F.cross_entropy(logits, batch["label"], reduction="none", label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == batch["label"]).float()}


def encode(dataset: Any, tokenizer: Any, length: int, kept: str | None = None) -> Any:
    """Columns text, label -> input_ids, attention_mask, label, and `kept` if it is there; longer texts are
    cut. Cached by `datasets`.
    """
    dataset = dataset.map(
        _encoded,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "length": length},
        remove_columns=[name for name in dataset.column_names if name not in ("label", kept)],
    )
    return arrays(dataset)


def _encoded(rows: dict[str, list], tokenizer: Any, length: int) -> dict[str, list]:
    encoded = tokenizer(rows["text"], truncation=True, max_length=length)
    # An empty text is one token of padding to a tokenizer that adds none: a model needs something to read.
    nothing = [tokenizer.pad_token_id or 0]
    return {
        "input_ids": [tokens or nothing for tokens in encoded["input_ids"]],
        "attention_mask": [mask or [1] for mask in encoded["attention_mask"]],
    }
