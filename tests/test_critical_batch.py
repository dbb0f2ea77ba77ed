"""The finder: its mathematics, and whole searches on a quadratic model with a known answer."""

from __future__ import annotations

import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from accelerate.state import AcceleratorState, GradientState
from launching import ROOT, environment, run_python, unread
from quadratic import NOISE
from test_report import wandb_records

import train
from adaptive.config import BadSetting, parse
from adaptive.schedules.candidate import candidate
from adaptive.tools import fit
from adaptive.tools.candidates import Asked, table_of
from adaptive.tools.critical_batch import _seeds, sweep_report
from adaptive.tools.critical_batch import main as critical_batch
from adaptive.tools.finder_report import table
from adaptive.tools.inspect_run import main as inspect_run
from adaptive.tools.runs import lines
from adaptive.tools.search import bounds

TASK = ["--task", f"{Path(__file__).parent / 'quadratic.py'}:Quadratic", "--optim", "sgd"]
PLAIN = ["--max_grad_norm", "0", "--lr_scheduler_type", "constant", "--report_to", "none"]
PLAIN += ["--micro_batch_size", "4096", "--log_every", "never"]


def test_the_fit_finds_what_made_the_numbers():
    """Exact numbers to 1e-9; unbiased under 5 % noise. Mutation: plain least squares of steps (0.12)."""
    sizes = np.array([4, 8, 16, 32, 64, 128, 256, 512])
    exact = 120 + 120 * 50 / sizes
    assert fit.fit_trade(sizes, exact) == pytest.approx((120, 6000), rel=1e-9)
    draws = np.random.default_rng(0).normal(0, 0.05, (200, len(sizes)))
    found = [fit.fit_trade(sizes, exact * np.exp(noise)) for noise in draws]
    assert np.median([e / s for s, e in found]) == pytest.approx(50, rel=0.02)
    assert np.std(np.log([e / s for s, e in found])) < 0.08


def test_no_trade_is_no_fit():
    """Steps that only fall as 1/B (all sizes below the critical one), constant steps, and two sizes."""
    assert fit.fit_trade([8, 16, 32], [400, 200, 90]) is None
    assert fit.fit_trade([8, 16, 32], [100, 110, 120]) is None
    assert fit.fit_trade([8, 16], [100, 60]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """95 % of 2,000 sets of 4 seeds. Mutation: 1.96 in place of Student's t (86 %)."""
    draws = np.exp(np.random.default_rng(1).normal(math.log(64), 0.2, (2000, 4)))
    inside = [low <= 64 <= high for _, low, high in map(fit.interval, draws)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    middle, low, high = fit.interval([64.0])
    assert middle == pytest.approx(64) and math.isnan(low) and math.isnan(high)
    assert fit.interval([]) is None


@pytest.mark.parametrize(
    ("metrics", "tolerance", "lower", "size"),
    [
        ({8: 1.0, 16: 1.005, 32: 1.009, 64: 1.02}, 0.01, True, 32),
        ({8: 1.0, 16: 1.02, 32: 1.005}, 0.01, True, 32),
        ({8: 1.1, 16: 1.0, 32: math.inf}, 0.01, True, 16),
        ({8: 0.9, 16: 0.899, 32: 0.88}, 0.01, False, 16),
        ({8: -2.0, 16: -1.99, 32: -1.9}, 0.01, True, 16),
        ({8: math.inf}, 0.01, True, None),
    ],
)
def test_turning_point(metrics, tolerance, lower, size):
    assert fit.turning_point(metrics, tolerance, lower) == size


def test_branch_rule():
    """Within eps of *all* smaller ones. Mutation: within eps of the smallest only, which takes 32 here."""
    assert fit.branch_size({8: 1.0, 16: 0.98, 32: 1.005}, 0.01) == 16
    assert fit.branch_size({8: 1.0, 16: 1.009, 32: 1.5}, 0.01) == 16
    assert fit.branch_size({8: math.inf, 16: math.inf}, 0.01) is None


def test_samples_to_a_loss_by_the_straight_line_of_logarithms():
    curve = [(0, 1.0), (100, 0.1), (200, 0.01)]
    assert fit.samples_to(0.1, curve) == 100
    assert fit.samples_to(10**-1.5, curve) == pytest.approx(150)
    assert fit.samples_to(0.001, curve) is None and fit.samples_to(2.0, curve) == 0
    assert fit.samples_to(-0.5, [(0, 1.0), (100, -1.0)]) == pytest.approx(75)
    assert fit.smoothed([4.0, 2.0, 1.0], 0.5) == 2.0


def swept(curves: dict[tuple[int, int], list], **flags) -> list[str]:
    """The table of a sweep whose candidates, (size, seed), came to these curves."""
    sizes, seeds = (sorted(set(part)) for part in zip(*curves, strict=True))
    given = {"sizes": sizes, "seeds": seeds, "target": None, "tolerance": 0.01, "metric": "eval_loss"} | flags
    own = [
        {"size": b, "seed": s, "ended": "done", "curve": c, "eval_loss": c[-1][1], "steps": 9, "anomalies": 0}
        for (b, s), c in curves.items()
    ]
    return table(sweep_report(Asked(SimpleNamespace(**given), None, []), own) | {"method": "sweep"})


def trade(size: int, s_min: float = 10, e_min: float = 80) -> list:
    """A curve at a loss of 1 after the steps of equation (1) of fit.py, at its second evaluation."""
    at = s_min * size + e_min
    return [[at / 2, 2.0], [at, 1.0], [2 * at, 0.9]]


def test_an_interval_is_of_the_seeds_that_have_a_fit():
    """Mutation: "one seed" where two others show no trade."""
    good, bad = ({(b, s): trade(b) for b in (4, 16, 64)} for s in (1, 2)), [[10, 2.0], [1000, 1.0]]
    one, two = good
    curves = one | {(b, s): bad for b in (4, 16, 64) for s in (2, 3)}
    (line,) = [line for line in swept(curves, target=1.0) if line.startswith("critical size")]
    assert line.startswith("critical size 8, 1 of 3 seeds with a fit: no interval: twice")
    assert "critical size 8, one seed: no interval: twice" in "\n".join(swept(one, target=1.0))
    assert "critical size 8, 95 % interval 8 to 8: twice" in "\n".join(swept(one | two, target=1.0))
    more = one | two | {(b, 3): bad for b in (4, 16, 64)}
    assert "95 % interval 8 to 8 (2 of 3 seeds with a fit): twice" in "\n".join(swept(more, target=1.0))


def test_a_target_that_is_met_by_the_first_evaluation_is_no_point_of_the_fit():
    """An upper bound of its samples, here 2.5 times them. Mutation: taken for them."""
    curves = {(b, 1): trade(b) for b in (4, 16, 64, 256)}
    curves[(2, 1)] = [[250, 0.99], [500, 0.9]]
    told = "\n".join(swept(curves, target=1.0))
    assert "critical size 8, one seed" in told
    assert re.search(r" 2 +1 +9 +0.9 +- +- +done, at the target early\n", told), told
    assert "note: 1 of 5 were at the target by their first evaluation and are not in the fit" in told
    assert "early" not in "\n".join(swept({(b, 1): trade(b) for b in (4, 16, 64)}))


def test_a_candidate_gives_up_only_on_a_fresh_evaluation(monkeypatch):
    """Mutations: every decision judged (an old evaluation against a later bound); a signal where nobody
    listens, as in inspect_run --verify, which it would end.
    """
    raised, quiet = [], candidate(size=8, bounds=[[100, 1.0]])
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a run in this process may have left its own
    assert quiet(120, 3.0) == 8.0 and quiet.lost
    monkeypatch.setattr("signal.getsignal", lambda number: raised.append)
    monkeypatch.setattr("signal.raise_signal", raised.append)
    size = candidate(size=8, bounds=[[100, 1.0], [200, 0.5]])
    assert [size(50, 3.0), size(120, 0.9), size(210, 0.9)] == [8.0] * 3 and not raised
    assert size(220, 0.8) == 8.0 and len(raised) == 1
    assert size(230, 0.9) == 8.0 and len(raised) == 1, "asked twice, a signal would leave at once"


def test_a_candidate_remembers_the_evaluation_it_has_judged():
    """Mutation: `seen` left out of its memory: after a resume that evaluation is held to a later bound."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    one, other = (candidate(size=8, bounds=[[100, 2.0], [200, 1.0]]) for _ in range(2))
    assert one(120, 1.5) == 8.0 and not one.lost
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other(220, 1.5) == 8.0 and not other.lost
    assert other(230, 1.4) == 8.0 and other.lost


def test_bounds_follow_the_best_of_the_second_half():
    rivals = [[[100, 9.0], [600, 3.0], [800, 4.0], [1000, 1.0]], [[600, 2.0], [900, 1.0]]]
    assert bounds(rivals, 1000, 0, lambda x: x + 0.1) == [[600, 2.1], [800, 2.1], [900, 1.1]]


def test_a_table_begins_at_nought_and_names_changes_only():
    assert table_of([(500, 8), (900, 8), (1500, 32)]) == "0:8 1500:32"
    assert table_of([]) is None


@pytest.mark.slow
def test_the_sweep_finds_the_closed_form(tmp_path):
    """Critical size within 15 % of the known noise scale, its interval over 3 seeds around it; then the same
    command runs nothing again, and another one into the same folder is refused.

    Mutation: steps of the whole run instead of those to the target: no trade, the turning point 16 is left.
    """
    folder = tmp_path / "sweep"
    flags = ["--method", "sweep", "--sizes", "16,48,160,512", "--seeds", "1,2,3", "--samples", "20000"]
    flags += ["--evaluations", "40", "--warmup", "0", "--give_up", "no", "--lr_scaling", "none"]
    flags += [*TASK, *PLAIN, "--output_dir", str(folder)]
    critical_batch(flags)
    report = json.loads((folder / "critical_batch.json").read_text())
    assert report["critical_batch_size"] == pytest.approx(NOISE, rel=0.15)
    low, high = report["interval"]
    assert low < report["critical_batch_size"] < high
    assert len(report["candidates"]) == 12 and all(c["samples"] == 20000 for c in report["candidates"])
    assert (folder / "critical_batch.png").stat().st_size > 20_000
    before = {path: path.stat().st_mtime_ns for path in folder.glob("size_*/*.jsonl")}
    critical_batch(flags)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("size_*/*.jsonl")} == before
    with pytest.raises(BadSetting, match="holds a search with samples 20000"):
        critical_batch([*flags, "--samples", "300"])


@pytest.mark.slow
def test_the_branch_rule_agrees_within_a_factor_of_two(tmp_path, capsys):
    """On the same model, from two checkpoints of a run whose rate is the best one for its size 8, k times
    size and rate. By equation (1) of quadratic.py 640 samples multiply the loss by 1e-4 at sizes 8 and 16,
    1e-3 at 32, 0.1 at 64 and 50 at 128: the rule must find half or all of the noise scale, and 128 loses.

    The search says what each branch is, and how to go on: a branch itself says neither.

    Mutations: the rate not scaled (no size loses: 128); branches that begin from fresh weights or continue
    the start's own folder; a line for each of the eight settings in which a branch is not its checkpoint's
    run; "go on with: accelerate launch ..." of one that has lost.
    """
    start = tmp_path / "start"
    rate = 1 / (1 + NOISE / 8)
    flags = [*TASK, *PLAIN, "--learning_rate", str(rate), "--batch_size", "8", "--schedule", "constant()"]
    flags += ["--max_samples", "80", "--save_every", "40 samples", "--output_dir", str(start)]
    train.main(parse(flags))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    untouched = {path: path.read_bytes() for path in start.rglob("*") if path.is_file()}
    folder = tmp_path / "branch"
    search = ["--method", "branch", "--start", str(start), "--factors", "1,2,4,8,16", "--samples", "640"]
    critical_batch([*search, "--output_dir", str(folder)])
    report = json.loads((folder / "critical_batch.json").read_text())
    assert [point["samples"] for point in report["points"]] == [40, 80]
    for point in report["points"]:
        assert NOISE / 2 <= point["critical"] <= NOISE * 2
        rows = {row["factor"]: row for row in point["candidates"]}
        assert [rows[k]["ended"] for k in (1, 2, 4, 16)] == ["done", "done", "done", "lost"]
        assert rows[4]["learning_rate"] == pytest.approx(4 * rate)
        assert rows[1]["samples"] == point["samples"] + 640 and rows[16]["samples"] < rows[1]["samples"]
    told = capsys.readouterr().out
    assert f"--schedule 'steps(\"{report['schedule']}\")'" in told
    assert "step_5_times_2 (16 samples a step, from " in told
    assert "step_5_times_16 has lost" in told and "stopped after step" in told
    assert inspect_run([str(folder / "step_5_times_2"), "--verify"]) == 0
    assert "when this checkpoint was saved" not in told and "go on with" not in told
    assert {path: path.read_bytes() for path in start.rglob("*") if path.is_file()} == untouched


def test_the_noise_scale_of_a_run(tmp_path, capsys):
    """The known one within a factor 1.5, with the warning; and read from a run that has it, also by a search
    whose output nobody reads.

    Mutation: trackers told after the screen, where `| head` has left.
    """
    folder = tmp_path / "noise"
    flags = [*TASK, *PLAIN, "--learning_rate", "1e-4"]
    critical_batch(
        [*flags, "--method", "noise", "--sizes", "16", "--samples", "3000", "--output_dir", str(folder)]
    )
    report = json.loads((folder / "critical_batch.json").read_text())
    assert NOISE / 1.5 < report["critical_batch_size"] < NOISE * 1.5
    assert "several times off" in capsys.readouterr().out
    again = ["--method", "noise", "--start", str(folder / "noise"), "--output_dir", str(tmp_path / "again")]
    critical_batch([*again, "--report_to", "none"])
    other = json.loads((tmp_path / "again" / "critical_batch.json").read_text())
    assert other["points"] == report["points"] and other["schedule"].startswith("0:")
    again[-1] = str(tmp_path / "unread")
    assert unread("-m", "adaptive.tools.critical_batch", *again, "--report_to", "tensorboard") == (141, "")
    assert (tmp_path / "unread" / "tensorboard").is_dir()


def test_what_cannot_be_searched_is_a_bad_setting(tmp_path):
    for flags, words in (
        (["--method", "branch"], "needs --start"),
        (["--method", "branch", "--start", str(tmp_path)], "no whole checkpoint"),
        (["--learning_rte", "1"], "did you mean --learning_rate"),
        (["--sizes", "8,many"], "write numbers above 0"),
        (["--method", "swep"], "choose from"),
        (["--seed", "7"], "write --seeds instead"),
        (["--batch-size=4"], "write --sizes or"),
        (["--target", "nan"], "write a loss"),
        (["--method", "branch", "--learning_rate", "1"], "--learning_rate: a branch holds its checkpoint's"),
    ):
        with pytest.raises(BadSetting, match=words):
            critical_batch([*flags, "--output_dir", str(tmp_path / words.replace(" ", "_"))])


@pytest.mark.slow
@pytest.mark.parametrize("flags, said", [
    (["--samples", "0"], "--samples is 0"), (["--evaluations", "0"], "--evaluations is 0"),
    (["--warmup", "-0.5"], "--warmup is -0.5"), (["--tolerance", "nan"], "--tolerance is nan"),
    (["--eps", "-1"], "--eps is -1"), (["--metric", "eval_acuracy"], "--metric eval_acuracy .*eval_loss"),
])  # fmt: skip
def test_a_search_that_was_not_meant_is_a_bad_setting(tmp_path, flags, said):
    """Mutations: a warmup below 0, which climbs the loss; a misspelt metric, of which every candidate has the
    worst, told when all are trained.
    """
    with pytest.raises(BadSetting, match=said):
        critical_batch(
            [*TASK, *PLAIN, "--samples", "64", "--sizes", "8,16", "--output_dir", str(tmp_path / "s"), *flags]
        )
    assert not (tmp_path / "s" / "size_16_seed_42").exists()


@pytest.mark.parametrize(("flags", "said"), [
    ("branch --sizes 8", "branch makes no use of --sizes; leave it out, or write --method sweep or noise"),
    ("branch --warmup=0.1", "branch makes no use of --warmup; leave it out, or write --method sweep"),
    ("sweep --factors 2", "sweep makes no use of --factors; leave it out, or write --method branch"),
    ("sweep --start runs/x", "sweep makes no use of --start"),
    ("noise --metric loss", "noise makes no use of --metric"),
    ("noise --sizes 8,16", "noise trains one run; write one number as --sizes"),
    ("noise --start runs/x --seeds 3", "reads --start runs/x and trains nothing; leave out --seeds"),
])  # fmt: skip
def test_a_flag_without_an_effect_is_a_bad_setting(tmp_path, flags, said):
    """Mutation: taken without a word, as if it had been looked at."""
    with pytest.raises(BadSetting, match=said):
        critical_batch([*TASK, *PLAIN, "--method", *flags.split(), "--output_dir", str(tmp_path / "s")])
    assert not (tmp_path / "s").exists()


def test_seeds_are_integers():
    """Mutation: numbers above 0: a seed of 0 refused, 1.5 taken for 1."""
    assert _seeds("3,0,3") == [0, 3]
    with pytest.raises(BadSetting, match="'1.5'; write integers"):
        critical_batch(["--seeds", "1.5"])


def test_a_mistake_leaves_the_folder_free(tmp_path):
    """Mutation: search.json kept: the corrected command is refused, "holds a search with start 'nowhere'"."""
    for start in ("nowhere", "nowhere_else"):
        with pytest.raises(BadSetting, match=f"--start {start} has no whole checkpoint"):
            critical_batch(["--method", "branch", "--start", start, "--output_dir", str(tmp_path / "s")])


def test_a_stream_is_searched(tmp_path, capsys):
    """Its candidates end at --samples. Mutation: --samples not told to `parse`: "a stream's length is
    unknown".
    """
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {n} of a stream\n" for n in range(400)))
    flags = [
        "--streaming",
        "--dataset_name",
        str(text),
        "--eval_dataset",
        str(text),
        "--sequence_length",
        "16",
    ]
    flags += ["--sizes", "8,16", "--samples", "48", "--evaluations", "2", "--report_to", "none"]
    critical_batch([*flags, "--output_dir", str(tmp_path / "s")])
    report = json.loads((tmp_path / "s" / "critical_batch.json").read_text())
    assert [row["samples"] for row in report["candidates"]] == [48, 48]
    assert inspect_run([str(tmp_path / "s" / "size_16_seed_42"), "--verify"]) == 0


@pytest.mark.slow
def test_who_gave_up_is_shown_and_every_tracker_has_the_result(tmp_path):
    """With the loss it gave up at, in the table and, hollow, in the picture; both in TensorBoard and trackio.

    Mutations: infinity for its metric, as the comparison has it; the finder's own run in W&B only.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, store = tmp_path / "search", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = [*TASK, *PLAIN, "--report_to", "tensorboard", "trackio", "--learning_rate", "0.02"]
    flags += ["--lr_scaling", "none", "--sizes", "8,128", "--samples", "2048", "--evaluations", "8"]
    command = ["-m", "adaptive.tools.critical_batch", *flags, "--output_dir", folder]
    done = run_python(*command, **store)
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr
    assert re.search(r"128 +42 +\d+ +- +- +- +lost at 0\.\d+\n", done.stdout), done.stdout[-2000:]
    kept = EventAccumulator(str(folder / "tensorboard"))
    kept.Reload()
    assert kept.Tags()["images"] == ["critical_batch"]
    assert {"candidates/text_summary", "critical_batch_size/text_summary"} <= set(kept.Tags()["tensors"])
    (base,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(base) as opened:
        rows = opened.execute("select metrics from metrics where run_name = 'search sweep'").fetchall()
    ((told,),) = rows
    told = json.loads(told)
    assert [row["size"] for row in told["candidates"]["_value"]] == [8, 128]
    assert told["critical_batch"]["_type"] == "trackio.image"


def test_a_search_that_is_killed_twice_goes_on(tmp_path):
    """The embedded task on 2 processes: SIGKILL in the second candidate, SIGTERM in the third, then the end.
    Each candidate has each sample once, what was over is not started again, all W&B runs are in one group,
    and the finder's own has table and picture.

    Mutations: result.json written before the candidate is over; the group left out of a candidate.
    """
    folder = tmp_path / "search"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/cpu_ddp.yaml",
    ]
    command += ["--main_process_port", "0", "-m", "adaptive.tools.critical_batch", "--sizes", "4,8,16"]
    command += ["--samples", "240", "--evaluations", "4", "--give_up", "no", "--sequence_length", "32"]
    command += ["--eval_share", "0.01", "--report_to", "wandb", "--output_dir", str(folder)]
    names = ["size_4_seed_42", "size_8_seed_42", "size_16_seed_42"]
    for name, number in ((names[1], signal.SIGKILL), (names[2], signal.SIGTERM)):
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
        metrics, deadline = folder / name / "metrics.jsonl", time.monotonic() + 200
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
        for each in [process, *workers] if number == signal.SIGKILL else [process]:
            each.send_signal(number)
        psutil.wait_procs(workers, timeout=60)
        process.wait(timeout=60)
        assert not (folder / name / "result.json").exists()
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "critical_batch.json").read_text())
    assert [row["samples"] for row in report["candidates"]] == [240] * 3
    starts = {name: [start["step"] for start in lines(folder / name / "starts.jsonl")] for name in names}
    assert starts[names[0]] == [0] and len(starts[names[1]]) == 2 and len(starts[names[2]]) == 2
    assert starts[names[2]][1] > 0, "a signal saves, nothing is run again"
    for name in names:
        assert inspect_run([str(folder / name), "--verify"]) == 0
        assert {start["world_size"] for start in lines(folder / name / "starts.jsonl")} == {2}
    files = list(folder.rglob("wandb/offline-run-*/*.wandb"))  # a kill may leave one without a record
    told = [pair for path in files for pair in wandb_records(path.parent)[1]]
    runs = [record for name, record in told if name == "run"]
    assert len({run.run_id for run in runs}) == 4 and {run.run_group for run in runs} == {"search"}
    logged = " ".join(path.name for path in folder.rglob("wandb/**/media/**/*") if path.is_file())
    assert ".png" in logged and ".table.json" in logged
