"""A tool's command line -> its flags; what is wrong is one line and exit status 2, as in train.py.

To add one: a tool builds a `Flags` where it would build an ArgumentParser, and ends with `leave(main)`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from adaptive.config import BadSetting, exit_with


class Flags(argparse.ArgumentParser):
    """Wrong flags are a BadSetting; argparse would print all others before the line that says which."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message}; see --help")


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a tool and exit with its status; as SIGPIPE would end it where nobody reads stdout any more."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
        sys.exit(status)
    except BadSetting as error:
        exit_with(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        sys.exit(128 + signal.SIGPIPE)
