"""Settings: a quick and complete --help, recipes, and one line with exit status 2 for everything that is
wrong."""

import dataclasses
import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from launching import run_python

from adaptive.config import INSTEAD, BadSetting, Config, Every, parse, save
from adaptive.records import open_folder

FLAGS = [f.name for group in dataclasses.fields(Config) for f in dataclasses.fields(group.default_factory)]
GROUPS = [group.name for group in dataclasses.fields(Config)]


def refused(arguments: list[str], *words: str) -> str:
    """The one line that `parse` answers with, which has all `words` and says what to do."""
    with pytest.raises(BadSetting) as caught:
        parse(arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    assert all(word in message for word in words), message
    return message


def recipe(folder: Path, text: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return ["--config", str(path)]


# --help


@pytest.fixture(scope="module")
def help_text() -> str:
    """`python train.py --help` on a terminal of 100 columns."""
    start = time.monotonic()
    done = run_python("train.py", "--help", COLUMNS="100", timeout=60, cold=True)
    seconds = time.monotonic() - start
    assert done.returncode == 0 and done.stderr == ""
    assert seconds < 5, f"--help took {seconds:.1f} s"
    return done.stdout


def test_help_is_quick_and_imports_no_torch(help_text):
    """Mutation: `from adaptive.engine import Engine` above `parse_or_exit` in train.py: 5 to 15 s, and torch
    is there."""
    program = (
        "import runpy, sys\n"
        "sys.argv = ['train.py', '--help']\n"
        "try:\n"
        "    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "heavy = {'torch', 'accelerate', 'transformers', 'datasets', 'deepspeed', 'wandb', 'numpy'}\n"
        "print('\\nheavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = run_python("-c", program, timeout=60, cold=True)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout[-300:] + done.stderr[-1000:]


def test_help_has_every_flag_in_its_group_with_its_unit(help_text):
    """Mutations: a field without a docstring; a docstring without "(unit)" at its end; a group merged into
    another."""
    groups = dict(re.findall(r"^╭─ (\w+) options ─+╮\n(.*?)^╰", help_text, re.DOTALL | re.MULTILINE))
    assert list(groups) == GROUPS
    told = {}
    for name, text in groups.items():
        entries = re.split(r"^│ (?=--)", text, flags=re.MULTILINE)
        head = entries.pop(0)
        assert re.search(r"│ \S.*\.\s*│", head), f"the group {name} has no description"
        for entry in entries:
            names = re.findall(r"--(\w+)", entry.splitlines()[0])
            words = " ".join(line.strip("│ ") for line in entry.splitlines()[1:])
            told |= dict.fromkeys(names, (name, words))
    for group in dataclasses.fields(Config):
        for field in dataclasses.fields(group.default_factory):
            assert field.name in told, f"--{field.name} is not in --help"
            name, words = told[field.name]
            assert name == group.name
            unit = re.fullmatch(r"(.{10,}) \(([^()]+)\)\. \(default: .*\)", words)
            assert unit, f"--{field.name}: {words!r} does not end with its unit in parentheses"


# Recipes


def test_a_recipe_is_read_and_flags_win(tmp_path):
    """Mutation: recipe arguments behind the command line's: batch_size is 4, audit on."""
    text = (
        "batch_size: 4\naudit: true\nlearning_rate: 3e-4\nreport_to: [tensorboard, none]\nmax_steps: -1\n"
        "optim: sgd\noptim_args: momentum=0.9\n"
        "schedule: steps('0:4 1K:8')\ntext_column: null\nrun_name: -7b\n"
        "eval_every: 10 minutes\n"
    )
    config = parse(recipe(tmp_path, text))
    assert (config.batch.batch_size, config.optim.learning_rate, config.output.audit) == (4.0, 3e-4, True)
    assert config.output.report_to == ("tensorboard", "none")
    assert (config.optim.optim_args, config.batch.schedule) == ("momentum=0.9", "steps('0:4 1K:8')")
    assert (config.run.max_steps, config.data.text_column, config.output.run_name) == (-1, None, "-7b")
    for order in (
        recipe(tmp_path, text) + ["--batch_size", "2.5", "--no_audit", "--report_to", "none"],
        ["--batch_size", "2.5", "--no_audit", "--report_to", "none"] + recipe(tmp_path, text),
    ):
        config = parse(order)
        assert (config.batch.batch_size, config.output.audit, config.output.report_to) == (
            2.5,
            False,
            ("none",),
        )
        assert config.optim.optim == "sgd"
    (first, path) = recipe(tmp_path, text)
    assert parse([f"{first}={path}"]).batch.batch_size == 4


def test_config_yaml_reads_back_what_it_was(tmp_path):
    """Mutation: `str(value)` for lists ("('wandb',)"), or null written as "": a recipe of a run is refused,
    or differs."""
    for at, arguments in enumerate((
        [],
        ["--batch_size", "0.3", "--report_to", "wandb", "none", "--bf16", "--learning_rate", "1e-05",
         "--seed", "7",
         "--lr_scheduler_kwargs", "num_cycles=2", "--max_samples", "1000000000000", "--eval_every", "never"],
        ["--per_device_train_batch_size", "0.18", "--fraction", "accumulate", "--samples_per_pass", "8",
         "--report_to",
         "--schedule", "steps(\"0:0.1 5K:0.5\")", "--run_name=--odd: name #1", "--adam_epsilon", "1e-300"],
    )):  # fmt: skip
        config = parse(arguments)
        save(config, tmp_path / f"{at}.yaml")
        assert parse(["--config", str(tmp_path / f"{at}.yaml")]) == config
        kept = yaml.safe_load((tmp_path / f"{at}.yaml").read_text())
        assert list(kept) == FLAGS, "every resolved setting"
        assert all(
            value is None or isinstance(value, (bool, int, float, str, list)) for value in kept.values()
        )


def test_aliases_and_dashes(tmp_path):
    """Mutation: ALIASES left out of `_check_name`: --model is "not a setting"."""
    config = parse(["--model", "gpt2", "--dataset", "rows.csv", "--batch-size", "4"])
    assert (config.model.model_name_or_path, config.data.dataset_name) == ("gpt2", ("rows.csv",))
    assert config.batch.batch_size == 4


def test_the_default_folder_is_new_and_named_after_the_task():
    """Mutations: a constant name: the second run without --output_dir is refused; `parents[1]` of a path that
    has none: an IndexError.
    """
    assert re.fullmatch(r"runs/causal_lm-\d{8}-\d{6}", parse([]).run.output_dir)
    assert parse(["--task", "ideas/my_task.py:Mine"]).run.output_dir.startswith("runs/my_task-")
    assert parse(["--output_dir", "here"]).run.output_dir == "here"
    for path, folder in (("/a/checkpoints/step_3", "/a"), ("/step_3", "/"), ("/", "/")):
        assert parse(["--resume_from_checkpoint", path]).run.output_dir == folder


# Bad settings


@pytest.mark.parametrize("arguments, words", [
    (["--batchsize", "4"], ["--batchsize is not a setting", "did you mean --batch_size?"]),
    (["--no_audits"], ["--no_audits is not a setting", "--audit"]),
    (["--zzz"], ["--zzz is not a setting", "--help"]),
    (["stray"], ["stray"]),
    (["--batch_size", "abc"], ["--batch_size", "abc"]),
    (["--batch_size"], ["--batch_size"]),
    (["--max_steps", "1.5"], ["--max_steps", "1.5"]),
    (["--dtype", "float8"], ["--dtype", "float8", "float32", "bfloat16"]),
    (["--epoch_end", "loop"], ["--epoch_end", "loop", "keep", "wrap", "drop"]),
    (["--batch_size", "4", "--per_device_train_batch_size", "2"],
     ["--batch_size and --per_device_train_batch_size", "one of them"]),
    (["--batch_size", "-4"], ["--batch_size is -4", "above 0"]),
    (["--noise_every", "0"], ["--noise_every is 0", "above 0"]),
    (["--noise_half_life", "-5"], ["--noise_half_life is -5", "above 0"]),
    (["--adam_beta1", "1.5"], ["--adam_beta1 is 1.5", "below 1"]),
    (["--adam_beta2", "1"], ["--adam_beta2 is 1.0", "below 1"]),
    (["--lora_dropout", "1"], ["--lora_dropout is 1", "below 1"]),
    (["--batch_size", "0"], ["--batch_size is 0", "above 0"]),
    (["--batch_size", "nan"], ["--batch_size is nan", "above 0"]),
    (["--per_device_train_batch_size", "inf"], ["--per_device_train_batch_size is inf", "above 0"]),
    (["--max_batch_size", "-1"], ["--max_batch_size", "above 0"]),
    (["--micro_batch_size", "0"], ["--micro_batch_size is 0", "above 0"]),
    (["--num_train_epochs", "0"], ["--num_train_epochs is 0", "above 0"]),
    (["--num_train_epochs", "1e308"], ["--num_train_epochs is 1e+308", "at most 1e9"]),
    (["--weights_only"], ["--weights_only is for --resume_from_checkpoint"]),
    (["--max_samples", "0"], ["--max_samples is 0", "above 0"]),
    (["--max_steps", "0"], ["--max_steps is 0", "-1"]),
    (["--learning_rate", "nan"], ["--learning_rate is nan", "0 or more"]),
    (["--weight_decay", "-0.1"], ["--weight_decay is -0.1", "0 or more"]),
    (["--dataloader_num_workers", "-1"], ["--dataloader_num_workers is -1", "0 or more"]),
    (["--fraction", "accumulate"], ["--fraction accumulate", "--per_device_train_batch_size"]),
    (["--fraction", "accumulate", "--batch_size", "0.5"], ["--fraction accumulate",
     "--batch_size has no such reading"]),
    (["--fraction", "accumulate", "--per_device_train_batch_size", "1.5"],
     ["--fraction accumulate", "1.5", "at most 1", "participate"]),
    (["--bf16", "--fp16"], ["--bf16 and --fp16", "one of them"]),
    (["--warmup_samples", "5", "--warmup_ratio", "0.1"], ["--warmup_samples and --warmup_ratio",
     "one of them"]),
    (["--warmup_ratio", "10"], ["--warmup_ratio is 10", "between 0 and 1"]),
    (["--seed", str(2**63)], ["--seed", "below 2^63"]),
    (["--task", "masked_lm", "--packing", "none"], ["--packing none is for causal_lm", "masked_lm"]),
    (["--task", "contrastive", "--label_smoothing_factor", "0.1"], ["--label_smoothing_factor is not for"]),
    (["--eval_share", "1"], ["--eval_share is 1", "0.1"]),
    (["--eval_every", "soon"], ['--eval_every is "soon"', "50 steps", "10 minutes", "never"]),
    (["--eval_every", "5 epochs"], ["--eval_every", "10000 samples"]),
    (["--log_every", "1.2.3 steps"], ["--log_every", "50 steps"]),
    (["--log_every=-5 steps"], ["--log_every", "50 steps"]),
    (["--report_to", "mlflow"], ["--report_to", "'mlflow'", "wandb, tensorboard, trackio or none"]),
    (["--config"], ["--config needs a YAML file"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    (["--config", "adaptive"], ["adaptive", "Is a directory"]),
])  # fmt: skip
def test_bad_settings_say_what_to_write_instead(arguments, words):
    """Mutations: each line of `check` and `_check_name` removed fails at least one case; NaN passes `value <=
    0`."""
    refused(arguments, *words)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_names_of_trainingarguments_are_answered_with_ours(name):
    """Mutation: INSTEAD behind the suggestions: --warmup_steps is answered with --warmup_samples, which is no
    synonym.

    What is named instead exists.
    """
    message = refused([f"--{name}", "4"], f"--{name} has no meaning here; write ")
    instead = message.split("; write ")[1]
    named = set(re.findall(r"(?<!\w)--(\w+)", instead)) - {"config_file", "num_processes"}
    assert named <= set(FLAGS), f"{named - set(FLAGS)} is no flag"
    assert name not in FLAGS


@pytest.mark.parametrize("text, words", [
    ("- batch_size\n- 4\n", ["holds no settings", "batch_size: 8"]),
    ("just words\n", ["holds no settings"]),
    ("a: [1, 2\n", ["is not YAML"]),
    ("\xff\xfe", ["is not YAML"]),
    ("batchsize: 4\n", ["--batchsize", "did you mean --batch_size?"]),
    ("batch:\n  batch_size: 4\n", ["--batch is not a setting", "--batch_size"]),
    ("gradient_accumulation_steps: 4\n", ["--gradient_accumulation_steps", "--micro_batch_size"]),
    ("batch_size: [4, 8]\n", ["8"]),
    ("batch_size: -4\n", ["--batch_size is -4"]),
    ("batch_size: yes\n", ["--batch_size"]),
    ("config: other.yaml\n", ["--config"]),
])  # fmt: skip
def test_bad_recipes(text, words, tmp_path):
    """Mutations: `isinstance(settings, dict)` left out (an AttributeError); UnicodeDecodeError not caught."""
    arguments = recipe(tmp_path, "")
    (tmp_path / "recipe.yaml").write_bytes(text.encode("latin-1"))
    refused(arguments, *words)


@pytest.mark.parametrize("text, count, unit", [
    ("50 steps", 50, "step"), ("50", 50, "step"), ("1 step", 1, "step"), ("10000 samples", 10_000, "sample"),
    (" 2.5 minutes ", 150, "minute"), ("never", 0, "step"), ("0", 0, "step"),
])  # fmt: skip
def test_intervals(text, count, unit):
    """Mutation: minutes not turned into seconds: ten of them are over after ten seconds."""
    assert Every.parse(text, "eval_every") == Every(count, unit)


def test_an_interval_is_due_once_for_each_multiple_that_was_passed():
    """Mutation: `after % count == 0`: steps of 16 samples never meet a multiple of 100."""
    every = Every.parse("100 samples", "eval_every")
    seen = [{"step": k, "samples": 16 * k, "seconds": 7.0 * k} for k in range(30)]
    due = [
        after["samples"] for before, after in zip(seen, seen[1:], strict=False) if every.due(before, after)
    ]
    assert due == [112, 208, 304, 400]
    minutes = Every.parse("1 minutes", "eval_every")
    assert [a["seconds"] for b, a in zip(seen, seen[1:], strict=False) if minutes.due(b, a)] == [63, 126, 182]
    assert not any(Every.parse("never", "x").due(b, a) for b, a in zip(seen, seen[1:], strict=False))
    assert not every.due(seen[7], seen[7]), "an empty step"


# The program itself


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`python train.py arguments` with an --output_dir in `folder`, where nothing may be left behind."""
    before = sorted(folder.rglob("*"))
    output = [] if "--output_dir" in arguments else ["--output_dir", str(folder / "run")]
    done = run_python("train.py", "--report_to", "none", *output, *arguments, timeout=120)
    assert sorted(folder.rglob("*")) == before, "something was written"
    return done


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr[-2000:]
    assert all(word in lines[0] for word in words), lines[0]
    assert done.stdout == ""


def test_a_bad_flag_is_one_line_and_status_2(tmp_path):
    """Mutation: `sys.exit(1)`, or BadSetting let through by `parse_or_exit`: a traceback and status 1."""
    assert_one_line(program(tmp_path, "--batchsize", "4"), "did you mean --batch_size?")


def test_a_missing_dataset_is_one_line_and_leaves_nothing(tmp_path):
    """Mutation: `open_folder` before the task has loaded its rows: an empty folder is left behind."""
    done = program(tmp_path, "--dataset_name", str(tmp_path / "rows.csv"))
    assert_one_line(done, "rows.csv", "write")


def test_a_folder_that_is_in_use_is_refused_and_left_alone(tmp_path):
    """Mutation: `any(folder.iterdir())` left out of `open_folder`: a second run writes into the first
    one's."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    done = program(tmp_path, "--output_dir", str(tmp_path / "run"), "--max_steps", "1")
    assert_one_line(done, "--output_dir", "is not empty", "write a new folder")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"
    config = parse(["--output_dir", str(tmp_path / "run" / "metrics.jsonl")])
    with pytest.raises(BadSetting, match="--output_dir .*File exists; write a folder"):
        open_folder(config)
    config.run.output_dir = str(tmp_path / "new" / "run")
    assert Path(open_folder(config)).is_dir() and open_folder(config) == config.run.output_dir, (
        "an empty one is as good"
    )


@pytest.mark.parametrize("arguments, words", [
    (["--schedule", "linaer()"], ["linaer", "linear", "FILE.py:NAME"]),
    (["--schedule", "nowhere.py:grow"], ["nowhere.py", "no such file"]),
    (["--schedule", "seesaw()", "--lr_scaling", "none"], ["seesaw", "--lr_scaling sqrt"]),
    (["--lr_scheduler_type", "cosin"], ["--lr_scheduler_type", "'cosin'", "cosine"]),
    (["--lr_scheduler_kwargs", "cycles=2"], ["--lr_scheduler_kwargs", "cycles"]),
    (["--lr_scaling", "square"], ["--lr_scaling", "'square'", "power(p)"]),
    (["--lr_scaling", "power(2j)"], ["--lr_scaling", "power(2j)", "power(p)"]),
    (["--task", "chess"], ["--task", "'chess'", "causal_lm", "FILE.py:CLASS"]),
    (["--task", "nowhere.py:Mine"], ["--task", "nowhere.py", "no such file"]),
])  # fmt: skip
def test_settings_of_the_loop_are_judged_before_the_engine_starts(arguments, words, tmp_path, monkeypatch):
    """Mutation: the engine started first in `main`: a process group, or a GPU, for a typing error."""
    import train

    def started(config):
        raise AssertionError("the engine was started")

    monkeypatch.setattr(train.Engine, "start", started)
    config = parse([*arguments, "--output_dir", str(tmp_path / "run")])
    with pytest.raises(BadSetting) as caught:
        train.main(config)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not list(tmp_path.iterdir())
