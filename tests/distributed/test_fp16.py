"""fp16 and bf16 on every engine that has both: real arithmetic, scalers, overflows; two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import audits, launch, records, run_python
from test_tasks_same import distance

import train
from adaptive.config import parse

COMMON = ["--report_to", "none", "--optim", "sgd", "--learning_rate", "0.1", "--lr_scheduler_type",
          "constant", "--batch_size", "5.5", "--schedule", "constant()", "--max_steps", "8", "--audit",
          "--sequence_length", "32", "--micro_batch_size", "2", "--max_grad_norm", "3", "--eval_every",
          "never", "--eval_share", "0.002", "--save_every", "5"]  # fmt: skip
ENGINES = ["cpu_ddp", "cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"]
HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def in_fp32(folder: Path, skipped: set[int], monkeypatch) -> Path:
    """The same run on one process in fp32, with no update in the steps `skipped`."""
    update, steps = train.update, iter(range(1, 99))

    def update_or_not(engine, measured, *settings):
        if next(steps) not in skipped:
            return update(engine, measured, *settings)
        engine.discard()
        return "overflow"

    with monkeypatch.context() as patched:
        patched.setattr(train, "update", update_or_not)
        train.main(parse([*COMMON, "--output_dir", str(folder)]))
    return folder


def alike(folder: Path, fp32: Path, within: float) -> None:
    """Losses and weights `within` of those in fp32, norms of gradients within five times as much."""
    for line, right in zip(records(folder), records(fp32), strict=True):
        assert (line["positions"], line["skipped"]) == (right["positions"], right["skipped"])
        assert line["loss"] == pytest.approx(right["loss"], rel=within)
        if not line["skipped"]:
            assert line["grad_norm"] == pytest.approx(right["grad_norm"], rel=5 * within)
    assert distance(folder, fp32) < within


@pytest.mark.parametrize("layout", ENGINES)
def test_steps_that_overflow_are_skipped_and_all_others_are_those_of_fp32(tmp_path, monkeypatch, layout):
    """R60 to R63: unscaled once, clipped to 3 as in fp32; skipped steps count and move nothing; the scale is
    in the checkpoint of step 5.

    Mutations: norms taken in fp16 (every step an "overflow" that ZeRO then took); backward without the scale
    under ZeRO-0 (weights stay where they were); "scaler" left out of save_state (DDP overflows again).
    """
    whole, again, bf16 = tmp_path / "whole", tmp_path / "again", tmp_path / "bf16"
    resume = ["--resume_from_checkpoint", str(whole / "checkpoints/step_5")]
    runs = [[*COMMON, "--fp16", "--output_dir", str(folder), *more]
            for folder, more in ((whole, []), (again, resume))]  # fmt: skip
    runs.append([*COMMON, "--bf16", "--output_dir", str(bf16)])
    launch(layout, 2, HERE / "halves.py", json.dumps(runs), ADAPTIVE_TIMEOUT_MINUTES="1")
    told = records(whole)
    skipped = {line["step"] for line in told if line["skipped"]}
    assert {line["skipped"] for line in told} == {None, "overflow"} and 1 <= len(skipped) <= 4
    assert told[-1]["updates"] == 8 - len(skipped) and told[-1]["samples"] == 44
    assert list(audits(whole)) == [0, 1]
    alike(whole, in_fp32(tmp_path / "fp32", skipped, monkeypatch), 2e-3)
    alike(bf16, in_fp32(tmp_path / "fp32_whole", set(), monkeypatch), 2e-2)
    assert [line["loss"] for line in records(again)] == [line["loss"] for line in told[5:]]
    assert distance(again, whole) == 0


def test_fp16_where_deepspeed_has_none_is_one_line():
    """Mutation: the check left out (a traceback of DeepSpeed's)."""
    asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json"}
    done = run_python("train.py", *COMMON, "--fp16", **asked, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # fmt: skip
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("error: --fp16: "), (
        done.stderr
    )
