"""Compiled models, adapters, attention, checkpointed activations, half precision: one process, the real loop.
And what a device or its driver may answer, played.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import records, run_python
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

import train
from adaptive import engine as module
from adaptive.agreement import Agreement
from adaptive.config import BadSetting, parse
from adaptive.engine import Engine
from adaptive.tasks.causal_lm import CausalLM

COMMON = ["--report_to", "none", "--optim", "sgd", "--learning_rate", "0.1", "--lr_scheduler_type",
          "constant", "--sequence_length", "32", "--max_grad_norm", "0", "--eval_every", "never"]  # fmt: skip
TEXTS = [f"def function_{n}(value):\n    return value + {n}\n" for n in range(60)]


def growing(step, current_size):
    return 1.5 + 0.7 * step


@pytest.fixture
def folder(tmp_path) -> Path:
    """A GPT-2 of one layer without dropout, and texts with a short last row."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1,
                        eos_token_id=1, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    ByT5Tokenizer().save_pretrained(tmp_path / "gpt2")
    (tmp_path / "code.txt").write_text("".join(TEXTS))
    return tmp_path


def run(folder: Path, name: str, *arguments: str) -> Path:
    flags = ["--model", str(folder / "gpt2"), "--dataset", str(folder / "code.txt")]
    train.main(parse([*COMMON, *flags, *arguments, "--output_dir", str(folder / name)]))
    return folder / name


def distance(one: Path, other: Path) -> float:
    a, b = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    squares = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    return float((sum(s for s, _ in squares) / sum(t for _, t in squares)).sqrt())


def test_a_compiled_run_compiles_twice_and_has_the_same_weights(folder, monkeypatch):
    """R94. Growing sizes in passes of 4, every remainder, rows of many lengths, evaluations between.

    Graphs: at most a pass of whole rows and one with a padded row, in training and in evaluation; none after
    the first epoch. Mutations: `rows` not handed to to_device (a graph for each remainder, then eager);
    `widths` left empty.
    """
    flags = ["--schedule", f"{__file__}:growing", "--batch_size", "1.5", "--micro_batch_size", "4",
             "--num_train_epochs", "3", "--eval_every", "3 steps",
             "--per_device_eval_batch_size", "4", "--packing", "none"]  # fmt: skip
    graphs, seed = [], train.Engine.seed

    def seeded(*arguments, **settings):  # once a step
        graphs.append(counters["stats"]["unique_graphs"])
        return seed(*arguments, **settings)

    monkeypatch.setattr(train.Engine, "seed", seeded)
    torch._dynamo.reset()
    counters.clear()
    whole = run(folder, "whole", *flags)
    assert counters["stats"]["unique_graphs"] == 0
    graphs.clear()
    compiled = run(folder, "compiled", *flags, "--compile", "--torch_compile_backend", "aot_eager")
    told = records(compiled)
    n = len(told)
    assert n > 15 and {r["batch_size"] % 4 for r in told} == {0, 1, 2, 3}, n
    first_epoch = next(at for at, r in enumerate(told) if r["epoch"] >= 1) + 1
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    assert graphs[-n:][first_epoch:] == [counters["stats"]["unique_graphs"]] * (n - first_epoch)
    assert distance(compiled, whole) < 1e-5
    for a, b in zip(told, records(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    evals = [[e["eval_loss"] for e in records(f, "eval")] for f in (compiled, whole)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)


def test_checkpointed_activations_change_nothing(folder):
    """Mutation: use_reentrant=True (no gradient reaches the layers: their inputs need none)."""
    flags = ["--batch_size", "5", "--micro_batch_size", "2", "--max_steps", "4"]
    assert (
        distance(run(folder, "less", *flags, "--gradient_checkpointing"), run(folder, "all", *flags)) < 1e-6
    )


def test_attention_is_the_one_asked_for(folder):
    flags = ["--model", str(folder / "gpt2")]
    for asked, found in (("eager", "eager"), ("sdpa", "sdpa"), ("auto", "sdpa")):
        model = CausalLM().model(parse([*flags, "--attn_implementation", asked]))
        assert model.config._attn_implementation == found
    with pytest.raises(BadSetting, match="--attn_implementation flash_attention_2"):
        CausalLM().model(parse([*flags, "--attn_implementation", "flash_attention_2"]))
    with pytest.raises(BadSetting, match="--attn_implementation flash"):  # of a preset too
        CausalLM().model(parse(["--attn_implementation", "flash"]))


def test_bf16_keeps_master_weights_in_fp32(folder):
    """Steps far below bf16's resolution add up. Mutation: the model cast to bf16 (it would not move)."""
    before = GPT2LMHeadModel.from_pretrained(folder / "gpt2").state_dict()
    flags = ["--bf16", "--learning_rate", "1e-6", "--optim", "adamw_torch", "--max_steps", "10"]
    after = load_file(run(folder, "half", *flags) / "model" / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    assert after[name].dtype == torch.float32
    moved = (after[name] - before[name]).abs()
    assert 5e-6 < float(moved.median()) < 2e-5 and float(before[name].abs().max()) > 1e-2


# Adapters


def test_lora_trains_adapters_and_saves_them_alone(folder):
    """Base weights stay bit for bit; the folder opens with from_pretrained and gives the trained losses.

    Mutation: save_model that hands save_pretrained nothing of the adapter's (losses of the base).
    """
    pytest.importorskip("peft")
    flags = ["--peft", "lora", "--lora_r", "4", "--optim", "adamw_torch", "--learning_rate", "1e-2",
             "--max_steps", "12", "--num_train_epochs", "3", "--gradient_checkpointing"]  # fmt: skip
    out = run(folder, "lora", *flags)
    saved = load_file(out / "model" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    assert not (out / "model" / "model.safetensors").exists()
    base = GPT2LMHeadModel.from_pretrained(folder / "gpt2")
    tuned = AutoModelForCausalLM.from_pretrained(out / "model")
    tokens = ByT5Tokenizer()("def function_7(value)", return_tensors="pt").input_ids
    losses = [float(m.eval()(tokens, labels=tokens).loss.detach()) for m in (base, tuned)]
    told = records(out)
    assert losses[1] < losses[0] - 0.03 and told[-1]["loss"] < told[0]["loss"] - 0.03
    kept = torch.load(out / "checkpoints" / "step_12" / "training.pt")["model"]
    assert torch.equal(kept["base_model.model.transformer.wte.weight"], base.transformer.wte.weight)

    # Stopped and resumed: the same losses.
    run(folder, "half", *flags, "--max_steps", "6", "--lr_scheduler_type", "constant")
    run(folder, "half", *flags, "--max_steps", "12", "--resume_from_checkpoint", "auto")
    assert [r["loss"] for r in records(folder / "half")] == [r["loss"] for r in told]


def test_lora_of_a_classifier_trains_its_new_head(tmp_path):
    """Mutation: LoraConfig without task_type (the head, drawn anew, stays frozen and is not saved)."""
    pytest.importorskip("peft")
    BertForSequenceClassification(
        BertConfig(vocab_size=384, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                   num_attention_heads=2, max_position_embeddings=64)
    ).save_pretrained(tmp_path / "bert")  # fmt: skip
    ByT5Tokenizer().save_pretrained(tmp_path / "bert")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"word {n},{n % 3}\n" for n in range(60)))
    flags = ["--task", "classification", "--model", str(tmp_path / "bert"), "--dataset",
             str(tmp_path / "rows.csv"), "--peft", "lora", "--max_steps", "5"]  # fmt: skip
    train.main(parse([*COMMON, *flags, "--output_dir", str(tmp_path / "run")]))
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any("classifier" in name for name in saved)
    AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model", num_labels=3, ignore_mismatched_sizes=True
    )


def test_lora_refusals_are_one_line(folder):
    pytest.importorskip("peft")
    with pytest.raises(BadSetting, match="pretrained"):
        CausalLM().model(parse(["--peft", "lora"]))
    with pytest.raises(BadSetting, match="--lora_target_modules nothing_of_this_name"):
        CausalLM().model(parse(["--model", str(folder / "gpt2"), "--peft", "lora",
                                "--lora_target_modules", "nothing_of_this_name"]))  # fmt: skip


# Devices


def with_gpu(monkeypatch, allocated: int, reserved: int, mem_get_info) -> Engine:
    """An engine that takes its device for a GPU of 100 bytes."""
    engine = Engine.start(parse(["--output_dir", "unused"]))
    engine.device = torch.device("cuda")
    engine.optimizer = SimpleNamespace(state={"there": 1})
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    return engine


def test_memory_of_a_device_that_does_not_say(monkeypatch):
    """R93, R95. 40 of 100 allocated, 95 reserved: usage is 0.95, and 60 are ours to use, whether the driver
    answers or, as on some ROCm versions, raises.

    Mutations: usage from memory_allocated (0.4); mem_get_info unguarded in free_bytes (RuntimeError).
    """

    def broken(device):
        raise RuntimeError("HIP error: invalid argument")

    for answer in (lambda device: (5, 100), broken):
        engine = with_gpu(monkeypatch, 40, 95, answer)
        assert engine.memory_usage() == pytest.approx(0.95)
        assert engine.free_bytes() == 60


def test_what_the_allocator_keeps_is_no_reason_to_reduce_apart(monkeypatch):
    """95 of 100 reserved and 40 used is not tight, 92 used is. Mutation: memory_usage() > TIGHT, which keeps
    DDP from overlapping for good once the allocator has grown.
    """
    for used, tight in ((40, False), (92, True)):
        engine = with_gpu(monkeypatch, used, 95, lambda device: (5, 100))
        assert engine._is_tight() is tight


def test_memory_for_the_optimizer_is_set_aside_until_it_is_there(monkeypatch):
    """Two moments for the weights of this process that train, on engines that share them too.

    Mutation: nothing where the weights are shared.
    """
    engine = with_gpu(monkeypatch, 40, 95, lambda device: (5, 100))
    engine.optimizer, engine.sharded = SimpleNamespace(state={}), True
    frozen = torch.nn.Parameter(torch.zeros(99), requires_grad=False)
    engine.parameters = [torch.nn.Parameter(torch.zeros(5)), frozen]
    assert engine.free_bytes() == 60 - 2 * 5 * 4


def test_one_process_under_ddp_runs_its_passes_apart():
    """torchrun of one process: DDP around the model. A backward that runs out of memory must not leave its
    reducer waiting. Mutation: no_sync left out where there is one process.
    """
    engine = Engine.start(parse(["--output_dir", "unused"]))
    engine.module, engine.apart, asked = torch.nn.Linear(1, 1), True, []
    engine.accelerator.no_sync = lambda model: asked.append(model) or contextlib.nullcontext()
    for model in (engine.module, SimpleNamespace(module=engine.module)):
        engine.model = model
        with engine._pass(last=True):
            pass
    assert asked == [engine.model]


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, ""), ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "unset ROCR_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, "keep HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "every device is hidden"), ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
    ],
)  # fmt: skip
def test_masks_are_looked_at_when_a_run_starts(monkeypatch, capsys, given, warned):
    """R96. One warning, and the variables stay as they were. Mutation: pairs compared as texts (1 and 1)."""
    monkeypatch.setattr(module.os, "environ", {"ACCELERATE_USE_CPU": "true"} | given)
    Engine.start(parse(["--output_dir", "unused"]))
    told = capsys.readouterr().err
    assert warned in told and told.count("warning") == bool(warned)
    assert {k: v for k, v in module.os.environ.items() if "VISIBLE" in k} == given


def test_nothing_of_one_vendor_is_needed_to_start():
    """R98. Without NVIDIA's and AMD's Python packages, and with no program started: everything imports, and
    the optimizer is torch's own. Mutation: `import pynvml`, or a look at nvidia-smi, at the top of a file.
    """
    program = (
        "import importlib, pkgutil, subprocess, sys\n"
        "for name in ('pynvml', 'amdsmi', 'apex', 'bitsandbytes', 'flash_attn', 'deepspeed', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import torch, accelerate, adaptive\n"
        "def refused(*a, **k): raise AssertionError(f'started {a}')\n"
        "subprocess.Popen.__init__ = refused\n"
        "import train\n"
        "for found in pkgutil.walk_packages(adaptive.__path__, 'adaptive.'):\n"
        "    importlib.import_module(found.name)\n"
        "from adaptive.config import parse\n"
        "print(parse([]).optim.optim)"
    )
    done = run_python("-c", program, cold=True)
    assert (done.returncode, done.stdout.split()) == (0, ["adamw_torch"]), done.stderr[-2000:]


def test_only_the_engine_speaks_to_a_device():
    """R98. Mutation: torch.cuda.synchronize() in signals.py (AttributeError or an error where none is)."""
    root = Path(train.__file__).parent
    others = [root / "train.py", *(p for p in (root / "adaptive").rglob("*.py") if p.name != "doctor.py")]
    using = {p.name for p in others if "torch.cuda" in p.read_text() or "torch.xpu" in p.read_text()}
    assert using <= {"engine.py", "deepspeed_engine.py", "fsdp_engine.py"}, using


# Processes that wait


def test_the_timeout_reaches_the_process_group(monkeypatch):
    """R77. Mutation: Accelerator without InitProcessGroupKwargs (half an hour whatever is set)."""
    monkeypatch.setattr(module, "TIMEOUT_MINUTES", 0.25)
    engine = Engine.start(parse(["--output_dir", "unused"]))
    assert engine.accelerator.init_handler.timeout == timedelta(seconds=15)


def test_a_process_that_waits_long_says_where(monkeypatch, capsys):
    """R97. No word between processes for half of the timeout: rank, step and the functions it is in, once.

    Mutations: the watcher that does not look; told every second; `met_at` never moved on.
    """
    monkeypatch.setattr(module, "TIMEOUT_MINUTES", 1 / 300)  # half of it: 0.1 seconds
    engine = Engine.start(parse(["--output_dir", "unused"]))
    engine.seed(7)
    leaving = threading.Event()
    monkeypatch.setattr(
        engine, "_leaving", SimpleNamespace(wait=lambda seconds: leaving.wait(seconds / 50)), raising=False
    )
    monkeypatch.setattr(engine, "_last_word", lambda: None)
    threading.Thread(target=engine._watch, daemon=True).start()
    time.sleep(0.5)
    leaving.set()
    told = capsys.readouterr().err
    assert told.count("[rank 0] no word between processes") == 1 and "in step 7" in told
    assert sys._getframe().f_code.co_name in told
    before = engine.met_at
    Agreement._finish(engine)
    assert engine.met_at > before
