"""Python processes that need not import torch again: forks of one that has imported the packages.

Most of a short launch is imports, in the launcher and in each process that it starts. `folder()` has
executables that take the place of Python's and of accelerate's: they have the nursery (this file, as a
script) fork a child with their arguments, environment, folder and streams, hand signals on to it, and end as
it ends. The child is a real process with a session of its own; it has the packages loaded, none of this
repository's modules, and the nursery's hash seed; what it starts as `sys.executable` is forked, too. What is
about the start, the end or the order of a set uses the plain interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

PACKAGES = """
accelerate.commands.launch bitsandbytes datasets deepspeed deepspeed.module_inject networkx peft pytest rich
safetensors.torch torch._inductor.compile_fx torch.ao.quantization torch.distributed.checkpoint.state_dict
torch.distributed.fsdp torch.distributed.run transformers.models.auto.modeling_auto
transformers.models.bert.modeling_bert transformers.models.gpt2.modeling_gpt2
transformers.models.llama.modeling_llama transformers.models.t5.modeling_t5 tyro
""".split()
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
    nursery.connect({address!r})
    told = json.dumps([{first} + sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    nursery.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(told) + 4096)
    socket.send_fds(nursery, [told], [0, 1, 2])
    child = int(nursery.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = int(nursery.recv(64))
if status < 0:  # by a signal, as the child
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def folder() -> Path:
    """Has `python`, which takes -u, -m and a script, and `accelerate`; starts the nursery."""
    made = tempfile.TemporaryDirectory(prefix="warm")  # a short path: sockets have room for 107 bytes
    address = f"{made.name}/nursery"
    for name, first in {"python": [], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}.items():
        client = Path(made.name, name)
        client.write_text(CLIENT.format(python=sys.executable, address=address, first=first))
        client.chmod(0o755)
    pipe = subprocess.PIPE
    nursery = subprocess.Popen([sys.executable, __file__, address], stdin=pipe, stdout=pipe, text=True)
    atexit.register(made.cleanup)
    atexit.register(nursery.wait)
    atexit.register(nursery.stdin.close)  # first: it ends the nursery
    assert "ready\n" in iter(nursery.stdout.readline, ""), "it says why above"  # some packages talk
    return Path(made.name)


class Nursery:
    """Forks a child for each connection; whoever connected gets its number, then its exit status."""

    def __init__(self, address: str):
        self.ready = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.bind(address)
        self.door.listen(64)
        self.ready.register(self.door, selectors.EVENT_READ, self.welcome)
        self.ready.register(sys.stdin, selectors.EVENT_READ, self.close)
        self.children: dict[int, socket.socket] = {}  # handle of a child's process -> who waits for it
        self.work: list[str] | None = None  # in a child: its arguments

    def serve(self) -> list[str]:
        """Returns in children only, with the arguments of Python that they were started with."""
        print("ready", flush=True)
        while self.work is None:
            for key, _ in self.ready.select():
                key.data(key.fileobj)
                if self.work is not None:
                    break
        return self.work

    def welcome(self, door: socket.socket) -> None:
        client, _ = door.accept()
        message, streams, _, _ = socket.recv_fds(client, 1 << 22, 3)
        arguments, environment, folder = json.loads(message)
        child = os.fork()
        if child == 0:
            self.ready.close(), self.door.close(), client.close()
            os.setsid()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for number, handle in enumerate(streams):
                os.dup2(handle, number)
                os.close(handle)
            self.work = arguments
            return
        for handle in streams:
            os.close(handle)
        handle = os.pidfd_open(child)
        client.send(str(child).encode())
        self.children[handle] = client
        self.ready.register(handle, selectors.EVENT_READ, functools.partial(self.ended, child))
        self.ready.register(client, selectors.EVENT_READ, functools.partial(self.left, child))

    def ended(self, child: int, handle: int) -> None:
        _, status = os.waitpid(child, 0)
        client = self.children.pop(handle)
        self.ready.unregister(handle)
        if client in self.ready.get_map():
            self.ready.unregister(client)
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        client.close()
        os.close(handle)

    def left(self, child: int, client: socket.socket) -> None:
        """Whoever waited was killed: as the interpreter itself would have been."""
        os.kill(child, signal.SIGKILL)
        self.ready.unregister(client)

    def close(self, _) -> None:
        for client in self.children.values():
            client.close()
        os._exit(0)


def run(arguments: list[str]) -> None:
    """As `python arguments` does."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)
    sys.path[1:1] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def leave(work: Callable, *arguments) -> None:
    """Do it and end as the interpreter does, without taking a thousand modules apart, which takes seconds."""
    status = 0
    try:
        work(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def threads() -> set[str]:
    """Names of this process's; jemalloc, which pyarrow brings, starts its own again in a fork."""
    names = {Path(entry, "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()}
    return names - {"jemalloc_bg_thd"}


if __name__ == "__main__":
    nursery, sys.executable = Nursery(sys.argv[1]), str(Path(sys.argv[1]).with_name("python"))
    for package in PACKAGES:
        __import__(package)
    assert len(threads()) == 1, "a fork has the thread that forked, none of the others"
    leave(run, nursery.serve())
