"""A W&B run's folders -> which steps W&B holds, so that a resumed run tells it each step once.

A kill takes W&B's last 32 KiB with it, which are steps before the checkpoint too, and steps after the
checkpoint that W&B does hold come again. Rows are known by (step, whether they are an evaluation).
To add one: nothing here; this file follows W&B's format, and where that changes it knows of no step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, struct.Struct("<IHB")  # a LevelDB log: checksum, length, kind of a piece
WHOLE, LAST = 1, 4


def rows_held(folder: Path, run: Any) -> Any:
    """Predicate (step, is_eval) -> whether the W&B `run`, resumed, holds it already.

    Offline by its local files, online by the server's summary: rows go there in their order.
    """
    if run.offline:
        held = set()
        for path in folder.glob(f"wandb/*run-*-{run.id}/run-{run.id}.wandb"):
            held |= {(row.get("step"), "eval_loss" in row) for row in _history(path)}
        return lambda step, is_eval: (step, is_eval) in held
    last = run.summary.get("step") or 0
    return lambda step, is_eval: step <= last


def _history(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2 as pb

    for data in _records(path.read_bytes()):
        record = pb.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """Records in pieces that cross no block; one that a kill cut short is none."""
    at, parts = 7, b""  # W&B's own header
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if at + length > len(data) or not WHOLE <= kind <= LAST:
            return
        parts = (b"" if kind <= 2 else parts) + data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield parts
