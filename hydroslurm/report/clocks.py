"""Align the clocks of processes and hosts, and bound the error. Pure.

Timestamps are CLOCK_MONOTONIC, which each boot of each host counts from its own start; every event
also carries the date (CLOCK_REALTIME). Two errors arise on the way to a common time:

- Within one attempt: the date may be set, or may have been read late.
  :class:`~hydroslurm.report.attempts.DateWatch` measures by how much the difference of the two
  clocks changed. Setting the date moves nothing: the attempts of one boot share CLOCK_MONOTONIC.
- Between hosts: their dates may differ. Joint actions of the ranks bound the difference: no rank
  learns that all have parked before the last one has, none commits before all have copied their
  shards. Where these bounds contradict the dates, a host is shifted to the middle of the bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydroslurm.report.attempts import SET_NS, Attempt
from hydroslurm.report.lines import spelled
from hydroslurm.report.tables import figure, required


@dataclass(frozen=True)
class HostClock:
    """The date of one host against the first rank's."""

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
    """How the clocks of a run were aligned.

    Attributes:
        hosts: those other than the first rank's.
        set_ns: hosts whose date was set during the run, and by how much.
        within_ns: the largest error within an attempt; None if no attempt has enough events.
        between_ns: the largest between hosts; None with one host, or with ``unbounded`` ones.
        unbounded: hosts whose date nothing bounds.
    """

    hosts: tuple[HostClock, ...] = ()
    within_ns: int | None = None
    set_ns: tuple[tuple[str, int], ...] = ()

    @property
    def between_ns(self) -> int | None:
        known = [host.error_ns for host in self.hosts if host.error_ns is not None]
        return None if self.unbounded or not known else max(known)

    @property
    def unbounded(self) -> tuple[str, ...]:
        return tuple(host.host for host in self.hosts if host.error_ns is None)

    @property
    def error_ns(self) -> int | None:
        """Of any two moments of the run; None when it is not known."""
        if self.unbounded:
            return None
        within_ns, between_ns = self.within_ns, self.between_ns
        if between_ns is None:
            return within_ns
        return between_ns + (within_ns or 0)

    @property
    def message(self) -> str:
        """For people, in one line."""
        return " ".join(self.sentences())

    def sentences(self) -> list[str]:
        """For people; always at least one."""
        said = []
        if self.within_ns is None:
            said.append("Clocks: the events are too few to tell whether the date was set meanwhile")
        else:
            said.append(
                f"Clocks: within a process the date is good to {spelled(self.within_ns / 1e9)}"
            )
        if self.unbounded:
            who = ", ".join(self.unbounded[:5]) + (" ..." if len(self.unbounded) > 5 else "")
            said.append(f"by how much the date of {who} differs is not known: taken as it is")
        elif self.between_ns is not None:
            said.append(
                f"between hosts to {spelled(self.between_ns / 1e9)}, by what ranks did together"
            )
        else:
            said.append("all ranks were on one host")
        for host in self.hosts:
            if host.shift_ns:
                said.append(
                    f"the date of {host.host} was shifted by {spelled(-host.shift_ns / 1e9)}"
                )
            if host.contradictory and host.host not in dict(self.set_ns):
                said.append(f"the date of {host.host} was set while the run went on")
        sentences = [f"{'; '.join(said)}."]
        if self.set_ns:
            each = [f"of {host} by {by_ns / 1e9:+,.0f} s" for host, by_ns in self.set_ns[:5]]
            more = " and so on" if len(self.set_ns) > 5 else ""
            sentences.append(
                f"The date was set while the run went on: {', '.join(each)}{more}. Durations are "
                "counted by the monotonic clock, without that; moments that Slurm tells are not."
            )
        return sentences


def align(attempts: Sequence[Attempt]) -> tuple[tuple[Attempt, ...], Alignment]:
    """Return the attempts with aligned dates, and how they were aligned."""
    attempts, set_ns = _by_boot(attempts)
    within = [attempt.clock_error_ns for attempt in attempts if attempt.clock_error_ns is not None]
    within_ns = max(within, default=None)
    hosts = list(dict.fromkeys(attempt.host for attempt in attempts))
    if len(hosts) < 2:
        return tuple(attempts), Alignment(within_ns=within_ns, set_ns=set_ns)
    clocks = {host: _clock(host, attempts, first=hosts[0]) for host in hosts[1:]}
    shifted = tuple(
        replace(attempt, clock_offset_ns=attempt.clock_offset_ns - clocks[attempt.host].shift_ns)
        if attempt.host in clocks and clocks[attempt.host].shift_ns
        else attempt
        for attempt in attempts
    )
    return shifted, Alignment(tuple(clocks.values()), within_ns, set_ns)


def _by_boot(attempts: Sequence[Attempt]) -> tuple[list[Attempt], tuple[tuple[str, int], ...]]:
    """The attempts of each boot with one common date, that of most of them; and each change of the
    date that one rank saw."""
    boots: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.boot is not None:
            boots.setdefault(attempt.boot, []).append(attempt)
    dates = {
        boot: statistics.median_low([attempt.clock_offset_ns for attempt in of_boot])
        for boot, of_boot in boots.items()
    }
    changes: list[tuple[str, int]] = []
    for of_boot in boots.values() or [attempts]:
        changes += _set_as_seen([attempt for attempt in of_boot if attempt.rank == of_boot[0].rank])
    return [_dated(attempt, dates.get(attempt.boot or "")) for attempt in attempts], tuple(changes)


def _dated(attempt: Attempt, offset_ns: int | None) -> Attempt:
    ahead_ns = 0 if offset_ns is None else attempt.clock_offset_ns - offset_ns
    if offset_ns is None or abs(ahead_ns) < SET_NS:
        return attempt
    return replace(attempt, clock_offset_ns=offset_ns, date_ahead_ns=ahead_ns)


def _set_as_seen(attempts: Sequence[Attempt]) -> Iterator[tuple[str, int]]:
    """In the attempts of one rank on one boot, and between them."""
    before: Attempt | None = None
    for attempt in sorted(attempts, key=lambda one: one.first_mono_ns):
        if before is not None and before.boot is not None:
            by_ns = attempt.clock_offset_ns - before.clock_offset_ns - sum(before.date_set_ns)
            if abs(by_ns) >= SET_NS:
                yield attempt.host, by_ns
        yield from ((attempt.host, by_ns) for by_ns in attempt.date_set_ns)
        before = attempt


def _clock(host: str, attempts: Sequence[Attempt], *, first: str) -> HostClock:
    """By how much its date is ahead of the first host's: at most, and at least."""
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
    """One rank of each host, of every attempt of the job."""
    found: dict[tuple[int | None, int], dict[str, Attempt]] = {}
    for attempt in attempts:
        if attempt.world_size > 1:
            found.setdefault((attempt.job_id, attempt.restart_count), {}).setdefault(
                attempt.host, attempt
            )
    for by_host in found.values():
        if first in by_host and host in by_host:
            yield by_host[first], by_host[host]


_JointActions = Mapping[tuple[str, int], tuple[int, int]]


def _joint_actions(attempt: Attempt) -> _JointActions:
    """What this rank did together with all: a name -> the moment (date) before which it cannot have
    come about, and the one at which this rank knew that it had."""
    found: dict[tuple[str, int], tuple[int, int]] = {}

    def add(name: str, number: int, before_ns: int | None, after_ns: int | None) -> None:
        if before_ns is not None and after_ns is not None and before_ns <= after_ns:
            found[name, number] = (attempt.epoch_ns(before_ns), attempt.epoch_ns(after_ns))

    add("joined", 0, attempt.first_mono_ns, attempt.joined_mono_ns)
    all_parked = [pause for pause in attempt.pauses if pause.all_parked_mono_ns is not None]
    for number, pause in enumerate(all_parked):
        # all ranks learn of every such moment, so their counts agree
        add("parked", number, pause.parked_mono_ns, pause.all_parked_mono_ns)
    for save in attempt.progress.saves:
        if save.step is not None:
            add("saved", save.step, save.staged_mono_ns, save.durable_mono_ns)
    return found


def _bounds(here: _JointActions, there: _JointActions) -> Iterable[tuple[int, int]]:
    """Of what both took part in. Actions that are counted are compared only when both have the
    same number of them: a lost line would shift the count."""
    counts = [sum(name == "parked" for name, _ in side) for side in (here, there)]
    for key in here.keys() & there.keys():
        if key[0] == "parked" and counts[0] != counts[1]:
            continue
        (before_here, after_here), (before_there, after_there) = here[key], there[key]
        yield before_there - after_here, after_there - before_here
