"""Running out of memory: recognised, forgotten, the same step run again; what fits is found by measuring."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import records

import train
from adaptive.config import BadSetting, Batch, Every, parse
from adaptive.engine import _Holding
from adaptive.memory import MicroBatch, find, ran_out
from adaptive.state import RunState
from adaptive.tasks import Loaded, Task

HERE = __file__
RAN_OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total)"),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"),
    torch.OutOfMemoryError("some text of a later version"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("hipErrorOutOfMemory: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838'),
    torch.distributed.DistBackendError("NCCL error ... Last error: Cuda failure 2 'out of memory'"),
    torch.distributed.DistBackendError("RCCL error ... Last error: HIP failure 'out of memory'"),
    RuntimeError("Failed to CUDA calloc async 4 bytes"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: not enough memory: you tried"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
]
SOMETHING_ELSE = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) in the memory of layer 2"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("DataLoader worker is killed by signal: Bus error. Insufficient shared memory (shm)."),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    RuntimeError("pin memory thread exited unexpectedly"),
    ValueError("CUDA out of memory"),  # a user's text, not the allocator's
    KeyError("out of memory"),
]


@pytest.mark.parametrize("error", RAN_OUT, ids=lambda e: str(e)[:40])
def test_what_running_out_looks_like(error):
    """R68. Mutation: a text left out of TEXTS, or only the type looked at."""
    assert ran_out(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=lambda e: str(e)[:40])
def test_what_only_looks_like_it(error):
    """R68. Mutation: any text with the word memory taken."""
    assert not ran_out(error)


@settings(max_examples=300, deadline=None)
@given(
    limit=st.integers(0, 500), most=st.integers(1, 400), fixed=st.integers(0, 900),
    per_row=st.integers(1, 50), kills=st.booleans(),
)  # fmt: skip
def test_the_largest_size_that_fits_is_found(limit, most, fixed, per_row, kills):
    """R69. Memory linear in the rows: exactly the largest; where running out kills, no try that could.

    Mutations: the guess not clipped to the share; bisection that returns the size that was too large.
    """
    tried, free = [], fixed + per_row * limit

    def bytes_of(rows):
        tried.append(rows)
        return fixed + per_row * rows if fixed + per_row * rows <= free or kills else None

    found = find(most, bytes_of, free, kills)
    assert found == min(limit, most) or (kills and found <= min(limit, most))
    assert len(tried) == len(set(tried)) and max(tried) <= max(1, most)
    if kills:
        assert max(tried) <= 4 and all(fixed + per_row * rows <= free for rows in tried[1:])
        assert found == min(limit, most) or found < 4  # in proportion is an upper bound, not an equality


@settings(max_examples=100, deadline=None)
@given(limit=st.integers(1, 60), most=st.integers(1, 60))
def test_a_hidden_limit_is_found_by_trying(limit, most):
    """R69. What is measured says nothing of the limit (2 to 4 gives 3): the search falls and ends.

    Mutation: the guess returned without a try where a try is harmless.
    """
    assert find(most, lambda rows: 1.0 if rows <= limit else None, 1e9, False) == min(limit, most)


def test_bytes_alive_are_counted_as_the_allocator_does():
    """The peak of two backward passes of a known graph, in bytes. Mutation: freed tensors not subtracted."""
    weight = torch.zeros(1000, requires_grad=True)
    with _Holding() as holding:
        square = weight * weight  # 4,000 bytes
        del square
        (weight * 2.0).exp().sum().backward()
    assert 8_000 <= holding.peak <= 16_100
    assert holding.now == weight.grad.nbytes == 4_000


class Small(Task):
    """A linear model with a running mean, on 64 rows; passes of more than LIMIT rows run out from CALL on."""

    limit, first, last, calls, alive = 10**9, 0, 10**9, 0, None

    def load(self, config):
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(64, 5, generator=draw, dtype=torch.float64)
        return Loaded(train=[{"x": row.numpy()} for row in rows])

    def model(self, config):
        layers = [
            torch.nn.Linear(5, 7),
            torch.nn.BatchNorm1d(7),
            torch.nn.Dropout(0.0),
            torch.nn.Linear(7, 1),
        ]
        layers[1].eval()  # its mean would couple samples; the buffer below moves by itself
        model = Moving(torch.nn.Sequential(*layers)).double()
        model.layers[0].weight.register_hook(lambda gradient: self._run_out(model, "backward"))
        return model

    def loss_sum(self, model, batch):
        Small.calls += 1
        self.rows = len(batch["x"])
        hidden = model(batch["x"])
        self._run_out(model, "forward", hidden)
        return hidden.square().sum(dim=1)

    def _run_out(self, model, where, hidden=None):
        if where != self.where or not self.first <= self.calls <= self.last or self.rows <= self.limit:
            return
        big = torch.zeros(1000)
        if hidden is not None:
            hidden.big = big
        Small.alive = weakref.ref(big)
        raise torch.OutOfMemoryError("CUDA out of memory")


class Moving(torch.nn.Module):
    """Counts its passes in a buffer, as a running mean would move."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        if self.training:
            assert Small.alive is None or Small.alive() is None, "the attempt before is still in memory"
            self.passes += 1
        return self.layers[3](torch.tanh(self.layers[0](x)))


RUN = [
    "--task", f"{HERE}:Small", "--report_to", "none", "--batch_size", "6.5", "--schedule", "constant()",
    "--max_steps", "6", "--optim", "sgd", "--learning_rate", "0.05", "--dtype", "float64",
    "--eval_every", "never", "--normalize_by", "samples", "--optim_args", "momentum=0.9",
]  # fmt: skip


def run(folder, *more, where="never", first=0, last=10**9, limit=10**9):
    class Told(Small):
        pass

    Told.where, Told.first, Told.last, Told.limit = where, first, last, limit
    Small.calls, Small.alive = 0, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_task", lambda name: Told())
        state = train.main(parse([*RUN, "--output_dir", str(folder), *more]))
    return state, torch.load(folder / "model" / "weights.pt"), records(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("where", "first"), [("forward", 1), ("backward", 1), ("forward", 4), ("backward", 4)]
)
def test_a_step_that_ran_out_is_run_again(undisturbed, tmp_path, where, first):
    """R64, R65, R70. In fp64 to 1e-12: weights, losses; counters and positions the same; smaller passes.

    Mutations: the gradient not cleared in `drop` (1e-1); counters moved before the attempt; activations of
    the failed attempt alive at the next (an exception that is kept); the buffer not put back.
    """
    state, weights, lines = run(tmp_path / "run", where=where, first=first, limit=2)
    plain_state, plain, plain_lines = undisturbed
    moved = float(weights.pop("layers.0.weight").sub(plain["layers.0.weight"]).abs().max())
    assert moved < 1e-12 and float(plain["layers.0.weight"].abs().max()) > 0.1
    same = ("step", "updates", "samples", "positions", "batch_size", "carry", "skipped", "weight")
    assert [[r[k] for k in same] for r in lines] == [[r[k] for k in same] for r in plain_lines]
    assert [r["loss"] for r in lines] == pytest.approx([r["loss"] for r in plain_lines], rel=1e-12)
    assert [r["micro_batch_size"] for r in lines] == [32] * (first - 1) + [1 if first == 1 else 1] * (
        7 - first
    )
    assert float(weights["passes"]) == sum(r["passes"] for r in lines), "only passes that counted moved it"
    assert state.micro_batch_size == 1 and plain_state.micro_batch_size is None


def test_what_memory_allowed_is_remembered(tmp_path):
    """R48. A checkpoint keeps the size; the run goes on with it, also where more is written.

    Mutation: the size kept outside of the state.
    """
    folder = tmp_path / "run"
    run(folder, "--max_steps", "3", where="forward", first=2, limit=3)
    manifest = json.loads((folder / "checkpoints" / "step_3" / "manifest.json").read_text())
    assert manifest["state"]["micro_batch_size"] == 3
    _, _, lines = run(folder, "--resume_from_checkpoint", "auto", "--micro_batch_size", "64")
    assert [r["micro_batch_size"] for r in lines] == [32, 3, 3, 3, 3, 3]


def test_rows_grow_back(tmp_path):
    """Halved at step 2 and doubled every second step after it, never above the setting; the run is the same.

    Mutation: regrow_at not moved on (64 after one step).
    """
    state, _, lines = run(
        tmp_path / "run", "--micro_batch_regrow", "2 steps", "--micro_batch_size", "6", "--max_steps", "9",
        where="forward", first=2, last=3, limit=1,
    )  # fmt: skip
    assert [r["micro_batch_size"] for r in lines] == [6, 1, 1, 2, 2, 4, 4, 6, 6]
    assert state.regrow_at is None and state.micro_batch_size == 6


@pytest.mark.parametrize(("setting", "rows"), [
    ("never", [4, 4, 4, 4]), ("2 minutes", [4, 8, 8, 16]), ("5 steps", [8, 16, 16, 16]),
])  # fmt: skip
def test_rows_grow_back_as_this_start_says(setting, rows):
    """An earlier start halved them at "5 steps"; here at steps 10, 15, 16, 20 after 20, 141, 150, 262 s.

    Mutations: grown by `never`; seconds compared with the step that an earlier start had noted.
    """
    state = RunState(micro_batch_size=4, regrow_at=10, regrow_unit="step")
    made = MicroBatch.__new__(MicroBatch)
    made.state, made.most, made.every = state, 64, Every.parse(setting, "micro_batch_regrow")
    seen = []
    for state.step, state.seconds in ((10, 20.0), (15, 141.0), (16, 150.0), (20, 262.0)):
        made._regrow()
        seen.append(state.micro_batch_size)
    assert seen == rows if setting != "5 steps" else seen[:3] == rows[:3]


def test_one_row_too_many_is_an_error(tmp_path):
    """R69. At one row: one line that names the length, and the run stops. Mutation: a size of 0."""
    with pytest.raises(BadSetting, match="one sample of length 5 does not fit in memory, at step 1"):
        run(tmp_path / "run", where="backward", first=1, limit=0)


def test_other_errors_are_not_swallowed(tmp_path, monkeypatch):
    """Mutation: `except Exception` without ran_out."""
    monkeypatch.setattr(Small, "loss_sum", lambda *_: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(tmp_path / "run")


def test_an_evaluation_too_large_is_an_error(tmp_path, monkeypatch):
    """One line that says what to write. Mutation: no `only_once` around the evaluation (a traceback)."""
    monkeypatch.setattr(Small, "measure", lambda *_: bytearray(2**62), raising=False)
    monkeypatch.setattr(
        Small, "load", lambda self, config, load=Small.load: Loaded(*[load(self, config).train] * 2)
    )
    with pytest.raises(
        BadSetting, match="evaluation of step 6 .*smaller --per_device_eval_batch_size than 64"
    ):
        run(tmp_path / "run")


@pytest.mark.parametrize(("limit", "expected"), [(10**9, 6), (3, 3), (1, 1)])
def test_auto_finds_what_fits(undisturbed, tmp_path, limit, expected):
    """Never above the largest share (6 samples), and exactly a hidden limit below 4; weights as without it.

    Mutations: the probe's gradient left in the first step; the buffer moved by the probe.
    """
    state, weights, lines = run(
        tmp_path / "run", "--micro_batch_size", "auto", "--max_batch_size", "6.5",
        where="forward", first=0, limit=limit,
    )  # fmt: skip
    assert state.micro_batch_size == min(expected, 7) or limit == 10**9
    assert float(weights["layers.0.weight"].sub(undisturbed[1]["layers.0.weight"]).abs().max()) < 1e-12
    assert float(weights["passes"]) == sum(r["passes"] for r in lines)


@pytest.mark.parametrize(("device", "repeats", "ends"), [
    ("cuda", True, False), ("cuda", False, True), ("cpu", True, True),
])  # fmt: skip
def test_sizes_are_tried_where_running_out_ends_nothing(monkeypatch, device, repeats, ends):
    """Stages 2 and 3 cannot run a step again. Mutation: every size tried on a GPU, whatever the engine."""
    asked = []
    monkeypatch.setattr("adaptive.memory.find", lambda most, taken, free, kills: asked.append(kills) or 3)
    made = MicroBatch.__new__(MicroBatch)
    made.engine = SimpleNamespace(
        device=torch.device(device), repeats=repeats, maximum=list, free_bytes=lambda: 100
    )
    assert made._find(None, None, 8) == 3 and asked == [ends]


def test_auto_on_a_cpu_follows_the_memory_there_is(monkeypatch):
    """Free memory twice as large: about twice the rows; no pass of more than 4 rows is tried.

    Mutation: the machine's memory not asked.
    """
    tried = []

    def two_mebibytes_a_row(self, task, own):
        tried.append(own)
        return 10e6 + 2e6 * own

    monkeypatch.setattr(MicroBatch, "_try", two_mebibytes_a_row)
    engine = SimpleNamespace(
        world_size=1, repeats=True, device=torch.device("cpu"), maximum=lambda v: v, length=8,
        free_bytes=lambda: free,
    )  # fmt: skip
    data = SimpleNamespace(lengths={"train": 10**6}, longest_row=lambda n: {}, copies=lambda row, n: n)
    config = SimpleNamespace(batch=Batch(micro_batch_size="auto"))
    report = SimpleNamespace(say=lambda line: None)
    sizes = []
    for free in (1e9, 2e9):  # noqa: B007 (read by free_bytes)
        state = RunState.fresh(["train"], 1, 8.0)
        MicroBatch(config, engine, None, data, state, report)
        sizes.append(state.micro_batch_size)
    assert sizes == [int((0.85e9 - 10e6) / 2e6), int((1.7e9 - 10e6) / 2e6)] and max(tried) == 4


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()
