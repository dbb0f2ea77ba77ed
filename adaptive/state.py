"""RunState: all memory of a run outside the model and the optimizer.

A few integers, exact fractions and plain numbers; equal on every process; one small JSON file in a
checkpoint. Where the next sample comes from, what the schedule saw and how far the learning rate has come
follow from it.
To add one: a field with a default; it is then saved, restored and compared like the others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from adaptive.config import BadSetting

if TYPE_CHECKING:
    from adaptive.plan import StepPlan
    from adaptive.signals import Measured


@dataclass
class RunState:
    """Counters as in the README's vocabulary; `step` counts decisions, `updates` changes of the weights."""

    step: int = 0
    updates: int = 0
    samples: int = 0  # consumed, over all processes
    tokens: int = 0  # supervised items consumed, over all processes
    input_tokens: int = 0  # tokens that are not padding
    padding_tokens: int = 0  # positions of the micro-batches that hold nothing
    seconds: float = 0.0  # wall clock of rank 0, resumes added up
    world_size: int = 1  # of the first start: the unit of per-device sizes
    size: float = 0.0  # last target, in the schedule's unit
    sizes: dict[str, float] = field(default_factory=dict)  # source -> its part of `size`
    initial_size: float = 0.0  # of decision 1, in the schedule's unit
    cursor: dict[str, int] = field(default_factory=dict)  # source -> next position
    carry: dict[str, Fraction] = field(default_factory=dict)  # source -> asked for and not yet run, in [0, 1)
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> steps
    skipped_in_a_row: int = 0  # non-finite steps since the last good one
    stream: dict[str, Any] | None = None  # where a stream is read on from: stream.py
    reservoir: dict[str, list] = field(default_factory=dict)  # source -> slots: [position, uses] or None
    signals: dict[str, Any] = field(default_factory=dict)  # last value of each signal
    beta2_product: float = 1.0  # of Adam's beta2 in all updates, for its bias correction
    noise: dict[str, float] | None = None  # running sums of the noise scale's two parts
    bad_samples: int = 0  # consumed but not read, with --on_bad_sample skip
    invalid: int = 0  # measurements that gave no estimate
    micro_batch_size: int | None = None  # most rows of a pass that memory allowed, None: the setting's
    regrow_at: float | None = None  # when it is doubled, in `regrow_unit`
    regrow_unit: str = "step"  # that of --micro_batch_regrow when it was noted
    evaluated_at: int = 0  # step of the last evaluation
    evaluation_owed: bool = False  # one was due and a signal came first
    best_eval_loss: float | None = None
    best_at: int = 0  # step that had it
    schedule: Any = None  # what the schedule's own state_dict() returned

    @classmethod
    def fresh(cls, sources: list[str], world_size: int, initial_size: float) -> RunState:
        """Of a run that has not begun."""
        zeros = dict.fromkeys(sources, 0)
        carry = dict.fromkeys(sources, Fraction(0))
        return cls(
            world_size=world_size, initial_size=initial_size, size=initial_size, cursor=zeros, carry=carry
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; fractions as "p/q"."""
        values = dataclasses.asdict(self)
        values["carry"] = {source: str(carry) for source, carry in self.carry.items()}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Inverse of `to_json`; ValueError names a field this version does not know."""
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(
                f"the state has unknown fields {sorted(unknown)}; it was written by another version"
            )
        carry = {source: Fraction(text) for source, text in values.get("carry", {}).items()}
        return cls(**(values | {"carry": carry}))

    def counters(self) -> dict[str, float]:
        """What intervals such as --eval_every are measured in."""
        return {"step": self.step, "samples": self.samples, "seconds": self.seconds}

    def advance(
        self,
        plan: StepPlan,
        skipped: str | None,
        measured: Measured | None,
        decision: dict,
        beta2: float = 1.0,
    ) -> None:
        """Count a step that is over; samples are consumed whether or not the weights changed."""
        self.step += 1
        self.updates += skipped is None
        self.beta2_product *= beta2 if skipped is None else 1.0
        self.samples += plan.size
        self.cursor, self.carry = plan.cursor, plan.carry
        self.size, self.schedule = decision["size"], decision["schedule"]
        self.sizes = decision.get("sizes", self.sizes)
        self.invalid += decision.get("invalid", 0)
        self.reservoir = plan.reservoir or self.reservoir
        self.seconds = measured.seconds if measured else decision["seconds"]
        if measured:
            self.tokens += measured.items
            self.input_tokens += measured.input_tokens
            self.padding_tokens += measured.padding_tokens
        if skipped:
            self.skipped[skipped] = self.skipped.get(skipped, 0) + 1
        if skipped != "empty":
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped == "nonfinite" else 0

    def learn_evaluation(self, eval_loss: float | None) -> None:
        """Remember what the evaluation of this step said."""
        self.signals["eval_loss"], self.evaluated_at = eval_loss, self.step
        if eval_loss is not None and (self.best_eval_loss is None or eval_loss < self.best_eval_loss):
            self.best_eval_loss, self.best_at = eval_loss, self.step

    def refuse_divergence(self, max_skipped: int) -> None:
        """RuntimeError after more than `max_skipped` non-finite steps in a row."""
        if self.skipped_in_a_row > max_skipped:
            raise RuntimeError(
                f"{self.skipped_in_a_row} non-finite steps in a row; a lower --learning_rate or a longer "
                "--warmup_samples may help, --max_skipped allows more"
            )

    def refuse_no_update(self) -> None:
        """BadSetting where a run ends without having changed a weight: that is no success."""
        if not self.updates:
            why = f"skipped: {self.skipped}" if self.skipped else "its data is less than one step"
            raise BadSetting(
                f"the run ended after {self.step} steps without one update ({why}); look at the data, or "
                "write another --batch_size, --max_steps or --epoch_end keep"
            )
