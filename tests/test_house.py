"""The house: imports go one way, train.py and its functions stay short, lines stay readable."""

import ast
import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, run_python

PACKAGE = ROOT / "adaptive"
SOURCES = [ROOT / "train.py", *sorted(PACKAGE.rglob("*.py"))]
OWN_CODE = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

# file or folder -> what of this package it may import: itself and what stands upstream of it (DESIGN 9)
UPSTREAM = {
    "config.py": set(),
    "order.py": set(),
    "plan.py": set(),
    "participation.py": {"plan", "config"},
    "state.py": {"config", "plan"},
    "memory.py": {"config", "plan", "state"},
    "schedules": {"config", "plan", "state", "schedules"},
    "scaling.py": {"config", "plan", "state", "schedules"},
}
LIGHT = {"numpy", "tyro", "yaml"}  # what these may import beside the standard library


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_of(place: str) -> list[Path]:
    return sorted((PACKAGE / place).glob("*.py")) if not place.endswith(".py") else [PACKAGE / place]


def imported(source: str) -> set[str]:
    """Modules that running `source` can import, inside functions too; those under `if TYPE_CHECKING` never
    are.

    "adaptive.plan" for every way to write it: import adaptive.plan, from adaptive import plan, from
    adaptive.plan ...
    """
    modules, waiting = set(), [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            whole = node.module == "adaptive" or node.module == "adaptive.schedules"
            modules |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if whole else {str(node.module)}
            )
        waiting += ast.iter_child_nodes(node)
    return modules


def functions(path: Path) -> list[tuple[str, int]]:
    """(name, lines of the body) of every function; signature and docstring do not count, comments and blanks
    do.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found.append((node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0))
    return found


@pytest.mark.parametrize("place", [p for p in UPSTREAM if p != "participation.py" or (PACKAGE / p).exists()])
def test_imports_go_one_way(place):
    """Mutations: `import torch` in plan.py, also inside a function; `from adaptive.signals import KNOWN` in
    schedules.
    """
    paths = files_of(place)
    assert paths, f"no file {place}"
    for path in paths:
        for module in imported(path.read_text()):
            top, *below = module.split(".")
            if top == "adaptive":
                assert below[0] in UPSTREAM[place], (
                    f"{name(path)} imports {module}, which is downstream of it"
                )
            else:
                assert top in LIGHT | set(sys.stdlib_module_names), f"{name(path)} imports {module}"


def test_the_table_of_imports_has_no_cycle():
    """Mutation: "schedules" added to what plan.py may import."""
    places = {
        place.removesuffix(".py"): allowed - {place.removesuffix(".py")}
        for place, allowed in UPSTREAM.items()
    }
    while places:
        free = [place for place, allowed in places.items() if not allowed & set(places)]
        assert free, f"a cycle among {sorted(places)}"
        places = {place: allowed for place, allowed in places.items() if place not in free}


def test_upstream_modules_start_without_torch():
    """Mutation: `import torch` in any module that scaling.py or records.py reaches, however it is written."""
    program = (
        "import sys\n"
        "from adaptive import config, order, plan, scaling, schedules, state\n"
        "heavy = {'torch', 'accelerate', 'transformers', 'datasets', 'deepspeed', 'wandb'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print(sorted(m for m in sys.modules if m.startswith('adaptive.')))\n"
    )
    done = run_python("-c", program, timeout=60, cold=True)
    heavy, own = map(ast.literal_eval, done.stdout.splitlines())
    assert heavy == [], done.stderr
    upstream = {f"adaptive.{place.removesuffix('.py')}" for place in UPSTREAM}
    assert {".".join(module.split(".")[:2]) for module in own} <= upstream


def test_nothing_in_the_package_imports_the_program():
    """Mutation: `from train import gradient` in evaluate.py. Tools may."""
    for path in SOURCES[1:]:
        if path.parent.name != "tools":
            assert "train" not in {module.split(".")[0] for module in imported(path.read_text())}, name(path)


def test_heavy_packages_are_imported_only_where_they_are_used():
    """Mutation: `import wandb` at the top of report.py: every rank, and every run without it, pays for it."""
    for path in SOURCES:
        top_level = ast.Module(
            [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))], []
        )
        at_start = {module.split(".")[0] for module in imported(ast.unparse(top_level))}
        assert not at_start & {"deepspeed", "wandb", "matplotlib", "tensorboard"}, name(path)


COLLECTIVE = {
    "from_rank0", "sum", "sum_integers", "start_sum", "maximum", "wait", "gather", "same_everywhere",
    "stop_asked_anywhere", "save_state", "load_state", "load_weights", "save_model", "whole_state", "seed",
    "full_gradient", "reduce_gradient", "backward", "all_reduce", "all_gather", "broadcast", "barrier",
    "wait_for_everyone", "main_first",
}  # fmt: skip


def told_to_rank_0_alone(source: str) -> list[str]:
    """Collectives in what only rank 0 runs: under `if ...is_main`, in what from_rank0 is given, and in the
    functions of the same file that are called there.
    """
    tree = ast.parse(source)
    named = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    waiting: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp)) and re.fullmatch(r"[\w.]*is_main", ast.unparse(node.test)):
            waiting += node.body if isinstance(node.body, list) else [node.body]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_rank0":
            waiting += [arg.body for arg in node.args if isinstance(arg, ast.Lambda)]
    seen, found = set(), []
    for node in waiting:  # which grows
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            owner, _, called = ast.unparse(call.func).rpartition(".")
            if owner in ("", "self") and called in named and called not in seen:
                seen.add(called)
                waiting.append(named[called])
            if called in COLLECTIVE and owner.rpartition(".")[2] in ("self", "engine", "dist", "accelerator"):
                found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_rank_0_alone_waits_for_nobody(path):
    """R24, R29, R77, R89. Mutation: `self.engine.wait()` in Checkpoints._seal; what is said and drawn knows
    no other process at all.
    """
    assert told_to_rank_0_alone(path.read_text()) == []
    if path.name in ("report.py", "console.py", "trackers.py", "records.py"):
        assert not {m for m in imported(path.read_text()) if m.startswith(("torch", "adaptive.engine"))}


def test_waiting_alone_is_found():
    source = (
        "def save(self):\n    if self.engine.is_main:\n        self.seal()\n"
        "    self.engine.from_rank0(lambda: sum(self.engine.sum([1])))\n"
        "    work(lambda: dist.barrier() if self.is_main else None)\n"
        "    if not self.is_main:\n        self.engine.wait()\n"
        "def seal(self):\n    self.engine.wait()\n"
    )
    found = {"self.engine.wait()", "self.engine.sum([1])", "dist.barrier()"}
    assert set(told_to_rank_0_alone(source)) == found


def test_train_py_reads_in_200_lines():
    """Mutation: a feature written into the loop."""
    assert len((ROOT / "train.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_are_short(path):
    """Mutation: `check` of config.py with all its tables inside (52 lines). `main` may have 120, the others
    40.
    """
    long = {f: n for f, n in functions(path) if n > (120 if f == "main" and path.name == "train.py" else 40)}
    assert not long, f"{name(path)}: {long}"


def test_the_ruler_measures():
    """Mutation: `imported` without its walk into functions; `functions` counting from the signature."""
    source = (
        "import os.path\nfrom adaptive import plan, order as o\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
        "def f():\n    from adaptive.schedules.literal import parse_call\n    import accelerate.utils as u\n"
    )
    assert imported(source) == {
        "os.path", "adaptive.plan", "adaptive.order", "json", "adaptive.schedules.literal",
        "accelerate.utils",
    }  # fmt: skip
    lengths = dict(functions(ROOT / "tests" / "test_house.py"))
    assert (
        lengths["name"] == 1
        and lengths["test_train_py_reads_in_200_lines"] == 1
        and lengths["functions"] == 6
    )


@pytest.mark.parametrize("path", OWN_CODE, ids=name)
def test_lines_fit(path):
    """Mutation: any line of more than 110 characters."""
    long = [at for at, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 110]
    assert not long, f"{name(path)}: lines {long}"
