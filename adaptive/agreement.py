"""Values that processes hold -> one value on all of them, over gloo with CPU tensors.

Agreement never waits for a GPU, and its messages are small: what costs is the number of exchanges one after
the other. So both directions are trees of ceil(log2 W) exchanges, where gloo's own all-reduce is a ring of
2 (W - 1). All ranks must call these functions in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from adaptive.config import BadSetting

RESUME = "the same command with --resume_from_checkpoint auto goes on from the last checkpoint"
PEER = "rank {rank} lost another process, whose own error says why"
LOST = {  # part of an error's text -> what happened
    "DataLoader worker (pid": "a data worker of rank {rank} was killed; the machine's memory, or "
    "/dev/shm, may be full: fewer --dataloader_num_workers need less",
    "closed by peer": PEER,
    "Connection reset": PEER,
    "Broken pipe": PEER,
    "Timed out waiting": "rank {rank} waited too long for another process: it hangs, or is gone",
}
MESSAGE_BYTES = 16_384  # of the first message from rank 0, a decision; what is longer takes a second one


class Agreement:
    """The processes of a run; `group` is a gloo group of all of them, None for the default one."""

    def __init__(self, rank: int, world_size: int, group: Any = None):
        self.rank, self.world_size, self.group = rank, world_size, group
        self.met_at = time.monotonic()  # when this process last turned to the others
        self._begun: Callable[[], list] | None = None  # a sum that was started and not yet asked for

    def from_rank0(self, decide: Callable[[], Any]) -> Any:
        """What `decide()` returns on rank 0 (JSON), on every rank; an exception there is raised
        everywhere.
        """
        if self.world_size == 1:
            return decide()
        text, error = b"", None
        if self.rank == 0:
            try:
                text = json.dumps({"answer": decide()}).encode()
            except Exception as failure:  # whatever it is, the other ranks wait for word
                error = failure
                kind = "BadSetting" if isinstance(failure, BadSetting) else type(failure).__name__
                text = json.dumps({"error": str(failure), "kind": kind}).encode()
        text = self._broadcast(text)
        if error:
            raise error
        message = json.loads(text)
        if "error" in message:
            kind, said = message["kind"], message["error"]
            if kind == "BadSetting":
                raise BadSetting(said)
            raise RuntimeError(f"rank 0 failed with {kind}: {said}")
        return message["answer"]

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sum over ranks, in fp64; every rank gets the same bits."""
        return self._start(values, float)()

    def sum_integers(self, values: list[int]) -> list[int]:
        """Elementwise sum over ranks, exact."""
        return self.start_sum(values)()

    def start_sum(self, values: list[int]) -> Callable[[], list[int]]:
        """`sum_integers` in two: what the caller does before it calls the result waits for no other rank."""
        return self._start(values, int)

    def maximum(self, values: list[float]) -> list[float]:
        """Elementwise maximum over ranks, in fp64."""
        return self._start(values, float, torch.maximum)()

    def same_everywhere(self, value: str, what: str) -> None:
        """RuntimeError on every rank unless all ranks hold rank 0's `value`; for --check_agreement."""
        digest = hashlib.blake2b(value.encode(), digest_size=8).hexdigest()
        agreed = self.from_rank0(lambda: digest)
        (differing,) = self.sum_integers([int(agreed != digest)])
        if differing:
            raise RuntimeError(f"{differing} of {self.world_size} processes disagree about {what}")

    def wait(self) -> None:
        """Barrier on the CPU."""
        self.sum_integers([0])

    @staticmethod
    def explain(error: RuntimeError) -> None:
        """Say in one line, before its traceback, what an error means that began elsewhere."""
        rank = os.environ.get("RANK", "0")
        for part, meaning in LOST.items():
            if part in str(error):
                line = f"error: {meaning.format(rank=rank)}; {RESUME}"
                return print(line, file=sys.stderr, flush=True)

    def _start(self, values: list, kind: type, combine: Callable = torch.add) -> Callable[[], list]:
        """`values` (k,) of all ranks, by recursive doubling (Thakur et al. 2005, section 4.5).

        Partners at distance 1, 2, 4 ... add the same two numbers, so that all ranks get the same bits. A rank
        beyond the largest power of 2 hands its part to one below it before, and gets the sum from it after.
        """
        if self.world_size == 1:
            return lambda: list(map(kind, values))
        own = torch.tensor(values, dtype=torch.float64 if kind is float else torch.int64)
        self._finish()
        rank, power = self.rank, 1 << (self.world_size.bit_length() - 1)
        above = rank + power if rank + power < self.world_size else None
        if above is None:  # nothing to wait for: on its way while the caller does something else
            first = self._exchange(own, rank - power if rank >= power else rank ^ 1)

        def total() -> list:
            self._begun = None
            if rank >= power:
                return first().tolist()
            value, distance = own if above is None else combine(own, self._receive(own, above)), 1
            while distance < power:
                exchanged = (
                    first if above is None and distance == 1 else self._exchange(value, rank ^ distance)
                )
                value, distance = combine(value, exchanged()), 2 * distance
            if above is not None:
                self._send(value, above).wait()
            return value.tolist()

        self._begun = functools.cache(total)
        return self._begun

    def _finish(self) -> None:
        """A sum nobody asked for yet comes before the next message: one order on all ranks, come what may."""
        self.met_at = time.monotonic()
        if self._begun:
            self._begun()

    def _broadcast(self, text: bytes) -> bytes:
        """Rank 0's `text`; one message where it is short, as a decision is."""
        buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            head = len(text).to_bytes(8, "little") + text[: MESSAGE_BYTES - 8]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        received = self._hand_down(buffer)
        length, received = int.from_bytes(received[:8], "little"), received[8:]
        if length > len(received):
            rest = torch.zeros(length - len(received), dtype=torch.uint8)
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(text[len(received) :]), dtype=torch.uint8)
            received += self._hand_down(rest)
        return received[:length]

    def _hand_down(self, buffer: torch.Tensor) -> bytes:
        """Rank 0's `buffer`, down a binomial tree: a rank's parent is its number without its lowest bit."""
        self._finish()
        reach = self.rank & -self.rank or 1 << (self.world_size - 1).bit_length()
        if self.rank:
            dist.irecv(buffer, self.rank - reach, group=self.group).wait()
        children = [self.rank + (reach >> k) for k in range(1, reach.bit_length())]
        sending = [self._send(buffer, child) for child in children if child < self.world_size]
        for work in sending:
            work.wait()
        return buffer.numpy().tobytes()

    def _send(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, rank, group=self.group)

    def _receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        """What `rank` sent, of the shape of `like`."""
        received = torch.empty_like(like)
        dist.irecv(received, rank, group=self.group).wait()
        return received

    def _exchange(self, tensor: torch.Tensor, rank: int) -> Callable[[], torch.Tensor]:
        """Send to `rank` and get as much from it; the function that comes back waits for both.

        Both begin now: gloo sends when the other side is ready to receive.
        """
        received, sending = torch.empty_like(tensor), self._send(tensor, rank)
        receiving = dist.irecv(received, rank, group=self.group)

        def wait() -> torch.Tensor:
            receiving.wait()
            sending.wait()
            return received

        return wait
