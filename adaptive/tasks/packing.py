"""Texts or encoded documents -> rows of at most so many tokens.

`pack` joins texts and cuts the stream; `split` gives each document rows of its own; `bundle` lays whole
documents side by side, each with positions from 0, so that none sees another. All cached by `datasets`.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from adaptive.config import BadSetting
from adaptive.corpus import is_stream

COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids")


def pack(dataset: Any, tokenizer: Any, length: int, averaged: str | None = None) -> Any:
    """Column "text" -> rows of `length` tokens, documents joined by the end token; the last row may be
    shorter.

    Rows that already have input_ids stay as they are. averaged: a column of numbers to keep, as the mean over
    a row's tokens.
    """
    if averaged and not isinstance(dataset[0].get(averaged), Real):
        raise BadSetting(
            f"--difficulty_column {averaged} is no column of numbers; the data has the columns "
            f"{', '.join(dataset.column_names)}"
        )
    if "input_ids" not in dataset.column_names:
        settings = {"tokenizer": tokenizer, "length": length} | ({"averaged": averaged} if averaged else {})
        dataset = dataset.map(
            _packed, batched=True, batch_size=1000, fn_kwargs=settings, remove_columns=dataset.column_names
        )
    return columns(dataset, averaged)


def split(dataset: Any, tokenizer: Any, length: int) -> Any:
    """Column "text" -> a row for each document with its end token, several where it is longer than
    `length`.
    """
    if "input_ids" not in dataset.column_names:
        settings = {"tokenizer": tokenizer, "length": length}
        dataset = dataset.map(_split, batched=True, fn_kwargs=settings, remove_columns=dataset.column_names)
    return columns(dataset)


def bundle(dataset: Any, length: int) -> Any:
    """Documents (input_ids, labels) -> rows of several, at most `length` tokens, with position_ids.

    First fit, the longest first, among 1000 neighbours. No document's first token is supervised: what stands
    before it is another's.
    """
    dataset = dataset.with_format(None)
    dataset = dataset.map(
        _bundled, batched=True, batch_size=1000, fn_kwargs={"length": length},
        remove_columns=dataset.column_names,
    )  # fmt: skip
    return columns(dataset)


def columns(dataset: Any, also: str | None = None) -> Any:
    if dataset.column_names is None:  # a stream that was just made of these
        return dataset
    return arrays(dataset.select_columns([c for c in (*COLUMNS, also) if c in dataset.column_names]))


def arrays(dataset: Any) -> Any:
    """Rows of arrays; a stream's become so where they are kept (stream.py): `datasets` is slow at that."""
    return dataset if is_stream(dataset) else dataset.with_format("numpy")


def _documents(texts: list[str], tokenizer: Any) -> list[list[int]]:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [document if end is None else [*document, end] for document in encoded["input_ids"]]


def _pieces(tokens: list[int], length: int) -> list[list[int]]:
    rows = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    return [row for row in rows if len(row) > 1]  # one token alone predicts nothing


def _packed(
    texts: dict[str, list], tokenizer: Any, length: int, averaged: str | None = None
) -> dict[str, list]:
    documents = _documents(texts["text"], tokenizer)
    rows: dict[str, list] = {"input_ids": _pieces([t for document in documents for t in document], length)}
    if averaged:
        each = np.repeat(np.array(texts[averaged], dtype=np.float64), [len(d) for d in documents])
        starts = range(0, length * len(rows["input_ids"]), length)
        rows[averaged] = [float(each[at : at + length].mean()) for at in starts]
    return rows


def _split(texts: dict[str, list[str]], tokenizer: Any, length: int) -> dict[str, list]:
    documents = _documents(texts["text"], tokenizer)
    return {"input_ids": [piece for document in documents for piece in _pieces(document, length)]}


def _bundled(rows: dict[str, list], length: int) -> dict[str, list]:
    tokens, labels = rows["input_ids"], rows.get("labels", rows["input_ids"])
    order = sorted(range(len(tokens)), key=lambda at: -len(tokens[at]))
    bundles: list[list[int]] = []
    room: list[int] = []
    for at in order:
        place = next((k for k, free in enumerate(room) if free >= len(tokens[at])), len(room))
        if place == len(room):
            bundles.append([])
            room.append(length)
        bundles[place].append(at)
        room[place] -= len(tokens[at])
    return {
        "input_ids": [[token for at in bundle for token in tokens[at]] for bundle in bundles],
        "labels": [[label for at in bundle for label in [-100, *labels[at][1:]]] for bundle in bundles],
        "position_ids": [[k for at in bundle for k in range(len(tokens[at]))] for bundle in bundles],
    }
