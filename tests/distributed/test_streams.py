"""Streams on several processes: the run of one process, also after stops, and files of each one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import audits, decisions, launch, records
from test_stream import distance, files

import train
from adaptive.config import parse

HERE = Path(__file__).parent
COMMON = ["--report_to", "none", "--optim", "sgd", "--learning_rate", "0.1", "--lr_scheduler_type",
          "constant", "--audit", "--check_agreement", "--streaming", "--save_every", "never"]  # fmt: skip
WILD = ["--task", f"{HERE}/material.py:InOrder", "--schedule", f"{HERE}/material.py:wild()",
        "--shuffle_buffer", "0"]  # fmt: skip
pytestmark = pytest.mark.slow


def shuffled(data: Path) -> list[str]:
    return ["--dataset_name", str(data), "--packing", "none", "--shuffle_buffer", "150", "--batch_size",
            "41.5", "--schedule", "constant()", "--sequence_length", "32"]  # fmt: skip


def several(layout: str, processes: int, *runs: list[str]) -> str:
    done = launch(layout, processes, HERE / "several_runs.py", json.dumps([[*COMMON, *run] for run in runs]))
    return done.stdout + done.stderr


def seen(folder: Path, processes: int) -> list[list[int]]:
    """Places of the stream of each step, over the processes that ran."""
    ranks = audits(folder)
    assert sorted(ranks) == list(range(processes))
    return [sorted(sum((line["indices"] for line in step), [])) for step in zip(*ranks.values(), strict=True)]


def test_the_same_samples_in_the_same_steps(tmp_path):
    """Three processes against one, a list read in order and shuffled files; then two and one process go on
    from three. Mutations: a share from the last step's end instead of p mod W: rows no rank has (KeyError); a
    mark of rank 0's own rows: the resumed run begins at other places.
    """
    data = shuffled(files(tmp_path / "data", 700))
    runs = {"wild": WILD, "shuffled": data, "stopped": [*data, "--max_steps", "9"]}
    flags = [[*run, "--output_dir", str(tmp_path / "three" / name)] for name, run in runs.items()]
    said = several("cpu_ddp", 3, *flags)
    assert "is over after 367 samples" in said
    again = [*data, "--output_dir", str(tmp_path / "three" / "stopped"), "--resume_from_checkpoint", "auto"]
    several("cpu_ddp", 2, again)
    for name, run in list(runs.items())[:2]:
        train.main(parse([*COMMON, *run, "--output_dir", str(tmp_path / "one" / name)]))
        one, three = (records(tmp_path / w / name) for w in ("one", "three"))
        assert decisions(one) == decisions(three)
        assert [a["loss"] for a in one] == pytest.approx([b["loss"] for b in three], abs=1e-5)
        assert seen(tmp_path / "one" / name, 1) == seen(tmp_path / "three" / name, 3)
        assert distance(tmp_path / "one" / name, tmp_path / "three" / name) < 1e-6
    whole, stopped = (tmp_path / "three" / name for name in ("shuffled", "stopped"))
    assert decisions(records(whole)) == decisions(records(stopped))
    ran = audits(stopped)  # of the third process what it did before the stop
    places = [
        sorted(place for rank in ran.values() for line in rank if line["step"] == step + 1 for place in
               line["indices"]) for step in range(len(records(whole)))
    ]  # fmt: skip
    assert places == seen(whole, 3) and sorted(sum(places, [])) == list(range(sum(map(len, places))))
    assert distance(whole, stopped) < 1e-6
    mapped = [flag for flag in COMMON if flag != "--streaming"] + WILD
    train.main(parse([*mapped, "--output_dir", str(tmp_path / "mapped")]))
    assert distance(tmp_path / "three" / "wild", tmp_path / "mapped") < 1e-6


def test_files_of_each_process_and_streams_that_differ(tmp_path):
    """R43: 5 and 8 samples, in steps of 2 and of 3, and a run that goes on; nobody hangs, what is left is
    counted. Mutations: each rank ends by itself: a hang; the end of rank 0 for all: a
    KeyError on rank 0 where its file is the longer one.
    """
    texts = {0: 5, 1: 8}
    for rank, n in texts.items():
        for name, rows in (("part", n), ("trap", 13 - n)):
            lines = [json.dumps({"text": f"process {rank} row {k}"}) + "\n" for k in range(rows)]
            (tmp_path / f"{name}_{rank}.jsonl").write_text("".join(lines))
    flags = ["--packing", "none", "--schedule", "constant()", "--sequence_length", "32", "--shuffle_buffer",
             "0", "--dataset_is_sharded", "--eval_every", "never"]  # fmt: skip
    runs = [
        [*flags, "--dataset_name", str(tmp_path / f"{name}_{{rank}}.jsonl"), "--batch_size", size,
         "--output_dir", str(tmp_path / f"{name}_{size}"), *more]
        for name, size, more in (("part", "2", ()), ("part", "3", ()), ("trap", "3", ("--max_steps", "2")),
                                 ("trap", "3", ("--resume_from_checkpoint", "auto")))
    ]  # fmt: skip
    said = several("cpu_ddp", 2, *runs)
    assert said.count("is over after 10 samples; 3 samples that other processes still had are left out") == 2
    assert "is over after 11 samples; 2 samples that" in said  # rank 0 has 8, rank 1 has 5
    for folder, end, steps in (("part_2", 10, 5), ("part_3", 10, 4), ("trap_3", 11, 4)):
        told = records(tmp_path / folder)
        assert [told[-1]["samples"], len(told)] == [end, steps]
        assert sum(seen(tmp_path / folder, 2), []) == list(range(end))
    one = launch(
        "cpu", 1, "train.py", *COMMON, *runs[3][:-2], "--resume_from_checkpoint", "auto", check=False
    )
    assert one.returncode and "started on 2 processes" in one.stderr
