"""One run, cut by processes, micro-batch, engine and read-ahead, has the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import audits, decisions, launch, records
from material import ROWS
from safetensors.torch import load_file

HERE = Path(__file__).parent
MATERIAL = HERE / "material.py"
COMMON = [
    "--task",
    f"{MATERIAL}:Uneven",
    "--batch_size",
    "2.3",
    "--schedule",
    f"{MATERIAL}:wild",
    "--num_train_epochs",
    "2",
    "--lr_scheduler_type",
    "constant",
    "--report_to",
    "none",
    "--audit",
    "--check_agreement",
    "--eval_every",
    "40 steps",
    "--weight_decay",
    "0.01",
]
SGD = ["--optim", "sgd", "--learning_rate", "0.1"]
ADAMW64 = ["--optim", "adamw_torch", "--learning_rate", "1e-3", "--dtype", "float64"]
ADAMW = ["--optim", "adamw_torch", "--learning_rate", "1e-3", "--max_steps", "20"]
HALF = [*ADAMW, "--beta_scaling", "half_life"]
CHECKED = [*HALF, "--self_check", "7"]
CHECKPOINTED = [*SGD, "--gradient_checkpointing"]
CUTS = {  # layout, processes -> {name: (optimizer, micro-batch, workers)}
    ("cpu", 1): {"sgd-1-3-2": (SGD, 3, 2), "adamw64-1-1-0": (ADAMW64, 1, 0)},
    ("cpu_ddp", 2): {"sgd-2-3-0": (SGD, 3, 0), "adamw64-2-64-2": (ADAMW64, 64, 2)},
    ("cpu_ddp", 3): {"sgd-3-1-2": (SGD, 1, 2), "adamw64-3-3-0": (ADAMW64, 3, 0), "half-3": (CHECKED, 3, 0)},
    ("cpu_ddp", 4): {"sgd-4-64-0": (SGD, 64, 0), "adamw64-4-3-0": (ADAMW64, 3, 0)},
    ("cpu_zero0", 2): {"sgd-z0": (SGD, 3, 0), "adamw-z0": (ADAMW, 3, 0), "half-z0": (CHECKED, 3, 0)},
    ("cpu_zero1", 2): {"sgd-z1": (SGD, 3, 0), "adamw-z1": (ADAMW, 3, 0), "half-z1": (CHECKED, 3, 0)},
    ("cpu_zero2", 2): {"sgd-z2": (SGD, 3, 0), "adamw-z2": (ADAMW, 3, 0), "half-z2": (CHECKED, 3, 0)},
    ("cpu_zero3", 2): {"sgd-z3": (SGD, 3, 0), "adamw-z3": (ADAMW, 3, 0), "half-z3": (CHECKED, 3, 0)},
    ("cpu_fsdp2", 3): {
        "sgd-f": (CHECKPOINTED, 1, 0),
        "adamw64-f": (ADAMW64, 3, 0),
        "half-f": (CHECKED, 3, 0),
    },
}
REFERENCES = {
    "sgd": (SGD, 64, 0), "adamw64": (ADAMW64, 64, 0), "adamw": (ADAMW, 64, 0), "half": (HALF, 64, 0),
}  # fmt: skip
TOLERANCE = {"sgd": 1e-6, "adamw64": 1e-9, "adamw": 1e-5, "half": 1e-5}

pytestmark = pytest.mark.slow


def run_all(folder: Path, layout: str, processes: int, cases: dict) -> None:
    runs = [
        [
            *COMMON,
            *optimizer,
            "--micro_batch_size",
            str(micro),
            "--dataloader_num_workers",
            str(workers),
            "--output_dir",
            str(folder / name),
        ]
        for name, (optimizer, micro, workers) in cases.items()
    ]
    launch(
        layout, processes, HERE / "several_runs.py", json.dumps(runs), cold=True, ADAPTIVE_TIMEOUT_MINUTES="1"
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    run_all(folder, "cpu", 1, REFERENCES)
    return folder


def distance(one: Path, other: Path) -> float:
    """Norm of the difference over the norm, of the worst tensor."""
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).double().norm() / a[name].double().norm()) for name in a)


@pytest.mark.parametrize(("layout", "processes"), CUTS)
def test_weights_losses_and_samples_do_not_depend_on_the_cut(reference, tmp_path, layout, processes):
    """R24. Mutations: mean of micro-batch means in train.gradient (1e-2); `world_size *` left out of
    loss_scale (1e-1); gradient_accumulation_boundary always True (ZeRO-1, 2: 1e-1); share() that gives all
    ranks the first one's rows (rows twice). Of half_life (with a self check, which must not disturb):
    torch's own bias correction (1e-2). Of the self check: the gradient of this process alone compared (0.5
    and more). Of FSDP2: `set_requires_gradient_sync(not last)`; rows of `_part` by strides and not in one
    piece.
    """
    run_all(tmp_path, layout, processes, CUTS[layout, processes])
    for name in CUTS[layout, processes]:
        kind = name.split("-")[0]
        mine, whole = tmp_path / name, reference / kind
        assert list(audits(mine)) == list(range(processes)), "another number of processes ran"
        ours, theirs = records(mine), records(whole)
        assert len(ours) == len(theirs) >= (20 if kind in ("adamw", "half") else 60)
        checks = {r["step"]: r["self_check"] for r in ours if "self_check" in r}
        assert list(checks) == ([7, 14] if kind == "half" else [])
        assert all(0 <= apart < 1e-5 for apart in checks.values())
        assert decisions(ours) == decisions(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a["loss"] is None and b["loss"] is None) or a["loss"] == pytest.approx(
                b["loss"], rel=1e-6
            )
        evals = [[e["eval_loss"] for e in records(folder, "eval")] for folder in (mine, whole)]
        assert evals[0] == pytest.approx(evals[1], rel=1e-5)
        assert distance(mine, whole) < TOLERANCE[kind]
        assert used_rows(mine) == used_rows(whole)


def used_rows(folder: Path) -> list[list[int]]:
    """Rows of every step over all ranks; checks that each epoch has each row exactly once."""
    steps: dict[int, list[int]] = {}
    for lines in audits(folder).values():
        for line in lines:
            steps.setdefault(line["step"], []).extend(line["indices"])
    for record in records(folder):
        assert len(steps[record["step"]]) == record["batch_size"]
    order = [row for step in sorted(steps) for row in sorted(steps[step])]
    for start in range(0, len(order), ROWS):
        epoch = order[start : start + ROWS]
        assert len(set(epoch)) == len(epoch)
    return [sorted(steps[step]) for step in sorted(steps)]
