"""ZeRO with the optimizer's state in CPU memory, tried on CPUs: its copies are made there too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import ROOT, audits, records, run_python
from test_same_answer import COMMON, HERE, SGD, distance

from adaptive.tasks.causal_lm import CausalLM

pytestmark = pytest.mark.slow


class Spoilt(CausalLM):
    """Some rows have no finite loss: their steps are discarded, wherever they are computed."""

    def loss_sum(self, model, batch):
        losses = super().loss_sum(model, batch)
        return torch.where(batch["input_ids"].sum(dim=1) % 41 == 5, torch.nan, losses)


def layout(folder: Path, stage: int) -> Path:
    """The shipped file of this stage, for 2 processes without a GPU, which has no memory to pin."""
    settings = json.loads((ROOT / "ds_configs" / f"zero{stage}_offload.json").read_text())
    for name in ("offload_optimizer", "offload_param"):
        if name in settings["zero_optimization"]:
            settings["zero_optimization"][name]["pin_memory"] = False
    (folder / "ds.json").write_text(json.dumps(settings))
    config = (ROOT / "accelerate_configs" / f"cpu_zero{stage}.yaml").read_text()
    path = folder / "layout.yaml"
    path.write_text(config.replace(f"ds_configs/zero{stage}.json", str(folder / "ds.json")))
    return path


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_steps_are_those_of_one_process(tmp_path, stage):
    """A gradient that was discarded is gone, after a step that is not finite and after one that --self_check
    ran again; norms and skipped steps are those of one process, weights agree to 1e-6.

    Mutation: micro_step_id left above 0 by `discard` (twice the gradient with --self_check, and no finite
    step after one that is not).
    """
    flags = [*COMMON, *SGD, "--micro_batch_size", "3", "--max_steps", "24", "--eval_every", "never", "--task",
             f"{__file__}:Spoilt", "--max_skipped", "24", "--max_grad_norm", "0"]  # fmt: skip
    runs = {name: [*flags, "--output_dir", str(tmp_path / name)] for name in ("one", "two", "checked")}
    runs["checked"] += ["--self_check", "1"]
    done = run_python(HERE / "several_runs.py", json.dumps([runs["one"]]))
    assert done.returncode == 0, done.stderr[-3000:]
    command = ["-m", "accelerate.commands.launch", "--config_file", layout(tmp_path, stage)]
    both = json.dumps([runs["two"], runs["checked"]])
    done = run_python(*command, "--main_process_port", "0", HERE / "several_runs.py", both)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    one = records(tmp_path / "one")
    skipped = [record["skipped"] for record in one]
    assert skipped.count("nonfinite") >= 3 and skipped.count(None) >= 10
    for name in ("two", "checked"):
        assert set(audits(tmp_path / name)) == {0, 1}
        told = records(tmp_path / name)
        assert [record["skipped"] for record in told] == skipped
        norms = [[record["grad_norm"] for record in lines if record["grad_norm"]] for lines in (told, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert distance(tmp_path / name, tmp_path / "one") < 1e-6
