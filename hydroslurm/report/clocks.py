"""How the clocks of processes and hosts are lined up, and how far that may be wrong. Pure.

Stamps are CLOCK_MONOTONIC, which each boot of each host counts for itself; every event carries the
date, too (CLOCK_REALTIME). Two errors come in on the way from a stamp to a common time:

- In one life: the date may be set, or was read late. :mod:`~hydroslurm.report.datewatch` says by
  how much the difference of the two clocks changed. A date that was set moves nothing: the lives of
  one boot of one host are counted by the one CLOCK_MONOTONIC that they share.
- Between hosts: their dates may differ. What ranks do together bounds by how much: nobody is told
  that all have parked before the last has, nobody commits before all have copied their part. Where
  these say that dates cannot be right, a host is shifted by the middle of what is possible.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydroslurm.report.datewatch import SET_NS
from hydroslurm.report.pauses import Life


@dataclass(frozen=True)
class HostClock:
    """The date of one host against the first rank's.

    Attributes:
        host: its name.
        shift_ns: to be taken from its dates; 0 where they agree as far as anybody can tell.
        error_ns: the most that is left; None where nothing that ranks did together bounds it.
        bounds: how many such things were found.
        contradictory: they do not fit one difference: a date was set while the run went on.
    """

    host: str
    shift_ns: int = 0
    error_ns: int | None = None
    bounds: int = 0
    contradictory: bool = False


@dataclass(frozen=True)
class Alignment:
    """How the times of a run were lined up.

    Attributes:
        hosts: those beside the first rank's.
        set_ns: hosts whose date was set while the run went on, and by how much.
        within_ns: the largest error within a life; None where no life could tell.
        between_ns: the largest between hosts; None with one host, or with ``unbounded`` ones.
        unbounded: hosts of which only their own date is known.
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

    def sentences(self) -> list[str]:
        """For people, always one at least."""
        said = []
        if self.within_ns is None:
            said.append("Clocks: the events are too few to tell whether the date was set meanwhile")
        else:
            said.append(f"Clocks: within a process the date is good to {_time(self.within_ns)}")
        if self.unbounded:
            who = ", ".join(self.unbounded[:5]) + (" ..." if len(self.unbounded) > 5 else "")
            said.append(f"by how much the date of {who} differs is not known: taken as it is")
        elif self.between_ns is not None:
            said.append(f"between hosts to {_time(self.between_ns)}, by what ranks did together")
        else:
            said.append("all ranks were on one host")
        for host in self.hosts:
            if host.shift_ns:
                said.append(f"the date of {host.host} was shifted by {_time(-host.shift_ns)}")
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


def align(lives: Sequence[Life]) -> tuple[tuple[Life, ...], Alignment]:
    """The lives with their dates lined up, and what is to be said about it."""
    lives, set_ns = _by_boot(lives)
    within = [life.clock_error_ns for life in lives if life.clock_error_ns is not None]
    within_ns = max(within, default=None)
    hosts = list(dict.fromkeys(life.host for life in lives))
    if len(hosts) < 2:
        return tuple(lives), Alignment(within_ns=within_ns, set_ns=set_ns)
    clocks = {host: _clock(host, lives, first=hosts[0]) for host in hosts[1:]}
    shifted = tuple(
        replace(life, clock_offset_ns=life.clock_offset_ns - clocks[life.host].shift_ns)
        if life.host in clocks and clocks[life.host].shift_ns
        else life
        for life in lives
    )
    return shifted, Alignment(tuple(clocks.values()), within_ns, set_ns)


def _by_boot(lives: Sequence[Life]) -> tuple[list[Life], tuple[tuple[str, int], ...]]:
    """The lives of each boot with one date for all, that of most of them; and how often and by how
    much it was set, as one rank saw it."""
    boots: dict[str, list[Life]] = {}
    for life in lives:
        if life.boot is not None:
            boots.setdefault(life.boot, []).append(life)
    dates = {
        boot: statistics.median_low([life.clock_offset_ns for life in of_boot])
        for boot, of_boot in boots.items()
    }
    told: list[tuple[str, int]] = []
    for of_boot in boots.values() or [lives]:
        told += _set_as_seen([life for life in of_boot if life.rank == of_boot[0].rank])
    return [_dated(life, dates.get(life.boot or "")) for life in lives], tuple(told)


def _dated(life: Life, offset_ns: int | None) -> Life:
    ahead_ns = 0 if offset_ns is None else life.clock_offset_ns - offset_ns
    if offset_ns is None or abs(ahead_ns) < SET_NS:
        return life
    return replace(life, clock_offset_ns=offset_ns, date_ahead_ns=ahead_ns)


def _set_as_seen(lives: Sequence[Life]) -> Iterator[tuple[str, int]]:
    """In the lives of one rank on one boot, and between them."""
    before: Life | None = None
    for life in sorted(lives, key=lambda one: one.first_mono_ns):
        if before is not None and before.boot is not None:
            by_ns = life.clock_offset_ns - before.clock_offset_ns - sum(before.date_set_ns)
            if abs(by_ns) >= SET_NS:
                yield life.host, by_ns
        yield from ((life.host, by_ns) for by_ns in life.date_set_ns)
        before = life


def _clock(host: str, lives: Sequence[Life], *, first: str) -> HostClock:
    """By how much its date is ahead of the first host's: at most, and at least."""
    ahead = [
        bound
        for here, there in _together(lives, first, host)
        for bound in _bounds(_meetings(here), _meetings(there))
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


def _together(lives: Sequence[Life], first: str, host: str) -> Iterator[tuple[Life, Life]]:
    """One rank of each host, of every life of the job."""
    found: dict[tuple[int | None, int], dict[str, Life]] = {}
    for life in lives:
        if life.world_size > 1:
            found.setdefault((life.job_id, life.restart_count), {}).setdefault(life.host, life)
    for by_host in found.values():
        if first in by_host and host in by_host:
            yield by_host[first], by_host[host]


_Meetings = Mapping[tuple[str, int], tuple[int, int]]


def _meetings(life: Life) -> _Meetings:
    """What this rank did together with all: a name -> the moment (date) before which it cannot have
    come about, and the one at which this rank knew that it had."""
    found: dict[tuple[str, int], tuple[int, int]] = {}

    def add(name: str, number: int, before_ns: int | None, after_ns: int | None) -> None:
        if before_ns is not None and after_ns is not None and before_ns <= after_ns:
            found[name, number] = (life.epoch_ns(before_ns), life.epoch_ns(after_ns))

    add("joined", 0, life.first_mono_ns, life.joined_mono_ns)
    all_parked = [pause for pause in life.pauses if pause.all_parked_mono_ns is not None]
    for number, pause in enumerate(all_parked):
        # numbers count what all ranks were told, so that all have the same ones
        add("parked", number, pause.parked_mono_ns, pause.all_parked_mono_ns)
    for save in life.progress.saves if life.progress else ():
        if save.step is not None:
            add("saved", save.step, save.staged_mono_ns, save.durable_mono_ns)
    return found


def _bounds(here: _Meetings, there: _Meetings) -> Iterable[tuple[int, int]]:
    """Of what both took part in. Meetings that are counted are compared only when both have as
    many: a line that is lost would shift them."""
    counts = [sum(name == "parked" for name, _ in side) for side in (here, there)]
    for key in here.keys() & there.keys():
        if key[0] == "parked" and counts[0] != counts[1]:
            continue
        (before_here, after_here), (before_there, after_there) = here[key], there[key]
        yield before_there - after_here, after_there - before_here


def _time(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"
