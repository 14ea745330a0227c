"""Act 2 of the demo, watched: what the events of a training say while it runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from demo_stage import log_lines, say, wait_for

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import HydroslurmError
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.reading import read_history
from hydroslurm.report.stops import Stop


def wait_for_step(run: RunDir, name: str, step: int) -> None:
    """Until the training has come so far, as its log shows it."""

    def reached() -> bool:
        shown = (re.search(r" step (\d+) ", line) for line in log_lines(run))
        return any(match and int(match[1]) >= step for match in shown)

    wait_for(f"step {step} of {name}", reached, run=run.root)


def wait_for_attempt(run: RunDir, name: str, number: int) -> None:
    """Until so many attempts have made a step; says from where the newest goes on."""
    _wait_for(run, number, _trains, f"attempt {number} of {name} to make a step")
    if number > 1:
        step = history(run).stops[number - 2].next_step
        say(f"[cyan]{name}[/]: attempt {number} resumes from step {step}")


def tell_stop(run: RunDir, name: str, number: int) -> None:
    """Wait until an attempt has left, and say how."""
    _wait_for(run, number, lambda attempt: attempt.ended, f"attempt {number} of {name} to leave")
    stops = history(run).stops
    if len(stops) < number or stops[number - 1].left == "finished":
        raise HydroslurmError(f"{name} had finished before it could be stopped; try more --epochs")
    say(f"[cyan]{name}[/]: {_in_words(stops[number - 1])}")


def history(run: RunDir) -> History:
    """Empty as long as the job has not started."""
    with contextlib.suppress(HydroslurmError):
        return read_history(run.root)
    return History(name=run.root.name)


def _wait_for(run: RunDir, number: int, condition: Callable[[Attempt], bool], what: str) -> None:
    def holds() -> bool:
        attempts = history(run).attempts
        return len(attempts) >= number and condition(attempts[number - 1])

    wait_for(what, holds, run=run.root)


def _trains(attempt: Attempt) -> bool:
    return attempt.progress.first_step_mono_ns is not None


def _in_words(stop: Stop) -> str:
    words = f"{stop.reason or 'asked'} at step {stop.step}, "
    if stop.durable_ms is None:
        return words + "not saved"
    words += f"saved {stop.durable_ms:.0f} ms after {stop.signal}"
    if stop.requeued_ms is not None:
        words += f", in the queue again after {stop.requeued_ms:.0f} ms"
    return words
