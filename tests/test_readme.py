"""The README's commands and examples do what it says, in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from launching import ROOT, environment, records, run_python

README = (ROOT / "README.md").read_text()
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -q -r "
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line
]
COMMANDS = [line for line in LINES if "pytest" not in line]
TOOLS = [line for line in COMMANDS if "-m adaptive.tools." in line]  # run in order: later ones need earlier
EXAMPLES = re.findall(r"```python\n(# (\w+\.py) +(--.*?)\n.*?)```", README, re.DOTALL)
QUICK = ["--max_samples", "200", "--report_to", "none", "--max_steps", "40"]


def test_a_size_that_a_device_cannot_carry_lasts_for_a_run():
    """Mutation: the row without its schedule: the default one grows a share of 0.25 to 2.25 at step 101."""
    (row,) = [line for line in README.splitlines() if line.startswith('| "my device carries 8')]
    flags = shlex.split(row.split("`")[1])
    done = run_python("train.py", *flags, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "sizes from 32 to 32 samples" in done.stdout


@pytest.fixture
def copy(tmp_path) -> Path:
    """A fresh checkout, so that nothing the commands leave behind stays here."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path / "clone"


def run(command: str, folder: Path, cold: bool = False) -> str:
    """Run a shell line as a person would who has set everything up; its output."""
    first = [] if cold else [warm.folder()]
    path = [*first, Path(sys.executable).parent, os.environ["PATH"]]
    settings = environment(PATH=os.pathsep.join(map(str, path)))
    del settings["WANDB_MODE"], settings["PYTHONPATH"]
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout + done.stderr


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def test_setup_and_ci_are_the_readmes():
    """`.ci/run` calls the README's test command, and both commands set everything up themselves."""
    first, tests = (line for line in LINES if line.startswith("python3 -m venv"))
    assert first == SETUP + "requirements.txt && accelerate launch train.py"
    pytest_line = "pytest -n 2 --dist loadfile --no-loadscope-reorder"  # launches first, or one process idles
    assert tests == SETUP + f"requirements-dev.txt && ruff check . && {pytest_line}"
    assert tests in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
def test_main_job(copy):
    """The first command trains below 2.0 nats per byte and leaves everything the README names."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = run(COMMANDS[0].partition("requirements.txt && ")[2], copy, cold=True)
    folder = only_run(copy)
    train, last_eval = records(folder), records(folder, "eval")[-1]
    assert last_eval["eval_loss"] < 2.0
    assert train[-1]["train_coverage"] == 1.0 and train[-1]["seconds"] < 240  # 120 on an idle machine
    assert train[0]["batch_size"] < train[-2]["batch_size"]
    assert "wandb sync" in output
    assert list(folder.rglob("*.wandb")) and (folder / "config.yaml").is_file()
    model, tokenizer = (
        auto.from_pretrained(folder / "model") for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    prompt = tokenizer("def ", return_tensors="pt", add_special_tokens=False)
    assert model.generate(**prompt, max_new_tokens=8, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS[1:] if line not in TOOLS])
def test_other_commands(copy, command):
    output = run(command, copy)
    if "--help" in command:
        assert "--max_batch_size" in output
        return
    if "--dry_run" in command:
        assert "fewer here" in output and not (copy / "runs").exists()
        return
    folder = only_run(copy)
    assert records(folder)[-1]["updates"] > 0
    processes = 2 if "cpu_" in command else 1
    assert f"{processes} process(es)" in output


@pytest.mark.slow
def test_tools(copy):
    """The tools' commands, one after the other; the doctor may find a problem of this machine."""
    doctor, search, *others = TOOLS
    assert "accelerate_configs/" in run(f"{doctor} || true", copy)
    found = run(search, copy)
    assert "turning point" in found and re.search(r"critical size [\d.]+, one seed: no interval", found), (
        found
    )
    assert (copy / "runs/search/critical_batch.png").is_file()
    told = [run(command, copy) for command in others]
    assert told[0].startswith("right: runs/search/size_16_seed_42")
    assert (copy / "runs" / "compare.png").is_file() and "compare.png" in told[1]


def test_three_complete_examples_are_there():
    """A schedule, a signal and a task."""
    assert {name for _, name, _ in EXAMPLES} >= {"my_idea.py", "my_signal.py", "my_task.py"}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "name", "flag"), EXAMPLES, ids=[example[1] for example in EXAMPLES])
def test_examples(copy, text, name, flag):
    """Each complete example runs as written, with the flag beside its name."""
    (copy / name).write_text(text)
    run(shlex.join(["accelerate", "launch", "train.py", *shlex.split(flag), *QUICK]), copy)
    assert records(only_run(copy))[-1]["updates"] > 0
    assert json.loads((only_run(copy) / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
