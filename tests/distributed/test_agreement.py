"""Sums and decisions reach every process, the same bits on all, for any number of processes."""

from __future__ import annotations

import json
import math

import pytest
from launching import launch, run_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_agreement(world_size, tmp_path):
    """A sum that a rank begins and never asks for is over before the next message.

    Mutations: partner rank ^ distance without the ranks above the power of 2 (3, 7 hang or differ); no
    `_finish` (from_rank0 reads a sum's bytes).
    """
    script = tmp_path / "agree.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    done = run_python(*launcher, script, tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(told) == world_size
    for one in told:
        assert one["sums"] == told[0]["sums"], "the same bits"
        assert one["integers"] == [sum(range(world_size)) + 2**60, world_size]
        assert one["long"] == 50_000
        assert one["error"] == "rank 0 failed with KeyError: 'x'" or one["rank"] == 0
    for j, total in enumerate(told[0]["sums"]):
        parts = [one["own"][j] for one in told]
        assert total == pytest.approx(math.fsum(parts), abs=1e-12 * max(map(abs, parts)))


@pytest.mark.parametrize("leave", ["", "Engine.leave()"])
def test_the_watching_thread_ends_before_the_process(leave, tmp_path):
    """A thread that is always inside the store while two processes end, tidily or not: status 0.

    Mutation: `_rest` that does nothing (exit status -6 without `leave`: "terminate called").
    """
    script = tmp_path / "leave.py"
    script.write_text(WATCHED + leave)
    done = launch("cpu_ddp", 2, script, timeout=120, cold=True)
    assert done.stdout.count("left by 2") == 2 and "terminate called" not in done.stderr


WATCHED = """
from adaptive.config import parse
from adaptive.engine import Engine

engine = Engine.start(parse(["--output_dir", "unused"]))
Engine._leaving.wait = lambda seconds: Engine._leaving.is_set()
engine.listen()
engine.wait()
print(f"left by {engine.world_size}\\n", end="", flush=True)  # one write, which no other cuts in two
"""
SCRIPT = """
import json, random, sys
from datetime import timedelta
import torch.distributed as dist
from adaptive.agreement import Agreement

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world_size = dist.get_rank(), dist.get_world_size()
processes, draw = Agreement(rank, world_size), random.Random(rank)
own = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-6, 6) for _ in range(20)]
told = {"rank": rank, "own": own, "sums": processes.sum(own)}
asked = processes.start_sum([rank + 2**60 * (rank == 1), 1])
never = processes.start_sum([rank])  # as when this rank runs out of memory before it asks
told["long"] = len(processes.from_rank0(lambda: "x" * 50_000))
told["integers"] = asked()
try:
    processes.from_rank0(lambda: {}["x"])
except (KeyError, RuntimeError) as error:
    told["error"] = str(error)
processes.same_everywhere("plan", "the plan")
processes.wait()
open(f"{sys.argv[1]}/rank{rank}.json", "w").write(json.dumps(told))
dist.destroy_process_group()
"""
