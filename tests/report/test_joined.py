"""What Slurm and nsys say, joined to the log's pauses and stops; and where a run's time went."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from report.profiles import profile_of
from report.ranklog import RankLog
from report.views import figures_of, history_of, shown, tells

from hydroslurm.core.events import EventKind
from hydroslurm.core.goodput import Goodput
from hydroslurm.core.jobid import JobId
from hydroslurm.core.status import RankStatus, fold
from hydroslurm.errors import NoSuchJob, SlurmMissing
from hydroslurm.report.external_sources import Accounting, ask_slurm
from hydroslurm.report.figures import Report
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.stops import SlurmAttempt
from hydroslurm.report.views import pauses_table, stops_table
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.values import Job, JobState

T0 = 1_700_000_000


def requeued() -> tuple[RankLog, RankLog]:
    first = RankLog(pid=1).trains(0, attempt=1).pause(4, for_s=3).stop(10, step=40)
    return first, RankLog(pid=2, restart_count=1).trains(30, attempt=2, step=40)


ATTEMPTS = (
    SlurmAttempt(7, 0, "REQUEUED", T0 - 9, T0 - 9, T0 - 2, T0 + 11, suspended_s=3),
    SlurmAttempt(7, 1, "RUNNING", T0 + 11, T0 + 17, T0 + 28),
)


class Answers:
    """A Slurm's answers; what is missing is refused as Slurm does."""

    def __init__(self, *jobs: Job, error: Exception | None = None) -> None:
        self._jobs = jobs
        self._error = error

    def history(self, job_id: JobId) -> tuple[Job, ...]:
        if self._error:
            raise self._error
        found = tuple(job for job in self._jobs if job.is_named(job_id))
        if not found:
            raise NoSuchJob("accounting has nothing on it")
        return found

    def job(self, job_id: int) -> Job:
        raise NoSuchJob("unknown")

    def config(self) -> Config:
        return Config({"PreemptParameters": "suspend_grace_time=5"})


def test_a_stop_up_to_the_next_start() -> None:
    """Eligible, queue, and start of the process come from Slurm's two attempts; of a job whose next
    one is in the queue what is known of it."""
    (row,) = figures_of(history_of(*requeued()), Accounting(ATTEMPTS, 2)).stops.every_stop
    assert (row.slurm_before, row.slurm_after) == ATTEMPTS
    assert (row.eligible_s, row.queued_s) == (6.0, 11.0)
    assert row.start_s == pytest.approx(2.0)
    assert row.left_s == pytest.approx(0.1)
    waiting = (ATTEMPTS[0], dataclasses.replace(ATTEMPTS[1], state="PENDING", start_epoch_s=None))
    (row,) = figures_of(history_of(requeued()[0]), Accounting(waiting, 2)).stops.every_stop
    assert (row.eligible_s, row.queued_s, row.start_s) == (6.0, None, None)


@pytest.mark.parametrize(
    ("for_s", "grace_s", "stopped_us"), [(3, 2, 2e6), (1, 2, None), (3, None, None)]
)
def test_sigstop(for_s: float, grace_s: int | None, stopped_us: float | None) -> None:
    """Slurm's SIGSTOP comes with the site's grace, unless the resume came before, and is not made
    up where the site was not asked."""
    history = history_of(RankLog().installed().pause(4, for_s=for_s))
    (row,) = Report(history, Accounting((), grace_s)).pauses
    assert row.stopped_us == stopped_us


def test_held_for_another_rank() -> None:
    """A rank that was told by another counts from that one's signal."""
    signalled = RankLog(rank=0, pid=10).installed().pause(4, cause="user")
    told = RankLog(rank=1, pid=11).installed().pause(4.0005, cause="peers")
    own, peers = Report(history_of(signalled, told)).pauses
    assert own.asked_us is None
    assert peers.asked_us == pytest.approx(500, abs=1)


def test_nsys_beside_the_log(tmp_path: Path) -> None:
    """A pause is joined by process and stamp; the difference is the largest of its latencies'. No
    table of the full report cuts a number or a heading off."""
    history = history_of(*requeued())
    profile = profile_of(tmp_path, 1)
    sources = (Accounting(ATTEMPTS, 2), (profile,))
    rows = Report(history, *sources)
    (row,), (stop,) = rows.pauses, [one.stop for one in rows.stopped]
    assert row.nsys is not None
    assert row.nsys.difference_us == pytest.approx(220, abs=2)
    assert row.nsys.park_us == pytest.approx(300, abs=2)
    kernels_us = (row.nsys.last_kernel_us, row.nsys.first_kernel_us)
    assert kernels_us == pytest.approx((32, 90), abs=2)
    assert stop.nsys_committed_ms == pytest.approx(50, abs=0.01)
    nsys = figures_of(history, *sources).nsys
    assert (nsys.joined, nsys.profiles[0].error_us) == (1, (profile.alignment_error_ns or 0) / 1e3)
    lines = shown(history, *sources)
    assert any("The same pauses by nsys" in line for line in lines)
    assert not any("…" in line or len(line) > 80 for line in lines)
    table = pauses_table(rows, wide=True)
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    table = stops_table(rows, wide=True)
    cells |= dict(zip(table.headings, table.rows[0], strict=True))
    told = [float(cells[f"{name}"]) for name in ("parked, nsys (µs)", "largest difference (µs)")]
    assert told == pytest.approx([300, 220], abs=2)
    assert cells["saved, nsys (ms)"] == "50.0"


def test_a_profile_of_another_run(tmp_path: Path) -> None:
    """A profile with other processes joins nothing, and that is said, with what it lacks."""
    profiles = (profile_of(tmp_path, 999, kernels=False),)
    words = " ".join(" ".join(shown(history_of(requeued()[0]), Accounting(), profiles)).split())
    assert "it holds no process of this run" in words
    assert "profiled without --trace=cuda" in words


def _job(state: JobState, *times_s: int) -> Job:
    started, ended = (T0 + one for one in times_s)
    return Job(job_id=7, state=state, start_epoch_s=started, end_epoch_s=ended)


def test_slurm_is_asked() -> None:
    """Attempts and grace come as values; a running attempt has no end, whatever its time limit. A
    job of another time is another cluster's: nothing of it is used, and that is said."""
    history = history_of(*requeued())
    jobs = (_job(JobState.REQUEUED, -2, 11), _job(JobState.RUNNING, 28, 999))
    answer = ask_slurm(lambda: Answers(*jobs), history.attempts)  # type: ignore[arg-type, return-value]
    assert [attempt.end_epoch_s for attempt in answer.attempts] == [T0 + 11, None]
    assert (answer.suspend_grace_s, answer.missing) == (5, ())
    assert [answer.of(attempt) for attempt in history.attempts] == list(answer.attempts)
    elsewhere = Answers(_job(JobState.COMPLETED, -999, -900))
    answer = ask_slurm(lambda: elsewhere, history.attempts)  # type: ignore[arg-type, return-value]
    assert answer.attempts == ()
    assert "another cluster" in answer.missing[0]


@pytest.mark.parametrize("error", [None, SlurmMissing("no program sacct")])
def test_slurm_that_does_not_know(error: Exception | None) -> None:
    """The report goes on without it, and names what it lacks."""
    history = history_of(*requeued())
    answer = ask_slurm(lambda: Answers(error=error), history.attempts)  # type: ignore[arg-type, return-value]
    assert answer.attempts == ()
    words = " ".join(" ".join(shown(history, answer)).split())
    assert ("no program sacct" if error else "accounting has nothing") in words


T0 = 1_700_000_000
PARTS = ("productive", "made_again", "saving", "parked", "starting", "leaving", "unknown")


def goodput(*logs: RankLog, slurm: tuple[SlurmAttempt, ...] = ()) -> Goodput:
    found = goodput_of(history_of(*logs), Accounting(slurm))
    assert found is not None
    parts = sum(getattr(found, f"{name}_s") for name in PARTS)
    assert parts == pytest.approx(found.allocated_s, abs=1e-6)
    assert found.allocated_s + found.queued_s == pytest.approx(found.wall_s, abs=1e-6)
    if not slurm:  # what the first rank's status says while the job runs
        status = fold(event for log in logs for event in log.events)
        live = RankStatus.from_json(status.to_json()).goodput() if status else None
        assert vars(live) == {k: pytest.approx(v, abs=1e-5) for k, v in vars(found).items()}
    return found


def slurm_attempt(number: int, *moments: int) -> SlurmAttempt:
    """Submitted, eligible, started, ended."""
    return SlurmAttempt(7, number, "REQUEUED", *(T0 + one for one in moments), suspended_s=0)


def two_attempts(step: int = 40) -> tuple[RankLog, RankLog]:
    """10.1 s, of which 2 parked; and 20 s later 15.1 s."""
    one = RankLog(pid=1).trains(0, attempt=1).pause(5, for_s=2).stop(10, step=40)
    two = RankLog(pid=2, restart_count=1).trains(30, attempt=2, step=step)
    return one, two.stop(45, step=100, attempt=2)


def test_the_parts_are_the_whole() -> None:
    """Starting, parked, saving and leaving are what they are, and the rest made steps."""
    found = goodput(*two_attempts())
    parts = {"starting_s": 5.0, "parked_s": 2.0, "leaving_s": 0.16, "productive_s": 20.04 - 2.0}
    tells(found, {"allocated_from": "events", "queued_s": 19.9, "steps": 100, **parts})
    assert found.of_allocated == pytest.approx(found.productive_s / 25.2, rel=1e-3)
    assert found.step_s == pytest.approx(18.04 / 98, rel=1e-2)


def test_steps_that_were_made_again_do_not_count() -> None:
    """An attempt that began 13 steps back takes a third of the first one's time."""
    found, whole = goodput(*two_attempts(step=27)), goodput(*two_attempts())
    assert found.made_again_s == pytest.approx(5.52 * 13 / 39, rel=0.01)
    tells(found, {"steps_lost": 13, "restarts": 1, "restart_s": 22.5})  # 10 s to 32.5 s
    assert found.steps == 27 + 73
    assert (found.of_wall or 0) < (whole.of_wall or 0)


def test_an_attempt_that_never_trained() -> None:
    """It repeats nothing: what the one before it has lost is known once another one trains."""
    one, _ = two_attempts()
    dies = RankLog(pid=3, restart_count=1).installed(20)
    dies.add(EventKind.ATTEMPT_BEGAN, 22, attempt=2, step=27)
    two = RankLog(pid=2, restart_count=2).trains(30, attempt=3, step=27)
    found = goodput(one, dies, two.uninstalled(40))
    tells(found, {"steps_lost": 13, "restarts": 1, "restart_s": 22.5})


def test_a_run_that_had_finished() -> None:
    """What trains in its folder later loses nothing of it, and restarts nothing."""
    done = RankLog(pid=1).trains(0, attempt=1).at_step(30).add(EventKind.SAVE_SKIPPED, 9)
    done.add(EventKind.ATTEMPT_ENDED, 10, ending="finished").uninstalled(11)
    anew = RankLog(pid=2, restart_count=1).trains(30, attempt=2, step=0).uninstalled(40)
    tells(goodput(done, anew), {"steps_lost": 0, "restarts": 0, "made_again_s": 0.0, "steps": 31})


def test_by_slurm() -> None:
    """With accounting the start of Python and the way out are allocated; only the queue is not."""
    attempts = (slurm_attempt(0, -10, -10, -3, 11), slurm_attempt(1, 11, 17, 28, 47))
    found = goodput(*two_attempts(), slurm=attempts)
    parts = {"allocated_s": 33.0, "wall_s": 57.0, "starting_s": 10.0, "queued_s": 24.0}
    tells(found, {"allocated_from": "slurm", **parts})


def test_killed() -> None:
    """From the last event of a killed attempt nothing is known, and that is a part of its own."""
    log = RankLog(pid=1).trains(0, attempt=1).at_step(30).add(EventKind.SAVE_SKIPPED, 12)
    after = RankLog(pid=2, restart_count=1).trains(60, attempt=2, step=20)
    found = goodput(log, after.uninstalled(70), slurm=(slurm_attempt(0, 0, 0, 0, 50),))
    tells(found, {"unknown_s": 38.0, "at_most": True, "allocated_from": "both"})


def test_without_steps() -> None:
    """Where only pausing was installed there is no goodput, and none is made up."""
    found = goodput(RankLog().installed().pause(3, for_s=2).uninstalled(10))
    tells(found, {"of_allocated": None, "of_wall": None, "steps": 0})
    tells(found, {"parked_s": 2.0, "unknown_s": 8.0})


def test_an_installation_that_a_run_replaces() -> None:
    """It is the begin of the same attempt."""
    log = RankLog().installed(0).pause(1, for_s=0.5).uninstalled(2).trains(3, attempt=1)
    tells(goodput(log.stop(20, step=30)), {"starting_s": 5.5, "parked_s": 0.0, "restarts": 0})


def test_saves_that_the_training_waits_for() -> None:
    """A copy of the state is waited for; the commit in the background is not, nor is a pause."""
    log, save = RankLog().trains(0, attempt=1), {"checkpoint_step": 9, "save_kind": "periodic"}
    log.add(EventKind.SAVE_STARTED, 5.0, **save).pause(5.2, for_s=1)
    log.add(EventKind.SAVE_STAGED, 6.5, **save).add(EventKind.SAVE_COMMITTED, 9.0, **save)
    found = goodput(log.stop(20, step=30))
    assert (found.saving_s, found.parked_s) == pytest.approx((0.5, 1.0), abs=1e-3)
