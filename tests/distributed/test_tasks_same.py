"""masked_lm, seq2seq and packed documents on three processes: the weights of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import audits, launch, records
from safetensors.torch import load_file
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

import train
from adaptive.config import parse
from adaptive.tasks.masked_lm import MaskedLM

COMMON = ["--report_to", "none", "--optim", "sgd", "--learning_rate", "0.05", "--lr_scheduler_type",
          "constant", "--batch_size", "7.5", "--schedule", "constant()", "--max_steps", "8", "--audit",
          "--sequence_length", "128", "--max_grad_norm", "0", "--label_smoothing_factor", "0.1",
          "--check_agreement", "--eval_share", "0.01"]  # fmt: skip
TASKS = {
    "masked_lm": ["--task", f"{__file__}:Still"],
    "seq2seq": ["--task", "seq2seq", "--max_target_length", "32"],
    "documents": ["--packing", "documents", "--sequence_length", "256", "--batch_size", "4.5"],
}


class Still(MaskedLM):
    """Without dropout, which is another one on other processes."""

    def model(self, config):
        model = super().model(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model


HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def distance(one: Path, other: Path) -> float:
    """Of all weights together: attention's key biases have a gradient of 0, and are rounding alone."""
    a, b = (load_file(next((folder / "model").glob("*.safetensors"))) for folder in (one, other))
    a, b = ({name: tensor.float() for name, tensor in held.items()} for held in (a, b))
    assert a.keys() == b.keys()
    squares = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    return float((sum(s for s, _ in squares) / sum(t for _, t in squares)).sqrt())


def runs(tasks: dict[str, list[str]], folder: Path, *more: str) -> list[list[str]]:
    return [[*COMMON, *flags, *more, "--output_dir", str(folder / name)] for name, flags in tasks.items()]


@pytest.fixture
def lora(tmp_path) -> list[str]:
    """Adapters of a GPT-2 folder, and its activations recomputed."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=384, n_embd=16, n_layer=2, n_head=2, n_positions=128, attn_pdrop=0.0,
                        embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    ByT5Tokenizer().save_pretrained(tmp_path / "gpt2")
    return ["--model", str(tmp_path / "gpt2"), "--peft", "lora", "--gradient_checkpointing",
            "--learning_rate", "1.0"]  # fmt: skip


def test_three_processes_have_the_weights_of_one(tmp_path, lora):
    """SGD in fp32 to 1e-5: the models compute in fp32 (T5's norm does so whatever its parameters are).

    Mutation: a draw of torch's or numpy's in `hide`; the position within the pass instead of the row's.
    """
    compiled = ["--compile", "--torch_compile_backend", "aot_eager"]
    tasks = TASKS | {"lora": lora, "compiled": ["--seed", "3"]}
    launched = runs(tasks, tmp_path / "three", "--micro_batch_size", "2")
    launched[-1] += compiled
    launch("cpu_ddp", 3, HERE / "several_runs.py", json.dumps(launched), ADAPTIVE_TIMEOUT_MINUTES="1")
    for name, arguments in zip(tasks, runs(tasks, tmp_path / "one"), strict=True):
        train.main(parse(arguments))
        one, three = tmp_path / "one" / name, tmp_path / "three" / name
        assert list(audits(three)) == [0, 1, 2]
        for a, b in zip(records(three), records(one), strict=True):
            assert (a["tokens"], a["positions"]) == (b["tokens"], b["positions"])
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        evals = [records(folder, "eval")[-1]["eval_loss"] for folder in (one, three)]
        assert evals[0] == pytest.approx(evals[1], rel=1e-5)
        assert distance(three, one) < 1e-5
