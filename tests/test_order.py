"""The order: a permutation for every size, equal everywhere, and as irregular as a random one."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive import order as module
from adaptive.order import VERSION, Order

POWERS = range(11, 23)

GOLDEN_MESSAGE = (
    "The order changed: every checkpoint written before would resume on other samples. If that is meant, "
    "raise adaptive.order.VERSION and write new golden vectors in the same commit; if not, undo the change."
)
GOLDEN = [  # seed, source, size, positions, indices
    (0, "train", 1, [0, 1, 9223372036854775808], [0, 0, 0]),
    (
        0,
        "train",
        10,
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
        [4, 0, 8, 9, 7, 1, 6, 3, 2, 5, 9, 4, 3, 0, 5, 6, 7, 1, 8, 2],
    ),
    (42, "train", 1000000, [0, 1, 2, 999999, 1000000], [583710, 806433, 493807, 342932, 673759]),
    (7, "train", 1048577, [0, 1, 1048576, 1048577], [650688, 222955, 937449, 980865]),
    (-3, "données", 1000, [0, 1, 2, 999, 1000], [228, 575, 600, 97, 769]),
    (
        42,
        "wiki",
        1000000000000,
        [0, 1, 2, 999999999999, 1000000000000, 1000000000000000],
        [85004107588, 107203156388, 659708777906, 784218053835, 442221660603, 682603109771],
    ),
    (
        1180591620717411303424,
        "train",
        4611686018427387904,
        [0, 4611686018427387903, 4611686018427387904, 18446744073709551615],
        [1080314011091533405, 2370778752387122629, 3131179273350330028, 2611358207409926705],
    ),
]


def epoch_of(order: Order, epoch: int = 0) -> np.ndarray:
    """Return the indices of one whole epoch, (size,)."""
    return order.indices(np.arange(epoch * order.size, (epoch + 1) * order.size))


def assert_bijection(indices: np.ndarray, size: int):
    """Fail unless indices hold each of 0 .. size - 1 exactly once."""
    assert indices.shape == (size,) and indices.dtype == np.int64
    assert indices.min() >= 0 and indices.max() < size, f"N={size}: an index is out of range"
    assert (np.bincount(indices, minlength=size) == 1).all(), f"N={size}: repeated indices"


def reference_index(seed: int, source: str, size: int, position: int) -> int:
    """Return the index by the text of the module docstring, one position, exact Python integers."""
    epoch, value = divmod(position, size)
    keys = module._epoch_keys(seed, source, epoch).tolist()
    side = next(a for a in range(max(4, math.isqrt(size) - 1), 2**32) if a * a >= size)
    while True:
        left, right = divmod(value, side)
        for key in keys:
            z = (right + key) % 2**64
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            left, right = right, (left + ((z ^ (z >> 31)) >> 1)) % side
        value = left * side + right
        if value < size:
            return value


# A permutation


def test_every_size_up_to_2048_is_a_bijection():
    """Mutation: walk with `if` instead of `while`; sizes far below side * side leave the range.

    Mutation: `% side` as `& (side - 1)` in the round; sides that are no power of two repeat indices.
    """
    for size in range(1, 2049):
        assert_bijection(epoch_of(Order(0, "train", size)), size)


@pytest.mark.parametrize("power", POWERS)
def test_sizes_around_powers_of_two_are_bijections(power):
    """Mutation: `side` without its `+ 1`; the domain no longer covers the size."""
    for size in (2**power - 1, 2**power, 2**power + 1):
        assert_bijection(epoch_of(Order(1, "train", size)), size)


@given(seed=st.integers(), source=st.text(max_size=8), size=st.integers(1, 3000), epoch=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_any_seed_source_and_epoch_is_a_bijection(seed, source, size, epoch):
    """Mutation: `_mix(right + key)` as `_mix(left + key)`; such a round cannot be undone."""
    assert_bijection(epoch_of(Order(seed, source, size), epoch), size)


# The same everywhere


@pytest.mark.parametrize("seed, source, size, positions, indices", GOLDEN)
def test_golden_vectors(seed, source, size, positions, indices):
    """R46, R47. Mutation: any change of a constant, of N_ROUNDS, the keys' text or VERSION changes them."""
    assert VERSION == 1, GOLDEN_MESSAGE
    found = Order(seed, source, size).indices(np.array(positions, dtype=np.uint64)).tolist()
    assert found == indices, GOLDEN_MESSAGE


@given(seed=st.integers(0, 99), size=st.integers(1, 2**62), position=st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_equals_exact_integer_arithmetic(seed, size, position):
    """Mutation: leave out `>> np.uint64(1)`, or key and constant in signed integers; other indices."""
    assert Order(seed, "train", size).index(position) == reference_index(seed, "train", size, position)


@given(size=st.integers(1, 10**12), positions=st.lists(st.integers(0, 10**16), max_size=40))
@settings(max_examples=100, deadline=None)
def test_random_access_equals_bulk(size, positions):
    """Mutation: walk all elements again instead of those out of range; an index depends on its neighbours.

    Unsorted, repeated and spread over many epochs. Mutation: `which` all zeros; all get one epoch's keys.
    """
    order = Order(3, "train", size)
    bulk = order.indices(np.array(positions, dtype=np.int64))
    assert bulk.tolist() == [order.index(position) for position in positions]


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 10**9])
def test_an_interval_across_an_epoch_boundary(size):
    """Mutation: take the first position's epoch for all; the second epoch repeats the first."""
    order, start = Order(5, "train", size), 3 * size - min(size, 50)
    across = order.indices(np.arange(start, 3 * size + min(size, 50)))
    before, after = np.split(across, [3 * size - start])
    assert before.tolist() == order.indices(np.arange(start, 3 * size)).tolist()
    assert after.tolist() == order.indices(np.arange(3 * size, 3 * size + min(size, 50))).tolist()
    if size >= 1000:
        assert epoch_of(Order(5, "train", 1000), 2).tolist() != epoch_of(Order(5, "train", 1000), 3).tolist()


def test_types_of_positions_and_of_settings_do_not_matter():
    order, positions = Order(np.int64(4), "train", np.int32(1000)), np.arange(990, 1010)
    assert order == Order(4, "train", 1000) and hash(order) == hash(Order(4, "train", 1000))
    for dtype in (np.int32, np.int64, np.uint64):
        assert (order.indices(positions.astype(dtype)) == order.indices(positions)).all()
    assert order.indices(np.array([], dtype=np.int64)).shape == (0,)
    assert positions[0] == 990, "the caller's array was changed"


# As irregular as a random order


@pytest.mark.parametrize("other", [Order(1, "train", 10_000), Order(0, "valid", 10_000), None])
def test_seeds_sources_and_epochs_have_unrelated_orders(other):
    """Rows at the same place in two unrelated orders: Poisson with mean 1.

    Mutation: leave seed, source or epoch out of the keys; 10,000 agree.
    """
    first = epoch_of(Order(0, "train", 10_000))
    second = epoch_of(other) if other else epoch_of(Order(0, "train", 10_000), 1)
    assert (first == second).sum() < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_keys_do_not_run_into_each_other():
    """Mutation: keys from f"{seed}{source}{epoch}"; epoch 11 of "a" is epoch 1 of "a1"."""
    assert epoch_of(Order(0, "a", 1000), 11).tolist() != epoch_of(Order(0, "a1", 1000), 1).tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_frequent(size):
    """Over 400 epochs per order, chi-squared within 5 standard deviations.

    Mutation: MIN_SIDE = 3; 243 standard deviations at 5 rows.
    """
    orders, per_order = math.factorial(size), 400
    n_epochs = orders * per_order
    rows = Order(1, "train", size).indices(np.arange(n_epochs * size)).reshape(n_epochs, size)
    counts = np.unique(rows @ size ** np.arange(size), return_counts=True)[1]
    assert len(counts) == orders
    chi_squared = ((counts - per_order) ** 2 / per_order).sum()
    assert abs(chi_squared - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1))


def class_ratio(labels: np.ndarray, n_classes: int, interval: int = 64) -> float:
    """Return the variance of class counts in intervals over that of a random order (hypergeometric).

    labels: (epochs, size) in the order of training, a class in [0, n_classes) each.
    """
    n_epochs, size = labels.shape
    n_intervals = size // interval
    cut = labels[:, : n_intervals * interval].reshape(n_epochs * n_intervals, interval)
    found = expected = 0.0
    for label in range(n_classes):
        share = (labels[0] == label).mean()
        counts = (cut == label).sum(axis=1)
        found += ((counts - interval * share) ** 2).mean()
        expected += interval * share * (1 - share) * (size - interval) / (size - 1)
    return found / expected


def class_ratios(indices: np.ndarray) -> dict[str, float]:
    """Return the ratio for two labellings of the rows, two ways of taking positions, five numbers of classes.

    indices: (epochs, size), size a square. Rows are labelled in turn (index mod C) or sorted by label,
    as in many files; an interval has consecutive positions, or positions one side apart, which share the
    network's right half.
    """
    n_epochs, size = indices.shape
    side = math.isqrt(size)
    assert side * side == size
    apart = indices.reshape(n_epochs, side, side).transpose(0, 2, 1).reshape(n_epochs, size)
    ratios = {}
    for way, taken in (("consecutive", indices), ("a side apart", apart)):
        for n_classes in (2, 4, 8, 10, 16):
            labels = (taken % n_classes).astype(np.int8)
            ratios[f"{way}, in turn, {n_classes}"] = class_ratio(labels, n_classes)
            labels = (taken * n_classes // size).astype(np.int8)
            ratios[f"{way}, sorted, {n_classes}"] = class_ratio(labels, n_classes)
    return ratios


def affine_epoch(size: int, epoch: int) -> np.ndarray:
    """Return an epoch, (size,), of the same network with round function `c * right + d`, size a square."""
    side = math.isqrt(size)
    keys = module._epoch_keys(0, "train", epoch)
    left, right = np.divmod(np.arange(size), side)
    for key in keys.tolist():
        left, right = right, (left + (key % side) * right + (key >> 32) % side) % side
    return left * side + right


@pytest.mark.parametrize("size", [2**20, 10**6])
def test_class_counts_vary_as_in_a_random_order(size):
    """About 47,000 intervals: the ratio's own standard deviation is below 0.7 %.

    Mutation: N_ROUNDS = 2; ratios a side apart, sorted, are far from 1. F affine: the next test.
    """
    order = Order(0, "train", size)
    ratios = class_ratios(np.stack([epoch_of(order, epoch) for epoch in range(3)]))
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("size", [2**20, 10**6])
def test_the_class_statistic_finds_an_affine_round_function(size):
    """The statistic has teeth: a bijection with affine rounds is rejected for either way and labelling.

    Nearly every ratio is wrong, up to 60 times; single ones may be right by chance.
    """
    epochs = np.stack([affine_epoch(size, epoch) for epoch in range(2)])
    assert_bijection(epochs[0], size)
    ratios = class_ratios(epochs)
    for kind in ("consecutive, in turn", "consecutive, sorted", "apart, in turn", "apart, sorted"):
        outside = [not 0.95 < ratio < 1.05 for name, ratio in ratios.items() if kind in name]
        assert len(outside) == 5 and sum(outside) >= 3, (kind, ratios)


# Cost and errors


def test_a_trillion_rows_cost_no_memory():
    """Mutation: np.arange(size), or a table of one side (8 MB), anywhere."""
    tracemalloc.start()
    try:
        Order(0, "train", 10**12).indices(np.arange(10**15, 10**15 + 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000, f"{peak} bytes for 256 indices"


@pytest.mark.parametrize("size", [0, -1, 2.5, 8.0, "8", None, True, 2**62 + 1])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"size=.*write the dataset's number of rows"):
        Order(0, "train", size)


@pytest.mark.parametrize("seed, source", [(1.5, "train"), ("1", "train"), (1, b"train"), (1, None)])
def test_a_bad_seed_or_source_is_refused(seed, source):
    with pytest.raises(ValueError, match="write"):
        Order(seed, source, 10)


@pytest.mark.parametrize("position", [-1, 2**64, 1.0])
def test_a_bad_position_is_refused(position):
    with pytest.raises(ValueError, match="position"):
        Order(0, "train", 10).index(position)


@pytest.mark.parametrize("positions", [[3, -1], [1.0], [True], [[1, 2], [3, 4]]])
def test_bad_positions_are_refused(positions):
    with pytest.raises(ValueError, match="position"):
        Order(0, "train", 10).indices(np.array(positions))
