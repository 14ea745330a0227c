"""Keep the rank's pause signals away from the processes below it.

**Started with exec** (multiprocessing's spawn and forkserver, ``subprocess``): exec resets handlers
to the default, so that one ``scancel --signal=USR1`` to all processes of the job step would kill
them. What was weighed:

- handlers in the child come too late: it takes a while from exec to the first line of ours, and
  programs that are not Python have none;
- ignoring the signals in the parent during the start would lose a pause that comes just then;
- ignoring them between fork and exec needs a fork, which ``subprocess`` avoids for good reason
  (vfork: 1 ms; fork: 100 ms where the rank holds 2 GiB);
- **blocking** them in the thread that starts it: a blocked mask is inherited through exec, there is
  no gap, and the signal reaches another thread of the parent or waits for those milliseconds.

A program that is not Python keeps them blocked: it does not die of one unless it empties its mask
itself (dash does, waiting for the first of several commands), and has to unblock one that it wants.
A Python with hydroslurm ignores them from its start on (:mod:`hydroslurm.runtime.below`), and hears
them again where the script installs a handler. ``os.system`` goes by none of the places that are
wrapped here.

**Forked**: inherits our handlers, which see that nothing is meant for it.

**Both** are paused together with the rank where they train: :mod:`hydroslurm.runtime.followers`.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from hydroslurm.core import registry
from hydroslurm.runtime.below import BELOW_ENV, Above


class SpawnShield:
    """Has what this process starts begin with some signals blocked. One at a time per process."""

    def __init__(self, signals: Iterable[int], *, killing: Iterable[int] = ()) -> None:
        """``signals``: for children that multiprocessing makes; ``killing``: for other programs,
        which Ctrl-Z is to stop."""
        places = (
            (multiprocessing.util, "spawnv_passfds", frozenset(signals)),
            (subprocess.Popen, "_execute_child", frozenset(killing)),
        )
        self._places = [place for place in places if place[2]]
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._killing = frozenset(killing)
        self._told_before: str | None = None

    def install(self) -> None:
        pid = os.getpid()
        self._told_before = os.environ.get(BELOW_ENV)
        mark = Above(pid, registry.start_ticks(pid) or 0, self._killing)
        os.environ[BELOW_ENV] = mark.as_text()
        for owner, name, signals in self._places:
            original = getattr(owner, name)
            wrapper = _blocking(original, signals)
            setattr(owner, name, wrapper)
            self._wrapped.append((owner, name, original, wrapper))

    def uninstall(self) -> None:
        """Put the originals back, unless somebody has wrapped them again since."""
        os.environ.pop(BELOW_ENV, None)
        if self._told_before is not None:
            os.environ[BELOW_ENV] = self._told_before
        for owner, name, original, wrapper in self._wrapped:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()


def _blocking(original: Callable[..., Any], signals: frozenset[int]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            return original(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return start
