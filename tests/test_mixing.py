"""Several sources in one step: sizes, shares, weights, signals and records, on one process and by hand."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import losses_of, n_supervised
from launching import audits, records
from test_gradient import (
    QUIET,
    Net,
    Tiny,
    alone,  # noqa: F401 (a fixture)
    as_rank,
    distance,
    gradients,
    make_rows,
    prepared,
    reset,
)

import train
from adaptive import scaling, signals
from adaptive.config import BadSetting, Batch, parse
from adaptive.corpus import load_corpus
from adaptive.data import Data, Share, load
from adaptive.order import Order
from adaptive.plan import Lengths, exact, plan_step, share
from adaptive.schedules import SCHEDULES, Schedule, decide, first_size, parse_schedule
from adaptive.state import RunState
from adaptive.tasks import Loaded, build_tokenizer
from adaptive.tasks.causal_lm import pack

ROWS = {"a": 13, "b": 29, "none": 7}


class Mixed(Tiny):
    """Rows by the name of the source; those of "none" are not supervised."""

    def load(self, config):
        rows = rows_of(config.data.dataset_name)
        return Loaded(train=rows, eval=rows[:5], fingerprint=f"f{len(rows)}")


def rows_of(name: str) -> list[dict]:
    rows = [{**row, "hard": np.float64(len(row["labels"]) / 10)} for row in make_rows(ROWS[name])]
    if name == "none":
        rows = [{**row, "labels": np.full_like(row["labels"], -100)} for row in rows]
    return rows


def by_source(step, current_sizes):
    """Sizes of its own for each source; 0 for b at every fifth step."""
    return {"a": 1.3 + step % 3, "b": 0 if step % 5 == 0 else 0.7 * (1 + step % 4)}


def half(step, current_size):
    return current_size


published = functools.partial(
    lambda step, current_size, task_ratios, largest: current_size + 2 if task_ratios["a"] > 0.5 else 8,
    largest=64,
)


def run(folder, *arguments: str) -> RunState:
    reset()
    return train.main(parse(["--task", f"{__file__}:Mixed", "--output_dir", str(folder), *QUIET, *arguments]))


def weights_of(folder) -> list[torch.Tensor]:
    return list(torch.load(folder / "model" / "weights.pt").values())


# Positions


def test_sizes_of_sources_over_ten_thousand_steps():
    """Counts within 1 of the sums, every epoch of every source exactly once, W = 1 and 3 alike.

    Mutations: `Fraction(size)` for `exact` in the sizes (0.3 in binary: an n late by one); share() with
    `before` not moved on by a source (one process gets the first sample of each).
    """
    rows, sizes = {"x": 37, "y": 101, "z": 53}, {"x": 0.3, "y": 1.3, "z": 2.75}
    lengths = Lengths(rows, Fraction(1000))
    target = {source: exact(size) for source, size in sizes.items()}
    state = SimpleNamespace(cursor=dict.fromkeys(rows, 0), carry=dict.fromkeys(rows, Fraction(0)), samples=0)
    used: dict[str, list[int]] = {source: [] for source in rows}
    for step in range(1, 10_001):
        plan = plan_step(target, state.cursor, state.carry, lengths, "keep", state.samples)
        state.cursor, state.carry, state.samples = plan.cursor, plan.carry, state.samples + plan.size
        for source, size in target.items():
            assert 0 <= step * size - plan.cursor[source] < 1
        parts = {w: [pair for rank in range(w) for pair in share(plan, rank, w)] for w in (1, 3)}
        together = {
            w: sorted((source, int(p)) for source, positions in parts[w] for p in positions) for w in parts
        }
        assert together[1] == together[3]
        held = [sum(len(positions) for _, positions in share(plan, rank, 3)) for rank in range(3)]
        assert max(held) - min(held) <= 1, "balanced over the sum of the sources"
        for source, position in together[3]:
            used[source].append(position)
    assert not plan.cut
    for source, positions in used.items():
        assert positions == list(range(plan.cursor[source]))
        indices = Order(42, source, rows[source]).indices(np.array(positions))
        for start in range(0, len(indices) - rows[source] + 1, rows[source]):
            assert len(set(indices[start : start + rows[source]].tolist())) == rows[source]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_the_same_on_one_process_and_on_three(workers):
    """Mutation: `rows + own.rows` in Data.share: the rows of one source with the indices of another."""
    config = parse(["--dataloader_num_workers", str(workers), *QUIET])
    datasets = {name: rows_of(name) for name in ("a", "b")}
    ranks = {w: [Data(datasets, config, rank, w) for rank in range(w)] for w in (1, 3)}
    lengths, target = Lengths({"a": 13, "b": 29}, Fraction(2)), {"a": exact(1.3), "b": exact(2.6)}
    cursor, carry, done = {"a": 0, "b": 0}, dict.fromkeys(target, Fraction(0)), 0
    while plan := plan_step(target, cursor, carry, lengths, "keep", done):
        cursor, carry, done = plan.cursor, plan.carry, done + plan.size
        taken = {}
        for w, data in ranks.items():
            parts = [one.share(plan, {"a": 0.5, "b": 0.25}) for one in data]
            taken[w] = sorted(pair for part in parts for pair in zip(part.sources, part.indices, strict=True))
            for part in parts:
                own = zip(part.sources, part.indices, part.rows, part.weights, strict=True)
                assert all(row is not None and np.array_equal(row["labels"], datasets[s][i]["labels"])
                           and weight == {"a": 0.5, "b": 0.25}[s] for s, i, row, weight in own)  # fmt: skip
        assert taken[1] == taken[3] and len(taken[1]) == plan.size
    assert done == 84


# The gradient


def by_hand(model, rows: dict[str, list[dict]], weights: dict[str, float], by_tokens: bool, apart: bool):
    """Gradient of sum_i w_i l_i, written per source: w_s / k_i, or n w / T for each token of a group."""
    total, n = torch.zeros((), dtype=torch.float64), sum(map(len, rows.values()))
    tokens = {source: sum(map(n_supervised, own)) for source, own in rows.items()}
    for source, own in rows.items():
        losses = losses_of(model, own)
        if by_tokens:
            count, among = (len(own), tokens[source]) if apart else (n, sum(tokens.values()))
            total = total + sum(losses) * (count * weights[source] / among if among else 0)
        else:
            for loss, row in zip(losses, own, strict=True):
                total = total + loss * weights[source] / max(1, n_supervised(row))
    return torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("by_tokens", [True, False])
@pytest.mark.parametrize("lambdas", [None, {"a": 0.5, "b": 0.3, "none": 0.2}])
def test_gradient_weighs_sources_exactly_for_every_cut(by_tokens, lambdas):
    """1e-12 in fp64: lambda_s G / (max(G, 1) G_s), W in 1, 2, 3, 5, micro-batches 1, 3, 64; sources that are
    absent, unsupervised or alone, more ranks than samples, G below 1.

    Mutations: one token total for all groups in group_totals (1e-1); `shares[s]` not divided by `sizes[s]`
    (1e-1); loss_scales by the order of sources without `self.groups` (1e-1).
    """
    engine, task = prepared()
    batch = engine.config.batch
    batch.normalize_by = "tokens" if by_tokens else "samples"
    if lambdas:
        batch.source_weights = tuple(lambdas.values())
    datasets, lengths = {name: rows_of(name) for name in ROWS}, Lengths(ROWS, Fraction(9))
    tried = 0
    for sizes in [(2.5, 4.25, 1.0), (5.0, 0.5, 0.5), (0.2, 0.3, 0.1), (0.6, 2.0, 0.75), (0.25, 0.25, 3.0)]:
        target, zero = dict(zip(ROWS, map(exact, sizes), strict=True)), dict.fromkeys(ROWS, 0)
        carry = {"a": Fraction(4, 5), "b": Fraction(0), "none": Fraction(1, 4)}
        plan = plan_step(target, zero, carry, lengths, "keep", 0)
        rows = {i.source: datasets[i.source][i.start : i.stop] for i in plan.intervals}
        total = sum(sizes)
        right = {source: 1 / max(total, 1) for source in ROWS}
        if lambdas:
            right = {s: lambdas[s] * total / (max(total, 1) * g) for s, g in zip(ROWS, sizes, strict=True)}
        expected = by_hand(engine.module, rows, right, by_tokens, apart=bool(lambdas))
        every = [n_supervised(row) for own in rows.values() for row in own]
        totals = [sum(every)] if not lambdas else [sum(map(n_supervised, rows.get(s, []))) for s in ROWS]
        for world_size, micro in itertools.product((1, 2, 3, 5), (1, 3, 64)):
            batch.micro_batch_size = micro
            weights = scaling.source_weights(batch, plan, world_size)
            added, sent = [torch.zeros_like(g) for g in expected], []
            for rank in range(world_size):
                one = as_rank(engine, rank, world_size, 0)
                one.start_sum = lambda values, sent=sent, totals=totals: (
                    sent.append(values) or (lambda: totals)
                )
                data = Data(datasets, engine.config, rank, world_size)
                for name, source in data.sources.items():  # in file order, as `rows` has them
                    source.order = SimpleNamespace(indices=lambda positions, n=ROWS[name]: positions % n)
                train.gradient(one, task, data.share(plan, weights), data.idle_row, batch)
                torch._foreach_add_(added, gradients(engine), alpha=1 / world_size)
                engine.discard()
            assert not by_tokens or [sum(part) for part in zip(*sent, strict=True)] == totals
            if any(every):
                assert distance(added, expected) < 1e-12, (sizes, world_size, micro)
            tried += 1
    assert tried == 5 * 12


def test_weights_of_sources_have_their_means_over_many_steps():
    """n_s w_s has the mean lambda_s for sizes above and below 1; `realized` and a cut step sum to 1.

    Mutation: `plan.target` for counts where w is 1/n: a step without source b weighs 0.5 in all.
    """
    target = {"a": exact(2.4), "b": exact(0.3)}
    lengths = Lengths({"a": 10**6, "b": 10**6}, Fraction(1))
    for policy in ("target", "realized"):
        batch = Batch(source_weights=(1.0, 3.0), fractional_scaling=policy)
        cursor, carry, sums, steps = (
            {"a": 0, "b": 0},
            dict.fromkeys(target, Fraction(0)),
            {"a": 0.0, "b": 0.0},
            [],
        )
        for _ in range(1000):
            plan = plan_step(target, cursor, carry, lengths, "keep", 0)
            cursor, carry = plan.cursor, plan.carry
            weights = scaling.source_weights(batch, plan, 1)
            steps.append(sum(n * weights[source] for source, n in plan.counts.items()))
            for source, n in plan.counts.items():
                sums[source] += n * weights[source]
        if policy == "target":
            assert (sums["a"] / 1000, sums["b"] / 1000) == pytest.approx((0.25, 0.75), rel=1e-9)
        else:
            assert steps == pytest.approx([1.0] * 1000)
    cut = plan_step(target, {"a": 5, "b": 5}, dict.fromkeys(target, Fraction(0)),
                    Lengths({"a": 6, "b": 6}, Fraction(1)), "keep", 10)  # fmt: skip
    assert cut.size == 2 or cut.cut
    cut = plan_step(target, {"a": 6, "b": 5}, {"a": Fraction(0), "b": Fraction(9, 10)},
                    Lengths({"a": 6, "b": 6}, Fraction(1)), "keep", 11)  # fmt: skip
    weights = scaling.source_weights(Batch(source_weights=(1.0, 3.0)), cut, 1)
    assert cut.cut and sum(n * weights[s] for s, n in cut.counts.items()) == pytest.approx(1)


# Whole runs


def naive(folder, rate: float = 0.1) -> list[torch.Tensor]:
    """SGD by hand over the audited rows and weights; by samples."""
    model, datasets = Net(), {name: rows_of(name) for name in ("a", "b")}
    for line in audits(folder)[0]:
        names = line.get("sources", ["a"] * len(line["indices"]))
        own = [datasets[name][index] for name, index in zip(names, line["indices"], strict=True)]
        if not any(map(n_supervised, own)):
            continue
        parts = zip(losses_of(model, own), own, line["weights"], strict=True)
        total = sum(loss * weight / max(1, n_supervised(row)) for loss, row, weight in parts)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True
        ):
            p.data -= rate * g
    return list(model.state_dict().values())


TWO = [
    "--dataset_name", "a", "--dataset_name", "b", "--normalize_by", "samples", "--num_train_epochs", "3",
    "--schedule", f"{__file__}:by_source", "--source_sizes", "3.5", "2.7", "--source_weights", "2", "1",
    "--micro_batch_size", "2", "--track", "difficulty", "task_ratios", "source_loss", "new_data_ratio",
    "--new_sources", "b", "--eval_every", "10 steps",
]  # fmt: skip


def test_a_run_with_two_sources_and_a_stop(tmp_path):
    """Weights are those of SGD by hand; records name each source; a run cut at step 9 goes on to the same.

    Mutations: sources swapped in the zip of source_weights (1e-1); `state.cursor` not restored by source
    (other rows); loss/SOURCE taken over the rows of all (records differ).
    """
    state = run(tmp_path / "run", *TWO)
    told, lines = records(tmp_path / "run"), audits(tmp_path / "run")[0]
    assert distance(weights_of(tmp_path / "run"), naive(tmp_path / "run")) < 1e-12
    assert state.samples == 3 * (13 + 29) and [r["target_batch_size/a"] for r in told[:2]] == [3.5, 2.3]
    assert state.samples == state.cursor["a"] + state.cursor["b"] == sum(r["batch_size"] for r in told)
    assert any(r["batch_size/b"] == 0 and r["batch_size/a"] and r["loss/b"] is None for r in told)
    model, first = Net(), told[0]
    own = [rows_of(s)[i] for s, i in zip(lines[0]["sources"], lines[0]["indices"], strict=True)]
    by_row = [(x.item() / max(1, n_supervised(r)), n_supervised(r) > 0) for x, r in
              zip(losses_of(model, own), own, strict=True)]  # fmt: skip
    supervised = [loss for loss, there in by_row if there]
    assert first["loss"] == pytest.approx(sum(supervised) / len(supervised), rel=1e-12)
    for name in ("a", "b"):
        each = [x for (x, there), s in zip(by_row, lines[0]["sources"], strict=True) if there and s == name]
        assert each and first[f"loss/{name}"] == pytest.approx(sum(each) / len(each), rel=1e-12)
    assert first["difficulty"] == pytest.approx(
        np.mean([1 - np.exp(-loss) for loss in supervised]), rel=1e-12
    )
    assert told[-1]["coverage/a"] == (state.cursor["a"] % 13 or 13) / 13
    for record, line in zip(told, lines, strict=True):
        assert sum(line["weights"]) == pytest.approx(record["batch_size"] * record["weight"], rel=1e-12)
    ratios = [r["task_ratios"] for r in told if r["task_ratios"]]
    assert all(sum(r.values()) == pytest.approx(1) for r in ratios)
    assert told[-1]["new_data_ratio"] == ratios[-1]["b"]
    evals = records(tmp_path / "run", "eval")
    assert len(evals) >= 2 and {"eval_loss", "eval_loss/a", "eval_loss/b"} <= set(evals[0])

    run(tmp_path / "cut", *TWO, "--max_steps", "9")
    again = run(tmp_path / "cut", *TWO, "--resume_from_checkpoint", "auto")
    assert again.to_json() | {"seconds": 0, "signals": 0} == state.to_json() | {"seconds": 0, "signals": 0}
    assert all(map(torch.equal, weights_of(tmp_path / "cut"), weights_of(tmp_path / "run")))
    with pytest.raises(BadSetting, match=r"another dataset.*\(a:f13/13 b:f29/29, here a:f13/13 c:f29/29\)"):
        run(tmp_path / "cut", "--dataset_name", "a", "c=b", *TWO[4:6], "--resume_from_checkpoint", "auto")


def test_packed_rows_have_the_mean_difficulty_of_their_tokens(tmp_path):
    """Documents of 3, 4 and 6 bytes and their ends in rows of 5: each token has its document's number.

    Mutation: `lengths` without the end token (every later row is off).
    """
    file = tmp_path / "rows.csv"
    file.write_text("text,hard,name\nabc,1,x\nabcd,0.5,y\nabcdef,0,z\n")
    dataset = load_corpus(parse_data(file), 42).train
    assert len(dataset) == 2, "one is held out"
    hard = {3: 1.0, 4: 0.5, 6: 0.0}
    tokens = [hard[len(text)] for text in dataset["text"] for _ in range(len(text) + 1)]
    packed = pack(dataset, build_tokenizer(parse([]), {}), 5, "hard")
    rows = [tokens[at : at + 5] for at in range(0, len(tokens), 5)]
    assert list(packed["hard"]) == pytest.approx([np.mean(row) for row in rows if len(row) > 1])
    with pytest.raises(BadSetting, match="--difficulty_column name"):
        pack(dataset, build_tokenizer(parse([]), {}), 5, "name")


def parse_data(file):
    return replace(parse(["--text_column", "text"]).data, dataset_name=str(file), eval_dataset=None)


def test_one_named_source_and_one_unnamed_are_what_one_was(tmp_path):
    """Mutation: a single dataset named by its path: the order, and every record, would be another."""
    one = ["--dataset_name", "a", "--max_steps", "5"]
    run(tmp_path / "one", *one)
    run(tmp_path / "same", "--dataset_name", "train=a", *one[2:])
    told = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in records(tmp_path / f)]
        for f in ("one", "same")
    ]
    assert told[0] == told[1] and told[0][0]["positions"][0][0] == "train"
    assert not [name for name in told[0][0] if "/" in name]
    assert all("sources" not in line for line in audits(tmp_path / "one")[0])


def test_difficulty_comes_from_a_column(tmp_path):
    """Mutation: the mean of this rank's means, or the column of the idle row counted."""
    run(tmp_path / "run", "--dataset_name", "b", "--difficulty_column", "hard", "--batch_size", "4",
        "--schedule", "curriculum(threshold=0.6)", "--max_steps", "6")  # fmt: skip
    rows = rows_of("b")
    for record, line in zip(records(tmp_path / "run"), audits(tmp_path / "run")[0], strict=True):
        assert record["difficulty"] == pytest.approx(np.mean([rows[i]["hard"] for i in line["indices"]]))
    sizes = [r["target_batch_size"] for r in records(tmp_path / "run")]
    hard = [r["difficulty"] > 0.6 for r in records(tmp_path / "run")]
    assert sizes[1:] == [max(s - 2, 4) if h else s + 1 for s, h in zip(sizes, hard, strict=False)][:5]
    with pytest.raises(BadSetting, match="--difficulty_column no"):
        run(tmp_path / "no", "--dataset_name", "b", "--difficulty_column", "no")


def test_a_sample_without_a_difficulty_is_left_out_of_the_mean():
    """NaN, as a column with a missing value has it. Mutation: summed, and the signal is null for good."""
    own = SimpleNamespace(rows=[{}] * 4, difficulty=[0.25, math.nan, 0.75, math.nan])
    total, n = signals._difficulty(own, [torch.zeros(4)])
    assert (float(total), n) == (1.0, 2)


# Decisions


def made(function, sources: dict[str, int], batch: Batch | None = None, step: int = 1, **seen):
    schedule = function if isinstance(function, Schedule) else Schedule("mine", function, set(signals.KNOWN))
    state = RunState.fresh(list(sources), 3, 8.0)
    state.step = step
    given = {"step": step, "current_size": 8.0, **seen}
    return decide(schedule, state, given, batch or Batch(batch_size=8), Lengths(sources, Fraction(1)), 0.0)


def test_numbers_are_split_and_mappings_are_taken():
    """Mutations: split by --source_weights instead of sizes; max_batch_size on each source, not the sum;
    parts scaled to their sum as a float.
    """
    two = {"a": 30, "b": 10}
    assert made(half, two)["targets"] == {"a": "6", "b": "2"}, "by rows"
    sized = Batch(batch_size=8, source_sizes=(0.7, 1.3))
    assert made(half, two, sized)["targets"] == {"a": "14/5", "b": "26/5"}
    assert made(half, two, sized)["sizes"] == {"a": 2.8, "b": 5.2}
    answer = lambda step, current_size: {"a": 0.3, "b": 2}  # noqa: E731
    taken = made(answer, two)
    assert (taken["size"], taken["target"], taken["targets"]) == (2.3, "23/10", {"a": "3/10", "b": "2"})
    thirds = made(lambda step, current_size: {"a": 1 / 3, "b": 2.7}, two)  # whose sum is no float
    assert thirds["targets"] == {"a": str(exact(1 / 3)), "b": "27/10"}, "as they were returned"
    held = made(answer, two, Batch(batch_size=8, max_batch_size=1.15))
    assert held["targets"] == {"a": "3/20", "b": "1"} and "--max_batch_size" in held["clamped"]
    per_device = made(answer, two, Batch(per_device_train_batch_size=1))
    assert per_device["targets"] == {"a": "9/10", "b": "6"}, "on 3 processes"
    assert made(lambda step, current_size: {"a": 1, "b": 0}, two)["targets"] == {"a": "1", "b": "0"}
    share = Batch(per_device_train_batch_size=0.5, fraction="accumulate")
    for wrong, words in [
        ({"a": 1}, "one for each of a, b"), ({"a": 1, "c": 1}, "a, c"), ({"a": -1, "b": 2}, "-1"),
        ({"a": 0, "b": 0}, "0"), ({"a": float("nan"), "b": 2}, "nan"),
    ]:  # fmt: skip
        with pytest.raises(BadSetting, match=words):
            made(lambda step, current_size, wrong=wrong: wrong, two)
    with pytest.raises(BadSetting, match="--fraction participate"):
        made(lambda step, current_size: {"a": 0.5, "b": 0.5}, two, share)
    batch = Batch(source_sizes=(0.7, 1.3))
    assert first_size(Schedule("half", half, set(signals.KNOWN)), batch) == 2.0 == batch.batch_size


@pytest.mark.parametrize("text, seen, size", [
    ("task_aware(task='a')", {"task_ratios": {"a": 0.6, "b": 0.4}}, 10),
    ("task_aware(task='b')", {"task_ratios": {"a": 0.6, "b": 0.4}, "current_size": 12}, 11),
    ("task_aware", {"task_ratios": {"a": 0.6, "b": 0.4}, "current_size": 63}, 64),
    ("task_aware", {"task_ratios": {"a": 0.4, "b": 0.6}}, 8),
    ("task_aware", {}, 8),
    ("incremental", {"new_data_ratio": 0.29}, 9), ("incremental", {"new_data_ratio": 0.3}, 8),
    ("incremental", {"new_data_ratio": 0.3, "current_size": 9}, 8),
    ("incremental", {"new_data_ratio": 0.1, "current_size": 32}, 32),
    ("curriculum", {"difficulty": 0.81}, 6), ("curriculum", {"difficulty": 0.8}, 9),
    ("curriculum", {"difficulty": 0.9, "current_size": 4}, 4),
    ("curriculum", {"difficulty": 0.1, "current_size": 32}, 32),
    (f"{__file__}:published", {"task_ratios": {"a": 0.6, "b": 0.4}}, 10),
])  # fmt: skip
def test_published_schedules(text, seen, size):
    """Mutations: `>=` for `>` in curriculum; `min` by the size before; a partial by path without keywords."""
    schedule = parse_schedule(text, set(signals.KNOWN))
    assert made(schedule, {"a": 300, "b": 100}, **seen)["size"] == pytest.approx(size)
    assert {"task_aware", "incremental", "curriculum"} <= set(SCHEDULES)


def test_a_task_that_is_no_source_is_named():
    """Mutation: never the dominant one: the size falls to the smallest without a word."""
    schedule = parse_schedule("task_aware(task='A')", set(signals.KNOWN))
    with pytest.raises(BadSetting, match="task='A' is no source; write one of a, b"):
        made(schedule, {"a": 300, "b": 100}, task_ratios={"a": 0.6, "b": 0.4})


# Settings


def test_sources_are_named_in_flags_and_recipes(tmp_path):
    """Mutations: later --dataset_name flags replace earlier ones; a recipe's sources without their `new`."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"sources": {
        "code": {"dataset": "stdlib", "batch_size": 2.5, "weight": 3, "eval_dataset": "held.csv"},
        "prose": {"dataset_name": "x/stdlib_topics", "batch_size": 1, "weight": 1, "new": True},
    }}))  # fmt: skip
    config = parse(["--config", str(recipe)])
    assert config.data.dataset_name == ("code=stdlib", "prose=x/stdlib_topics")
    assert (config.batch.source_sizes, config.batch.source_weights) == ((2.5, 1.0), (3.0, 1.0))
    assert (config.data.new_sources, config.data.eval_dataset) == (("prose",), ("code=held.csv",))
    seen = []
    task = SimpleNamespace(
        load=lambda c: seen.append((c.data.dataset_name, c.data.eval_dataset)) or Loaded([1])
    )
    assert load(task, config).fingerprint == "code:/1 prose:/1"
    assert seen == [("stdlib", "held.csv"), ("x/stdlib_topics", None)]
    assert load(task, parse(["--dataset", "a/b"])).train == {"train": [1]}
    assert list(load(task, parse(["--dataset", "a/b.csv", "--dataset=c/d"])).train) == ["b", "d"]
    later = ["--dataset_name", "z", "--source_sizes", "--source_weights", "--new_sources", "--eval_dataset"]
    assert parse(["--config", str(recipe), *later]).data.dataset_name == ("z",)
    for wrong, words in [
        (["--dataset_name", "a", "x/a"], "two sources a"),
        (["--dataset_name", "a", "b", "--source_sizes", "1"], "each"),
        (["--source_weights", "0"], "above 0"), (["--new_sources", "x"], "--new_sources x"),
        (["--dataset_name", "a", "b", "--eval_dataset", "c"], "one of a, b"),
    ]:  # fmt: skip
        with pytest.raises(BadSetting, match=words):
            parse(wrong)
    recipe.write_text("sources: {code: {path: stdlib}}")
    with pytest.raises(BadSetting, match="code has path"):
        parse(["--config", str(recipe)])


def test_what_several_sources_cannot_have_is_said(tmp_path, capsys):
    """R91. Passes of other sources differ by more than noise: no number is better than a wrong one.

    Mutation: the noise scale measured all the same: it counts the distance between the sources as noise.
    """
    config = parse(["--dataset_name", "a", "b"])
    with pytest.raises(BadSetting, match="noise_scale"):
        signals.wanted({"noise_scale"}, (), config)
    assert signals.wanted({"loss"}, ("noise_scale", "difficulty"), config) == {"loss", "difficulty"}
    assert "noise_scale is not measured" in capsys.readouterr().err
    with pytest.raises(BadSetting, match="--new_sources"):
        signals.wanted({"new_data_ratio"}, (), config)
    with pytest.raises(BadSetting, match="no source is new"):  # with one source too: a ratio of 0 for ever
        signals.wanted({"new_data_ratio"}, (), parse([]))
    mixed = {"a": [{"input_ids": [1]}], "b": [{"input_ids": [1], "labels": [2]}]}
    with pytest.raises(BadSetting, match="have the columns input_ids and input_ids, labels"):
        Data(mixed, config, 0, 1)


def test_share_of_rows_that_weigh_alike():
    """Mutation: `Share.alike` with counts of the step in place of this rank's."""
    part = Share.alike(make_rows(3), 7, 0.25)
    assert (part.size, part.counts, part.sizes, part.weights) == (7, {"train": 3}, (7,), [0.25] * 3)
