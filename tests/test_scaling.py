"""The factors: weights that keep a sample's influence, a learning rate that follows samples, names that are
judged.
"""

import math
from fractions import Fraction
from itertools import cycle, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from adaptive import scaling
from adaptive.config import BadSetting, Batch, Optim
from adaptive.optim import build_optimizer, set_step
from adaptive.plan import Lengths, exact, plan_step
from adaptive.schedules import decide, parse_schedule
from adaptive.signals import KNOWN
from adaptive.state import RunState

BATCH = {name: Batch(fractional_scaling=name) for name in ("target", "realized", "ceil")}


def plans(
    sizes, steps: int | None = None, rows: int = 10**6, epoch_end: str = "keep", sources=("train",)
) -> list:
    """The first `steps` plans, or all, of a run of one epoch; `sizes` are used in a cycle, the same for each
    source.
    """
    lengths = Lengths(dict.fromkeys(sources, rows), Fraction(1))
    cursor, carry, done, made = dict.fromkeys(sources, 0), dict.fromkeys(sources, Fraction(0)), 0, []
    for size in islice(cycle(sizes), steps):
        plan = plan_step(dict.fromkeys(sources, exact(size)), cursor, carry, lengths, epoch_end, done)
        if plan is None:
            break
        made.append(plan)
        cursor, carry, done = plan.cursor, plan.carry, done + plan.size
    return made


def weights(name: str, made: list, world_size: int = 1) -> list[float]:
    return [scaling.sample_weight(BATCH[name], plan, world_size) for plan in made]


def curve(name: str, settings: str = ""):
    return scaling.parse_decay(Optim(lr_scheduler_type=name, lr_scheduler_kwargs=settings))


# Weights


def test_the_worked_example_of_two_and_a_half():
    """Mutation: `1 / plan.size` for `target`: the total weight of every step is 1 (by up to 0.2)."""
    made = plans([2.5], 6)
    assert [plan.size for plan in made] == [2, 3] * 3
    assert weights("target", made) == [0.4] * 6
    assert [plan.size * w for plan, w in zip(made, weights("target", made), strict=True)] == pytest.approx(
        [0.8, 1.2] * 3
    )
    assert weights("realized", made) == pytest.approx([1 / 2, 1 / 3] * 3)
    assert weights("ceil", made) == pytest.approx([1 / 3] * 6)
    assert weights("ceil", made, world_size=2) == pytest.approx([1 / 4] * 6)


@pytest.mark.parametrize("size, world_size, ceil", [
    (0.5, 1, 1), (2.0, 4, 1 / 4), (4.0, 4, 1 / 4), (4.5, 4, 1 / 8), (1.44, 8, 1 / 8), (10.4, 8, 1 / 16),
])  # fmt: skip
def test_the_published_formula_depends_on_the_devices(size, world_size, ceil):
    """Mutation: `ceil(G)` for `W ceil(G / W)`: 1/2 for 2 samples on 4 devices, where the publication has
    1/4.
    """
    with_samples = [plan for plan in plans([size], 8) if plan.size]
    assert with_samples and weights("ceil", with_samples, world_size) == pytest.approx(
        [ceil] * len(with_samples)
    )


@pytest.mark.parametrize("name", BATCH)
def test_a_cut_step_is_a_mean(name):
    """Mutation: `cut` ignored in `mean_size` or in `ceil`: the last of 11 samples would weigh 1/4 (by
    0.75).
    """
    last = plans([4], rows=11)[-1]
    assert (last.size, last.cut) == (3, True)
    assert weights(name, [last]) == pytest.approx([1 / 3])
    assert scaling.mean_size(last) == 3


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 40), st.integers(1, 200))
def test_the_mean_total_weight_of_a_step_tends_to_one(size, steps):
    """Mutation: `M = n` gives 1 at once, for another objective (the worked example); `M = floor(G)` 1.25 for
    2.5.

    sum(n) is within 1 of sum(G), so the sum of n/M over K steps is within 1/G of K.
    """
    made = plans([size], steps)
    totals = [plan.size / scaling.mean_size(plan) for plan in made]
    assert 0 <= steps - sum(totals) < 1 / exact(size)
    assert weights("target", made) == [float(1 / exact(size))] * steps
    whole = plans([math.ceil(size)], steps)
    assert weights("target", whole) == weights("realized", whole), "for whole sizes it is the mean"


@pytest.mark.parametrize("size", [0.3, 0.18, 0.5, 0.99])
def test_below_one_an_update_is_one_sample_of_weight_one(size):
    """Mutation: `M = G` without the maximum: 0.3 gives the sample weight 3.3 (the published 1/ceil gives
    1).
    """
    made = plans([size], 100)
    assert {plan.size for plan in made} == {0, 1}
    assert sum(plan.size for plan in made) == math.floor(exact(size) * 100)
    for name in BATCH:
        assert weights(name, made) == [float(plan.size) for plan in made]
    assert {scaling.mean_size(plan) for plan in made} == {1}


def test_several_sources_share_one_mean():
    """Mutation: the size of one source for their sum: weights of 1/2.5 instead of 1/5."""
    made = plans([2.5], 4, sources=("text", "image"))
    assert [plan.size for plan in made] == [4, 6, 4, 6]
    assert weights("target", made) == [0.2] * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.floats(1, 30), st.integers(1, 10_000))
def test_ranks_and_tokens(world_size, size, items):
    """Mutation: `w / T` without n: a step of 3 samples is scaled by a third. Mutation: W left out: by the
    ranks' mean.

    Summed over T tokens (n samples) and averaged over W ranks the scale gives n w.
    """
    plan = plans([size], 1)[0]
    weight = scaling.sample_weight(BATCH["target"], plan, world_size)
    by_tokens = scaling.loss_scale(weight, plan.size, world_size, items)
    assert by_tokens * items / world_size == pytest.approx(plan.size * weight, rel=1e-12)
    by_samples = scaling.loss_scale(weight, plan.size, world_size, None)
    assert by_samples / world_size == pytest.approx(weight, rel=1e-15)
    mean = scaling.loss_scale(1 / plan.size, plan.size, 1, items)
    assert mean == pytest.approx(1 / items, rel=1e-12), "with w = 1/n it is the mean over tokens"
    assert scaling.loss_scale(weight, plan.size, world_size, 0) == 0, "a step without a supervised token"


# Learning rate


@pytest.mark.parametrize("name, kwargs, theirs, their_kwargs", [
    ("linear", "", "linear", {}),
    ("constant", "", "constant", {}),
    ("constant_with_warmup", "", "constant_with_warmup", {}),
    ("cosine", "", "cosine", {}),
    ("cosine", "num_cycles=1.5", "cosine", {"num_cycles": 1.5}),
    ("cosine_with_min_lr", "min_lr_ratio=0.1", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_with_restarts", "", "cosine_with_restarts", {}),
    ("cosine_with_restarts", "num_cycles=4", "cosine_with_restarts", {"num_cycles": 4}),
    ("polynomial", "power=2.5, lr_end_ratio=0.01", "polynomial", {"power": 2.5, "lr_end": 0.01}),
    ("warmup_stable_decay", "decay_share=0.25", "warmup_stable_decay",
     {"num_decay_steps": 50, "decay_type": "linear"}),
    ("warmup_stable_decay", "decay_share=0.5, min_lr_ratio=0.2", "warmup_stable_decay",
     {"num_decay_steps": 100, "decay_type": "linear", "min_lr_ratio": 0.2}),
])  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 20])
def test_decays_are_those_of_transformers(name, kwargs, theirs, their_kwargs, warmup):
    """Mutations: `num_cycles` unused in `_restarts` (by 1.0), `% 1` left out (by 0.5), a cycle twice as long
    in
    `_cosine` (by 1.0), `decay_share` of the stable part instead of the end.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(theirs, optimizer, warmup, 200 + warmup, their_kwargs)
    ours = curve(name, kwargs)
    for step in range(0, 201):
        expected = scheduler.lr_lambdas[0](step + warmup) if hasattr(scheduler, "lr_lambdas") else 1.0
        assert ours(step / 200) == pytest.approx(expected, abs=1e-12), f"{step / 200:.1%}"
    varies = name not in ("constant", "constant_with_warmup")
    assert len({round(ours(step / 200), 6) for step in range(201)}) > 20 or not varies


def test_decays_stay_between_peak_and_zero_outside_the_run():
    """Mutation: no clamp of progress: `linear` is negative for a run that counts one sample too many."""
    for name in scaling.DECAYS:
        factor = curve(name)
        assert factor(-0.5) == factor(0.0) == 1.0
        assert factor(1.5) == factor(1.0) >= 0


def test_the_decay_ends_with_the_samples_whatever_the_sizes():
    """Mutation: progress by steps / planned steps (R63): with sizes from 4 to 16 the last lr is far from the
    end.
    """
    lengths = Lengths({"train": 203}, Fraction(1))
    made = plans([4, 6, 9, 16, 1.5], rows=203)
    starts = [
        lengths.progress({"train": plan.consumed}, plan.consumed, step) for step, plan in enumerate(made)
    ]
    factors = [curve("linear")(progress) for progress in starts]
    for plan, factor in zip(made, factors, strict=True):
        assert factor == pytest.approx(1 - plan.consumed / 203)
    assert factors[0] == 1 and factors[-1] == pytest.approx(made[-1].size / 203)


@pytest.mark.parametrize("rule, ratio, factor", [
    ("none", 4.0, 1.0), ("linear", 4.0, 4.0), ("sqrt", 4.0, 2.0), ("power(0.75)", 16.0, 8.0),
    ("power(p=0.5)", 0.25, 0.5), ("adascale", 4.0, 1.0), ("adascale", 0.25, 0.5),
    ("sqrt", 18 / 8, 1.5), ("sqrt()", 9.0, 3.0), ("linear", 0.5, 0.5),
])  # fmt: skip
def test_rules(rule, ratio, factor):
    """Mutation: sqrt and linear exchanged (by a factor 2 at ratio 4); `ratio ** 1/p` for power."""
    assert scaling.parse_rule(rule)(ratio) == pytest.approx(factor, rel=1e-15)


def test_warmup_is_counted_in_samples():
    """Mutation: by steps: sizes 4 and 16 would rise alike. Mutation: `samples / length`: the first update
    stands still.
    """
    assert scaling.warmup(0, 8, 80) == 0.1
    assert scaling.warmup(24, 16, 80) == 0.5
    assert scaling.warmup(72, 8, 80) == scaling.warmup(10**9, 1, 80) == 1.0
    assert scaling.warmup(0, 8, 0) == 1.0


@pytest.mark.parametrize("name, kwargs, words", [
    ("cosin", "", ["--lr_scheduler_type", "'cosin'", "cosine_with_restarts", "warmup_stable_decay"]),
    ("cosine", "cycles=2", ["--lr_scheduler_kwargs", "'cycles=2'", "cosine"]),
    ("cosine", "num_cycles='two'", ["--lr_scheduler_kwargs", "two"]),
    ("cosine", '{"num_cycles": 2}', ["--lr_scheduler_kwargs"]),
    ("warmup_stable_decay", "decay_share=0", ["--lr_scheduler_kwargs", "decay_share=0",
     "warmup_stable_decay"]),
    ("warmup_stable_decay", "decay_share=-1", ["the factor is -1 at 0% of the run"]),
    ("polynomial", "power=-1", ["--lr_scheduler_kwargs", "polynomial"]),
    ("linear", "x=__import__('os').getcwd()", ["--lr_scheduler_kwargs", "plain numbers"]),
])  # fmt: skip
def test_bad_decays_are_answered_in_one_line(name, kwargs, words):
    """Mutation: no trial call in `parse_decay`: a TypeError, or a negative learning rate, in the middle of
    the run.
    """
    with pytest.raises(BadSetting) as caught:
        curve(name, kwargs)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("rule", ["square", "power", "power(1, 2)", "power('a')", "sqrt(2)", "linear(2)",
 "power(5000)", "adascale(2, 3, 4)",
                                  "sqrt + 1", "", "lambda r: r"])  # fmt: skip
def test_bad_rules_are_answered_in_one_line(rule):
    """Mutation: no trial call in `parse_rule`: "power" without a number fails at the first step, on every
    rank.
    """
    with pytest.raises(BadSetting) as caught:
        scaling.parse_rule(rule)
    message = str(caught.value)
    assert (
        message.startswith("--lr_scaling is ")
        and rule in message
        and "write" in message
        and "\n" not in message
    )


@given(st.floats(0.05, 500), st.floats(0.5, 64), st.floats(0, 1e6))
def test_the_gain_of_adascale(ratio, base, noise):
    """(sigma^2 + mu^2) / (sigma^2 / S + mu^2), between 1 and S; its square root for Adam.

    Mutation: the noise scale over M in both places (gain 1); S for the gain at any noise.
    """
    signal = 0.7
    trace = noise * signal  # tr(S)
    sigma, mu = trace / base, signal  # variance of a base step's gradient, squared mean
    exact_gain = (sigma + mu) / (sigma / ratio + mu)
    for optimizer, power in (("sgd", 1.0), ("adamw_torch", 0.5), ("adamw_torch_fused", 0.5)):
        rule = scaling.parse_rule("adascale", optimizer)
        assert rule.signals == {"noise_scale"}
        assert rule(ratio, base, noise) == pytest.approx(exact_gain**power, rel=1e-9)
        assert min(1.0, ratio) - 1e-9 <= rule(ratio, base, noise) ** (1 / power) <= max(1.0, ratio) + 1e-9
        assert rule(1.0, base, noise) == pytest.approx(1.0)
    assert scaling.parse_rule("sqrt").signals == set()


# Adam's second moment

ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-3, "learning_rate": 0.01}


class ByHand:
    """AdamW with the correction of equation (7), written out."""

    def __init__(self, weights, optim: Optim):
        self.w, self.optim = weights.clone(), optim
        self.m = self.v = torch.zeros_like(weights)
        self.t, self.product = 0, 1.0

    def step(self, gradient, rate: float, ratio: float):
        beta1, beta2 = self.optim.adam_beta1, self.optim.adam_beta2**ratio
        self.t, self.product = self.t + 1, self.product * beta2
        self.w = self.w * (1 - rate * self.optim.weight_decay)
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        root = (self.v / (1 - self.product)).sqrt()
        self.w = self.w - rate * self.m / (1 - beta1**self.t) / (root + self.optim.adam_epsilon)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_half_life_is_adam_with_the_product_of_its_betas(name):
    """60 updates of sizes from 1 to 64 samples, base 8, two groups, fp64: by hand, and after a resume.

    Mutations: the factor on the rate left out (2e-1); epsilon or weight decay as configured (1e-3, 1e-4);
    the product of the betas counted before the update.
    """
    optim = Optim(optim=name, weight_decay=0.1, beta_scaling="half_life", **ADAM)
    draw = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    weights = [model.weight.detach().clone(), model.bias.detach().clone()]
    plain = Optim(**ADAM)
    by_hand = [ByHand(weights[0], optim), ByHand(weights[1], plain)]  # biases do not decay
    optimizer, product = build_optimizer(model, optim), 1.0
    for t, size in enumerate(islice(cycle([1, 64, 3.5, 8, 20, 1, 1]), 60)):
        ratio, rate = size / 8, 0.01 * (1 + t % 3)
        moment = scaling.second_moment(optim, ratio, product, t)
        set_step(optimizer.param_groups, optim, rate, moment)
        gradients = [torch.randn(w.shape, generator=draw, dtype=torch.float64) for w in weights]
        for parameter, gradient, hand in zip(model.parameters(), gradients, by_hand, strict=True):
            parameter.grad = gradient
            hand.step(gradient, rate, ratio)
        optimizer.step()
        product *= moment.beta2
        if t == 30:  # stopped and resumed
            held = optimizer.state_dict()
            optimizer = build_optimizer(model, optim)
            optimizer.load_state_dict(held)
    for parameter, hand in zip(model.parameters(), by_hand, strict=True):
        assert parameter.detach().numpy() == pytest.approx(
            hand.w.numpy(), rel=1e-9 if "fused" in name else 1e-12
        )


def test_the_second_moment_forgets_by_samples():
    """A constant g^2, then another: after 640 samples the old one counts the same at size 1 and at size 64.

    Mutation: beta2 ** (base / M); beta2 at every update (0.53 against 0.99).
    """
    optim, left = Optim(beta_scaling="half_life", **ADAM), {}
    for size in (1, 8, 64):
        left[size] = 1.0
        for update in range(640 // size):
            left[size] *= scaling.second_moment(optim, size / 8, left[size], update).beta2
    assert left[1] == pytest.approx(left[64], rel=1e-9) == pytest.approx(0.99 ** (640 / 8), rel=1e-9)


def test_the_bias_correction_is_exact_from_the_first_update():
    """Of a constant gradient the corrected second moment is g^2 after every update, whatever the sizes.

    Mutation: torch's 1 - beta2^t: at t = 201, grown by 8, the update is 2 times too large.
    """
    optim, v, product = Optim(beta_scaling="half_life", **ADAM), 0.0, 1.0
    sizes = [8.0] * 200 + [64.0, 1.0, 64.0, 0.3]
    for t, size in enumerate(sizes):
        moment = scaling.second_moment(optim, size / 8, product, t)
        v, product = moment.beta2 * v + (1 - moment.beta2) * 9.0, product * moment.beta2
        torchs = 1 - moment.beta2 ** (t + 1)
        assert v / (torchs * moment.factor**2) == pytest.approx(9.0, rel=1e-9)
    assert scaling.second_moment(Optim(), 8.0, 0.5, 3) == scaling.SecondMoment(0.999, 1.0)


# Seesaw


@pytest.mark.parametrize(
    "decay, expected", [("cosine", 1 / 2), ("quarter_cosine", 2 / math.pi), ("linear", 1 / 2)]
)
def test_seesaw_needs_the_share_of_steps_that_the_decay_integrates_to(decay, expected):
    """Mutation: `initial_size / sqrt(lr_decay)`: cosine leaves 2/pi, the quarter cosine 0.763 (by 0.13).

    Uncapped, a size B0 / decay(p) takes B0 samples in decay(p) steps, so steps left are the integral of
    decay.
    The learning rate falls by the square root of the decay, and samples per step times lr squared stay as
    they were.
    """
    rows, size = 40_000, 4.0
    lengths, batch = Lengths({"train": rows}, Fraction(1)), Batch(batch_size=size)
    schedule, factor = parse_schedule("seesaw()", set(KNOWN)), curve(decay)
    assert schedule.needs == {"lr_scaling": "sqrt"}
    state, rule, rates = RunState.fresh(["train"], 1, size), scaling.parse_rule("sqrt"), []
    while True:
        now = factor(lengths.progress(state.cursor, state.samples, state.step))
        seen = {"initial_size": state.initial_size, "lr_decay": now}
        decision = decide(schedule, state, seen, batch, lengths, 0.0)
        target = {"train": Fraction(decision["target"])}
        plan = plan_step(target, state.cursor, state.carry, lengths, "keep", state.samples)
        if plan is None:
            break
        rates.append(now * rule(float(scaling.mean_size(plan) / exact(size))))
        if not plan.cut:
            assert rates[-1] == pytest.approx(math.sqrt(now), rel=1e-9)
        state.advance(plan, None, None, decision)
    assert state.samples == rows
    assert state.step / (rows / size) == pytest.approx(expected, rel=0.005)
