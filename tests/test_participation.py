"""Bernoulli and reservoir: how often, how equally, and that nothing but saved state decides."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from launching import records
from test_gradient import alone  # noqa: F401 (a fixture)
from test_mixing import TWO, distance, naive, run, weights_of

from adaptive import scaling
from adaptive.config import BadSetting, Config, parse
from adaptive.data import Data
from adaptive.participation import plan_with
from adaptive.plan import Lengths, Pick, StepPlan, exact, share
from adaptive.state import RunState

STEPS = 10_000


def settings(participation: str, seed: int = 42, **batch) -> Config:
    config = parse(["--participation", participation, "--seed", str(seed)])
    for name, value in batch.items():
        setattr(config.batch, name, value)
    return config


def plans(config: Config, sizes: dict, lengths: Lengths, steps: int, state: RunState | None = None) -> list:
    """The next `steps` plans, or all; `state` is moved on."""
    state = state or RunState.fresh(list(sizes), 1, 1.0)
    made, decision = [], {"targets": {source: str(exact(size)) for source, size in sizes.items()}}
    while len(made) < steps and (plan := plan_with(config, decision, state, lengths)):
        made.append(plan)
        state.advance(
            plan, None if plan.size else "empty", None, {"size": 1.0, "schedule": None, "seconds": 0}
        )
    return made


ENDLESS = Lengths({"train": 10**9}, Fraction(1))


@pytest.mark.parametrize("size", [1.0, 1.3, 2.5, 7.9])
def test_bernoulli_above_one_has_the_mean_weight_one(size):
    """The mean of n/M over 10,000 steps is 1 within 4 sigma, and n is floor(G) or one more.

    Mutation: `<=` against 1 - frac (1.3 draws seven of ten); the carry added too (1 + frac / 2 M).
    """
    config = settings("bernoulli")
    made = plans(config, {"train": size}, ENDLESS, STEPS)
    fraction = size % 1
    totals = [plan.size * scaling.sample_weight(config.batch, plan, 1) for plan in made]
    assert {plan.size for plan in made} <= {math.floor(size), math.floor(size) + 1}
    sigma = math.sqrt(fraction * (1 - fraction) / STEPS) / size
    assert abs(sum(totals) / STEPS - 1) <= 4 * sigma + 1e-12
    if fraction:
        draws = [plan.size > size for plan in made]
        pairs = sum(a and b for a, b in zip(draws, draws[1:], strict=False)) / STEPS
        assert abs(pairs - fraction**2) < 5 * fraction / math.sqrt(STEPS), "steps are drawn independently"


@pytest.mark.parametrize("size", [0.1, 0.25, 0.9])
def test_bernoulli_below_one_takes_its_share_of_steps(size):
    """The share of non-empty steps is G within 4 sigma; every sample weighs 1.

    Mutation: u drawn from the seed alone (all steps, or none).
    """
    config = settings("bernoulli")
    made = plans(config, {"train": size}, ENDLESS, STEPS)
    assert abs(sum(plan.size for plan in made) / STEPS - size) < 4 * math.sqrt(size * (1 - size) / STEPS)
    assert {scaling.sample_weight(config.batch, plan, 1) for plan in made if plan.size} == {1.0}


@pytest.mark.parametrize("epoch_end", ["keep", "wrap"])
def test_bernoulli_loses_nothing(epoch_end):
    """Who is not drawn stays next in line: positions of two epochs in order, each once, on 3 processes too.

    Mutation: the cursor moved on by ceil(G) where n was drawn.
    """
    lengths, config = Lengths({"a": 61, "b": 20}, Fraction(2)), settings("bernoulli", epoch_end=epoch_end)
    for sizes in ({"a": 2.3}, {"a": 1.7, "b": 0.4}):
        part = Lengths({s: lengths.sources[s] for s in sizes}, Fraction(2))
        made = plans(config, sizes, part, STEPS)
        used = {source: [] for source in sizes}
        for plan in made:
            assert plan.carry == dict.fromkeys(sizes, Fraction(0)), "nothing is carried"
            for rank in range(3):
                for source, positions in share(plan, rank, 3):
                    used[source] += positions.tolist()
        assert all(sorted(own) == list(range(len(own))) for own in used.values())
        assert sum(map(len, used.values())) == part.positions


def uses_of(correction: float, steps: int = 12_000, size: float = 0.75) -> tuple[np.ndarray, np.ndarray]:
    """(uses, sums of factors) of every position that arrived; K = 2."""
    config = settings("reservoir", usage_correction=correction)
    made = plans(config, {"train": size}, ENDLESS, steps)
    uses, weights = np.zeros(made[-1].cursor["train"]), np.zeros(made[-1].cursor["train"])
    for plan in made:
        for pick in plan.picks:
            uses[pick.position] += 1
            weights[pick.position] += pick.factor
    return uses, weights


def test_reservoir_uses_every_sample_alike_and_the_correction_narrows_it():
    """Expected use 1 for early, middle and late arrivals, within 4 sigma; the corrected weight has a mean
    within 5 % of 1 and a smaller spread.

    Mutations: an empty slot filled at once (the first are used K times as often); admission always (two in
    three are used, where half arrive in a slot at most); the sign of the correction (the spread grows).
    """
    uses, weights = uses_of(0.1)
    for part in np.array_split(uses[:-200], 6):
        sigma = uses.std() / math.sqrt(len(part))
        assert abs(part.mean() - 1) < 4 * sigma, part.mean()
    assert 0.3 < (uses > 0).mean() < 0.5, "one in K = 2 gets a slot"
    plain = uses_of(0.0)[1]
    assert np.array_equal(plain, uses), "without a correction every use counts 1"
    assert abs(weights.mean() / uses.mean() - 1) < 0.05
    assert weights.std() < 0.97 * uses.std()
    firsts = [uses_first(seed) for seed in range(120)]
    assert abs(np.mean(firsts) - 1) < 4 * np.std(firsts) / math.sqrt(120), "the very first samples too"


def uses_first(seed: int) -> float:
    """Mean use of the first 2 positions, K = 4."""
    made = plans(settings("reservoir", seed), {"train": 0.25}, ENDLESS, 320)
    return sum(pick.position < 2 for plan in made for pick in plan.picks) / 2


def test_reservoir_goes_on_from_its_json_and_is_bounded():
    """Mutations: slots kept outside RunState, or `slots` changed in place (a plan made twice differs); sizes
    judged at the first step alone: one that grew draws the same few samples several times in a step.
    """
    lengths, config = Lengths({"a": 50, "b": 40}, Fraction(3)), settings("reservoir")
    sizes = {"a": 0.5, "b": 0.3}
    whole = plans(config, sizes, lengths, STEPS)
    state = RunState.fresh(["a", "b"], 1, 1.0)
    plans(config, sizes, lengths, 100, state)
    again = RunState.from_json(json.loads(json.dumps(state.to_json())))
    twin, decision = RunState.from_json(again.to_json()), {"targets": {"a": "1/2", "b": "3/10"}}
    for _ in range(30):
        assert plan_with(config, decision, twin, lengths) == plan_with(config, decision, twin, lengths)
        plans(config, sizes, lengths, 1, twin)
    rest = plans(config, sizes, lengths, STEPS, again)
    assert [asdict(plan) for plan in rest] == [asdict(plan) for plan in whole[100:]]
    assert {s: len(slots) for s, slots in again.reservoir.items()} == {"a": 2, "b": 4}, "ceil(1/b) slots"
    assert sum(again.cursor.values()) == lengths.positions, "all have arrived"
    for plan in whole:
        picked = [pair for rank in range(3) for pair in share(plan, rank, 3)]
        together = sorted((source, int(p)) for source, positions in picked for p in positions)
        assert together == sorted((pick.source, pick.position) for pick in plan.picks)
        assert all(pick.position < plan.cursor[pick.source] for pick in plan.picks), "none before it arrives"
    with pytest.raises(BadSetting, match="below 1 per device"):
        plans(config, {"a": 1.0, "b": 0.3}, lengths, 1)
    with pytest.raises(BadSetting, match="below 1 per device"):
        plans(config, {"a": 4.0, "b": 0.3}, lengths, 1, twin)


@pytest.mark.parametrize("participation", ["bernoulli", "reservoir"])
def test_a_run_with_draws_and_a_stop(tmp_path, participation):
    """Weights are those of SGD by hand over the audit; cut at step 30 and resumed it is bit-identical.

    Mutation: `reservoir` not saved.
    """
    flags = [*TWO[:8], "--schedule", "constant", "--batch_size", "0.9", "--participation",
             participation, "--usage_correction", "0.3"]  # fmt: skip
    state = run(tmp_path / "run", *flags)
    told = records(tmp_path / "run")
    assert {r["participation"] for r in told} == {participation}
    assert distance(weights_of(tmp_path / "run"), naive(tmp_path / "run")) < 1e-12
    assert sum(state.cursor.values()) == 3 * 42 and ("arrived" in told[0]) == (participation == "reservoir")
    run(tmp_path / "cut", *flags, "--max_steps", "30")
    again = run(tmp_path / "cut", *flags, "--resume_from_checkpoint", "auto")
    assert again.to_json() | {"seconds": 0, "signals": 0} == state.to_json() | {"seconds": 0, "signals": 0}
    assert [r["positions"] for r in records(tmp_path / "cut")] == [r["positions"] for r in told]


def test_factors_of_a_reservoir_are_those_of_its_samples():
    """Mutation: factors of all picks in place of this rank's, or in another order."""
    datasets = {"a": [{"x": n} for n in range(50)], "b": [{"x": n} for n in range(40)]}
    picks = tuple(Pick("a" if n < 4 else "b", 7 * n % 11, 1 + n / 8) for n in range(9))
    plan = StepPlan(dict.fromkeys(datasets, Fraction(4)), (), {}, {}, 5, False, "reservoir", picks)
    for world_size in (1, 2, 3):
        held = []
        for rank in range(world_size):
            data = Data(datasets, parse([]), rank, world_size)
            own = data.share(plan, {"a": 0.5, "b": 0.25})
            assert [row["x"] for row in own.rows] == own.indices
            held += zip(own.sources, own.indices, own.weights, strict=True)
        right = [
            (
                p.source,
                data.sources[p.source].order.index(p.position),
                {"a": 0.5, "b": 0.25}[p.source] * p.factor,
            )
            for p in picks
        ]
        assert sorted(held) == sorted(right)
