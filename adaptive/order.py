"""The random-access shuffle.

    position (int, absolute) -> epoch, offset = divmod(position, N) -> index (int, row of the dataset)

Nothing is materialised: an index is computed from its position alone, so N = 10**12 costs no memory, seeking
is O(1), and the data state of a run is a few integers.

**The permutation.** Let `a = ceil(sqrt(N))`, the *side*. An offset is a pair of halves `(left, right)`, both
in [0, a), with `offset = a * left + right`. A round is

    (left, right) -> (right, (left + F(right + key)) mod a)

and is undone by subtracting the same F, whatever F is: a balanced Feistel network is a bijection of [0, a**2)
for any F. With random independent F three rounds are already a pseudo-random permutation (Luby & Rackoff
1988, "How to construct pseudorandom permutations"); here there are eight, as F is a hash and small sides are
far from the asymptotic case. Adding modulo a instead of XOR on bits is the generalised Feistel of Black &
Rogaway 2002, "Ciphers with arbitrary finite domains", method 3: the domain exceeds N by at most a fraction 2
/ sqrt(N) + 1 / N, where one of bits would be up to four times too large.

**Cycle walking** (same paper, method 2). A result in [N, a * a) is sent through the network again until it
falls below N. Following the cycle of a bijection from a start below N to the next element below N is a
bijection of [0, N). At most `a * a - N + 1` passes are needed and nearly always one is enough.

**The round function** F is the finaliser of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators"; the constants are variant 13 of Stafford): multiplications and xor-shifts
modulo 2**64, as in the counter-based generators of Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3". It must not be linear. If `F(x) = c * x + d`, all rounds together are one affine map, and
consecutive offsets go to an arithmetic progression: a bijection, hence right by every test of repeats, but
with labels = index mod C the class counts of a step's samples vary many times more, or less, than in a random
order.

**Keys.** The eight 64-bit keys of an epoch are the BLAKE2b hash of (VERSION, seed, source, epoch). All
arithmetic is on unsigned 64-bit integers, so the order is the same on every platform and every version of
numpy.

To change anything that changes the order: a new `VERSION`, which checkpoints store, and new golden vectors.
"""

import functools
import hashlib
import json
import math
import operator
from dataclasses import dataclass

import numpy as np

VERSION = 1

N_ROUNDS = 8  # one BLAKE2b digest is exactly eight keys of 64 bits
MIN_SIDE = 4  # on a side of 3, eight rounds leave the 120 orders of 5 rows visibly unequal (tried)
MAX_SIZE = 2**62  # side <= 2**31: `a * left + right` and `left + F` stay below 2**64


@dataclass(frozen=True)
class Order:
    """The endless shuffled order of one source: epoch after epoch, each a permutation of [0, size).

    ValueError when seed or size is not an integer, source is not a string, or size is not in [1, 2**62].
    """

    seed: int
    """Chooses the order; the same seed, source and size give the same order anywhere. No unit."""
    source: str
    """Name of the dataset, so that sources of one run have unrelated orders. A name."""
    size: int
    """N, the rows of the dataset, in samples."""

    def __post_init__(self):
        # numpy integers are taken as Python's, so that equal orders hash to equal keys.
        object.__setattr__(self, "seed", _integer(self.seed, "seed", "an integer such as 42"))
        object.__setattr__(self, "size", _integer(self.size, "size", "the dataset's number of rows"))
        if not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"size={self.size} is not in 1..2**62; write the dataset's number of rows")
        if not isinstance(self.source, str):
            raise ValueError(f"source={self.source!r} is no name; write a string such as 'train'")

    @property
    def side(self) -> int:
        """Values of one half: the smallest a >= MIN_SIDE with a * a >= size."""
        return max(MIN_SIDE, math.isqrt(self.size - 1) + 1)

    def index(self, position: int) -> int:
        """Return the row number at one absolute position; ValueError unless 0 <= position < 2**64."""
        position = _integer(position, "position", "an integer >= 0")
        if not 0 <= position < 2**64:
            raise ValueError(f"position={position} is outside [0, 2**64); positions count up from 0")
        return int(self.indices(np.array([position], dtype=np.uint64))[0])

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the row numbers, int64 (n,), at absolute positions (n,), which may span epochs.

        Positions may come in any sequence. ValueError when they are not integers >= 0 in one dimension.
        """
        positions = np.asarray(positions)
        if positions.ndim == 1 and len(positions) == 0:
            return np.empty(0, dtype=np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise ValueError(
                f"positions of shape {positions.shape} and type {positions.dtype}: "
                "write a one-dimensional array of integers, int64 or uint64"
            )
        if positions.min() < 0:
            raise ValueError(f"position {positions.min()} is negative; positions count up from 0")
        epochs, offsets = np.divmod(positions.astype(np.uint64), np.uint64(self.size))
        keys, which = self._keys_of(epochs)
        return _walk(offsets, keys, which, self.size, self.side).astype(np.int64)

    def _keys_of(self, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys, uint64 (N_ROUNDS, epochs present), and the column each of the epochs (n,) uses."""
        if epochs.min() == epochs.max():  # the usual case, spared the sort of np.unique
            distinct, which = epochs[:1], np.zeros(len(epochs), dtype=np.intp)
        else:
            distinct, which = np.unique(epochs, return_inverse=True)
        keys = [_epoch_keys(self.seed, self.source, epoch) for epoch in distinct.tolist()]
        return np.stack(keys, axis=1), which


def _integer(value, name: str, instead: str) -> int:
    """Return value as a Python int; ValueError, saying what to write instead, when it is not an integer."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not an integer; write {instead}") from None


@functools.lru_cache(maxsize=64)  # the running and the next epoch of a few dozen sources, 64 bytes each
def _epoch_keys(seed: int, source: str, epoch: int) -> np.ndarray:
    """Return the keys of one epoch, read-only uint64 (N_ROUNDS,)."""
    # JSON, because plain joining would give ("a1", 2) and ("a", 12) the same keys.
    message = json.dumps([VERSION, seed, source, epoch]).encode("ascii")
    digest = hashlib.blake2b(message, digest_size=8 * N_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _walk(offsets: np.ndarray, keys: np.ndarray, which: np.ndarray, size: int, side: int) -> np.ndarray:
    """Permute offsets (n,) within [0, size) by cycle walking: only what is still out of range goes again."""
    result = _feistel(offsets, keys, which, side)
    outside = np.flatnonzero(result >= np.uint64(size))
    n_left = side * side - size  # values a cycle can hold outside: a bijection never needs more passes
    while len(outside):
        assert n_left > 0, "the network is no bijection"
        n_left -= 1
        result[outside] = _feistel(result[outside], keys, which[outside], side)
        outside = outside[result[outside] >= np.uint64(size)]
    return result


def _feistel(values: np.ndarray, keys: np.ndarray, which: np.ndarray, side: int) -> np.ndarray:
    """Permute values, uint64 (n,), within [0, side * side), each by its own column of the keys."""
    side = np.uint64(side)
    left, right = np.divmod(values, side)
    for key in keys:
        # Halving F keeps `left + F` below 2**64: a sum that wrapped would not be a bijection modulo side.
        step = _mix(right + key[which]) >> np.uint64(1)
        left, right = right, (left + step) % side
    return left * side + right


def _mix(z: np.ndarray) -> np.ndarray:
    """Return F(z), uint64 (n,): the finaliser of splitmix64, Steele et al. 2014. Overwrites z."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
