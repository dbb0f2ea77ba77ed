"""The plan: every position once, on one rank, in the right amount, and never more than the run allows."""

import json
import random
from fractions import Fraction
from itertools import cycle, islice, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adaptive.plan import CARRY_DENOMINATOR, Lengths, exact, passes, plan_step, share
from adaptive.state import RunState

POLICIES = ("keep", "wrap", "drop")
real_sizes = st.one_of(
    st.floats(0.2, 60, allow_nan=False),
    st.integers(1, 60),
    st.sampled_from([0.3, 0.5, 0.9, 1.0, 1.3, 2.5, 18.5]),
)
worlds = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 61])


def advance(state: RunState, plan) -> None:
    """What main does after a step without hardware."""
    state.advance(plan, None if plan.size else "empty", None, {"size": 1.0, "schedule": None, "seconds": 0.0})


def run(lengths: Lengths, sizes, epoch_end: str = "keep", most: int = 5_000) -> list:
    """The plans of a whole run; `sizes` are numbers, or {source: number}, used in a cycle."""
    state, plans = RunState.fresh(list(lengths.sources), 1, 1.0), []
    for size in islice(cycle(sizes), most):
        target = size if isinstance(size, dict) else {"train": size}
        target = {source: exact(value) for source, value in target.items()}
        plan = plan_step(target, state.cursor, state.carry, lengths, epoch_end, state.samples)
        if plan is None:
            return plans
        plans.append(plan)
        advance(state, plan)
    raise AssertionError(f"no end after {most} steps")


def one(rows: int, epochs=1, max_samples=None) -> Lengths:
    return Lengths({"train": rows}, exact(epochs), max_samples)


def positions_of(plan) -> list[tuple[str, int]]:
    return [(i.source, p) for i in plan.intervals for p in range(i.start, i.stop)]


def shares_of(plan, world_size: int) -> list[list[tuple[str, int]]]:
    """[rank][k]: (source, position)."""
    return [
        [(source, int(p)) for source, positions in share(plan, rank, world_size) for p in positions]
        for rank in range(world_size)
    ]


def ends(plans) -> list[tuple[int, bool]]:
    return [(plan.size, plan.cut) for plan in plans]


# Exactly once


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150),
    st.sampled_from([1, 1.5, 2, 3]),
    st.lists(real_sizes, min_size=1, max_size=8),
    worlds,
    st.sampled_from(POLICIES),
)
def test_every_position_of_every_epoch_belongs_to_one_rank_in_one_step(
    rows, epochs, sizes, world_size, policy
):
    """Mutation: `rank - before` without `% world_size` in `share`; a rank gets positions of the step before.

    Mutation: `stop = start + want` in `_cut`; an epoch's positions are used twice.
    """
    lengths = one(rows, epochs)
    plans = run(lengths, [min(size, rows) for size in sizes], policy)
    for plan in plans:
        together = sorted(p for part in shares_of(plan, world_size) for p in part)
        assert together == positions_of(plan)
    used = [p for plan in plans for _, p in positions_of(plan)]
    assert used == sorted(set(used)), "in order, none twice"
    if policy != "drop":
        assert used == list(range(lengths.positions)), "none lost"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.sampled_from([1, 1.5, 3]), st.lists(real_sizes, min_size=1, max_size=8))
def test_drop_discards_whole_remainders_only(rows, epochs, sizes):
    """Mutation: in `_cut`, `start += room` before asking for "drop", or `>=` for `>`: an exact fit is
    discarded.
    """
    lengths = one(rows, epochs)
    plans = run(lengths, [min(size, rows) for size in sizes], "drop")
    cursor, carry = 0, Fraction(0)
    for plan in plans:
        assert not plan.cut
        want = (carry + plan.target["train"]) // 1
        assert plan.size == want, "the same decision runs in the next epoch"
        start = plan.cursor["train"] - plan.size
        gap, left = start - cursor, rows - cursor % rows
        assert gap in (0, left), "part of an epoch was discarded"
        assert gap == 0 or want > left, "a remainder that was large enough was discarded"
        assert plan.size == 0 or start // rows == (plan.cursor["train"] - 1) // rows, "a step in two epochs"
        cursor, carry = plan.cursor["train"], plan.carry["train"]
    last = (carry + exact(min(sizes[len(plans) % len(sizes)], rows))) // 1
    end_of_epoch = min(lengths.positions, (cursor // rows + 1) * rows)
    rest = lengths.positions - end_of_epoch
    assert cursor == lengths.positions or (last > end_of_epoch - cursor and last > min(rest, rows))


# Shares


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 200), worlds)
def test_shares_differ_by_at_most_one(start, size, world_size):
    """Mutation: contiguous blocks of ceil(n / W): the last rank has none where others have several (n=5, W=4:
    2 2 1 0).
    """
    lengths = Lengths({"train": 10**13}, Fraction(1))
    plan = plan_step(
        {"train": Fraction(size)}, {"train": start}, {"train": Fraction(0)}, lengths, "keep", start
    )
    counts = [len(positions) for rank in range(world_size) for _, positions in share(plan, rank, world_size)]
    assert sum(counts) == plan.size == size
    assert max(counts) - min(counts) <= 1
    for rank in range(world_size):
        ((_, positions),) = share(plan, rank, world_size)
        assert (positions % world_size == rank).all(), "position p belongs to rank p mod W"


@settings(max_examples=60, deadline=None)
@given(st.lists(real_sizes, min_size=1, max_size=6), st.lists(real_sizes, min_size=1, max_size=6), worlds)
def test_the_samples_a_rank_needs_next_do_not_depend_on_the_schedule(sizes, others, world_size):
    """Mutation: `first = interval.start + rank` (a share by place inside the step): what was read ahead is
    wrong.
    """
    lines = []
    for schedule in (sizes, others):
        plans = run(one(200), schedule, "wrap")
        ranks = [[shares_of(plan, world_size)[rank] for plan in plans] for rank in range(world_size)]
        lines.append([[p for part in parts for p in part] for parts in ranks])
    assert lines[0] == lines[1]
    assert [p for _, p in lines[0][world_size - 1]] == list(range(world_size - 1, 200, world_size))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), worlds, st.integers(1, 40), st.integers(0, 1000))
def test_passes_are_equal_enough_and_have_one_remainder_shape(size, world_size, micro, start):
    """R93. Mutation: `size // world_size` for the largest share: a rank keeps rows it never computes.

    Mutation: one pass more, or ceil(n / m): idle passes beside a remainder, hence a second shape.
    """
    count = passes(size, world_size, micro)
    shares = [
        len(range(start + (r - start) % world_size, start + size, world_size)) for r in range(world_size)
    ]
    assert count * micro >= max(shares) > (count - 1) * micro, "enough, and none for nothing"
    for rows in shares:
        shapes = [
            max(1, min(micro, rows - at)) for at in range(0, count * micro, micro)
        ]  # an idle pass has one row
        assert len(shapes) == count
        assert len(set(shapes) - {micro}) <= 1
    assert passes(size, world_size, 10**9) == 1


# Amounts


def test_the_tenth_step_of_size_three_tenths_has_the_third_sample():
    """Mutation: a float carry (`exact` returning Fraction(size)): the sample comes at step 11."""
    plans = run(one(3), [0.3], "wrap", most=50)
    assert [step for step, plan in enumerate(plans, 1) if plan.size] == [4, 7, 10]
    carry, steps_with = 0.0, []
    for step in range(1, 11):  # what floating point makes of it
        n = int(carry + 0.3)
        carry = carry + 0.3 - n
        steps_with += [step] * n
    assert steps_with == [4, 7]
    binary, carry = Fraction(0.3), Fraction(0)
    assert (carry + 10 * binary) // 1 == 2, "the nearest binary fraction is below 3/10"


@settings(max_examples=150, deadline=None)
@given(st.lists(real_sizes, min_size=1, max_size=40), st.sampled_from(["keep", "wrap"]))
def test_samples_stay_within_one_of_what_was_asked(sizes, policy):
    """Mutation: `carry + size` left out of `want` (plain floor): 40 steps of 2.5 lose 20 samples.

    Mutation: `carry[source] + size - want` without the old carry: drifts by up to one sample a step.
    """
    asked, done = Fraction(0), 0
    for plan in run(one(150, 3), sizes, policy):
        if plan.cut:  # what the end of an epoch cut off is forgotten
            assert plan.carry["train"] == 0
            asked, done = Fraction(0), 0
            continue
        asked, done = asked + plan.target["train"], done + plan.size
        assert 0 <= asked - done < 1
        assert plan.carry["train"] == asked - done, "the carry is exact"


@pytest.mark.parametrize("policy", ["keep", "wrap"])
def test_carries_stay_short_with_sizes_that_never_repeat(policy):
    """Mutation: `_rounded` returning its argument: denominators of more than 10,000 digits after 2,000
    steps.
    """
    draw = random.Random(7)
    sizes = [draw.uniform(0.05, 30) for _ in range(2_000)]
    shares = [
        Fraction(8 * 3) / exact(draw.uniform(0.1, 1)) for _ in range(2_000)
    ]  # --fraction accumulate: c W / b
    for targets in (sizes, shares):
        asked, done, carry, cursor = Fraction(0), 0, {"train": Fraction(0)}, {"train": 0}
        lengths = one(10**9)
        for size in targets:
            plan = plan_step({"train": exact(size)}, cursor, carry, lengths, policy, done)
            cursor, carry = plan.cursor, plan.carry
            asked, done = asked + Fraction(round(exact(size) * 10**60), 10**60), done + plan.size
            assert carry["train"].denominator <= CARRY_DENOMINATOR
            assert 0 <= carry["train"] < 1
        assert abs(asked - done - carry["train"]) < Fraction(1, 10**36)


@pytest.mark.parametrize(
    "number, fraction",
    [
        (0.3, Fraction(3, 10)),
        (2.5, Fraction(5, 2)),
        (8, Fraction(8)),
        (1e-3, Fraction(1, 1000)),
        (1e22, Fraction(10**22)),
        (0.1 + 0.2, Fraction(30000000000000004, 10**17)),
        (Fraction(1, 3), Fraction(1, 3)),
    ],
)
def test_exact_is_the_decimal_number_that_was_written(number, fraction):
    """Mutation: `Fraction(size)`: 0.3 becomes 5404319552844595 / 2**54."""
    assert exact(number) == fraction


# Ends


@pytest.mark.parametrize("rows, epochs, most, sizes, policy, expected", [
    (10, 1, None, [4], "keep", [(4, False), (4, False), (2, True)]),
    (10, 2, None, [5], "keep", [(5, False)] * 4),
    (10, 2, None, [10], "keep", [(10, False)] * 2),
    (10, 2, None, [10], "drop", [(10, False)] * 2),
    (10, 2, None, [10], "wrap", [(10, False)] * 2),
    (10, 1, None, [4.5], "keep", [(4, False), (5, False), (1, True)]),
    (10, 2, None, [4.5], "keep", [(4, False), (5, False), (1, True)] * 2),
    (10, 2, None, [7], "keep", [(7, False), (3, True)] * 2),
    (10, 2, None, [7], "wrap", [(7, False), (7, False), (6, True)]),
    (10, 2, None, [7], "drop", [(7, False)] * 2),
    (10, 2, None, [5], "drop", [(5, False)] * 4),
    (10, 2, None, [2.5], "wrap", [(2, False), (3, False)] * 4),
    (3, 1, None, [0.5], "keep", [(0, False), (1, False)] * 3),
    (3, 1, None, [0.4], "keep", [(0, False), (0, False), (1, False), (0, False), (1, False), (0, False),
    (0, False),
                                 (1, False)]),
    (10, 1.5, None, [4], "keep", [(4, False), (4, False), (2, True), (4, False), (1, True)]),
    (10, 1.5, None, [4], "wrap", [(4, False)] * 3 + [(3, True)]),
    (10, 1.5, None, [4], "drop", [(4, False)] * 3),
    (7, 0.5, None, [3], "keep", [(3, False), (1, True)]),
    (10, 9, 13, [4], "keep", [(4, False), (4, False), (2, True), (3, True)]),
    (10, 9, 12, [4], "keep", [(4, False), (4, False), (2, True), (2, True)]),
    (10, 9, 13, [4], "wrap", [(4, False)] * 3 + [(1, True)]),
    (10, 9, 14, [4], "drop", [(4, False)] * 3),
    (10, 9, 16, [4], "drop", [(4, False)] * 4),
    (4, 2, None, [9], "keep", [(4, True)] * 2),
    (4, 2, None, [9], "drop", []),
    (1, 3, None, [1], "keep", [(1, False)] * 3),
])  # fmt: skip
def test_ends_of_epochs_and_of_the_run(rows, epochs, most, sizes, policy, expected):
    """Mutations: `want >= room` (an exact fit counts as cut); the carry kept at a cut (10 rows, 4.5: the
    second
    epoch starts with 5); epochs rounded down; `max_samples` compared with positions instead of samples.
    """
    assert ends(run(one(rows, epochs, most), sizes, policy)) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 60),
    st.sampled_from([0.3, 1, 2.5]),
    st.integers(1, 200),
    st.lists(real_sizes, min_size=1, max_size=5),
    st.sampled_from(POLICIES),
)
def test_never_more_than_the_run_allows(rows, epochs, most, sizes, policy):
    """Mutation: `Lengths.left` without `max_samples`; a run of 13 has 16."""
    lengths = one(rows, epochs, most)
    plans = run(lengths, [min(size, rows) for size in sizes], policy)
    samples = sum(plan.size for plan in plans)
    if policy == "drop":
        assert samples <= lengths.samples
    else:
        assert samples == lengths.samples == min(most, -(-exact(epochs) * rows // 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.sampled_from([0.5, 1, 3]),
    st.one_of(st.none(), st.integers(1, 300)),
    st.lists(real_sizes, min_size=1, max_size=5),
    st.sampled_from(["keep", "wrap"]),
)
def test_progress_rises_from_0_to_1(rows, epochs, most, sizes, policy):
    """Mutation: `samples / positions` with --max_samples below an epoch: the decay never reaches its end
    (R63).
    """
    lengths = one(rows, epochs, most)
    plans = run(lengths, sizes, policy)
    states = [(p.cursor, p.consumed + p.size, step) for step, p in enumerate(plans, 1)]
    progress = [lengths.progress({"train": 0}, 0, 0)] + [lengths.progress(*state) for state in states]
    assert progress[0] == 0 and progress[-1] == 1
    assert all(a <= b for a, b in pairwise(progress))
    by_steps = Lengths({"train": 10**9}, Fraction(1), max_steps=8)
    assert by_steps.progress({"train": 100}, 100, 2) == 0.25


# Several sources

sources = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(1, 40), real_sizes), min_size=2, max_size=3
)


@settings(max_examples=100, deadline=None)
@given(sources, st.sampled_from([1, 2.5]), worlds)
def test_several_sources_keep_their_sizes_and_are_balanced_over_their_sum(parts, epochs, world_size):
    """Mutation: each source shared by p mod W: with three sources of one sample each, one rank may get all
    three.

    Mutation: one carry for the sum: a source drifts from its own size by more than one.

    Mutation: at the run's end all for the first source, where `_shrink` divides in proportion.
    """
    lengths = Lengths({source: rows for source, (rows, _) in parts.items()}, exact(epochs))
    plans = run(lengths, [{source: size for source, (_, size) in parts.items()}])
    asked, done = dict.fromkeys(parts, Fraction(0)), dict.fromkeys(parts, 0)
    consumed, cursor = 0, dict.fromkeys(parts, 0)
    for plan in plans:
        shares = shares_of(plan, world_size)
        owners = {p: rank for rank, part in enumerate(shares) for p in part}
        in_order = positions_of(plan)
        assert sum(map(len, shares)) == len(owners) == plan.size
        assert [owners[p] for p in in_order] == [(consumed + j) % world_size for j in range(plan.size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for interval in plan.intervals:
            assert interval.start == cursor[interval.source], "each source goes on where it was"
            cursor[interval.source] = interval.stop
        if plan.cut:  # the run's end: what is left, in proportion to what each source would have taken
            taken = {source: plan.cursor[source] - done[source] for source in parts}
            wanted = {s: (asked[s] - done[s] + plan.target[s]) // 1 for s in parts}
            for source, n in taken.items():
                assert abs(n - Fraction(wanted[source] * plan.size, sum(wanted.values()))) < 1
        consumed += plan.size
        for source in parts:
            asked[source] += plan.target[source]
            done[source] = plan.cursor[source]
            assert plan.cut or 0 <= asked[source] - done[source] < 1
            assert done[source] - asked[source] < 1, "a cut gives no source more than it asked for"
        assert not plan.cut or plan is plans[-1]
    assert consumed == lengths.positions, "epochs x sum of N"


# What is kept


@settings(max_examples=60, deadline=None)
@given(st.lists(real_sizes, min_size=1, max_size=6), st.integers(0, 30), st.sampled_from(POLICIES))
@example([Fraction(10, 3)], 2, "wrap")
def test_a_run_goes_on_from_its_json_as_if_it_had_not_stopped(sizes, stop, policy):
    """Mutation: `float(carry)` in `to_json`: after two steps of 10/3 (accumulate 0.3) the carry 2/3
    comes back as a decimal number.
    """
    lengths = one(50, 2)
    plans = run(lengths, sizes, policy)
    state = RunState.fresh(["train"], 2, 8.0)
    for plan in plans[:stop]:
        advance(state, plan)
    again = RunState.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state and isinstance(again.carry["train"], Fraction)
    for at, expected in enumerate(plans[stop:], min(stop, len(plans))):
        target = {"train": exact(sizes[at % len(sizes)])}
        plan = plan_step(target, again.cursor, again.carry, lengths, policy, again.samples)
        assert plan == expected
        advance(again, plan)
    assert again.step == len(plans) and again.updates == sum(plan.size > 0 for plan in plans)
    assert again.skipped.get("empty", 0) == again.step - again.updates


def test_a_state_of_another_version_is_refused():
    """Mutation: unknown fields ignored; a later version's memory would be lost without a word."""
    with pytest.raises(ValueError, match="slots"):
        RunState.from_json(RunState.fresh(["train"], 1, 8.0).to_json() | {"slots": []})


def test_planning_changes_nothing_it_was_given():
    """Mutation: `cursor[source] += n` in place: a checkpoint or a retry of the step would see the future."""
    cursor, carry, target = {"train": 3}, {"train": Fraction(1, 2)}, {"train": Fraction(5, 2)}
    for policy in POLICIES:
        first = plan_step(target, cursor, carry, one(100), policy, 3)
        assert first == plan_step(target, cursor, carry, one(100), policy, 3)
    assert (cursor, carry, target) == ({"train": 3}, {"train": Fraction(1, 2)}, {"train": Fraction(5, 2)})
