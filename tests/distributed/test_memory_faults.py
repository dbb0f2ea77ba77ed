"""One rank runs out of memory: the same step again on all, or a clear stop on all. One rank runs out of disk:
training goes on. hungry.py is what runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from launching import audits, decisions, launch, records, run_python
from test_same_answer import COMMON, HERE, SGD, distance, used_rows

from adaptive.checkpoint import problem

pytestmark = pytest.mark.slow
SETTINGS = [
    *COMMON[2:], *SGD, "--task", f"{HERE / 'hungry.py'}:Hungry", "--micro_batch_size", "64",
    "--max_steps", "16", "--eval_every", "never",
]  # fmt: skip
FAULTS = {  # layout, processes -> --run_name of each run: where, rank, from which pass on, rows that fit
    ("cpu", 1): ("forward-0-1-3", "backward-0-5-2"),
    ("cpu_ddp", 2): ("forward-1-1-3", "backward-1-5-2", "backward-0-1-1"),
    ("cpu_zero0", 2): ("backward-1-3-2",),
    ("cpu_zero1", 2): ("forward-1-1-3", "backward-1-5-2"),
}


def arguments(folder: Path, *names: str) -> str:
    runs = [[*SETTINGS, "--run_name", name, "--output_dir", str(folder / name)] for name in names]
    return json.dumps(runs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    runs = arguments(folder, "never-0-0-0", *FAULTS["cpu", 1])
    done = run_python(HERE / "several_runs.py", runs)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize(("layout", "processes"), FAULTS)
def test_the_step_is_run_again(undisturbed, tmp_path, layout, processes):
    """R14, R64 to R66, R70. SGD in fp32: weights to 1e-6 of the undisturbed run, with its samples, sizes and
    losses; passes as small as the rank that ran out needs, on every rank.

    Mutations: the reduction left in the last backward (`apart` False: the other rank hangs); the gradient
    not forgotten (1e-1); no agreement before the reduction (hangs); micro-batch halved on one rank only.
    """
    folder, names = tmp_path, FAULTS[layout, processes]
    if processes > 1:
        launch(
            layout,
            processes,
            HERE / "several_runs.py",
            arguments(folder, *names),
            ADAPTIVE_TIMEOUT_MINUTES="0.5",
        )
    else:
        folder = undisturbed
    for name in names:
        mine, whole = folder / name, undisturbed / "never-0-0-0"
        assert list(audits(mine)) == list(range(processes)), "another number of processes ran"
        ours, theirs = records(mine), records(whole)
        assert decisions(ours) == decisions(theirs)
        assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-6)
        assert used_rows(mine) == used_rows(whole)
        assert distance(mine, whole) < 1e-6
        fitting = int(name.split("-")[3])
        assert ours[-1]["micro_batch_size"] <= fitting < theirs[-1]["micro_batch_size"]


STOPPED = [  # layout, fault, what to write
    ("cpu_zero2", "backward-1-9-0", "--micro_batch_size"),
    ("cpu_zero3", "forward-1-9-0", "--micro_batch_size"),
    ("cpu_fsdp2", "forward-1-9-0", "--micro_batch_size"),
    ("cpu_ddp", "measure-1-0-0", "--per_device_eval_batch_size"),
]


@pytest.mark.parametrize(("layout", "fault", "write"), STOPPED, ids=[case[0] for case in STOPPED])
def test_what_cannot_be_run_again_stops_everywhere(tmp_path, layout, fault, write):
    """ZeRO 2 and 3 and FSDP2 reduce or gather inside passes, and an evaluation is no step: the rank that ran
    out and the one that waits both end, well within the process group's timeout of 2 minutes, with the same
    line, and a status that is not 0.

    Mutation: `_watch` not started, or no word left (the other rank says "Connection closed", or hangs).
    """
    began = time.monotonic()
    done = launch(
        layout, 2, HERE / "several_runs.py", arguments(tmp_path, fault), check=False, timeout=110,
        ADAPTIVE_TIMEOUT_MINUTES="2",
    )  # fmt: skip
    assert done.returncode != 0 and time.monotonic() - began < 100
    line = "rank 1 ran out of memory"
    told = [said for said in (done.stdout + done.stderr).splitlines() if line in said]
    assert any("[rank1]" in said or "[rank 1]" in said for said in told), done.stderr[-3000:]
    assert any("[rank0]" in said or "[rank 0]" in said for said in told), done.stderr[-3000:]
    assert all(write in said and "--resume_from_checkpoint auto" in said for said in told)


@pytest.mark.parametrize(("layout", "processes"), [("cpu", 1), ("cpu_ddp", 2), ("cpu_zero3", 2)])
def test_the_optimizers_step_runs_out(undisturbed, tmp_path, layout, processes):
    """In the step of the last rank, with half of its weights changed: all stop with one line, within the
    timeout; what was saved before is whole, and from there on the run is the undisturbed one, to 1e-6.

    Mutation: no `only_once` around the update (a traceback, and no line on the other rank).
    """
    settings = [*SETTINGS, "--output_dir", str(tmp_path / "run"), "--save_every", "1 steps", "--run_name"]
    run = [HERE / "several_runs.py", json.dumps([[*settings, f"step-{processes - 1}-12-0"]])]
    how, began = {"check": False, "timeout": 110, "ADAPTIVE_TIMEOUT_MINUTES": "2"}, time.monotonic()
    done = launch(layout, processes, *run, **how) if processes > 1 else run_python(*run)
    assert done.returncode != 0 and time.monotonic() - began < 100
    lines = [
        said for said in (done.stdout + done.stderr).splitlines() if "in the optimizer's update of" in said
    ]
    assert len(lines) >= processes, done.stderr[-3000:]
    assert all("--resume_from_checkpoint auto" in said and "fsdp2.yaml" in said for said in lines)
    steps = [int(path.name.split("_")[1]) for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert f"in the optimizer's update of step {max(steps) + 1}" in lines[0]

    again = [
        HERE / "several_runs.py",
        json.dumps([[*settings, "never-0-0-0", "--resume_from_checkpoint", "auto"]]),
    ]
    done = launch(layout, processes, *again) if processes > 1 else run_python(*again)
    assert decisions(records(tmp_path / "run")) == decisions(records(undisturbed / "never-0-0-0"))
    assert list(audits(tmp_path / "run")) == list(range(processes)), "another number of processes ran"
    assert distance(tmp_path / "run", undisturbed / "never-0-0-0") < 1e-6


@pytest.mark.parametrize(("layout", "rank"), [("cpu_zero1", 1), ("cpu_zero3", 0)])
def test_the_disk_of_one_rank_is_full(undisturbed, tmp_path, layout, rank):
    """R81. From its 14th pass on: warnings, training to its end as undisturbed, the checkpoints before stay,
    nothing half-written beside them, and the end is one line, within the timeout.

    Mutation: DeepSpeed's save left by the rank whose write failed (the other waits in its barrier).
    """
    began, folder, run_name = time.monotonic(), tmp_path / "run", f"disk-{rank}-14-20"
    flags = [*SETTINGS, "--output_dir", str(folder), "--save_every", "4 steps", "--run_name", run_name]
    done = launch(
        layout, 2, HERE / "several_runs.py", json.dumps([flags]), check=False, timeout=110,
        ADAPTIVE_TIMEOUT_MINUTES="2",
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode != 0 and time.monotonic() - began < 100
    assert "was not saved" in said and f"rank {rank}: " in said, said[-3000:]
    assert "the last checkpoint could not be written" in said, said[-3000:]
    assert decisions(records(folder)) == decisions(records(undisturbed / "never-0-0-0"))
    left = list((folder / "checkpoints").iterdir())
    assert 0 < len(left) < 4 and not any(path.name == "step_16" or problem(path) for path in left), left
