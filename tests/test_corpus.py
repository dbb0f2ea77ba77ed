"""Real files of every kind -> the rows, columns, classes and splits of a Corpus, and each mistake's line."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from adaptive import corpus as module
from adaptive.config import BadSetting, Data
from adaptive.corpus import fingerprint, load_corpus, stdlib_pieces

ROWS = [{"text": f"line {i}", "label": "abc"[i % 3], "n": i} for i in range(30)]


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """A cache of the test run's own: results of earlier code must not answer for the code under test."""
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    patch.undo()


def write(path: Path, rows: list[dict]) -> str:
    """Write rows as the kind that the suffix says; returns the path as --dataset_name has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


def load(name, seed=1, need_labels=False, **flags):
    return load_corpus(Data(dataset_name=str(name), **flags), seed, need_labels=need_labels)


def refusal(name, **arguments) -> str:
    with pytest.raises(BadSetting) as caught:
        load(name, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def texts(corpus) -> list[str]:
    return corpus.train["text"][:] + corpus.eval["text"][:]


# --- every kind of name


@pytest.mark.parametrize("kind", [".csv", ".json", ".jsonl", ".parquet", ".txt", ""])
def test_every_kind_holds_out_its_own_rows(tmp_path, kind):
    """Mutation: hold out by `select(range(n))` of train without taking the rows out breaks the union."""
    corpus = load(write(tmp_path / f"rows{kind}", ROWS), eval_share=0.2)
    assert len(corpus.eval) == 6 and len(corpus.train) == 24
    assert sorted(texts(corpus)) == sorted(row["text"] for row in ROWS)
    if kind != ".txt":
        assert corpus.label_names == ["a", "b", "c"] == corpus.eval.features["label"].names
        by_text = {row["text"]: row for row in ROWS}
        for row in [*corpus.train, *corpus.eval]:
            assert corpus.label_names[row["label"]] == by_text[row["text"]]["label"]
            assert row["n"] == by_text[row["text"]]["n"]
    else:
        assert corpus.label_names is None and corpus.train.column_names == ["text"]


def test_hold_out_is_by_seed_and_in_order(tmp_path):
    name = write(tmp_path / "rows.csv", ROWS)
    held = [load(name, seed=seed, eval_share=0.3).eval["n"][:] for seed in (1, 1, 2)]
    assert held[0] == held[1] == sorted(held[0]) and held[0] != held[2]
    assert held[0] != list(range(9)) and held[0] != list(range(21, 30))
    train = load(name, seed=1, eval_share=0.3).train["n"][:]
    assert train == sorted(set(range(30)) - set(held[0]))


@pytest.mark.parametrize("share, n_rows, n_held", [(0.01, 5, 1), (0.99, 5, 4), (0.5, 2, 1), (0.1, 1, None)])
def test_each_side_has_a_row(tmp_path, share, n_rows, n_held):
    corpus = load(write(tmp_path / "rows.jsonl", ROWS[:n_rows]), eval_share=share)
    assert (corpus.eval and len(corpus.eval)) == n_held
    assert len(corpus.train) == n_rows - (n_held or 0)


@pytest.mark.parametrize(
    "others, chosen", [(["test", "validation"], "validation"), (["test"], "test"), (["extra"], None)]
)
def test_saved_splits(tmp_path, others, chosen):
    """Mutation: EVAL_SPLITS in another order takes test where there is a validation split."""
    rows = {split: datasets.Dataset.from_list([{"text": split}] * 10) for split in [*others, "train"]}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    corpus = load(tmp_path / "saved")
    assert set(corpus.eval["text"]) == {chosen or "train"}
    assert len(corpus.train) == (10 if chosen else 9) and set(corpus.train["text"]) == {"train"}


def test_folder_and_glob_of_files(tmp_path):
    for name in ("a.csv", "deep/b.csv", "reviews_test.csv", "validation/latest.csv", ".hidden/c.csv"):
        write(tmp_path / "my[data]" / name, [{"text": name}] * 2)
    folder = load(tmp_path / "my[data]")
    assert folder.train["text"][:] == ["a.csv"] * 2 + ["deep/b.csv"] * 2
    assert folder.eval["text"][:] == ["validation/latest.csv"] * 2
    pattern = load(tmp_path / "my?data]" / "*.csv")
    assert set(pattern.train["text"]) == {"a.csv"} and set(pattern.eval["text"]) == {"reviews_test.csv"}
    for name in ("test/train.csv", "test/a.csv"):
        write(tmp_path / name, [{"text": name}] * 2)
    assert len(load(tmp_path / "test" / "*.csv", eval_share=0.25).train) == 3, "the folder named is no split"
    only_test = load(tmp_path / "my[data]" / "reviews_test.csv", eval_share=0.5)
    assert len(only_test.train) == len(only_test.eval) == 1


def test_edited_file_is_read_again(tmp_path):
    name = write(tmp_path / "rows.csv", ROWS)
    load(name)
    write(tmp_path / "rows.csv", ROWS[:7])
    assert len(texts(load(name))) == 7


def test_eval_dataset_is_named_the_same_way(tmp_path):
    name = write(tmp_path / "rows.csv", ROWS)
    other = write(tmp_path / "other.parquet", [{"text": "held", "label": "c"}, {"text": "too", "label": "a"}])
    corpus = load(name, eval_dataset=other)
    assert len(corpus.train) == 30 and corpus.eval["text"][:] == ["held", "too"]
    assert corpus.eval["label"][:] == [2, 0], "eval has ids of its own instead of train's"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "test_only")
    assert len(load(name, eval_dataset=str(tmp_path / "test_only")).eval) == 30


# --- columns


def test_text_column(tmp_path):
    name = write(tmp_path / "a.jsonl", [{"body": f"b{i}", "text": f"t{i}", "other": i} for i in range(4)])
    assert set(texts(load(name))) == {"t0", "t1", "t2", "t3"}
    corpus = load(name, text_column="body")
    assert set(texts(corpus)) == {"b0", "b1", "b2", "b3"}
    assert sorted(corpus.train.column_names) == ["other", "text"]
    lone = write(tmp_path / "b.jsonl", [{"sentence": "s", "label": "x"}, {"sentence": "t", "label": "y"}])
    assert sorted(texts(load(lone))) == ["s", "t"]
    swapped = load(name, text_column="body", label_column="text")
    assert swapped.label_names == ["t0", "t1", "t2", "t3"] and set(texts(swapped)) == {"b0", "b1", "b2", "b3"}


def test_missing_text_is_empty(tmp_path):
    name = write(tmp_path / "a.jsonl", [{"text": "x", "n": 0}, {"text": None, "n": 1}, {"text": "z", "n": 2}])
    corpus = load(name)
    assert {row["n"]: row["text"] for row in [*corpus.train, *corpus.eval]} == {0: "x", 1: "", 2: "z"}


@pytest.mark.parametrize(
    "values, names",
    [
        ([10, 9, 2, 9], ["2", "9", "10"]),
        (["no", "yes", "no", "a"], ["a", "no", "yes"]),
        ([True, False, True, True], ["False", "True"]),
    ],
)
def test_classes_are_sorted(tmp_path, values, names):
    """Mutation: `class_encode_column` sorts as strings: 10 before 2."""
    name = write(tmp_path / "a.parquet", [{"text": str(v), "kind": v, "label": 0.5} for v in values])
    corpus = load(name, label_column="kind", need_labels=True)
    assert corpus.label_names == names
    assert all(names[row["label"]] == row["text"] for row in [*corpus.train, *corpus.eval])
    assert sorted(corpus.train.column_names) == ["label", "text"]


def test_eval_with_other_class_ids_is_renumbered(tmp_path):
    for name, names in (("train", ["neg", "pos"]), ("eval", ["pos", "neg"])):
        kinds = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=names))
        rows = datasets.Dataset.from_dict({"text": names, "label": [0, 1]}, features=kinds)
        rows.with_format("torch").save_to_disk(tmp_path / name)
    corpus = load(tmp_path / "train", eval_dataset=str(tmp_path / "eval"))
    assert corpus.label_names == ["neg", "pos"] and corpus.eval["label"][:] == [1, 0]
    assert type(corpus.train[0]["label"]) is int, "the saved format came along"


def test_read_only_folder(tmp_path):
    """Mutation: labels by `map` write a cache file into the user's folder."""
    name = write(tmp_path / "saved", ROWS)
    before = sorted(Path(name).rglob("*"))
    load(name, need_labels=True)
    assert sorted(Path(name).rglob("*")) == before


# --- refusals: (arguments, what the line says)


@pytest.mark.parametrize(
    "flags, says",
    [
        ({"text_column": "body"}, "the columns text, label, n, body is not one with text; write one"),
        ({"text_column": "n"}, "n is not one with text; write one of strings as --text_column"),
        ({"label_column": "kind"}, "the columns text, label, n, no kind; write the one with the class as"),
        ({"text_column": "text", "label_column": "text"}, "text is not one with text"),
    ],
)
def test_wrong_columns(tmp_path, flags, says):
    name = write(tmp_path / "rows.csv", ROWS)
    assert (message := refusal(name, **flags)).startswith(f"dataset {name} has ") and says in message


@pytest.mark.parametrize(
    "rows, flags, says",
    [
        ([{"a": "x", "b": "y"}], {}, "has the columns a, b, 2 of them with text; write one of strings"),
        ([{"a": 1}], {}, "has the columns a, 0 of them with text"),
        ([{"text": "x"}], {"need_labels": True}, "has the columns text, no label; write the one with"),
        ([{"text": "x", "label": 0.5}], {"need_labels": True}, "column label, is of float64; write one"),
        ([{"text": "x", "label": 0.5}], {"label_column": "label"}, "column label, is of float64; write"),
        ([{"text": "x", "label": [1]}], {"need_labels": True}, "column label, is of list; write one"),
        ([{"text": "x", "label": 1}, {"text": "y"}], {"need_labels": True}, "has rows without a class;"),
    ],
)
def test_wrong_rows(tmp_path, rows, flags, says):
    assert says in refusal(write(tmp_path / "rows.jsonl", rows), **flags)


def test_label_nobody_asked_for_stays(tmp_path):
    corpus = load(write(tmp_path / "rows.jsonl", [{"text": "x", "label": 0.5}] * 3))
    assert corpus.label_names is None and corpus.train["label"][:] == [0.5, 0.5]


def test_unlabelled_class_ids(tmp_path):
    kinds = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["u", "v"]))
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, -1]}, features=kinds)
    rows.save_to_disk(tmp_path / "d")
    assert "rows without a class" in refusal(tmp_path / "d", need_labels=True)


def test_unknown_class_in_eval(tmp_path):
    name = write(tmp_path / "a.csv", ROWS)
    other = write(tmp_path / "b.csv", [{"text": "x", "label": "zebra"}])
    message = refusal(name, eval_dataset=other, need_labels=True)
    assert f"dataset {other}, column label, has the class zebra, unknown to the training rows" in message
    assert "which have a, b, c; remove its rows" in message


@pytest.mark.parametrize("kind", ["rows.csv", "rows.jsonl", "rows.json", "rows.txt", "rows.parquet", "saved"])
def test_no_rows(tmp_path, kind):
    name = tmp_path / kind
    kinds = datasets.Features(text=datasets.Value("string"))
    if kind == "saved":
        datasets.Dataset.from_dict({"text": []}, features=kinds).save_to_disk(name)
    elif kind == "rows.parquet":
        datasets.Dataset.from_dict({"text": []}, features=kinds).to_parquet(name)
    elif kind == "rows.json":
        name.write_text("[]")
    else:
        name.write_text("text,label\n" if kind == "rows.csv" else "")
    assert f"dataset {name} has no rows" in refusal(name)


def test_no_rows_in_eval(tmp_path):
    kinds = datasets.Features(text=datasets.Value("string"))
    empty = datasets.Dataset.from_dict({"text": []}, features=kinds)
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=empty).save_to_disk(tmp_path / "d")
    assert "d has no rows in some split; write" in refusal(tmp_path / "d")
    write(tmp_path / "files" / "train.parquet", [{"text": "x"}])
    empty.to_parquet(tmp_path / "files" / "test.parquet")
    assert "files has no rows in some split; write" in refusal(tmp_path / "files")


def test_unusable_paths(tmp_path):
    told = "has no csv, json, jsonl, parquet or txt file; write stdlib, stdlib_topics, a hub name"
    assert told in refusal(tmp_path)
    (tmp_path / "a.tsv").write_text("text\nx\n")
    assert "a.tsv has no csv" in refusal(tmp_path / "a.tsv")
    assert "has no csv" in refusal(tmp_path / "*.parquet")
    write(tmp_path / "a.csv", ROWS)
    write(tmp_path / "b.jsonl", ROWS)
    assert "mixes csv and json; write" in refusal(tmp_path)
    (tmp_path / "c.json").write_text("{not json")
    assert "c.json could not be read (" in refusal(tmp_path / "c.json")
    datasets.DatasetDict({s: datasets.Dataset.from_list(ROWS) for s in "xy"}).save_to_disk(tmp_path / "d")
    assert "has splits x, y, no train" in refusal(tmp_path / "d")


def test_hub_name_without_network(monkeypatch):
    """Mutation: without the look-up of the hub's address the client retries for 23 seconds."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)

    def no_name_server(*_):
        raise socket.gaierror("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", no_name_server)
    start = time.monotonic()
    message = refusal("someone/no-such-dataset")
    assert time.monotonic() - start < 5
    assert message.startswith("dataset someone/no-such-dataset is no local path and could not be had from")
    assert message.endswith("write " + module.ACCEPTED)
    assert "is no local path" in refusal("nowhere/rows.csv")


def test_hub_name_with_network(monkeypatch):
    """The hub's answer is played; what was asked of it is recorded."""
    asked, full = [], datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(module, "_hub_has_address", lambda: True)

    def answer(name, config_name, data_files):
        asked.append((name, config_name, data_files))
        return datasets.DatasetDict(test=full.select([]) if name == "me/empty" else full, train=full)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert len(load("me/full", dataset_config_name="en", eval_dataset="me/other").eval) == 30
    load("me/full", dataset_config_name="en", eval_dataset="me/full")
    assert asked == [("me/full", "en", None), ("me/other", None, None), *[("me/full", "en", None)] * 2]
    assert refusal("me/empty") == "dataset me/empty (test) has no rows; write one that has"


def test_hub_name_with_hub_offline():
    code = "import adaptive.corpus as c, sys\ntry: c.load_corpus(c.Data(dataset_name='no-such'), 1)\n"
    code += "except c.BadSetting as error: sys.exit(str(error))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1, run.stderr
    assert re.match("dataset no-such is no local path .*write stdlib, stdlib_topics, a hub", run.stderr)


# --- stdlib


@pytest.fixture(scope="module")
def stdlib():
    return load("stdlib")


def test_stdlib_size_and_files(stdlib):
    sides = {"train": stdlib.train, "eval": stdlib.eval}
    n_bytes = {side: sum(len(text.encode()) for text in rows["text"]) for side, rows in sides.items()}
    assert 1_200_000 < n_bytes["train"] < 2_200_000
    assert 0.08 < n_bytes["eval"] / sum(n_bytes.values()) < 0.105
    train, held = stdlib.train["path"][:], stdlib.eval["path"][:]
    assert not set(train) & set(held) and train == sorted(train) and held == sorted(held)
    assert not [p for p in train + held if re.search(r"(^|/)tests?/", p)]
    assert "asyncio/tasks.py" in train + held
    for path, text, label in zip(train, stdlib.train["text"], stdlib.train["label"], strict=True):
        assert text == (Path(os.__file__).parent / path).read_bytes().decode() and text.strip()
        assert stdlib.label_names[label] == path.split("/")[0]
    assert set(stdlib.train["label"]) == set(range(len(module.STDLIB)))
    assert len(set(stdlib.eval["label"])) >= 5


def test_stdlib_again_is_quick_and_the_same_for_any_seed(stdlib):
    start = time.monotonic()
    again = load("stdlib", seed=99)
    assert time.monotonic() - start < 1
    assert again.train["path"][:] == stdlib.train["path"][:]
    assert again.eval["path"][:] == stdlib.eval["path"][:]
    assert again.train.cache_files == stdlib.train.cache_files != []


@pytest.mark.parametrize("share", [1e-6, 0.5, 0.99])
def test_stdlib_share(share):
    corpus = load("stdlib", eval_share=share)
    assert len(corpus.eval) >= 1 and set(corpus.train["label"]) == set(range(len(module.STDLIB)))
    assert not set(corpus.train["path"]) & set(corpus.eval["path"])


def test_stdlib_leaves_out_what_is_not_utf8(tmp_path, monkeypatch):
    """And an edited file is not answered from the cache."""
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert "holds no source" in refusal("stdlib")
    files = {"json/a.py": b"a = 1", "json/b.py": b"b", "json/bad.py": b"\xff", "json/test/c.py": b"c"}
    for name, content in (files | {"http/empty.py": b"\n", "os/d.py": b"d"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert sorted(texts(load("stdlib"))) == ["a = 1", "b"]
    (tmp_path / "json/a.py").write_bytes(b"a = 2")
    assert sorted(texts(load("stdlib"))) == ["a = 2", "b"]


def test_pieces(tmp_path):
    lengths = [100, 105, 124, 125, 3, 250]
    rows = [{"text": "".join(chr(97 + i % 26) for i in range(n)), "label": f"c{n}", "n": n} for n in lengths]
    name = write(tmp_path / "rows.jsonl", rows)
    corpus = stdlib_pieces(load(name, eval_dataset=name), 100)
    for side in (corpus.train, corpus.eval):
        assert [len(t) for t in side["text"]] == [100, 100, 100, 100, 25, 100, 100, 50]
        assert side["n"][:] == [100, 105, 124, 125, 125, 250, 250, 250]
        assert [corpus.label_names[i] for i in side["label"]] == [f"c{n}" for n in side["n"]]
    assert "".join(corpus.train["text"][-3:]) == rows[-1]["text"]
    with pytest.raises(ValueError, match="characters=0; write"):
        stdlib_pieces(corpus, 0)


def test_pieces_without_eval_and_cached(tmp_path, stdlib):
    one = load(write(tmp_path / "rows.jsonl", [{"text": "x" * 10}]))
    assert stdlib_pieces(one, 5).eval is None and len(stdlib_pieces(one, 5).train) == 2
    first, second = stdlib_pieces(stdlib, 512), stdlib_pieces(stdlib, 512)
    assert len(first.train) > 2500
    assert first.train.cache_files == second.train.cache_files != stdlib.train.cache_files


# --- fingerprint


def test_fingerprint_is_of_the_content(tmp_path):
    """Mutation: `dataset._fingerprint` differs between two files with the same rows."""
    names = [write(tmp_path / folder / "rows.jsonl", ROWS) for folder in "ab"]
    prints = {fingerprint(load(name).train) for name in names}
    prints |= {fingerprint(load(write(tmp_path / "rows.parquet", ROWS)).train)}
    assert len(prints) == 1 and re.fullmatch("[0-9a-f]{16}", *prints)


def test_fingerprint_sees_changes():
    def of(rows, names=("a", "b", "c")):
        kinds = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=list(names)))
        columns = {name: [row[name] for row in rows] for name in kinds}
        return fingerprint(datasets.Dataset.from_dict(columns, features=kinds))

    rows = [{"text": str(i), "label": i % 3} for i in range(100)]
    changed = [rows[:i] + [rows[i] | {"label": (i + 1) % 3}] + rows[i + 1 :] for i in range(100)]
    changed += [rows, rows[:99], rows[1:] + rows[:1], [], rows[:1], rows[:1] * 100, rows[:1] * 101]
    prints = [of(r) for r in changed] + [of(rows, "cab")]
    assert len(set(prints)) == len(prints)


def test_fingerprint_of_many_rows_is_cheap():
    rows = datasets.Dataset.from_dict({"text": ["x"] * 300_000})
    start = time.monotonic()
    fingerprint(rows)
    assert time.monotonic() - start < 0.3
