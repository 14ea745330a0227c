"""What a Python that was started somewhere below an installed process does, from its start on, with
the signals that are meant for that one. Every such Python reads it: it imports little."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from hydroslurm.runtime import autoload

BELOW_ENV = "HYDROSLURM_BELOW"
"""Environment variable, set by an installed process for what it starts: ``PID:STARTED:SIGNALS``;
when it started, in clock ticks, and the numbers of the signals that nothing below it dies of."""


class Above(NamedTuple):
    """An installed process that this one is below of."""

    pid: int
    started: int
    signals: frozenset[int]

    def as_text(self) -> str:
        return f"{self.pid}:{self.started}:{','.join(map(str, sorted(self.signals)))}"


def above(environ: Mapping[str, str]) -> Above | None:
    """The nearest one as the environment tells it; None where there is none, or where it is gone:
    what a rank submits takes its environment to other machines."""
    pid, _, rest = environ.get(BELOW_ENV, "").partition(":")
    started, _, signals = rest.partition(":")
    numbers = [pid, started, *filter(None, signals.split(","))]
    if not all(number.isdecimal() for number in numbers) or int(pid) == os.getpid():
        return None
    from hydroslurm.core.registry import start_ticks

    if start_ticks(int(pid)) != int(started):
        return None
    valid = signal.valid_signals()
    return Above(int(pid), int(started), frozenset(s for s in map(int, numbers[2:]) if s in valid))


def live_below(environ: Mapping[str, str]) -> None:
    """Ignore them, where nobody has done anything about them, and hear them again, so that a
    handler that comes later gets them. A process that multiprocessing has made keeps them blocked,
    for it may become a rank (``hydroslurm.install()``), which takes what has come; and it follows.
    """
    rank = above(environ)
    if rank is None:
        return
    untouched = {s for s in rank.signals if signal.getsignal(s) is signal.SIG_DFL}
    if not any("multiprocessing." in word for word in sys.orig_argv):
        autoload.ignore(untouched)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, rank.signals)
        return
    autoload.ignore(untouched - signal.sigpending())
    try:
        from hydroslurm.runtime.following import prepare

        prepare()
    except Exception as error:
        autoload.say(f"process {os.getpid()} goes on when its rank is paused: {error}")
