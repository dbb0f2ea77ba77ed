"""Run every benchmark at a tiny size, each in a child of one process that has imported what they share.

python tests/fork_benchmarks.py NAME...        # prints {name: [exit status, output]} as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import forking  # noqa: E402

SIDE_BY_SIDE = 2


def compare(module) -> None:
    """Each contender in a process of its own, as `main` starts them, and its table."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in module.CONTENDERS:
            said = Path(folder, name)
            assert forking.run(lambda n=name: contend(module, n), said) == 0, said.read_text()
            found[name] = [json.loads(said.read_text().splitlines()[-1])]
    module.show(found, "1")


def contend(module, name: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    module.contend(name, time.time())


def schedules(module) -> None:
    module.SHARED["max_samples"] = 12
    with tempfile.TemporaryDirectory() as folder:
        sys.argv += ["--only", "fixed 4", "--seeds", "1", "--out", f"{folder}/results.json"]
        module.main()


def gpu(module) -> None:
    """What gpu.sh runs on one process, and its table, which misses the other engines here."""
    module.RUN[module.RUN.index("--max_steps") + 1] = str(module.STEPS)
    module.train.tell_evaluation = lambda *arguments: True  # the whole validation set, at the end of each run
    with tempfile.TemporaryDirectory() as folder:
        parts = {"alone": module.alone, "ddp": lambda at: module.on_engine(at, "ddp")}
        for name, work in parts.items():
            Path(folder, f"{name}.json").write_text(json.dumps(work(Path(folder))))
        sys.argv.append(folder)
        with contextlib.suppress(SystemExit):
            module.main()


def interleave(module) -> None:
    blocks = module.run(["--batch_size", "4", "--sequence_length", "16"], lambda: None, 1, 2)
    print([[len(block) for block in part] for part in blocks])


# name -> what makes it small, and how it is run; by default its `main`
SMALL: dict[str, dict] = {
    "checkpoints": {"ROUNDS": 1, "WIDTH": 16, "LAYERS": 2},
    "compare": {"ROWS": 2, "STEPS": 4, "WARM": 1, "ROUNDS": 1},
    "gpu": {"STEPS": 6},
    "interleave": {},
    "order": {"N_CALLS": 3},
    "packing": {"ROWS": 2, "LENGTH": 64, "ROUNDS": 1, "STEPS": 1},
    "plain_loop": {"ROWS": 2, "N_BLOCKS": 3, "BLOCK_STEPS": 2},
    "planning": {"CALLS": 3},
    "resume": {"SAMPLES": (10**3, 10**6), "MEASURED": 10**4, "ROUNDS": 1, "STREAMED": 1600, "FILES": 2},
    "schedules": {},
    "signal_cost": {"ROUNDS": 1, "STEPS": 1},
    "step_overhead": {"ROWS": 4, "STEPS": 24, "LEFT_OUT": 4},
}
RUN: dict[str, Callable] = {"compare": compare, "gpu": gpu, "schedules": schedules, "interleave": interleave}


def one(name: str) -> None:
    sys.argv[1:] = []
    module = __import__(name)
    for constant, value in SMALL[name].items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        setattr(module, constant, value)
    RUN.get(name, lambda module: module.main())(module)


def main() -> None:
    import accelerate  # noqa: F401  (what the children share)
    import datasets  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import train  # noqa: F401

    torch.set_num_threads(1)
    waiting, running, done = list(sys.argv[1:]), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < SIDE_BY_SIDE:
                name = waiting.pop(0)
                running[forking.start(lambda name=name: one(name), Path(folder, name))] = name
            child, status, used = os.wait3(0)
            name = running.pop(child)
            print(f"{name}: {used.ru_utime + used.ru_stime:.1f} s of CPU time", file=sys.stderr)
            done[name] = [os.waitstatus_to_exitcode(status), Path(folder, name).read_text()]
    print(json.dumps(done))


if __name__ == "__main__":
    main()
