"""accelerate_configs/ and ds_configs/: what `accelerate launch` makes of each file, without launching."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch.distributed.run as torchrun
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.launch import (
    _filter_args,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ENGINES = sorted((ROOT / "ds_configs").glob("*.json"))
DEEPSPEED_LAYOUTS = [path for path in LAYOUTS if "zero" in path.name]
CPU_LAYOUTS = [path for path in LAYOUTS if path.name.startswith("cpu")]

# accelerate raises when one of these stands in a YAML beside `deepspeed_config_file`.
REFUSED = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "mixed_precision",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
    "zero_stage",
}
# What follows from the size of a step belongs to the loop; an engine that knew it would be a second owner.
ALLOWED_IN_ENGINE = {
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def keys_of(node: object) -> set[str]:
    """Every key of a nested mapping, at any depth."""
    if not isinstance(node, dict):
        return set()
    return set(node).union(*(keys_of(value) for value in node.values()))


@pytest.fixture
def bare_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shell that exported nothing, in the repository root, on a machine with 64 cores."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    monkeypatch.chdir(ROOT)
    with mock.patch.dict(os.environ):  # torch's launcher writes to os.environ itself
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "FSDP_", "OMP_", "DS_")) or name.endswith("VISIBLE_DEVICES"):
                del os.environ[name]
        yield


def become_worker(path: Path, *flags: str) -> None:
    """Take on the environment of a worker of `accelerate launch --config_file path *flags train.py`."""
    command = ["--config_file", str(path), "--main_process_port", "0", *flags, "train.py"]
    args, defaults, precision_in_yaml = _validate_launch_command(launch_command_parser().parse_args(command))
    if not args.use_deepspeed and not args.multi_gpu and not args.use_fsdp:
        os.environ.update(prepare_simple_launcher_cmd_env(args)[1])
        return
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config) + ["mixed_precision"] * precision_in_yaml
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        os.environ.update(prepare_deepspeed_cmd_env(args)[1])
    else:
        os.environ.update(prepare_multi_gpu_env(args))
    torch_args = _filter_args(args, torchrun.get_args_parser(), ["--training_script", "train.py"])
    torchrun.config_from_args(torch_args)  # sets OMP_NUM_THREADS where nobody has


def test_every_layout_is_shipped():
    names = {path.stem for path in LAYOUTS}
    assert names >= {"cpu", "cpu_ddp", "cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"}
    assert names >= {"single_gpu", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "multi_node"}
    assert names >= {"cpu_fsdp2", "fsdp2"}
    assert names >= {"rocm_single", "rocm_ddp", "rocm_zero2", "rocm_zero3"}
    assert {path.stem for path in ENGINES} >= {"zero0", "zero1", "zero2", "zero3", "zero3_offload"}


@each(LAYOUTS)
def test_layout_loads_and_its_comment_names_its_own_file(path: Path):
    """Mutation: a file copied for another layout with the old launch line left in."""
    config = load_config_from_file(str(path))  # raises on a key that accelerate does not know
    assert config.num_processes >= 1 and config.num_machines >= 1

    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().startswith("#") and len(comment) >= 2
    launched = re.findall(r"--config_file (\S+\.yaml)", "\n".join(comment))
    assert launched and set(launched) == {f"accelerate_configs/{path.name}"}


@each(LAYOUTS)
def test_layout_has_no_accumulation_but_one(path: Path):
    """Mutation: `gradient_accumulation_steps: 4` in a YAML (each step's gradient would be a quarter)."""
    text = path.read_text()
    assert all(value == "1" for value in re.findall(r"gradient_accumulation_steps\W+(\w+)", text))


@each(CPU_LAYOUTS)
def test_cpu_layout_has_one_thread_per_process_and_no_gpu(path: Path, bare_shell: None):
    """Mutation: drop `mpirun_config` from cpu.yaml (64 threads on 64 cores), or `gpu_ids` from any."""
    become_worker(path)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert set(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == {"-1"}
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


@each([path for path in CPU_LAYOUTS if path not in DEEPSPEED_LAYOUTS])
def test_only_the_command_line_changes_the_threads(path: Path, bare_shell: None):
    """Mutation: drop `mpirun_config` from cpu_ddp.yaml (the exported number wins)."""
    os.environ["OMP_NUM_THREADS"] = "8"
    become_worker(path)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    become_worker(path, "--num_cpu_threads_per_process", "3")
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_cpu_ddp_starts_as_many_workers_as_it_says():
    """Mutation: MULTI_CPU, which starts one process whatever num_processes says."""
    config = load_config_from_file(str(ROOT / "accelerate_configs/cpu_ddp.yaml"))
    assert config.distributed_type == DistributedType.MULTI_GPU and config.num_processes == 2


@each(DEEPSPEED_LAYOUTS)
def test_deepspeed_layout_refers_to_a_file_and_repeats_none_of_it(path: Path, bare_shell: None):
    """Mutation: `mixed_precision: "no"` or `zero_stage: 2` in a DeepSpeed YAML (accelerate raises)."""
    config = load_config_from_file(str(path))
    assert config.distributed_type == DistributedType.DEEPSPEED
    engine = config.deepspeed_config["deepspeed_config_file"]
    assert ROOT / engine in ENGINES
    stage = json.loads((ROOT / engine).read_text())["zero_optimization"]["stage"]
    assert Path(engine).stem == re.sub(r"^(cpu|rocm)_", "", path.stem)
    assert config.deepspeed_config["zero3_init_flag"] is (stage == 3 and path not in CPU_LAYOUTS)
    assert not REFUSED & keys_of(yaml.safe_load(path.read_text()))

    # What the worker's Accelerator does first; it raises on the refused keys.
    become_worker(path)
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps) == (stage, 1)
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"]["enabled"] is True
    assert plugin.deepspeed_config["fp16"]["enabled"] is False


@each([path for path in LAYOUTS if "fsdp" in path.name])
def test_fsdp_layout_asks_for_version_2_and_keeps_models_whole_until_they_are_sharded(
    path: Path, bare_shell: None
):
    """Mutations: `fsdp_version` left out (1); `fsdp_cpu_ram_efficient_loading` left out (true)."""
    assert load_config_from_file(str(path)).distributed_type == DistributedType.FSDP
    become_worker(path)
    told = {
        name: os.environ[f"FSDP_{name}"] for name in ("VERSION", "RESHARD_AFTER_FORWARD", "OFFLOAD_PARAMS")
    }
    assert told == {"VERSION": "2", "RESHARD_AFTER_FORWARD": "true", "OFFLOAD_PARAMS": "false"}
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@each([path for path in LAYOUTS if path not in DEEPSPEED_LAYOUTS])
def test_other_layouts_name_no_engine(path: Path):
    config = load_config_from_file(str(path))
    assert config.distributed_type != DistributedType.DEEPSPEED
    assert not config.deepspeed_config and config.mixed_precision == "no"


@each(ENGINES)
def test_engine_leaves_everything_that_follows_the_size_to_the_loop(path: Path):
    """R22. Mutation: an optimizer, scheduler, lr, clipping or train_batch_size in a DeepSpeed file."""
    engine = json.loads(path.read_text())
    assert set(engine) == ALLOWED_IN_ENGINE
    assert engine["train_micro_batch_size_per_gpu"] == 1
    assert engine["gradient_accumulation_steps"] == 1
    assert engine["zero_allow_untested_optimizer"] is True
    assert engine["zero_force_ds_cpu_optimizer"] is False
    assert engine["bf16"] == engine["fp16"] == {"enabled": "auto"}

    zero = engine["zero_optimization"]
    assert str(zero["stage"]) == re.findall(r"\d", path.stem)[0]
    assert (zero["stage"] == 3) == (zero.get("stage3_gather_16bit_weights_on_model_save") is True)
    assert ("offload" in path.stem) == ("offload_optimizer" in zero)


@each(LAYOUTS + ENGINES)
def test_no_path_of_a_machine(path: Path):
    assert not re.search(r"(^|[\s\"':])/[a-z]|https?://|~/", path.read_text())
