"""dataset name -> raw training and validation rows: columns "text" and, where there are, "label" or "target".

A name is stdlib, a local folder or file, or a hub name: `_splits` finds out which, the rest is the same for
all.
To add a file type: an entry in BUILDERS. To add a built-in dataset: a case in `_splits`.
"""

import ast
import contextlib
import glob
import hashlib
import json
import re
import socket
import sys
import sysconfig
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from adaptive.config import BadSetting, Data, warn
from adaptive.order import Order

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")  # in order of preference
# "test.csv", "reviews_train.csv" and "train-00000-of-00002.parquet" name their split, "latest.csv" does not.
SPLIT_NAME = re.compile(rf"(?i)(?:.*[-_.])?(train|{'|'.join(EVAL_SPLITS)})(?:-\d+-of-\d+|[-_]?\d*)")
FILES = "csv, json, jsonl, parquet or txt"
ACCEPTED = f"stdlib, stdlib_topics, a hub name, a save_to_disk folder, or a file, folder or glob of {FILES}"
# Well-known packages without large tables: 1.8 MB, of which the default --eval_share leaves 1.6 to train on.
STDLIB = ("asyncio", "concurrent", "email", "http", "json", "logging", "multiprocessing", "urllib")
# How `datasets` fails on empty json, saved, csv and text data.
NO_ROWS = re.compile("|list index out of range|.*corresponds to no data.*|.*at least one example.*")
VERSION = 1  # of `_source_rows` and `_cut`: `datasets` caches results by arguments, not by code


@dataclass(frozen=True)
class Corpus:
    """Rows as they were written; what a sample is, a task decides."""

    train: datasets.Dataset | datasets.IterableDataset
    """Columns "text" (str), where there are classes "label" (ClassLabel with names), where asked for "target"
    (str); others as found. Conversations have "messages" instead.
    """
    eval: datasets.Dataset | None
    """The same columns; None where one row leaves nothing to hold out, or a stream has none beside it."""
    label_names: list[str] | None
    """Names of the classes in the order of their ids; None without classes."""


def load_corpus(
    data: Data, seed: int, trust_remote_code: bool = False, need_labels: bool = False,
    need_target: bool = False, messages: bool = False, images: bool = False,
) -> Corpus:  # fmt: skip
    """Load --dataset_name, and --eval_dataset, else its validation or test split, else a held-out share.

    A missing text becomes "", so that row numbers stay those of the file; a row of a txt file is a line. A
    column "label" nobody asked for stays as it is where it holds no classes. With `messages` a column of that
    name is taken for conversations, with `images` one of images for what "target" describes.
    `trust_remote_code` changes nothing: `datasets` >= 4 runs no code of a dataset. Raises
    BadSetting for all that the user can correct.
    """
    needs = {"need_labels": need_labels, "need_target": need_target, "messages": messages, "images": images}
    datasets.disable_progress_bars()  # what is printed is report.py's choice
    name, share = data.dataset_name, data.eval_share
    train, others = _train_split(_splits(name, data.dataset_config_name, share, data.streaming), name)
    if data.streaming and not is_stream(train):
        train = train.to_iterable_dataset()
    train, label_names = _columns(train, name, data, **needs)
    if data.eval_dataset:  # of one source here (data.load)
        held_name = data.eval_dataset
        config_name = data.dataset_config_name if held_name == name else None
        held, _ = _train_split(_splits(held_name, config_name, share), held_name)
    elif split := next((split for split in EVAL_SPLITS if split in others), None):
        held_name, held = f"{name} ({split})", others[split]
        if is_stream(held):  # evaluation looks rows up
            held = datasets.Dataset.from_list(list(held), features=held.features)
    elif data.streaming:
        warn(f"nothing is evaluated: {name} has no validation split; --eval_dataset names other data")
        return Corpus(train, None, label_names)
    else:
        return Corpus(*_hold_out(train, share, seed), label_names)
    return Corpus(train, _columns(held, held_name, data, label_names, **needs)[0], label_names)


def stdlib_pieces(corpus: Corpus, characters: int) -> Corpus:
    """Cut every text into pieces of `characters`, each with its row's other columns; cached on disk.

    A last piece shorter than a quarter of that is dropped. ValueError when characters < 1.
    """
    if characters < 1:
        raise ValueError(f"characters={characters}; write the length of a piece, at least 1")
    arguments = {"characters": characters, "version": VERSION}
    settings = {"batched": True, "fn_kwargs": arguments, "features": corpus.train.features}
    train = corpus.train.map(_cut, **settings)
    held = corpus.eval.map(_cut, **settings) if corpus.eval is not None else None
    return Corpus(train, held, corpus.label_names)


def load_pairs(data: Data, seed: int, trust_remote_code: bool = False, images: bool = False) -> Corpus:
    """Load columns "text" (or, where `images` may be, "image") and "target"; of stdlib its functions."""
    stdlib = data.dataset_name == "stdlib"
    corpus = load_corpus(data, seed, trust_remote_code, need_target=not stdlib, images=images)
    return stdlib_functions(corpus) if stdlib else corpus


def stdlib_functions(corpus: Corpus) -> Corpus:
    """Every documented function of the files: "text" its source without the docstring, "target" that one's
    first paragraph; cached on disk.
    """
    settings = {"batched": True, "fn_kwargs": {"version": VERSION}}
    settings["remove_columns"] = corpus.train.column_names
    settings["features"] = datasets.Features(dict.fromkeys(("text", "target"), datasets.Value("string")))
    train = corpus.train.map(_functions, **settings)
    return Corpus(train, None if corpus.eval is None else corpus.eval.map(_functions, **settings), None)


def fingerprint(dataset: datasets.Dataset) -> str:
    """Return 16 hex digits of the row count, the class names, and up to 100 evenly spread rows.

    Unlike `dataset._fingerprint` it knows no paths or versions: equal texts and labels have equal ones on any
    machine. A change between the sampled rows goes unseen.
    """
    if is_stream(dataset):  # of its first 100 rows
        dataset, n = datasets.Dataset.from_list(list(dataset.take(100)), features=dataset.features), -1
    n = len(dataset)
    rows = np.linspace(0, n - 1, min(n, 100)).astype(int).tolist()
    told = ("text", "label", "target", "messages")
    sample = dataset.select_columns([c for c in told if c in dataset.column_names])[rows]
    message = json.dumps([n, getattr(dataset.features.get("label"), "names", None), sample], default=str)
    return hashlib.blake2b(message.encode(), digest_size=8).hexdigest()


def is_stream(dataset: datasets.Dataset | datasets.IterableDataset) -> bool:
    """Whether its rows come one after the other, and nobody knows how many."""
    return isinstance(dataset, datasets.IterableDataset)


def _splits(
    name: str, config_name: str | None, share: float, streaming: bool = False
) -> dict[str, datasets.Dataset | datasets.IterableDataset]:
    """Return the rows as they come, by split; `share` is for stdlib, which is held out by file."""
    if name == "stdlib":
        return _stdlib(share)
    if name == "stdlib_topics":
        return _topics(share)
    path = Path(name).expanduser()
    local = path.exists() or glob.has_magic(name)
    builder, files = _files(path) if local else (name, None)
    if not local and not _hub_has_address():
        datasets.config.HF_HUB_OFFLINE = True  # the client would retry for 23 s; downloads of old still load
    try:
        if builder == "save_to_disk":
            loaded = datasets.load_from_disk(str(path))
        elif builder == "imagefolder":
            loaded = datasets.load_dataset(builder, data_dir=str(path))
        else:
            more = {"streaming": True} if streaming else {}
            loaded = datasets.load_dataset(builder, None if local else config_name, data_files=files, **more)
    except Exception as error:  # the libraries below raise a dozen unrelated classes for bad names and files
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        if local and NO_ROWS.fullmatch(reason):
            raise BadSetting(f"dataset {name} has no rows in some split; write one that has") from None
        problem = "could not be read" if local else "is no local path and could not be had from the hub"
        raise BadSetting(f"dataset {name} {problem} ({reason}); write {ACCEPTED}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _files(path: Path) -> tuple[str, dict[str, list[str]] | None]:
    """Return the builder, and the files by split, of a file, a glob, or a folder, with all below it."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "save_to_disk", None
    if path.is_dir() and any(file.stem == "metadata" for file in path.rglob("metadata.*")):
        if any(file.suffix.lower() in IMAGES for file in path.rglob("*")):
            return "imagefolder", None  # of `datasets`: the metadata has file_name and text
    pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
    found = [path] if path.is_file() else map(Path, sorted(glob.glob(pattern, recursive=True)))
    files = [file for file in found if file.suffix.lower() in BUILDERS and file.is_file()]
    builders = sorted({BUILDERS[file.suffix.lower()] for file in files})
    if len(builders) != 1:
        has = f"mixes {' and '.join(builders)}" if builders else f"has no {FILES} file"
        raise BadSetting(f"dataset {path} {has}; write {ACCEPTED}")
    splits: dict[str, list[str]] = {}
    for file in files:
        # A file's folder counts only below the one that was named: "test/a.csv" itself is no test split.
        folder = file.parent.name if path.is_dir() and file.parent != path else ""
        named = SPLIT_NAME.fullmatch(file.stem) or SPLIT_NAME.fullmatch(folder)
        splits.setdefault(named[1].lower() if named else "train", []).append(glob.escape(str(file)))
    return builders[0], splits


def _hub_has_address() -> bool:
    """Whether asking the hub can work: its name is known here, or a proxy will resolve it."""
    with contextlib.suppress(OSError):
        host = urllib.request.urlparse(datasets.config.HF_ENDPOINT).hostname
        return bool(urllib.request.getproxies() or socket.getaddrinfo(host, 443))
    return False


def _train_split(splits: dict, name: str) -> tuple[datasets.Dataset, dict[str, datasets.Dataset]]:
    """Return the split called train, or the only one, and the others by name."""
    chosen = "train" if "train" in splits else next(iter(splits))
    if chosen != "train" and len(splits) > 1:
        raise BadSetting(f"dataset {name} has splits {', '.join(splits)}, no train; write one that has it")
    return splits[chosen], {split: rows for split, rows in splits.items() if split != chosen}


def _columns(
    ds: datasets.Dataset, name: str, data: Data, label_names: list[str] | None = None, *,
    need_labels: bool, need_target: bool, messages: bool, images: bool,
) -> tuple[datasets.Dataset, list[str] | None]:  # fmt: skip
    """Return the rows with the chosen columns called text, label and target, and the class names."""
    if is_stream(ds) and ds.column_names is None:
        with contextlib.suppress(StopIteration):  # no rows
            ds = ds._resolve_features()  # from the first rows, where the files name none
    if not (ds.column_names if is_stream(ds) else len(ds)):
        raise BadSetting(f"dataset {name} has no rows; write one that has")
    if messages and "messages" in ds.column_names and data.text_column in (None, "messages"):
        return ds.select_columns(["messages"]).with_format(None), None
    if images and (pictures := [c for c, kind in ds.features.items() if isinstance(kind, datasets.Image)]):
        return _image_columns(ds, name, data, pictures[0]), None
    ds = (
        ds.flatten() if need_target and not is_stream(ds) else ds
    )  # {"translation": {"en": ..., "de": ...}} is "translation.en" ...
    has = f"dataset {name} has the columns {', '.join(ds.column_names)}"
    label = data.label_column or ("label" if "label" in ds.column_names else None)
    if label not in ds.column_names and (label or need_labels):
        raise BadSetting(f"{has}, no {label or 'label'}; write the one with the class as --label_column")
    names = {label: "label"} if label else {}
    if need_target:
        names |= {_text_column(ds, has, data.target_column, "target", label): "target"}
    names |= {_text_column(ds, has, data.text_column, "text", *names): "text"}
    ds = ds.remove_columns([c for c in names.values() if c in ds.column_names and c not in names])
    ds = ds.rename_columns({old: new for old, new in names.items() if old != new}).with_format(None)
    for column in sorted({"text", "target"} & set(names.values())):
        if is_stream(ds) or ds.data.column(column).null_count:
            ds = ds.map(_without_none, input_columns=column, batched=True, fn_kwargs={"column": column},
                        features=ds.features)  # fmt: skip
    try:
        return _encode(ds, f"dataset {name}, column {label}", label_names) if label else (ds, None)
    except BadSetting:
        if need_labels or data.label_column:
            raise
        return ds, None


def _image_columns(ds: datasets.Dataset, name: str, data: Data, image: str) -> datasets.Dataset:
    """Return the rows with the columns image and target, the text that describes it."""
    has = f"dataset {name} has the columns {', '.join(ds.column_names)}"
    text = _text_column(ds, has, data.target_column or data.text_column, "text", image)
    ds = ds.select_columns([image, text]).rename_columns({image: "image", text: "target"})
    if ds.data.column("target").null_count:
        ds = ds.map(_without_none, input_columns="target", batched=True, fn_kwargs={"column": "target"})
    return ds.with_format(None)


def _text_column(ds: datasets.Dataset, has: str, asked: str | None, usual: str, *taken: str | None) -> str:
    """Return the column of strings that was asked for, or has the usual name, or is the only one left."""
    dtypes = {column: getattr(kind, "dtype", None) for column, kind in ds.features.items()}
    free = [c for c in ds.column_names if dtypes[c] in ("string", "large_string") and c not in taken]
    column = asked or (usual if usual in free else free[0] if len(free) == 1 else None)
    if column not in free:
        problem = f"{column} is not one with text" if column else f"{len(free)} of them with text"
        raise BadSetting(f"{has}, {problem}; write one of strings as --{usual}_column")
    return column


def _encode(ds: datasets.Dataset, what: str, names: list[str] | None) -> tuple[datasets.Dataset, list[str]]:
    """Make "label" a ClassLabel of `names`, by default its own, sorted; returns the rows and the names."""
    kind = ds.features["label"]
    is_class = isinstance(kind, datasets.ClassLabel)
    dtype = str(getattr(kind, "dtype", "list"))
    if not re.fullmatch(r"(large_)?string|u?int\d+|bool", dtype):
        raise BadSetting(f"{what}, is of {dtype}; write one of whole numbers, strings or yes/no as "
                         "--label_column (empty cells of a csv turn whole numbers into floats)")  # fmt: skip
    if is_stream(ds):
        if not is_class:
            raise BadSetting(f"{what}, does not name its classes, and a stream's are not known before its "
                             "end; write data with a ClassLabel (save_to_disk), or leave out --streaming"
                             )  # fmt: skip
        return ds, list(kind.names)
    values = ds.unique("label")
    if None in values or is_class and -1 in values:
        raise BadSetting(f"{what}, has rows without a class; remove them or write another --label_column")
    own = {value: kind.int2str(value) if is_class else str(value) for value in values}
    names = names or (list(kind.names) if is_class else [own[value] for value in sorted(values)])
    unknown = sorted(set(own.values()) - set(names))
    if unknown:
        raise BadSetting(f"{what}, has the class {unknown[0]}, unknown to the training rows, which have "
                         f"{', '.join(names[:10])}; remove its rows")  # fmt: skip
    if is_class and kind.names == names:
        return ds, names
    # Not by `map`, which writes beside a save_to_disk folder: maybe read-only, and shared by all processes.
    position = {name: i for i, name in enumerate(names)}
    ids = [position[own[value]] for value in ds["label"][:]]
    feature = datasets.ClassLabel(names=names)
    return ds.remove_columns("label").add_column("label", ids, feature=feature), names


def _hold_out(
    ds: datasets.Dataset, share: float, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Split off `share` of the rows, at least one on each side, chosen by the seed; both stay in order."""
    if len(ds) < 2:
        return ds, None
    n_held = min(max(round(share * len(ds)), 1), len(ds) - 1)
    is_held = np.zeros(len(ds), dtype=bool)
    is_held[Order(seed, "held out", len(ds)).indices(np.arange(n_held))] = True
    return ds.select(np.flatnonzero(~is_held)), ds.select(np.flatnonzero(is_held))


def _stdlib(share: float) -> dict[str, datasets.Dataset]:
    """Return the source of this Python's STDLIB, one row per file in order of their names, by split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    digests, sizes = {}, {}
    for path in sorted(path for package in STDLIB for path in (root / package).rglob("*.py")):
        file, content = path.relative_to(root), path.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):  # such a file is left out
            if content.decode("utf-8").strip() and not {"test", "tests"} & set(file.parts):
                digests[file.as_posix()] = hashlib.blake2b(content).hexdigest()
                sizes[file.as_posix()] = len(content)
    if not sizes:
        raise BadSetting(f"dataset stdlib: {root} holds no source of Python; write {ACCEPTED}")
    held = _held_files(sizes, share)
    kinds = {"text": datasets.Value("string"), "path": datasets.Value("string")}
    kinds["label"] = datasets.ClassLabel(names=list(STDLIB))
    splits = {}
    for split, is_held in (("train", False), ("validation", True)):
        # They name the cache: another Python or an edited file is another dataset. A list would mean shards.
        files = tuple((file, digest) for file, digest in digests.items() if (file in held) == is_held)
        arguments = {"root": str(root), "files": files, "version": (VERSION, sys.version)}
        splits[split] = datasets.Dataset.from_generator(
            _source_rows, features=datasets.Features(kinds), gen_kwargs=arguments
        )
    return splits


def _topics(share: float) -> dict[str, datasets.Dataset]:
    """Return the documentation topics that this Python's help() has, prose, one row each, by split."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: hashlib.blake2b(name.encode()).digest())
    n_held = min(max(round(share * len(names)), 1), len(names) - 1)
    splits = {"train": sorted(names[n_held:]), "validation": sorted(names[:n_held])}
    return {
        split: datasets.Dataset.from_dict({"text": [topics[name] for name in held], "path": held})
        for split, held in splits.items()
    }


def _held_files(sizes: dict[str, int], share: float) -> set[str]:
    """Return files with about `share` of the bytes, at most twice that and half of each package."""
    held, package = set(), {file: file.split("/")[0] for file in sizes}
    room = {name: min(2 * share, 0.5) * sum(sizes[f] for f in sizes if package[f] == name) for name in STDLIB}
    total = share * sum(sizes.values())
    for file in sorted(sizes, key=lambda file: hashlib.blake2b(file.encode()).digest()):
        if sizes[file] <= min(total, room[package[file]]):
            held.add(file)
            total -= sizes[file]
            room[package[file]] -= sizes[file]
    return held or {min(sizes, key=sizes.get)}


def _source_rows(root: str, files: tuple[tuple[str, str], ...], version: tuple[int, str]):
    for file, _ in files:
        text = Path(root, file).read_bytes().decode("utf-8")
        yield {"text": text, "path": file, "label": file.split("/")[0]}


def _without_none(texts: list[str | None], column: str = "text") -> dict[str, list[str]]:
    return {column: ["" if text is None else text for text in texts]}


def _cut(rows: dict[str, list], characters: int, version: int) -> dict[str, list]:
    """Return the pieces of a batch of rows; other columns are repeated."""
    kept = [
        (row, text[start : start + characters])
        for row, text in enumerate(rows["text"])
        for start in range(0, len(text), characters)
        if 4 * (len(text) - start) >= characters
    ]
    pieces = {name: [column[row] for row, _ in kept] for name, column in rows.items()}
    return pieces | {"text": [piece for _, piece in kept]}


def _functions(rows: dict[str, list], version: int) -> dict[str, list]:
    """Return source and docstring of the functions of a batch of files; what is no Python is left out."""
    sources, told = [], []
    for text in rows["text"]:
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(text)):
                words = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
                if words and len(node.body) > 1:
                    node.body = node.body[1:]
                    sources.append(ast.unparse(node))
                    told.append(" ".join(words.split("\n\n")[0].split()))
    return {"text": sources, "target": told}
