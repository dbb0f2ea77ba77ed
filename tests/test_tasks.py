"""Models and datasets as people bring them: folders of save_pretrained and save_to_disk, csv, parquet and
text files.
"""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
import torch
from launching import records
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

import train
from adaptive.config import BadSetting, parse
from adaptive.tasks import load_task
from adaptive.tasks.causal_lm import CausalLM

SMALL = [
    "--report_to",
    "none",
    "--eval_every",
    "never",
    "--max_steps",
    "6",
    "--batch_size",
    "3.5",
    "--sequence_length",
    "32",
]
TEXTS = [f"def function_{n}(value):\n    return value + {n}\n" for n in range(60)]


def run(folder: Path, *arguments: str) -> list[dict]:
    train.main(parse([*SMALL, "--output_dir", str(folder), *arguments]))
    return records(folder)


@pytest.fixture
def gpt2(tmp_path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    ByT5Tokenizer().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_causal_lm_from_a_folder_and_a_text_file(tmp_path, gpt2):
    """A pretrained folder starts from its own weights, at the pretrained learning rate, and is written
    back.
    """
    (tmp_path / "code.txt").write_text("".join(TEXTS))
    told = run(
        tmp_path / "run",
        "--model",
        str(gpt2),
        "--dataset",
        str(tmp_path / "code.txt"),
        "--lr_scheduler_type",
        "constant",
    )
    assert told[-1]["updates"] == 6
    assert told[0]["learning_rate"] == pytest.approx(5e-5 * 1.0)
    before = GPT2LMHeadModel.from_pretrained(gpt2).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 6 * 5e-5 * 2
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("a")["input_ids"][0] == ord("a") + 3


def test_causal_lm_from_save_to_disk_with_its_own_tokens(tmp_path, gpt2):
    """A dataset that already has input_ids is not tokenized again; rows of several lengths are padded, not
    lost.
    """
    rows = {"text": TEXTS, "label": [n % 3 for n in range(60)]}
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict(rows), "validation": datasets.Dataset.from_dict(rows)}
    ).save_to_disk(tmp_path / "saved")
    told = run(tmp_path / "run", "--model", str(gpt2), "--dataset", str(tmp_path / "saved"))
    characters = sum(len(text.encode()) + 1 for text in TEXTS)
    rows_packed = -(-characters // 32)
    assert told[-1]["epoch"] == pytest.approx(told[-1]["samples"] / rows_packed)


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_classification_from_files_with_names_of_ones_own(tmp_path, kind):
    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=384, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(tmp_path / "bert")
    ByT5Tokenizer().save_pretrained(tmp_path / "bert")
    dataset = datasets.Dataset.from_dict(
        {"body": TEXTS, "kind": ["odd" if n % 2 else "even" for n in range(60)]}
    )
    path = tmp_path / f"rows.{kind}"
    getattr(dataset, f"to_{kind}")(str(path))
    told = run(
        tmp_path / "run",
        "--task",
        "classification",
        "--model",
        str(tmp_path / "bert"),
        "--dataset",
        str(path),
        "--text_column",
        "body",
        "--label_column",
        "kind",
        "--eval_share",
        "0.2",
    )
    assert told[-1]["tokens"] == told[-1]["samples"]
    (evaluation,) = records(tmp_path / "run", "eval")
    assert 0 <= evaluation["eval_accuracy"] <= 1
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "even", 1: "odd"}


def test_a_hub_name_without_network_and_a_wrong_folder_are_one_line(tmp_path):
    for name in ("no-such-org/no-such-model", str(tmp_path)):
        with pytest.raises(BadSetting, match="is no preset") as error:
            CausalLM().model(parse(["--model", name, "--report_to", "none"]))
        assert "\n" not in str(error.value)


def test_packing_keeps_every_token():
    """Mutation: the last row dropped, or the end token between documents left out."""
    from adaptive.tasks.packing import pack

    packed = pack(datasets.Dataset.from_dict({"text": TEXTS}), ByT5Tokenizer(), 50)
    tokens = [int(token) for row in packed for token in row["input_ids"]]
    expected = [token for text in TEXTS for token in [*(byte + 3 for byte in text.encode()), 1]]
    assert tokens == expected
    assert {len(row["input_ids"]) for row in packed} <= {50, len(expected) % 50}


def test_collate_pads_and_counts():
    """Supervised, input and padding tokens of rows with 3, 5 and 2 tokens, and of two with 4.

    Mutations: padding counted as supervised; the first token of full rows counted (4).
    """
    import numpy as np

    task = CausalLM()
    batch = task.collate([{"input_ids": np.arange(3, 3 + length)} for length in (3, 5, 2)])
    assert task.items(batch).tolist() == [2, 4, 1]
    assert task.token_counts(batch) == (10, 5)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 5, 2]
    assert (batch["labels"] == -100).sum() == 5
    assert task.items(task.collate([{"input_ids": np.arange(4)}] * 2)).tolist() == [3, 3]


def test_unknown_task_names_the_known_ones(tmp_path):
    with pytest.raises(BadSetting, match="causal_lm, masked_lm, seq2seq, classification"):
        load_task("translation")
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    with pytest.raises(BadSetting, match="it has Mine"):
        load_task(f"{tmp_path}/mine.py:Yours")
    with pytest.raises(BadSetting, match="makes a Mine; write a (sub)?class of adaptive.tasks.Task"):
        load_task(f"{tmp_path}/mine.py:Mine")
    (tmp_path / "broken.py").write_text("class Mine:\n    def __init__(self):\n        self.a = {}['key']\n")
    with pytest.raises(BadSetting, match=r"broken.py:Mine: KeyError: 'key' \(broken.py:3\)"):
        load_task(f"{tmp_path}/broken.py:Mine")


def test_config_yaml_repeats_the_run(tmp_path):
    """--config RUN/config.yaml is the same run again, loss for loss."""
    first = run(
        tmp_path / "one", "--schedule", "linear(interval=2, max_size=9, increment=1.5)", "--max_samples", "30"
    )
    train.main(
        parse(["--config", str(tmp_path / "one" / "config.yaml"), "--output_dir", str(tmp_path / "two")])
    )
    second = records(tmp_path / "two")
    assert [r["loss"] for r in first] == [r["loss"] for r in second]
    assert json.dumps([r["positions"] for r in first]) == json.dumps([r["positions"] for r in second])
