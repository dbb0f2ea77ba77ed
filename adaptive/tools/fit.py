"""Sizes and what they cost -> the critical batch size; pure numpy.

The trade of McCandlish et al. 2018 ("An Empirical Model of Large-Batch Training", equation 5.1): S steps and
E = S B samples to the same loss lie on

    (S / S_min - 1) (E / E_min - 1) = 1,    that is    S = S_min + E_min / B                            (1)

and the critical size is E_min / S_min, where both are twice their minimum. The branch rule is that of Merrill
et al. 2025, "Critical Batch Size Revisited".
To add one: a function of plain sequences, and its line in the report of critical_batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# 97.5 % points of Student's t for 1, 2, ... degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def fit_trade(sizes: Sequence[float], steps: Sequence[float]) -> tuple[float, float] | None:
    """(S_min, E_min) of equation (1), by least squares of log(steps); None where the steps show no such
    trade.

    Errors of steps are relative, hence the logarithm: Gauss-Newton from the weighted linear fit.
    """
    inverse, steps = 1 / np.asarray(sizes, float), np.asarray(steps, float)
    if len(steps) < 3 or len(set(inverse)) < 3:
        return None
    design = np.stack([np.ones_like(inverse), inverse], axis=1)
    found = np.linalg.lstsq(design / steps[:, None], np.ones_like(steps), rcond=None)[0]
    for _ in range(50):
        if not (found > 0).all():
            return None
        model = design @ found
        move = np.linalg.lstsq(design / model[:, None], np.log(steps / model), rcond=None)[0]
        shrink = [0.5 * value / -change for value, change in zip(found, move, strict=True) if change < 0]
        scale = min([1.0, *shrink])  # a step never goes below half of either
        found = found + scale * move
    return float(found[0]), float(found[1])


def interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """(middle, low, high): geometric mean of one estimate per seed and its 95 % interval; None without any.

    With one seed there is no interval: low and high are NaN.
    """
    logs = np.log([value for value in values if value > 0])
    if not len(logs):
        return None
    middle, n = float(logs.mean()), len(logs)
    if n == 1:
        return math.exp(middle), math.nan, math.nan
    t = T_QUANTILES[min(n - 2, len(T_QUANTILES) - 1)]
    half = t * float(logs.std(ddof=1)) / math.sqrt(n)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def samples_to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Samples at which a curve of (samples, loss) first comes down to `target`; between two evaluations by
    the straight line, of log(loss) where losses are positive. None where it never does.
    """
    before: tuple[float, float] | None = None
    for samples, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return samples
            scale = math.log if min(loss, target) > 0 else float
            share = (scale(before[1]) - scale(target)) / (scale(before[1]) - scale(loss))
            return before[0] + share * (samples - before[0])
        before = (samples, loss)
    return None


def turning_point(
    metrics: dict[float, float], tolerance: float, lower_is_better: bool = True
) -> float | None:
    """The largest size whose metric is within `tolerance` (a share) of the best one; None where none has
    one.
    """
    sign = 1 if lower_is_better else -1
    known = {size: sign * metric for size, metric in metrics.items() if math.isfinite(metric)}
    if not known:
        return None
    best = min(known.values())
    return max(size for size, metric in known.items() if metric <= best + tolerance * abs(best))


def branch_size(losses: dict[float, float], eps: float) -> float | None:
    """The largest size whose loss is at most `eps` above that of every smaller one."""
    sizes = sorted(losses)
    fitting = [b for b in sizes if all(losses[b] <= losses[a] + eps for a in sizes if a < b)]
    return max((b for b in fitting if math.isfinite(losses[b])), default=None)


def smoothed(values: Sequence[float], keep: float) -> float:
    """The last value of a running mean that keeps `keep` of itself at each step, from the first value on."""
    mean = values[0]
    for value in values[1:]:
        mean = keep * mean + (1 - keep) * value
    return mean
