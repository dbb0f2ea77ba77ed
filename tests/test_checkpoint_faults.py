"""A checkpoint at every step, a death at every file operation: nothing is lost. fresh_process.py runs it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import fresh_process
import pytest
import torch
from fresh_process import DIED, N_STEPS, SCENARIOS
from launching import run_python

from adaptive.checkpoint import Checkpoints, changes, cut_back, problem
from adaptive.config import parse
from adaptive.engine import Engine
from adaptive.state import RunState

pytestmark = pytest.mark.slow


def results(job: str, folder: Path):
    done = run_python(fresh_process.__file__, job, folder, timeout=200, cold=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / f"{job}.json").read_text())


def check_deaths(cases: list[dict]) -> None:
    for case in cases:
        assert case["status"] == DIED, case
        assert case["same"], case
        assert not case["left"], case
        for name in case["hidden"]:
            assert f"passing over {name}" in case["said"], case


def test_death_at_every_file_operation_of_a_run(tmp_path):
    """R78. Opening the folder, three saves with pruning, records, the model: the next start of the same
    command ends with the undisturbed run's records, rows, state and weights, and says what it passed over.

    Mutations: written under the final name (damaged folders); pruning before the rename with --keep_last 1
    (nothing whole); config.yaml written in place; metrics not cut back without a checkpoint.
    """
    cases = results("crashes", tmp_path)
    assert len(cases) > 50
    check_deaths(cases)
    begun = False
    for case in cases:  # in the order of the operations: once there is one, there always is
        begun = begun or case["whole"] > 0
        assert case["whole"] > 0 or not begun, case
    kinds = {case["operation"].split()[0] for case in cases}
    assert kinds >= {"open", "write", "half", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def test_death_at_every_file_operation_of_a_resumed_run(tmp_path):
    """R78. The same, after a death in a save, and with a damaged checkpoint of a later step in the way.

    Mutation: damaged checkpoints left where they are (--keep_last 1 keeps that one and removes the new).
    """
    cases = results("resumes", tmp_path)
    assert len(cases) > 25
    check_deaths(cases)
    assert all(case["whole"] > 0 for case in cases)
    assert any("set_aside_step_9" in case["said"] + case["first"] for case in cases)


def test_an_error_at_every_file_operation_of_a_save(tmp_path):
    """No space at any one operation on a checkpoint: a warning, training goes on, older ones stay.

    Mutation: OSError not caught in `_attempt`, or partial folders not removed.
    """
    cases = results("errors", tmp_path)
    assert len(cases) > 30
    for case in cases:
        assert case["same"] and not case["left"], case
        assert case["status"] == 0 or "Traceback" not in case["first"], case
        assert case["whole"] > 0 or case["status"], case


def test_a_signal_in_every_pass(tmp_path):
    """R76. SIGTERM in each pass of training and of each evaluation: exit status 0 with the line that resumes,
    and after the resume the same records: an evaluation that was cut off is made up for, none is told twice.

    Mutations: `evaluation_owed` not in the state (a gap); `evaluated_at` a local of main (a double).
    """
    found = results("signals", tmp_path)
    *cases, last = found["cases"]
    assert len(cases) > 13 and last["outcome"] == found["whole"]
    assert len([line for line in found["whole"]["lines"] if line["kind"] == "eval"]) == 3
    for case in cases:
        assert (case["status"], case["again"]) == (0, 0), case
        assert "--resume_from_checkpoint auto" in case["first"], case
        assert case["outcome"] == found["whole"], case


def test_a_checkpoint_at_every_step_goes_on_the_same(tmp_path):
    """R40, R45, R46, R53, R55, R59. Empty steps, an epoch's edge, a schedule and an estimator with memory,
    dropout, two sources, a reservoir, a draw: from each checkpoint a fresh process runs the rest with the
    same rows, sizes, rates, losses, state and weights, to the bit.

    Mutations: any field left out of RunState.to_json (carry, noise, reservoir, beta2_product, signals).
    """
    found = results("every_step", tmp_path)
    assert list(found) == list(SCENARIOS)
    for name, result in found.items():
        assert result["status"] == 0, (name, result["said"])
        whole = result["whole"]
        assert len(result["cases"]) == N_STEPS - 1
        for case in result["cases"]:
            step = case["step"]
            assert case["status"] == 0, (name, step, case["said"])
            for kind in ("lines", "audit"):
                rest = [line for line in whole[kind] if line["step"] > step]
                assert case[kind] == rest, (name, step, kind)
            assert case["state"] == whole["state"] and case["weights"] == whole["weights"], (name, step)
    skipped = {line.get("skipped") for line in found["feedback"]["whole"]["lines"]}
    assert "empty" in skipped, "there was an empty step"
    edges = [line for line in found["feedback"]["whole"]["lines"] if line["epoch"] >= 1]
    assert edges, "an epoch ended"
    assert found["reservoir"]["whole"]["state"]["reservoir"] and found["dropout"]["whole"]["state"]["noise"]


def test_damage_of_every_kind_is_told(tmp_path):
    """A manifest that is missing, torn, or another program's; a file that is missing, shorter, or changed."""
    good = tmp_path / "step_1"
    good.mkdir()
    (good / "a").write_text("abc")
    digest = hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    manifest = {"files": {"a": 3}, "checksums": {"a": digest}}
    for text, why in [
        (None, "no manifest"), ("{", "damaged"), ("[]", "damaged"), ("{}", "damaged"),
        (json.dumps(manifest), None), (json.dumps(manifest | {"files": {"b": 1}}), "b is missing"),
        (json.dumps(manifest | {"checksums": {"a": "0"}}), "other content"),
    ]:  # fmt: skip
        if text is not None:
            (good / "manifest.json").write_text(text)
        assert (problem(good) or "None").count(str(why)), text
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n\xff\xfe{"ste')
    cut_back(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_settings_that_a_resumed_start_gives_otherwise_are_told():
    """R48. Another size does not move the position, and sizes go on from the last: said, not ignored."""
    before = json.loads(json.dumps(parse(["--batch_size", "4", "--run_tags", "a"]).flat()))
    same = parse(
        ["--batch_size", "4", "--run_tags", "a", "--output_dir", "x", "--resume_from_checkpoint", "y"]
    )
    assert changes(before, same.flat(), 4.0) == []
    lines = changes(before, parse(["--batch_size", "6", "--run_tags", "a", "--seed", "1"]).flat(), 5.5)
    assert sorted(line.split()[0] for line in lines) == ["--batch_size", "--seed"]
    assert any("6.0, and was 4.0" in line and "go on from 5.5" in line for line in lines)


def test_a_step_saved_twice_is_replaced_whole(tmp_path):
    """R79. What a kill left of a save goes; the second save of a step takes the place of the first.

    Mutation: the rename on to a folder that is there (OSError: Directory not empty).
    """
    config = parse(["--output_dir", str(tmp_path)])
    engine, told = Engine.start(config), SimpleNamespace(wandb_run_id=None, warn=print)
    engine.prepare(model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    for place in ("step_2.partial", "step_1.replaced", "step_9.universal"):
        (tmp_path / "checkpoints" / f".{place}").mkdir(parents=True)
    for number in (1.0, 2.0):
        model.weight.data.fill_(number)
        checkpoints = Checkpoints(config, engine, "")
        assert checkpoints.save(RunState(step=3), told)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_3"]
        assert problem(path := tmp_path / "checkpoints" / "step_3") is None
        assert torch.load(path / "training.pt")["model"]["weight"].unique().tolist() == [number]
