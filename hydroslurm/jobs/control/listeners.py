"""Which job steps of a job hear a pause by signal, and why the others are left alone.

``scancel --signal`` reaches every process of a job step (under proctrack/linuxproc) or each of its
tasks, and SIGUSR1 kills whoever does not know it, or means something else to them: Lightning saves
and requeues. So it goes only to steps whose ranks have written down that they take it, and behind
whom nobody would die of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.signals import signal_name
from hydroslurm.gate.signals import is_ours_alone

Verb = Literal["pause", "resume"]


@dataclass
class _Rank:
    """One process, as it announced itself."""

    rank: int
    pid: int
    host: str
    told: Mapping[str, Any]
    replaced: set[str] = field(default_factory=set)


@dataclass
class _Step:
    """All that is known of one job step; ``tasks``: that have come so far, ended ones too."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Listeners:
    """Whom a signal may be sent to.

    Attributes:
        signals: job step -> the number of the signal that its ranks take. None stands for all job
            steps: the ranks are of a release that did not tell theirs.
        ranks: that will hear it.
        refusals: of each other step why it is left alone.
    """

    signals: Mapping[int | None, int]
    ranks: frozenset[int]
    refusals: tuple[str, ...]


_UNTOLD = {"pause": 10, "resume": 12}
"""SIGUSR1 and SIGUSR2, of a release that did not write them down."""


def listeners(files: Mapping[int, Path], verb: Verb, *, restart_count: int) -> Listeners:
    """Read who has announced itself in the present attempt. Who wrote a file that cannot be
    read is not among them."""
    signals: dict[int | None, int] = {}
    ranks: set[int] = set()
    refusals: list[str] = []
    for step_id, step in _steps(files, restart_count).items():
        reason = _why_not(step_id, step, verb)
        if reason:
            refusals.append(reason)
            continue
        first = next(iter(step.ranks.values())).told
        signals[step_id] = first["asked_by"][verb] if "asked_by" in first else _UNTOLD[verb]
        ranks |= step.ranks.keys()
    return Listeners(signals, frozenset(ranks), tuple(refusals))


_BATCH = -1
"""In the place of a step, for what runs in the batch script."""


def _steps(files: Mapping[int, Path], restart_count: int) -> dict[int | None, _Step]:
    steps: dict[int | None, _Step] = {}
    for rank, path in files.items():
        of_pid: dict[tuple[str, int], int | None] = {}
        with contextlib.suppress(OSError):
            for event in read_events(path):
                if event.restart_count == restart_count:
                    _take(steps, of_pid, rank, event)
    return {step_id: step for step_id, step in steps.items() if step.ranks}


def _take(
    steps: dict[int | None, _Step],
    of_pid: dict[tuple[str, int], int | None],
    rank: int,
    event: Event,
) -> None:
    process = event.host, event.pid
    if event.kind is EventKind.INSTALLED:
        told = event.data
        step_id = _step_of(told)
        of_pid[process] = step_id
        step = steps.setdefault(step_id, _Step())
        step.ranks[rank] = _Rank(rank, event.pid, event.host, told)
        step.tasks.add(told.get("task", rank))
        return
    if process not in of_pid:
        return
    known = steps[of_pid[process]].ranks.get(rank)
    if known is None or (known.host, known.pid) != process:
        return
    if event.kind is EventKind.HANDLER_REPLACED:
        of_others = {str(event.data.get("signal"))}
        known.replaced -= of_others
        if not is_ours_alone(event.data):
            known.replaced |= of_others
    elif event.kind is EventKind.UNINSTALLED:
        del steps[of_pid[process]].ranks[rank]


def _step_of(told: Mapping[str, Any]) -> int | None:
    if "step_id" not in told:
        return None
    step_id = told["step_id"]
    return _BATCH if step_id is None else int(step_id)


def _why_not(step_id: int | None, step: _Step, verb: Verb) -> str:
    """Empty where the signal harms nobody and every rank takes it."""
    if step_id == _BATCH:
        return (
            "its ranks run in the batch script without srun, where a signal would reach the batch "
            "shell too; start them with srun"
        )
    ranks = step.ranks.values()
    reasons = (_of_rank(rank, verb) for rank in ranks)
    reason = next(filter(None, reasons), "") or _of_signals(step, verb) or _of_tasks(step)
    return f"step {step_id}: {reason}" if reason and step_id is not None else reason


def _of_rank(rank: _Rank, verb: Verb) -> str:
    told = rank.told
    who = f"rank {rank.rank} (pid {rank.pid} on {rank.host})"
    number = told["asked_by"].get(verb) if "asked_by" in told else _UNTOLD[verb]
    if number is None:
        return f"{who} takes no signal for a {verb}: HYDROSLURM_SIGNALS, or it was ignored before"
    name = signal_name(number)
    if name in rank.replaced:
        return (
            f"{who} has another handler for {name} than hydroslurm's. What that does is not known: "
            "Lightning saves and requeues. Choose another signal, "
            f"HYDROSLURM_SIGNALS=user_{verb}=..., or have the library leave this one alone"
        )
    if told.get("deaf"):
        return (
            f"{name} would kill {', '.join(told['deaf'])}, above {who}; start the script with "
            "srun itself, `exec` in the wrapper, or `hydroslurm agent` in the place of torchrun"
        )
    return ""


def _of_signals(step: _Step, verb: Verb) -> str:
    told = [rank.told["asked_by"][verb] for rank in step.ranks.values() if "asked_by" in rank.told]
    if len(set(told)) > 1:
        names = ", ".join(sorted({signal_name(number) for number in told}))
        return f"its ranks take different signals for a {verb} ({names})"
    return ""


def _of_tasks(step: _Step) -> str:
    told = [rank.told for rank in step.ranks.values()]
    tasks = max((one.get("step_tasks", 0) for one in told), default=0)
    if len(step.tasks) >= tasks or all(one.get("held") for one in told):
        return ""
    return (
        f"{len(step.tasks)} of its {tasks} tasks have announced themselves, and the signal would "
        "kill the others. They may still be starting: try again. `srun --preempt` and "
        "HYDROSLURM_PREEMPT=pause protect tasks that start; helpers belong into a job step of "
        "their own"
    )
