"""Names -> optimizers that step; groups by decay and by layer."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from launching import records
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    T5Config,
)

import train
from adaptive.config import BadSetting, Optim, parse
from adaptive.optim import OPTIMIZERS, build_optimizer, depths_below_the_top, parameter_groups

WIDE = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3,
        "num_attention_heads": 2}  # fmt: skip
MODELS = {
    "bert": (AutoModelForSequenceClassification, BertConfig(**WIDE)),
    "bert-mlm": (AutoModelForMaskedLM, BertConfig(**WIDE)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(vocab_size=50, n_embd=8, n_layer=3, n_head=2)),
    "llama": (AutoModelForCausalLM, LlamaConfig(**WIDE)),
    "gpt-neox": (AutoModelForCausalLM, GPTNeoXConfig(**WIDE)),
    "opt": (AutoModelForCausalLM, OPTConfig(vocab_size=50, hidden_size=8, ffn_dim=8, num_hidden_layers=3,
                                            num_attention_heads=2, word_embed_proj_dim=8)),
    "t5": (AutoModelForSeq2SeqLM, T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=3,
                                           num_decoder_layers=2, num_heads=2)),
}  # fmt: skip
PARTS = {  # a part of the name -> layers above it
    "bert": {"embeddings.word": 4, "embeddings.LayerNorm": 4, "layer.0": 3, "layer.2": 1, "pooler": 0,
             "classifier": 0},
    "bert-mlm": {"embeddings.word": 4, "layer.0": 3, "cls.predictions.transform": 0},
    "gpt2": {"wte": 4, "wpe": 4, "h.0.": 3, "h.2.": 1, "ln_f": 0},
    "llama": {"embed_tokens": 4, "layers.0.": 3, "layers.2.": 1, "model.norm": 0, "lm_head": 0},
    "gpt-neox": {"embed_in": 4, "layers.0.": 3, "layers.2.": 1, "final_layer_norm": 0, "lm_head": 0},
    "opt": {"embed_tokens": 4, "embed_positions": 4, "decoder.final_layer_norm": 0, "layers.0.": 3},
    "t5": {"shared": 4, "encoder.block.0.": 3, "encoder.block.2.": 1, "decoder.block.0.": 2,
           "decoder.block.1.layer.2": 1, "decoder.final_layer_norm": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_counted_from_the_top(name):
    """Mutations: the innermost ModuleList (T5: `layer.2` of a block); order of registration instead of names
    (OPT's last norm stands before its layers).
    """
    auto, settings = MODELS[name]
    model = auto.from_config(settings)
    depths = depths_below_the_top(model)
    assert depths.keys() == {n for n, _ in model.named_parameters()}
    for part, depth in PARTS[name].items():
        found = {d for n, d in depths.items() if part in n}
        assert found == {depth}, (part, found)
    groups = parameter_groups(model, 0.1, 0.5)
    assert sum(len(g["params"]) for g in groups) == len(depths)
    by_id = {id(p): g for g in groups for p in g["params"]}
    for n, p in model.named_parameters():
        assert by_id[id(p)]["lr_factor"] == 0.5 ** depths[n]
        assert by_id[id(p)]["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)


def test_shared_layers_count_once_and_a_model_without_layers_is_refused():
    model = AutoModelForMaskedLM.from_config(
        AlbertConfig(
            vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
            embedding_size=8)
    )  # fmt: skip
    assert {d for n, d in depths_below_the_top(model).items() if "albert_layers" in n} == {1}
    with pytest.raises(BadSetting, match="layer_lr_decay"):
        parameter_groups(torch.nn.Linear(2, 2), 0.0, 0.9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name):
    """20 steps at the rate it was given, which is a hundredth before: `lr` of the groups is heard.

    Mutation: an optimizer that takes the rate at its construction, or one of its own (Adafactor's
    relative_step).
    """
    pytest.importorskip(
        {"lion_8bit": "bitsandbytes", "lion": "pytorch_optimizer", "lion_32bit": "pytorch_optimizer",
         "lamb": "pytorch_optimizer", "lars": "pytorch_optimizer"}.get(
            name, "bitsandbytes" if "8bit" in name else "torch")
    )  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    inputs, moved = torch.randn(32, 64), []
    settings = Optim(optim=name, learning_rate=1e-2, weight_decay=0.01)
    optimizer = build_optimizer(model, settings)
    for rate in (1e-4, 1e-2):
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(5):
            model(inputs).sub(1.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved.append(math.dist(*(torch.cat([p.detach().flatten() for p in ps]).tolist()
                                 for ps in (before, model.parameters()))))  # fmt: skip
    assert 0 < moved[0] < 0.2 * moved[1]


def test_a_missing_package_is_one_line(monkeypatch):
    """Mutation: the ImportError handed on as it is."""
    for name, package in (("adamw_8bit", "bitsandbytes"), ("lamb", "pytorch_optimizer")):
        for module in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(BadSetting, match=f"pip install {package}"):
            build_optimizer(torch.nn.Linear(2, 2), Optim(optim=name, learning_rate=1e-3))


def test_names_and_settings_that_do_not_fit_are_one_line():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadSetting, match="adamw_torch"):
        build_optimizer(model, Optim(optim="adam"))
    with pytest.raises(BadSetting, match="does not fit sgd"):
        build_optimizer(model, Optim(optim="sgd", optim_args="speed=3", learning_rate=0.1))
    for name in ("lamb", "adafactor", "lars"):
        with pytest.raises(BadSetting, match="ZeRO-2"):
            build_optimizer(model, Optim(optim=name, learning_rate=0.1), zero_stage=2)


@pytest.mark.parametrize("arguments, words", [
    ("0.9", "has 0.9; write NAME=VALUE"),
    ("momentum=0.9, weight_decay=0.1", "has weight_decay; write --weight_decay"),
    ("lr=1", "has lr; write --learning_rate"),
])  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(arguments, words):
    """Mutations: positional ones dropped without a word; a decay that every group overrides."""
    with pytest.raises(BadSetting, match=words):
        build_optimizer(torch.nn.Linear(2, 2), Optim(optim="sgd", optim_args=arguments, learning_rate=0.1))


def test_a_missing_learning_rate_is_named():
    """A task of the user's may set none. Mutation: left to torch, which compares None with 0."""
    with pytest.raises(BadSetting, match="write --learning_rate"):
        build_optimizer(torch.nn.Linear(2, 2), Optim())


def test_a_run_uses_the_factors_and_reports_anomalies(tmp_path, capsys):
    """SGD with momentum 0 moves each layer by its factor times the gradient; norms above the limit are told.

    Mutation: set_step without lr_factor (all layers move alike).
    """
    flags = ["--task", "classification", "--report_to", "none", "--max_steps", "3", "--batch_size", "4",
             "--optim", "sgd", "--learning_rate", "1e-3", "--eval_every", "never", "--layer_lr_decay", "0.01",
             "--sequence_length", "32", "--grad_anomaly", "1e-3"]  # fmt: skip
    moved = {}
    step = torch.optim.SGD.step

    def watch(self, *a, **k):
        before = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        done = step(self, *a, **k)
        for group, olds in zip(self.param_groups, before, strict=True):
            for p, old in zip(group["params"], olds, strict=True):
                moved[id(p)] = ((p - old).norm().item(), p.grad.norm().item() * group["lr"])
        rates.append(sorted({g["lr"] for g in self.param_groups}))
        return done

    rates = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", watch)
        train.main(parse([*flags, "--output_dir", str(tmp_path / "run")]))
    told = records(tmp_path / "run")
    for found, record in zip(rates, told, strict=True):
        peak = record["learning_rate"]
        assert found == pytest.approx([peak * 0.01**k for k in (3, 2, 1, 0)])
    assert all(a == pytest.approx(b, rel=1e-2, abs=1e-7) for a, b in moved.values())
    assert capsys.readouterr().out.count("above --grad_anomaly") == 3


def test_a_model_without_a_weight_that_trains_is_refused():
    """Mutation: torch's "optimizer got an empty parameter list", said of --optim_args."""
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadSetting, match="no weight of the model requires a gradient"):
        build_optimizer(model, parse(["--learning_rate", "0.1"]).optim)
