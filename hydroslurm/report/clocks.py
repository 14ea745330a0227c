"""Align the clocks of processes and hosts, and bound the error. Pure.

Timestamps are CLOCK_MONOTONIC, which each boot of a host restarts; every event also carries the
date (CLOCK_REALTIME). A common time has two sources of error:

- Within one attempt: the date may have been set, or read late; see
  :class:`~hydroslurm.report.attempts.DateWatch`. Attempts of one boot share one CLOCK_MONOTONIC and
  get one common date, so that setting the date moves none of them.
- Between hosts: their dates may differ. Joint actions of the ranks bound the difference: no rank
  learns that all have parked before the last one has; none commits before all have copied their
  shards. If the bounds contradict the dates, a host is shifted to the middle of its bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydroslurm.core.figure import figure, required
from hydroslurm.report.attempts import Attempt
from hydroslurm.report.lines import spelled


@dataclass(frozen=True)
class HostClock:
    """The date of one host relative to the first rank's."""

    # fmt: off
    host: str = required("Its name.")
    shift_ns: int = figure(
        "Subtracted from its dates; 0 where the dates are consistent.", default=0)
    error_ns: int | None = figure(
        "The largest remaining error; null where no joint action of ranks bounds it.")
    bounds: int = figure("How many such actions were found.", default=0)
    contradictory: bool = figure(
        "No single shift satisfies them: a date was set during the run.", default=False)
    # fmt: on


@dataclass(frozen=True)
class Alignment:
    """How times of several processes were aligned."""

    # fmt: off
    error_ns: int | None = figure("Of any two moments of the run; null: unknown.")
    within_ns: int | None = figure("Of two moments of one process; null: too few events to tell.")
    between_ns: int | None = figure(
        "Of two hosts' dates; null with one host, or where nothing bounds it.")
    hosts: tuple[HostClock, ...] = figure("Hosts other than the first rank's.", default=())
    message: str = figure("The same, for people.", default="The clocks were not compared.")
    # fmt: on


def align(attempts: Sequence[Attempt]) -> tuple[tuple[Attempt, ...], Alignment]:
    """Return the attempts with aligned dates, and how they were aligned."""
    if not attempts:
        return (), Alignment()
    attempts = _by_boot(attempts)
    within = [attempt.clock_error_ns for attempt in attempts if attempt.clock_error_ns is not None]
    names = list(dict.fromkeys(attempt.host for attempt in attempts))
    clocks = {host: _clock(host, attempts, first=names[0]) for host in names[1:]}
    aligned = tuple(
        replace(attempt, clock_offset_ns=attempt.clock_offset_ns - clocks[attempt.host].shift_ns)
        if attempt.host in clocks and clocks[attempt.host].shift_ns
        else attempt
        for attempt in attempts
    )
    return aligned, _alignment(tuple(clocks.values()), max(within, default=None))


def _alignment(hosts: tuple[HostClock, ...], within_ns: int | None) -> Alignment:
    bounds = [host.error_ns for host in hosts if host.error_ns is not None]
    unbounded = [host.host for host in hosts if host.error_ns is None]
    between_ns = None if unbounded else max(bounds, default=None)
    error_ns = within_ns if between_ns is None else between_ns + (within_ns or 0)
    parts = []
    if within_ns is None:
        parts.append("Clocks: the events are too few to tell whether the date was set meanwhile")
    else:
        parts.append(f"Clocks: within a process the date is good to {spelled(within_ns / 1e9)}")
    if unbounded:
        who = ", ".join(unbounded[:5]) + (" ..." if len(unbounded) > 5 else "")
        parts.append(f"by how much the date of {who} differs is not known: taken as it is")
    elif between_ns is not None:
        parts.append(f"between hosts to {spelled(between_ns / 1e9)}, by what ranks did together")
    else:
        parts.append("all ranks were on one host")
    for host in hosts:
        if host.shift_ns:
            parts.append(f"the date of {host.host} was shifted by {spelled(-host.shift_ns / 1e9)}")
        if host.contradictory:
            parts.append(f"the date of {host.host} was set while the run went on")
    message = f"{'; '.join(parts)}."
    return Alignment(None if unbounded else error_ns, within_ns, between_ns, hosts, message)


def _by_boot(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Give the attempts of each boot one common date, that of most of them."""
    boots: dict[str, list[int]] = {}
    for attempt in attempts:
        if attempt.boot is not None:
            boots.setdefault(attempt.boot, []).append(attempt.clock_offset_ns)
    dates = {boot: statistics.median_low(offsets) for boot, offsets in boots.items()}
    return [
        replace(attempt, clock_offset_ns=dates[attempt.boot])
        if attempt.boot is not None
        else attempt
        for attempt in attempts
    ]


def _clock(host: str, attempts: Sequence[Attempt], *, first: str) -> HostClock:
    """Bound how far this host's date is ahead of the first host's."""
    ahead = [
        bound
        for here, there in _together(attempts, first, host)
        for bound in _bounds(_joint_actions(here), _joint_actions(there))
    ]
    if not ahead:
        return HostClock(host)
    least_ns, most_ns = max(low for low, _ in ahead), min(high for _, high in ahead)
    if least_ns > most_ns:
        error_ns = max(abs(least_ns), abs(most_ns))
        return HostClock(host, error_ns=error_ns, bounds=len(ahead), contradictory=True)
    shift_ns = 0 if least_ns <= 0 <= most_ns else (least_ns + most_ns) // 2
    error_ns = max(abs(least_ns - shift_ns), abs(most_ns - shift_ns))
    return HostClock(host, shift_ns=shift_ns, error_ns=error_ns, bounds=len(ahead))


def _together(
    attempts: Sequence[Attempt], first: str, host: str
) -> Iterator[tuple[Attempt, Attempt]]:
    """Yield pairs of attempts, one rank of each host, for every attempt of the job."""
    by_host_of: dict[tuple[int | None, int], dict[str, Attempt]] = {}
    for attempt in attempts:
        if attempt.world_size > 1:
            by_host_of.setdefault((attempt.job_id, attempt.restart_count), {}).setdefault(
                attempt.host, attempt
            )
    for by_host in by_host_of.values():
        if first in by_host and host in by_host:
            yield by_host[first], by_host[host]


_JointActions = Mapping[tuple[str, int], tuple[int, int]]


def _joint_actions(attempt: Attempt) -> _JointActions:
    """Return this rank's joint actions: name -> the date before which it cannot have happened,
    and the date at which this rank knew of it."""
    actions: dict[tuple[str, int], tuple[int, int]] = {}

    def add(name: str, number: int, before_ns: int | None, after_ns: int | None) -> None:
        if before_ns is not None and after_ns is not None and before_ns <= after_ns:
            actions[name, number] = (attempt.epoch_ns(before_ns), attempt.epoch_ns(after_ns))

    add("joined", 0, attempt.first_mono_ns, attempt.joined_mono_ns)
    all_parked = [pause for pause in attempt.pauses if pause.all_parked_mono_ns is not None]
    for number, pause in enumerate(all_parked):
        # all ranks learn of every such action, so their counts agree
        add("parked", number, pause.parked_mono_ns, pause.all_parked_mono_ns)
    for save in attempt.progress.saves:
        if save.step is not None:
            add("saved", save.step, save.staged_mono_ns, save.durable_mono_ns)
    return actions


def _bounds(here: _JointActions, there: _JointActions) -> Iterable[tuple[int, int]]:
    """Yield bounds from shared actions. Counted actions are compared only if both sides have the
    same number of them: a lost line would shift the count."""
    counts = [sum(name == "parked" for name, _ in side) for side in (here, there)]
    for key in here.keys() & there.keys():
        if key[0] == "parked" and counts[0] != counts[1]:
            continue
        (before_here, after_here), (before_there, after_there) = here[key], there[key]
        yield before_there - after_here, after_there - before_here
