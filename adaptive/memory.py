"""A pass that ran out of memory -> the same step in smaller passes; memory there is -> rows of a pass.

How many rows a pass has is about memory only and never changes the gradient (plan.py, scaling.py), so it may
change at any step. An attempt that some process cannot finish is dropped by all (engine.py: no gradient, no
draw, no counter is left of it), the rows are halved, and the same step runs again. What memory allowed is
part of the run's state.
To add one: the text of an allocator that is not recognised is a line of TEXTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adaptive.config import BadSetting, Batch, Config, Every
from adaptive.plan import passes
from adaptive.state import RunState

TYPES = {"OutOfMemoryError", "MemoryError"}  # torch's for every accelerator; Python's and NumPy's
TEXTS = (  # of torch's RuntimeErrors that have no type of their own; in lower case
    "cuda out of memory", "cuda error: out of memory", "cudaerrormemoryallocation",
    "hip out of memory", "hip error: out of memory", "hiperroroutofmemory",
    "xpu out of memory", "mps backend out of memory",
    "cublas_status_alloc_failed", "cusolver_status_alloc_failed", "cusparse_status_alloc_failed",
    "cudnn_status_alloc_failed", "cufft_alloc_failed",
    "hipblas_status_alloc_failed", "rocblas_status_memory_error", "miopenstatusallocfailed",
    "hipsolver_status_alloc_failed",
    "cuda failure 'out of memory'", "cuda failure 2 'out of memory'", "failed to cuda malloc",  # NCCL
    "failed to cuda calloc", "hip failure 'out of memory'", "failed to hip malloc",  # RCCL
    "nvml_success == r internal assert failed",  # on a MIG slice, where the allocator asks how much there is
    "defaultcpuallocator: can't allocate memory", "defaultcpuallocator: not enough memory", "std::bad_alloc",
)  # fmt: skip
MARGIN = 0.85  # of the free memory that `auto` plans with: allocators need room to move
PROBES = (1, 2, 4)  # rows whose memory is measured; what more rows take follows from the last two
LOOK_AT = 256  # rows of the dataset among which the longest is looked for


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on NVIDIA, AMD, a MIG slice, in a collective or on a CPU."""
    if TYPES & {kind.__name__ for kind in type(error).__mro__}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in TEXTS)


class MicroBatch:
    """Rows of a pass over a run: --micro_batch_size, less where memory does not allow it."""

    def __init__(self, config: Config, engine: Any, task: Any, data: Any, state: RunState, report: Any):
        """Collective: finds the size before the first step, where it is asked for or cannot shrink later."""
        self.config, self.batch, self.engine = config, config.batch, engine
        self.state, self.report = state, report
        self.every = Every.parse(self.batch.micro_batch_regrow, "micro_batch_regrow")
        auto = self.batch.micro_batch_size == "auto"
        share = -(-max(data.lengths.values()) // engine.world_size)
        self.most = share if auto else self.batch.micro_batch_size
        if state.micro_batch_size is None and (auto or not engine.repeats):
            longest = data.longest_row(LOOK_AT)
            found = self._find(task, lambda rows: data.copies(longest, rows), min(self.most, share))
            if auto or found < min(self.most, share):
                state.micro_batch_size = found
                report.say(f"passes of at most {found} rows: what fits in memory, by measuring small ones")

    def run(self, attempt: Callable[[Batch], Any], size: int) -> tuple[Batch, Any]:
        """`attempt` a step of `size` samples until it fits; the settings it ran with, what it returned."""
        engine, state = self.engine, self.state
        self._regrow()
        while True:
            batch = engine.norms.prepare(self.settings(), state.step + 1, size, engine.world_size)
            engine.seed(state.step + 1)
            measured = attempt(batch) if size else None
            if measured is not None or not size:
                return batch, measured
            rows = min(batch.micro_batch_size, -(-size // engine.world_size))  # of the largest pass there was
            self._shrink(rows, passes(size, engine.world_size, rows))

    def settings(self) -> Batch:
        """--micro_batch_size and its group, with the rows that fit as far as is known."""
        rows = min(self.most, self.state.micro_batch_size or self.most)
        return (
            self.batch if rows == self.batch.micro_batch_size else replace(self.batch, micro_batch_size=rows)
        )

    def _shrink(self, rows: int, n_passes: int) -> None:
        if rows == 1:
            self._refuse()
        (longest,) = self.engine.maximum([self.engine.length])
        self.state.micro_batch_size = rows // 2
        if self.every.count:
            self.state.regrow_at, self.state.regrow_unit = self._now() + self.every.count, self.every.unit
        self.report.warn(
            f"out of memory at step {self.state.step + 1} with passes of {rows} rows of length "
            f"{longest:.0f} ({n_passes} of them); the step is run again with {rows // 2}"
        )

    def _regrow(self) -> None:
        """Double the rows once --micro_batch_regrow has passed since they were halved or doubled."""
        state = self.state
        if state.regrow_at is None or not self.every.count:
            return
        if state.regrow_unit != self.every.unit:  # of a start with another setting: counted anew
            state.regrow_at, state.regrow_unit = self._now() + self.every.count, self.every.unit
        if self._now() < state.regrow_at:
            return
        state.micro_batch_size = min(2 * (state.micro_batch_size or self.most), self.most)
        grown = state.micro_batch_size == self.most
        state.regrow_at = None if grown else self._now() + self.every.count

    def _now(self) -> float:
        return self.state.counters()[{"sample": "samples", "minute": "seconds"}.get(self.every.unit, "step")]

    def _find(self, task: Any, copies: Callable[[int], Any], most: int) -> int:
        engine = self.engine
        free = -engine.maximum([-MARGIN * engine.free_bytes()])[0]  # on the fullest process
        ends = engine.device.type == "cpu" or not engine.repeats  # the process, or the run: see passes()
        found = find(most, lambda rows: self._try(task, copies(rows)), free, ends)
        return found or self._refuse()

    def _refuse(self) -> None:
        (longest,) = self.engine.maximum([self.engine.length])
        raise BadSetting(
            f"one sample of length {longest:.0f} does not fit in memory, at step {self.state.step + 1}; "
            "write a smaller --sequence_length or model, --gradient_checkpointing, or --bf16"
        )

    def _try(self, task: Any, own: Any) -> float | None:
        """Bytes that passes of the rows in `own` hold at once, on the fullest process; None: it ran out."""
        engine = self.engine
        collated = task.collate(own.rows)

        def two_passes() -> None:  # in the second the gradient of the first is there too
            engine.open_step([collated])
            with engine.passes():
                (batch,) = task.before_passes(engine, [collated], own)
                for last in (False, True):
                    with engine.pass_(last):
                        engine.backward(task.loss_sum(engine.model, engine.to_device(batch)).sum() * 0.0)

        engine.seed(self.state.step + 1)
        taken = engine.peak_bytes(two_passes)
        failed = engine.sum_integers([engine.starved is not None])[0]
        engine.drop()
        return None if failed else engine.maximum([taken])[0]


def find(most: int, bytes_of: Callable[[int], float | None], free: float, kills: bool) -> int:
    """The most rows, up to `most`, that hold at most `free` bytes; `bytes_of` tries some, None: it ran out.

    Larger sizes follow from small ones, and are tried where running out is an exception and nothing worse:
    where it `kills`, as on a CPU, no size is tried that could.
    """
    taken: dict[int, float] = {}

    def fit(rows: int) -> bool:
        known = max(taken, default=0)
        if kills and known and taken[known] * rows / known > free:  # in proportion: more than it can be
            return False
        held = bytes_of(rows)
        if held is None or held > free:
            return False
        taken[rows] = held
        return True

    fits, too_many = 0, most + 1
    for rows in PROBES:
        if rows < too_many:
            fits, too_many = (rows, too_many) if fit(rows) else (fits, rows)
    if too_many > most > fits > 1:
        per_row = max(taken[fits] - taken[fits // 2], 1) / (fits - fits // 2)
        guess = min(int(fits + (free - taken[fits]) / per_row), most)
        if guess <= fits or kills or fit(guess):
            return max(guess, fits)
        too_many = guess
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if fit(middle) else (fits, middle)
    return fits
