"""What is known of a run beside its event log: what Slurm says, and what nsys recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hydroslurm.core.files import clean
from hydroslurm.report.accounting import Accounting, SlurmLife
from hydroslurm.report.history import History
from hydroslurm.report.nsys.profile import Profile
from hydroslurm.report.nsys.profiled import ProfiledPause, ProfiledStop
from hydroslurm.report.pauses import Life, Pause, StopRequest


@dataclass(frozen=True)
class Beside:
    """Other sources, each joined to the log by what both of them hold.

    Attributes:
        accounting: Slurm's answers.
        profiles: nsys reports. A pause or stop of one is that of the log with the same process and
            the same stamp of its request, to the nanosecond.
        missing: what could not be read, in sentences.
    """

    accounting: Accounting = field(default_factory=Accounting)
    profiles: tuple[Profile, ...] = ()
    missing: tuple[str, ...] = ()

    def slurm_life(self, life: Life) -> SlurmLife | None:
        return self.accounting.of(life)

    def profiled_pause(self, life: Life, pause: Pause) -> ProfiledPause | None:
        return self._pauses.get((life.pid, pause.requested_mono_ns))

    def profiled_stop(self, life: Life, request: StopRequest | None) -> ProfiledStop | None:
        return self._stops.get((life.pid, request.requested_mono_ns)) if request else None

    @cached_property
    def _pauses(self) -> Mapping[tuple[int, int | None], ProfiledPause]:
        return {
            (pause.pid, pause.requested_mono_ns): pause
            for profile in self.profiles
            for pause in profile.pauses
            if pause.requested_mono_ns is not None
        }

    @cached_property
    def _stops(self) -> Mapping[tuple[int, int | None], ProfiledStop]:
        return {
            (stop.pid, stop.requested_mono_ns): stop
            for profile in self.profiles
            for stop in profile.stops
            if stop.requested_mono_ns is not None
        }

    def sentences(self, history: History) -> list[str]:
        """What is missing, and of which profile nothing belongs to this run."""
        pids = {life.pid for life in history.lives}
        said = [*history.missing, *self.accounting.missing, *self.missing]
        for profile in self.profiles:
            said += [f"{profile.path.name}: {sentence}" for sentence in profile.missing]
            if history.lives and not pids & set(profile.pids):
                said.append(f"{profile.path.name}: it holds no process of this run.")
        return [_sentence(one) for one in said]


def _sentence(words: str) -> str:
    words = clean(words, most=2000)
    return words if words.endswith((".", "!", "?")) else f"{words}."


def span_us(begin_ns: int | None, end_ns: int | None) -> float | None:
    """Microseconds between two stamps; None for what is unknown or runs backwards."""
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return (end_ns - begin_ns) / 1e3
