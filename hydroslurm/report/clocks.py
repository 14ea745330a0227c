"""How the clocks of processes and hosts are lined up, and how far that may be wrong. Pure.

Stamps are CLOCK_MONOTONIC, which each boot of each host counts for itself; every event carries the
date, too (CLOCK_REALTIME). Two errors come in on the way from a stamp to a common time:

- In one life: the date may be set, or was read late. :class:`DateWatch` says by how much the
  difference of the two clocks changed.
- Between hosts: their dates may differ. What ranks do together bounds by how much: nobody is told
  that all have parked before the last has, nobody commits before all have copied their part. Where
  these say that dates cannot be right, a host is shifted by the middle of what is possible.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydroslurm.report.pauses import Life

_BUCKET_NS = 10 * 10**9


class DateWatch:
    """The difference of date and CLOCK_MONOTONIC over one life.

    An event is stamped when it happens and dated when it is recorded, so that the difference of its
    clocks is never too small: of every 10 s the least counts. A single one that is larger than both
    of its neighbours was recorded late, for example by a process that had been stopped meanwhile.
    """

    def __init__(self) -> None:
        self._least: dict[int, int] = {}

    def see(self, mono_ns: int, epoch_ns: int) -> None:
        bucket, offset_ns = mono_ns // _BUCKET_NS, epoch_ns - mono_ns
        if offset_ns < self._least.setdefault(bucket, offset_ns):
            self._least[bucket] = offset_ns

    @property
    def offset_ns(self) -> int:
        """Date minus CLOCK_MONOTONIC."""
        return statistics.median_low(self._believed())

    @property
    def error_ns(self) -> int | None:
        """The most that it was anything else at another time; None of a life of a few seconds."""
        believed = self._believed()
        if len(believed) < 2:
            return None
        offset_ns = self.offset_ns
        return max(abs(one - offset_ns) for one in believed)

    def _believed(self) -> list[int]:
        least = [self._least[bucket] for bucket in sorted(self._least)]
        if len(least) < 2:
            return least
        padded = [least[1], *least, least[-2]]
        around = zip(padded, padded[1:], padded[2:], strict=False)
        return [min(one, max(before, after)) for before, one, after in around]


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
        within_ns: the largest error within a life; None where no life could tell.
        between_ns: the largest between hosts; None with one host, or with ``unbounded`` ones.
        unbounded: hosts of which only their own date is known.
    """

    hosts: tuple[HostClock, ...] = ()
    within_ns: int | None = None

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
            if host.contradictory:
                said.append(f"the date of {host.host} was set while the run went on")
        return [f"{'; '.join(said)}."]


def align(lives: Sequence[Life]) -> tuple[tuple[Life, ...], Alignment]:
    """The lives with their dates lined up, and what is to be said about it."""
    within = [life.clock_error_ns for life in lives if life.clock_error_ns is not None]
    within_ns = max(within, default=None)
    hosts = list(dict.fromkeys(life.host for life in lives))
    if len(hosts) < 2:
        return tuple(lives), Alignment(within_ns=within_ns)
    clocks = {host: _clock(host, lives, first=hosts[0]) for host in hosts[1:]}
    shifted = tuple(
        replace(life, clock_offset_ns=life.clock_offset_ns - clocks[life.host].shift_ns)
        if life.host in clocks and clocks[life.host].shift_ns
        else life
        for life in lives
    )
    return shifted, Alignment(hosts=tuple(clocks.values()), within_ns=within_ns)


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
