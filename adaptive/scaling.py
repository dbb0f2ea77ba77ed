"""Sizes -> the factors that follow from them: on the loss, on the learning rate and on Adam's beta2.

**The gradient of a step.** Over its n samples the step's gradient is

    g = sum_i w_i grad l_i                                                                          (1)

with l_i the loss of sample i (token tasks: the mean over its supervised tokens). The schedule asks for G
samples, a real number; rounding by error diffusion (plan.py) runs n = floor(carry + G) of them. The weight is

    target    w = 1 / M, M = max(G, 1)    every sample has the same influence, however rounding placed it  (2)
    realized  w = 1 / n                   the plain mean of the step                                       (3)
    ceil      w = 1 / (W ceil(G / W))     the published formula for a per-device size G / W                (4)

Worked example of (2): G = 2.5 runs 2, 3, 2, 3, ... samples, each with weight 1/2.5, so steps have the total
weight 0.8, 1.2, 0.8, ...; its mean is 1, because sum(n) stays within 1 of sum(G). For a whole G, (2) is the
mean. Below 1 an update has one sample of weight 1, and every 1/G-th step is an update. A step that an epoch's
end cut short has G = n.

**Tokens.** With --normalize_by tokens each supervised token of the step weighs n w / T, T being their number
over all ranks and passes: for w = 1/n this is the mean over tokens (not a mean of means, which is another
objective).

**Several sources.** G = sum of G_s and n = sum of n_s: by (2) to (4) every sample of the step weighs the
same, whatever its source; a source's part in the gradient is its part of the samples. With --source_weights
lambda_s, in proportions, a sample of source s weighs

    w_s = w lambda_s / r_s,    r_s = G_s / G                                                           (5)

with w from (2) to (4), and lambda summing to 1 over the sources with r_s > 0. Then n_s w_s has the mean
lambda_s over the steps for every source, however small G_s is, and a step without a sample of s owes it
nothing: the next one that has some weighs 1/r_s. For G >= 1, w_s is lambda_s / G_s; lambda_s = r_s is the
default. Where w is 1/n (`realized`, a cut step) r_s is n_s / n.

With --normalize_by tokens a token of source s then weighs n_s w_s / T_s, T_s counting the tokens of that
source alone: else sources with long samples would take more than their lambda.

**Reservoir.** A sample drawn from a slot (participation.py) has its w_s multiplied by max(0, 1 - k (u - U)),
u being its uses so far, U their mean over the slots, and k --usage_correction.

**Ranks.** A data-parallel engine averages gradients over its W ranks, so each rank's loss is multiplied by W;
nothing else scales: accumulation is 1 in Accelerator and in DeepSpeed. Then the sum over ranks and passes is
(1), whatever the number of ranks, their shares and the micro-batches.

**Learning rate** of a step: `base_lr * warmup * decay(p) * rule(M / base)`, base being the M of
--base_batch_size, so at least 1, and p the share of the run before the step. Linear rule: Goyal et al. 2017;
square root: Krizhevsky 2014, and Malladi et al. 2022 for Adam. AdaScale
(Johnson et al. 2020): a step of S = M / base times the samples is worth the gain

    r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) = (B / base + 1) / (B / M + 1)                          (6)

steps of the base size, with sigma^2 = tr(S) / base and mu^2 = |G|^2, so that sigma^2 / mu^2 is the noise
scale B over the base size; between 1 and S. SGD's rate is multiplied by r, that of others by sqrt(r). Before
a noise scale is measured, a larger size has no gain and a smaller one loses all of it.

**Adam's second moment** with --beta_scaling half_life: after a step of M samples the old average counts
beta2' = beta2^(M / base), so that its half-life is the same number of *samples* at every size. The average
of a constant g^2 is then v = g^2 (1 - prod beta2'_i), and Adam must divide by

    1 - prod_i beta2'_i      where torch divides by 1 - beta2'^t with the last beta2' alone              (7)

(a growth by 8 at step 201 would double its update). With f^2 the ratio of the two, f * lr, f * epsilon and
weight_decay / f in torch's own formula are exactly Adam with (7), under any engine that calls it. (A
parameter without a gradient in a whole step, which torch passes over, would count fewer updates.)

Pure Python, no torch.
To add one: a decay or a rule is a line in the dictionaries at the foot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from adaptive.config import BadSetting, Batch, Optim
from adaptive.plan import StepPlan, exact
from adaptive.schedules.literal import parse_call

ONE = Fraction(1)


def mean_size(plan: StepPlan) -> Fraction:
    """M of equation (2): the size the step stands for, in samples over all processes."""
    return Fraction(max(plan.size, 1)) if plan.cut else max(plan.asked, ONE)


def sample_weight(batch: Batch, plan: StepPlan, world_size: int) -> float:
    """w of equations (2) to (4) by --fractional_scaling, without the factor W of the ranks; 0 for an empty
    step.
    """
    if not plan.size:
        return 0.0
    if batch.fractional_scaling == "realized":
        return 1 / plan.size
    if batch.fractional_scaling == "ceil":
        asked = plan.size if plan.cut else plan.asked
        return 1 / (world_size * math.ceil(asked / world_size))
    size = mean_size(plan)
    return size.denominator / size.numerator  # the nearest float of the exact 1 / M


def source_weights(batch: Batch, plan: StepPlan, world_size: int) -> dict[str, float]:
    """w_s of equation (5), source -> weight of one of its samples, without the factor W; 0 without one."""
    weight, counts = sample_weight(batch, plan, world_size), plan.counts
    if not batch.source_weights or not plan.size:
        return {source: weight if n else 0.0 for source, n in counts.items()}
    sizes = counts if plan.cut or batch.fractional_scaling == "realized" else plan.target
    shares = dict(zip(plan.target, map(exact, batch.source_weights), strict=True))
    unit = sum(sizes.values()) / sum(share for source, share in shares.items() if sizes[source])
    return {s: weight * float(unit * shares[s] / sizes[s]) if counts[s] else 0.0 for s in counts}


def loss_scale(weight: float, size: int, world_size: int, items: int | None) -> float:
    """What one rank multiplies a sum of losses by: W w for samples, W n w / T for tokens (`items` is T, not
    None).

    A step without a supervised token has scale 0.
    """
    if items is None:
        return world_size * weight
    return world_size * size * weight / items if items else 0.0


def parse_decay(optim: Optim) -> Callable[[float], float]:
    """--lr_scheduler_type and its settings -> factor of the peak learning rate at progress p in [0, 1]."""
    name, settings = optim.lr_scheduler_type, optim.lr_scheduler_kwargs
    if name not in DECAYS:
        raise BadSetting(f"--lr_scheduler_type is {name!r}; write one of {', '.join(DECAYS)}")
    _, arguments, options = parse_call(f"{name}({settings})", "--lr_scheduler_kwargs")
    decay = DECAYS[name]
    try:
        for progress in (0.0, 0.5, 1.0):
            factor = decay(progress, *arguments, **options)
            if not 0 <= factor < math.inf:
                raise ValueError(f"the factor is {factor:g} at {progress:.0%} of the run")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BadSetting(f"--lr_scheduler_kwargs {settings!r} does not fit {name}: {error}") from None
    return lambda progress: decay(min(1.0, max(0.0, progress)), *arguments, **options)


def parse_rule(text: str, optimizer: str = "adamw_torch") -> Callable[..., float]:
    """--lr_scaling -> factor of the learning rate at (size / base size, base size, noise scale or None).

    Its attribute `signals`: names of the signals it needs.
    """
    name, arguments, options = parse_call(text, "--lr_scaling")
    if name not in RULES:
        raise BadSetting(
            f"--lr_scaling is {text!r}; write none, linear, sqrt, adascale or power(p), such as power(0.75)"
        )
    try:
        rule = RULES[name]
        if not math.isfinite(rule(2.0, *arguments, **options)):  # TypeError for a complex number
            raise OverflowError
    except (TypeError, OverflowError):
        raise BadSetting(
            f"--lr_scaling is {text!r}; write none, linear, sqrt, adascale or power(p), such as power(0.75)"
        ) from None
    if rule is adascale_gain:
        power = 1.0 if optimizer == "sgd" else 0.5

        def factor(ratio: float, base: float = 1.0, noise_scale: float | None = None) -> float:
            return adascale_gain(ratio, base, noise_scale) ** power

        factor.signals = {"noise_scale"}
        return factor

    def factor(ratio: float, base: float = 1.0, noise_scale: float | None = None) -> float:
        return rule(ratio, *arguments, **options)

    factor.signals = set()
    return factor


def adascale_gain(ratio: float, base: float = 1.0, noise_scale: float | None = None) -> float:
    """r of equation (6) at `ratio` = M / base; base and noise scale in samples."""
    if noise_scale is None:
        return min(1.0, ratio)
    noise = noise_scale / base
    return (noise + 1) / (noise / ratio + 1)


@dataclass(frozen=True)
class SecondMoment:
    """Adam's second moment in one step: its beta2, and f of equation (7)."""

    beta2: float
    factor: float


def second_moment(optim: Optim, ratio: float, product: float, updates: int) -> SecondMoment:
    """Of the update after `updates` ones whose beta2 have the `product`; `ratio` as in M / base."""
    if optim.beta_scaling == "none":
        return SecondMoment(optim.adam_beta2, 1.0)
    beta2 = optim.adam_beta2**ratio
    torchs = -math.expm1((updates + 1) * math.log(beta2)) if beta2 else 1.0
    return SecondMoment(beta2, math.sqrt((1 - product * beta2) / torchs))


def warmup(samples: int, size: int, length: int) -> float:
    """Linear warmup factor in (0, 1] of a step of `size` samples after `samples`; `length` in samples.

    The step's own samples count, so that the first update already moves.
    """
    return min(1.0, (samples + size) / length) if length else 1.0


def _cosine(p: float, num_cycles: float = 0.5, min_lr_ratio: float = 0.0) -> float:
    return min_lr_ratio + (1 - min_lr_ratio) * max(0.0, 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * p)))


def _restarts(p: float, num_cycles: int = 1) -> float:
    return 0.0 if p >= 1 else 0.5 * (1 + math.cos(math.pi * (num_cycles * p % 1)))


def _stable_decay(p: float, decay_share: float = 0.1, min_lr_ratio: float = 0.0) -> float:
    return min_lr_ratio + (1 - min_lr_ratio) * min(1.0, (1 - p) / decay_share)


DECAYS: dict[str, Callable[..., float]] = {
    "constant": lambda p: 1.0,
    "constant_with_warmup": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "polynomial": lambda p, power=1.0, lr_end_ratio=0.0: lr_end_ratio + (1 - lr_end_ratio) * (1 - p) ** power,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "cosine_with_restarts": _restarts,
    "quarter_cosine": lambda p: math.cos(math.pi * p / 2),
    "warmup_stable_decay": _stable_decay,
}
RULES: dict[str, Callable[..., float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "power": lambda ratio, p: ratio**p,
    "adascale": adascale_gain,
}
