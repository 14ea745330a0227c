"""Background threads, none of which ends silently."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable


def thread(
    run: Callable[..., object], *arguments: object, name: str, daemon: bool = True
) -> threading.Thread:
    """Make a thread, without starting it. An exception that ends it is reported on stderr.

    Without this a SystemExit ends a thread silently, and so does every error where a script has
    set ``threading.excepthook``.
    """

    def guarded() -> None:
        try:
            run(*arguments)
        except BaseException:
            say(f"a fault of hydroslurm's own ended its thread {name}:\n{traceback.format_exc()}")

    return threading.Thread(target=guarded, name=name, daemon=daemon)


def say(text: str) -> None:
    """Write one line to stderr; if that is closed, broken or on a full disk, drop it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"hydroslurm: {text}\n")  # print() would take stdout where it is None
        sys.stderr.flush()
