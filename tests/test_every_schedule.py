"""Every schedule that --schedule can name: within its bounds, without a hidden memory, planned where it can
be, and run on the embedded task. What those of measurements do with numbers is in test_feedback.py.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import records
from test_gradient import reset
from test_noise_scale import test_a_real_run_of_each as run_of_feedback
from test_replay_and_plan import write_run
from test_schedules import SIGNALS

import train
from adaptive.config import Batch, parse
from adaptive.plan import Lengths
from adaptive.schedules import SCHEDULES, decide, parse_schedule
from adaptive.state import RunState

PUBLISHED = Path(__file__).parent / "test_schedules.py"  # the functions of REQUIREMENTS A, by path
OPEN_LOOP = {  # text -> (least, most), where sizes begin in between
    "constant()": (7, 7),
    "linear(interval=2)": (1, 32),
    "steps('0:3 20:6.5 50:4')": (3, 6.5),
    "ramp(2.5, 9, 60)": (2.5, 9),
    "exponential(9, 2.5, 60)": (2.5, 9),
    "cosine(2.5, 9, 60)": (2.5, 9),
    "seesaw()": (2, 20),
    "replay('RUN')": (2.5, 7),
}
MIXING = {
    "task_aware(task='a')": (8, 64),
    "incremental()": (8, 32),
    "curriculum()": (4, 32),
    f"{PUBLISHED}:task_aware()": (8, 64),
    f"{PUBLISHED}:incremental()": (8, 32),
    f"{PUBLISHED}:curriculum()": (4, 32),
}
SHARE = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)  # the ends half of the time: there bounds are reached
SEEN = st.fixed_dictionaries({
    "samples": st.integers(0, 100), "lr_decay": SHARE, "difficulty": SHARE,
    "new_data_ratio": SHARE, "task_ratios": SHARE.map(lambda a: {"a": a, "b": 1 - a}),
})  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> str:
    """A run whose sizes can be replayed."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    write_run(folder, [2.5, 2.5, 7.0, 4.0] * 4, [2, 3, 7, 4] * 4)
    return str(folder)


def test_every_name_is_here():
    """Mutation: one added to SCHEDULES and to no test."""
    measured = next(m for m in run_of_feedback.pytestmark if m.name == "parametrize").args[1]
    named = {text.split("(")[0] for text in (*OPEN_LOOP, *MIXING, *measured) if ".py:" not in text}
    assert named == set(SCHEDULES) - {"candidate"}, "whose runs are those of test_critical_batch.py"


@pytest.mark.parametrize("text", [*OPEN_LOOP, *MIXING])
@settings(max_examples=40, deadline=None)
@given(seen=st.lists(SEEN, min_size=1, max_size=12), place=SHARE)
def test_bounds_and_no_memory(recorded, text, seen, place):
    """Whatever is seen: within the bounds, and a fresh one that is asked backwards gives the same answers.

    Mutations: `max` left out of `curriculum` (0 and less), `min` of it (33); `last` of a ramp
    kept from call to call.
    """
    least, most = (OPEN_LOOP | MIXING)[text]
    schedule, fresh = (parse_schedule(text.replace("RUN", recorded), SIGNALS) for _ in range(2))
    first = schedule.start or least + place * (most - least)
    # seesaw's bound is --max_batch_size; the others have their own, which that must not hide.
    limit = most if text == "seesaw()" else 2 * most
    batch, lengths = Batch(batch_size=first, max_batch_size=limit), Lengths({"a": 10**6}, Fraction(1))
    state, answers = RunState.fresh(["a"], 1, first), []
    for step, signals in enumerate(seen, 1):
        state.step = step
        told = {"step": step, "current_size": state.size, "initial_size": first, **signals}
        answers.append((told, schedule.call(told, otherwise=-1.0)))
        state.size = decide(schedule, state, told, batch, lengths, 0.0)["size"]
        assert least <= state.size <= most
    assert schedule.state_dict() is None
    for told, answer in reversed(answers):
        assert fresh.call(told, otherwise=-1.0) == answer > 0


def embedded(folder: Path, text: str, *more: str) -> list[str]:
    return ["--schedule", text, "--report_to", "none", "--sequence_length", "32", "--eval_every", "never",
            "--save_every", "never", "--output_dir", str(folder), *more]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", OPEN_LOOP)
def test_a_plan_and_a_run_of_functions_of_progress(tmp_path, recorded, capfd, text):
    """On the embedded task: --dry_run tells the steps, and draws both curves; the run has those sizes.

    Mutation: `samples` or `lr_decay` of the step before handed to the schedule in one of both.
    """
    start = [] if parse_schedule(text.replace("RUN", recorded), SIGNALS).start else ["--batch_size", "7"]
    flags = embedded(tmp_path / "run", text.replace("RUN", recorded), *start, "--max_samples", "90")
    flags += ["--max_batch_size", "20"]
    reset()
    planned = train.main(parse([*flags, "--dry_run"]))
    told = capfd.readouterr().out
    assert "asked over samples" in told and "learning rate (of its peak) over samples" in told
    assert "█" in told and not (tmp_path / "run").exists()
    reset()
    train.main(parse(flags))
    ran = records(tmp_path / "run")
    assert f"{len(ran):,} steps, {ran[-1]['updates']:,} updates, 90 samples" in told
    assert (planned.step, planned.size) == (len(ran), ran[-1]["target_batch_size"])
    sizes = {record["target_batch_size"] for record in ran}
    assert text.startswith("constant") == (len(sizes) == 1)
    assert all(record["loss"] > 0 for record in ran if record["batch_size"])


@pytest.mark.slow
@pytest.mark.parametrize("text", MIXING, ids=lambda text: text.rpartition("/")[2])
def test_a_run_of_functions_of_the_mixture(tmp_path, text):
    """Ours, and the published functions as they were: two embedded sources, each size that of the signals of
    the step before.

    Mutation: the signals of the step itself; `new_data_ratio` of the old source.
    """
    more = ["--dataset_name", "a=stdlib", "b=stdlib_topics", "--new_sources", "b", "--source_sizes", "6", "4"]
    reset()
    train.main(parse(embedded(tmp_path / "run", text, "--batch_size", "10", "--max_steps", "12", *more)))
    ran, schedule = records(tmp_path / "run"), parse_schedule(text, SIGNALS)
    seen = {"task_ratios", "new_data_ratio", "difficulty"} & schedule.signals
    for before, record in zip(ran, ran[1:], strict=False):
        told = {"step": before["step"], "current_size": before["target_batch_size"]}
        told |= {name: before[name] for name in seen}
        assert record["target_batch_size"] == schedule.call(told, otherwise=-1.0)
    assert len(seen) == 1 and len({record["target_batch_size"] for record in ran}) > 1
