"""recipes/: each parses, names its own launch line, and runs on a stand-in of the same architecture.

A stand-in is a model built from its config and a few rows in the shape of the recipe's dataset; everything
else is the recipe's own, sizes are held at the rows there are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import pytest
import torch
import transformers as tf
import yaml
from launching import ROOT, launch, records
from safetensors import safe_open

import train
from adaptive.config import parse

RECIPES = sorted(
    p for p in (ROOT / "recipes").glob("*.yaml") if p.stem != "sweep_wandb"
)  # W&B reads that one
WORDS = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS = {  # name in the recipe -> the same architecture, small
    "Qwen/Qwen2.5-7B-Instruct": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**WORDS, **WIDE, num_key_value_heads=2)
    ),
    "google-bert/bert-base-uncased": lambda: tf.BertForMaskedLM(tf.BertConfig(**WORDS, **WIDE)),
    "google-t5/t5-large": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "openai-community/gpt2-medium": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(**WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    ),
}
TALK = [{"role": "user", "content": "two plus two"}, {"role": "assistant", "content": "four"}]
ROWS = {  # dataset in the recipe -> a row in its shape
    "HuggingFaceH4/no_robots": {"prompt": "p", "messages": TALK, "category": "Open QA"},
    "fancyzhx/ag_news": {"text": "Stocks rose on Monday", "label": 2},
    "wmt/wmt14": {"translation": {"en": "a small house", "de": "ein kleines Haus"}},
    "Salesforce/wikitext": {"text": " = Robert Boulter = \n"},
}
SMALL = ["--report_to", "none", "--eval_every", "never", "--save_every", "never", "--num_train_epochs", "100",
         "--sequence_length", "64"]  # fmt: skip
EXTRAS = {"qwen_7b_amd": "bitsandbytes", "qwen_7b_nvidia": "bitsandbytes", "qwen_7b_lora": "peft",
          "t5_translation": "pytorch_optimizer"}  # fmt: skip


def settings(name: str) -> dict:
    return yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())


def stand_in(name: str, folder: Path, steps: int) -> list[str]:
    """Arguments of a run of recipe `name` with the stand-ins, into folder/name."""
    pytest.importorskip(EXTRAS.get(name, "torch"))
    told, here = settings(name), folder / f"{name}_material"
    torch.manual_seed(0)
    MODELS[told["model_name_or_path"]]().save_pretrained(here / "model")
    tokenizer = tf.ByT5Tokenizer(mask_token="<extra_id_0>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(here / "tokenizer")  # beside Qwen's config it would be opened as Qwen's
    datasets.Dataset.from_list([ROWS[told["dataset_name"]]] * 60).save_to_disk(here / "rows")
    names = ["--model", str(here / "model"), "--tokenizer_name", str(here / "tokenizer")]
    flags = [
        *SMALL,
        *names,
        "--dataset",
        str(here / "rows"),
        "--no_torch_compile",
        "--max_steps",
        str(steps),
        "--output_dir",
        str(folder / name),
    ]
    return ["--config", str(ROOT / "recipes" / f"{name}.yaml"), *flags]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_names_its_launch_line(path):
    """Mutation: a setting renamed in config.py; a recipe copied with the old launch line left in."""
    config = parse(["--config", str(path)]).flat()
    for name, value in yaml.safe_load(path.read_text()).items():
        if name == "sources":
            assert [text.split("=")[0] for text in config["dataset_name"]] == list(value)
            continue
        value = [value] if isinstance(config[name], list) and not isinstance(value, list) else value
        assert config[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    lines = [line for line in path.read_text().splitlines() if line.startswith("# accelerate launch ")]
    assert len(lines) == 1
    assert lines[0].endswith(f"train.py --config recipes/{path.name}")
    for layout in re.findall(r"--config_file (\S+)", lines[0]):
        assert (ROOT / layout).is_file()


def test_amd_and_nvidia_differ_in_the_launch_line_alone():
    assert settings("qwen_7b_amd") == settings("qwen_7b_nvidia")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert_classification", "t5_translation", "masked_lm_ramp", "gpt2_critical_batch"]
)
def test_recipe_in_one_process(name, tmp_path):
    train.main(parse(stand_in(name, tmp_path, 3)))
    told = records(tmp_path / name)
    assert told[-1]["updates"] == 3 and all(r["loss"] < 8 for r in told)
    assert told[-1]["batch_size"] == min(60 - 6, settings(name)["batch_size"]) or told[-1]["batch_size"] > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"),
    [("cpu_zero3", ["qwen_7b_amd"]), ("cpu_zero2", ["qwen_7b_lora"])],
)
def test_recipes_of_7b_models_under_their_stage(layout, names, tmp_path):
    """Two processes of DeepSpeed's real engine; 0.18 samples a device are 9 in 25 steps."""
    runs = [stand_in(name, tmp_path, 25) for name in names]
    done = launch(layout, 2, Path(__file__).parent / "several_runs.py", json.dumps(runs))
    assert done.stdout.count("DeepSpeed ZeRO") == len(names) and "2 process(es)" in done.stdout
    for name in names:
        told, model = records(tmp_path / name), tmp_path / name / "model"
        if "lora" not in name:
            assert told[-1]["samples"] == told[-1]["updates"] == 9  # floor(25 * 0.36)
        assert told[-1]["updates"] > 0 and told[-1]["loss"] is None or told[-1]["loss"] < 8
        (weights,) = model.glob("*.safetensors")
        with safe_open(weights, "pt") as held:
            assert ("lora" in name) == all("lora_" in key for key in held.keys())  # noqa: SIM118
