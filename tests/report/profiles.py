"""What nsys saw of a rank that was paused and stopped."""

from __future__ import annotations

from pathlib import Path

from integration.nsys.reportfile import Process, ReportFile
from report.ranklog import RankLog

from hydroslurm.report.nsys import Profile, read_profile

S, MS, US = 10**9, 10**6, 10**3


def profile_of(folder: Path, pid: int, *, kernels: bool = True) -> Profile:
    """A pause from 4 s to 7 s with kernels around it, parked after 300 us by nsys; a stop at 10 s,
    committed after 50 ms."""
    report = ReportFile(folder / "rank-0-restart-0.sqlite")
    rank = Process(report, pid, offset_ns=RankLog().mono_ns(0))
    rank.pause(1, 4 * S, until_ns=7 * S, signals=("SIGTSTP", "SIGCONT"))
    rank.request("stop_request", 10 * S, "SIGTERM")
    rank.range("saving", 10 * S + 25 * MS, 10 * S + 45 * MS, 40)
    rank.range("committing", 10 * S + 45 * MS, 10 * S + 50 * MS, 40)
    if kernels:
        around = ((3 * S, 4 * S + 32 * US), (7 * S + 90 * US, 7 * S + 95 * US))
        report.gpu("KERNEL", *((*one, rank.global_pid) for one in around))
    return read_profile(report.save())
