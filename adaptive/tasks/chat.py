"""Conversations -> tokens and labels: the tokenizer's chat template, with the assistant's words supervised.

Where the template marks them ({% generation %}), its marks are used. Elsewhere an answer begins where the
conversation before it ends, as rendered with the prompt for an answer, and lasts through its end-of-turn.
"""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from adaptive.config import BadSetting
from adaptive.tasks.packing import arrays


def encode(dataset: Any, tokenizer: Any, length: int) -> Any:
    """Column "messages" ([{"role", "content"}]) -> input_ids, labels, cut at `length`. Cached on disk."""
    if not tokenizer.chat_template:
        raise BadSetting("the tokenizer has no chat template; write a --tokenizer_name that has one")
    settings = {"tokenizer": tokenizer, "length": length}
    dataset = dataset.map(
        _encoded, batched=True, with_indices=True, fn_kwargs=settings, remove_columns=dataset.column_names
    )
    return arrays(dataset)


def _encoded(rows: dict[str, list], indices: list[int], tokenizer: Any, length: int) -> dict[str, list]:
    pairs = []
    for index, messages in zip(indices, rows["messages"], strict=True):
        try:
            pairs.append(supervised(messages, tokenizer))
        except BadSetting:
            raise
        except Exception as error:  # of the data, or of what the tokenizer's template makes of it
            raise BadSetting(
                f"the conversation of row {index} cannot be encoded ({type(error).__name__}: {error}); "
                'write a list of messages, such as {"role": "user", "content": "text"}'
            ) from error
    return {
        "input_ids": [tokens[:length] for tokens, _ in pairs],
        "labels": [labels[:length] for _, labels in pairs],
    }


def supervised(messages: list[dict], tokenizer: Any) -> tuple[list[int], list[int]]:
    """(tokens, labels) of one conversation; labels are -100 outside the assistant's messages."""
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if "generation %}" in tokenizer.chat_template:
        (whole,), (spans,) = render_jinja_template(
            [messages], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )  # fmt: skip
    else:
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [answer_span(messages, at, whole, tokenizer) for at in answers]
    if tokenizer.is_fast:
        told = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        inside = [any(a <= start and stop <= b for a, b in spans) and stop > start
                  for start, stop in told["offset_mapping"]]  # fmt: skip
        return _labelled(told["input_ids"], inside)
    tokens, inside, at = [], [], 0
    for start, stop in [*spans, (len(whole), len(whole))]:
        for text, answers in ((whole[at:start], False), (whole[start:stop], True)):
            more = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            tokens, inside, at = tokens + more, inside + [answers] * len(more), stop
    return _labelled(tokens, inside)


def answer_span(messages: list[dict], at: int, whole: str, tokenizer: Any) -> tuple[int, int]:
    """[start, stop) in the rendered conversation of message `at`, its end of turn included.

    Templates may write an earlier answer without what only the last one has (a block of thoughts).
    """
    before = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
    upto = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
    content = messages[at]["content"].strip()
    ending = upto[upto.rfind(content) + len(content) :]
    found = whole.find(content, len(before))
    stop = found + len(content) + len(ending)
    if not whole.startswith(before) or found < 0 or not whole.startswith(ending, found + len(content)):
        raise BadSetting(
            "where answers begin and end cannot be read off the tokenizer's chat template; write a "
            "--tokenizer_name whose template marks them with {% generation %}"
        )
    return len(before), stop


def _labelled(tokens: list[int], inside: list) -> tuple[list[int], list[int]]:
    return tokens, [token if answers else -100 for token, answers in zip(tokens, inside, strict=True)]
