"""Losses of masked_lm, seq2seq, packed documents and smoothed labels against the same written by hand."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from launching import records
from test_gradient import as_rank, distance, gradients
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import train
from adaptive.config import BadSetting, parse
from adaptive.data import Share
from adaptive.engine import Engine
from adaptive.tasks import chat
from adaptive.tasks.causal_lm import CausalLM
from adaptive.tasks.classification import _encoded
from adaptive.tasks.masked_lm import MaskedLM, draws, numbered
from adaptive.tasks.packing import bundle, split
from adaptive.tasks.seq2seq import Seq2Seq

SMALL = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
QUIET = ["--report_to", "none", "--dtype", "float64", "--optim", "sgd", "--learning_rate", "0.1"]
TEXTS = [f"def function_{n}(value):\n    return value + {n * n}\n" * (1 + n % 3) for n in range(40)]
GPT2 = GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=2, n_positions=128, attn_pdrop=0, embd_pdrop=0,
                  resid_pdrop=0)  # fmt: skip
BERT = BertConfig(**SMALL, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                  hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
BART = BartConfig(**SMALL, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                  decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0,
                  decoder_start_token_id=1, max_position_embeddings=128)  # fmt: skip
LLAMA = LlamaConfig(**SMALL, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)


def smoothed(logits: torch.Tensor, label: int, share: float) -> torch.Tensor:
    """(words,) -> the loss of one token as it is defined."""
    log_p = logits - torch.logsumexp(logits, dim=0)
    return -(1 - share) * log_p[label] - share * log_p.mean()


def build(kind: type, settings) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind(settings).double().train()


def masked_by_hand(model, row: dict, task: MaskedLM, share: float) -> tuple[torch.Tensor, int]:
    """Chosen tokens read off `draws` one by one."""
    chance, fate, word = draws(task.seed, int(row["position"]), len(row["input_ids"]))
    tokens, chosen = row["input_ids"].copy(), []
    for at, token in enumerate(row["input_ids"]):
        if chance[at] < task.share and token not in task.special:
            chosen.append(at)
            if fate[at] >= 0.2:
                tokens[at] = task.mask
            elif fate[at] >= 0.1:
                tokens[at] = int(word[at] * task.n_words)
    logits = model(torch.from_numpy(tokens)[None]).logits[0]
    losses = [smoothed(logits[at], int(row["input_ids"][at]), share) for at in chosen]
    return sum(losses, logits.sum() * 0), len(chosen)


def seq2seq_by_hand(model, row: dict, task, share: float) -> tuple[torch.Tensor, int]:
    written = row["labels"].tolist()
    read = torch.tensor([[model.config.decoder_start_token_id, *written[:-1]]])
    logits = model(torch.from_numpy(row["input_ids"])[None], decoder_input_ids=read).logits[0]
    return sum(smoothed(logits[at], label, share) for at, label in enumerate(written)), len(written)


def bundled_by_hand(model, row: dict, task, share: float) -> tuple[torch.Tensor, int]:
    """Each document of the row alone, from the position where its position_ids start again."""
    starts = np.flatnonzero(row["position_ids"] == 0).tolist() + [len(row["input_ids"])]
    total, n = 0.0, 0
    for start, stop in zip(starts, starts[1:], strict=False):
        tokens = row["input_ids"][start:stop]
        logits = model(torch.from_numpy(tokens)[None]).logits[0]
        total = total + sum(smoothed(logits[at - 1], int(tokens[at]), share) for at in range(1, len(tokens)))
        n += len(tokens) - 1
    return total, n


def material(name: str) -> tuple:
    """(task, model, rows, by hand) with uneven rows."""
    texts, tokenizer = datasets.Dataset.from_dict({"text": TEXTS}), ByT5Tokenizer()
    if name == "masked_lm":
        task, model = MaskedLM(), build(BertForMaskedLM, BERT)
        task.seed, task.share, task.mask, task.n_words, task.special = 3, 0.3, 259, 259, np.array([0, 1, 2])
        rows = numbered(split(texts, tokenizer, 60))
        return task, model, [rows[k] for k in range(17)], masked_by_hand
    if name == "seq2seq":
        task, model = Seq2Seq(), build(BartForConditionalGeneration, BART)
        task.shifted = model.prepare_decoder_input_ids_from_labels
        rows = [
            {
                "input_ids": np.arange(3, 8 + n % 5),
                "attention_mask": np.ones(5 + n % 5, dtype=np.int64),
                "labels": np.arange(40, 42 + n % 7),
            }
            for n in range(17)
        ]
        return task, model, rows, seq2seq_by_hand
    rows = bundle(split(texts, tokenizer, 40), 100)
    return CausalLM(), build(GPT2LMHeadModel, GPT2), [rows[k] for k in range(17)], bundled_by_hand


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("name", ["masked_lm", "seq2seq", "documents"])
def test_gradient_is_the_mean_over_tokens_for_every_cut(name, share):
    """1e-12 in fp64 for 17 rows on W = 1 and 3, passes of 1, 5 and 64; evaluation is not smoothed.

    Mutations: `draws(self.seed, 0, ...)` for all rows; attention_mask beside position_ids in CausalLM
    (documents see each other: 1e-2); smoothing left out (1e-2), or on in evaluation; labels[0] of a document
    supervised.
    """
    task, model, rows, by_hand = material(name)
    engine = Engine.start(parse(QUIET))
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    task.label_smoothing = share
    losses, counts = zip(*(by_hand(model, row, task, share) for row in rows), strict=True)
    right = torch.autograd.grad(sum(losses) / sum(counts), list(model.parameters()), allow_unused=True)
    right = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), right, strict=True)]
    for world_size, micro in ((1, 1), (1, 5), (1, 64), (3, 5), (3, 64)):
        settings = engine.config.batch
        settings.normalize_by, settings.micro_batch_size = "tokens", micro
        added = [torch.zeros_like(g) for g in right]
        for rank in range(world_size):
            one, own = as_rank(engine, rank, world_size, sum(counts)), rows[rank::world_size]
            share = Share.alike(own, len(rows), 1 / len(rows))
            train.gradient(one, task, share, lambda: rows[0], settings)
            torch._foreach_add_(added, gradients(engine), alpha=1 / world_size)
            engine.discard()
        assert distance(added, right) < 1e-12, (world_size, micro)
    engine.model.eval()
    with torch.no_grad():
        batch = task.collate(rows)
        assert float(task.measure(engine.model, batch)["loss"].sum()) == pytest.approx(
            float(sum(by_hand(model, row, task, 0.0)[0] for row in rows)), rel=1e-12
        )
        assert task.items(batch).tolist() == list(counts)


def test_a_mask_is_a_function_of_seed_and_position():
    """Mutations: the position left out of the key (equal masks); np.random in `hide` (unequal ones)."""
    task, _, rows, _ = material("masked_lm")
    rows[1] = rows[0] | {"position": np.int64(1)}
    rows[2] = rows[0] | {"position": 0}
    hidden = [task.hide(row["input_ids"], int(row["position"])) for row in rows[:3]]
    assert not np.array_equal(hidden[0]["labels"], hidden[1]["labels"])
    assert np.array_equal(hidden[0]["input_ids"], hidden[2]["input_ids"])
    tokens, shares = np.full(10_000, 50), []
    for position in range(5):
        hidden = task.hide(tokens, position)
        chosen = hidden["labels"] != -100
        inputs = hidden["input_ids"][chosen]
        shares.append([chosen.mean(), (inputs == task.mask).mean(), (inputs == 50).mean()])
    assert np.mean(shares, axis=0) == pytest.approx([0.3, 0.8, 0.1], abs=0.015)


@pytest.mark.parametrize(("kind", "settings"), [(GPT2LMHeadModel, GPT2), (LlamaForCausalLM, LLAMA)])
def test_documents_in_one_row_do_not_see_each_other(kind, settings, monkeypatch):
    """A row of several against each alone; also laid out in one long row, as flash attention needs it.

    Mutation: `bundle` without position_ids, or counting on from document to document.
    """
    model, task = build(kind, settings), CausalLM()
    rows = bundle(split(datasets.Dataset.from_dict({"text": TEXTS}), ByT5Tokenizer(), 40), 100)
    rows = [rows[k] for k in range(5)]
    assert max((row["position_ids"] == 0).sum() for row in rows) > 1
    right = [bundled_by_hand(model, row, None, 0.0)[0].item() for row in rows]
    batch = task.collate(rows)
    assert task.loss_sum(model, batch).tolist() == pytest.approx(right, rel=1e-6)
    monkeypatch.setattr("adaptive.tasks.causal_lm.uses_flash_attention", lambda model: True)
    assert task.loss_sum(model, batch).tolist() == pytest.approx(right, rel=1e-6)


def test_bundles_hold_every_document_once():
    """Mutation: a document longer than the room left put into it; the longest lost."""
    documents = split(datasets.Dataset.from_dict({"text": TEXTS}), ByT5Tokenizer(), 90)
    rows = bundle(documents, 100)
    found = []
    for row in rows:
        assert len(row["input_ids"]) <= 100
        starts = np.flatnonzero(row["position_ids"] == 0)
        assert (row["labels"][starts] == -100).all()
        found += [tuple(piece.tolist()) for piece in np.split(row["input_ids"], starts[1:])]
    assert sorted(found) == sorted(tuple(row["input_ids"].tolist()) for row in documents)
    assert len(rows) < 0.8 * len(documents)


# Conversations

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)
THOUGHTS = (  # as some reasoning models: the last answer alone has a block of thoughts
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "is two plus two four or five"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "is it four"},
    {"role": "assistant", "content": "yes"},
]


def fast_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, as a fast tokenizer with offsets."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: k for k, word in enumerate(["<unk>", *pre_tokenizers.ByteLevel.alphabet()])}
    raw = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def test_texts_without_a_token_and_tokenizers_without_padding_classify(tmp_path):
    """GPT-2's kind: it adds no token to an empty text, and pads with the token that ends one. Passes of 1 row
    or of 4 are the same steps.

    Mutations: an empty row kept (of a pass of its own: cannot reshape); no pad token (cannot handle batch
    sizes > 1).
    """
    tokenizer = fast_tokenizer()
    assert _encoded({"text": [""]}, tokenizer, 9) == {"input_ids": [[0]], "attention_mask": [[1]]}
    GPT2LMHeadModel(GPT2Config(**GPT2.to_diff_dict() | {"pad_token_id": None})).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    texts = ["" if n % 3 == 0 else "x" * n for n in range(30)]
    datasets.Dataset.from_dict({"text": texts, "label": [n % 2 for n in range(30)]}).to_json(
        tmp_path / "t.jsonl"
    )
    flags = [
        "--task",
        "classification",
        "--model",
        str(tmp_path / "model"),
        "--dataset",
        str(tmp_path / "t.jsonl"),
    ]
    flags += [
        "--report_to",
        "none",
        "--batch_size",
        "4",
        "--max_steps",
        "4",
        "--optim",
        "sgd",
        "--micro_batch_size",
    ]
    with pytest.raises(BadSetting, match="its tokenizer has none, nor a token that ends a text"):
        train.main(parse([*flags, "4", "--output_dir", str(tmp_path / "none")]))
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(tmp_path / "model")
    losses = []
    for rows in ("1", "4"):
        train.main(parse([*flags, rows, "--output_dir", str(tmp_path / rows)]))
        losses.append([record["loss"] for record in records(tmp_path / rows)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("make", [ByT5Tokenizer, fast_tokenizer])
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, "four<|end|>\nyes<|end|>\n"),
        (MARKED, "four<|end|>yes<|end|>"),
        (THOUGHTS, "four<|end|>\n<t></t>yes<|end|>\n"),
    ],
    ids=["chatml", "marked", "thoughts"],
)
def test_only_answers_are_supervised(make, template, answers):
    """Mutation: `found` searched from the start (the user's "four" is taken); the end of turn left out."""
    tokenizer = make()
    tokenizer.chat_template = template
    tokens, labels = chat.supervised(TALK, tokenizer)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokens == tokenizer(whole, add_special_tokens=False)["input_ids"]
    told = [label for label in labels if label != -100]
    assert told == tokenizer(answers, add_special_tokens=False)["input_ids"]
    assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))


def test_conversations_train_and_pack(tmp_path):
    """A jsonl of messages, one row each and several in a row; a model folder with its template."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    talks = [
        [{"role": "user", "content": "?" * n}, {"role": "assistant", "content": "!" * n}] for n in range(30)
    ]
    datasets.Dataset.from_dict({"messages": talks, "id": ["x"] * 30}).to_json(tmp_path / "talks.jsonl")
    flags = ["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "talks.jsonl"), "--report_to",
             "none", "--batch_size", "4.5", "--eval_share", "0.1"]  # fmt: skip
    seen = {}
    for packing in ("none", "documents"):
        train.main(parse([*flags, "--packing", packing, "--output_dir", str(tmp_path / packing)]))
        seen[packing] = records(tmp_path / packing)[-1]
    # Supervised: the answers and their "<|end|>\n".
    assert seen["none"]["samples"] == 27 and seen["none"]["tokens"] == seen["documents"]["tokens"] > 27 * 8
    assert seen["documents"]["samples"] < 27
    assert seen["none"]["input_tokens"] == seen["documents"]["input_tokens"]
    with pytest.raises(BadSetting, match="--packing stream"):
        train.main(parse([*flags, "--packing", "stream", "--output_dir", str(tmp_path / "bad")]))


@pytest.mark.parametrize(
    "messages", ["a text", [], [{"role": "assistant", "content": None}], [{"who": "me"}]]
)
def test_a_conversation_that_is_none_is_one_line(messages):
    """It names the row. Mutation: `supervised` called bare: AttributeError, KeyError, ValueError."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    good = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    with pytest.raises(BadSetting, match=r"the conversation of row 8 cannot be encoded \(.*list of messages"):
        chat._encoded({"messages": [good, messages]}, [7, 8], tokenizer, 16)


# Whole runs, on what is embedded


def test_masked_lm_draws_anew_in_each_epoch_and_evaluates_alike(tmp_path):
    """Two epochs of one text: other tokens are supervised in the second; the validation loss of unmoved
    weights stays.

    Mutation: the position not handed on by data.py (both epochs alike).
    """
    (tmp_path / "code.txt").write_text("".join(TEXTS[:20]))
    flags = ["--task", "masked_lm", "--dataset", str(tmp_path / "code.txt"), "--report_to", "none",
             "--num_train_epochs", "2", "--batch_size", "64", "--schedule", "constant()", "--learning_rate",
             "0", "--eval_every", "1 steps", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    train.main(parse(flags))
    told, evals = records(tmp_path / "run"), records(tmp_path / "run", "eval")
    assert len(told) == 2 and told[0]["batch_size"] == told[1]["batch_size"]
    assert told[1]["tokens"] != 2 * told[0]["tokens"]
    assert len({e["eval_loss"] for e in evals}) == 1 and len(evals) == 2
    AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")


def test_seq2seq_writes_docstrings(tmp_path):
    """The embedded pairs, and a column of two languages as people publish them."""
    flags = ["--task", "seq2seq", "--report_to", "none", "--max_steps", "6", "--batch_size", "4",
             "--eval_every", "never", "--sequence_length", "64"]  # fmt: skip
    train.main(parse([*flags, "--label_smoothing_factor", "0.1", "--output_dir", str(tmp_path / "run")]))
    told = records(tmp_path / "run")
    assert told[-1]["updates"] == 6 and told[-1]["tokens"] > 6 * 4 * 10
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")

    pairs = [{"translation": {"en": f"number {n}", "de": f"Zahl {n}"}} for n in range(40)]
    datasets.Dataset.from_list(pairs).save_to_disk(tmp_path / "pairs")
    names = ["--dataset", str(tmp_path / "pairs"), "--text_column", "translation.en"]
    more = ["--target_column", "translation.de", "--source_prefix", "de: ", "--max_target_length", "6"]
    train.main(parse([*flags, *names, *more, "--output_dir", str(tmp_path / "pairs_run")]))
    told = records(tmp_path / "pairs_run")
    assert told[-1]["tokens"] == 6 * 4 * 6
    with pytest.raises(BadSetting, match="--target_column"):
        train.main(parse([*flags, "--dataset", str(tmp_path / "pairs"), "--output_dir", str(tmp_path / "x")]))
