"""A real job on a real Slurm below a real nsys, paused, requeued and cancelled: what nsys's reports
say, against the event log; and what our report makes of that, and of Slurm's accounting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import require_slurm
from processes import wait_until
from training.trainings import ROOT, Training

from hydroslurm.core.events import Event, EventKind
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.errors import WrongJobState
from hydroslurm.jobs.requests import JobAnswer, requeue_job
from hydroslurm.report.external_sources import Accounting, ask_slurm
from hydroslurm.report.figures import Report
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.nsys import Profile, ProfiledPause, profiles_in, read_profile
from hydroslurm.report.reading import read_history
from hydroslurm.slurm.client import JobState, open_client

pytestmark = pytest.mark.slurm

AGREEMENT_NS = 1_000_000
SUSPENDS, SIGNALLED = 2, 3


class Job(Training):
    """sbatch/profile.sbatch on a real Slurm.

    Attributes:
        requeued: the answer to the gentle request.
    """

    requeued: JobAnswer

    def submit(self, *options: str) -> Job:
        for name in ("examples", "sbatch"):
            (self.folder / name).symlink_to(ROOT / name)
        script = str(ROOT / "sbatch" / "profile.sbatch")
        self.job_id = self.slurm("sbatch", "--parsable", script, *options)
        return self

    def seen(self, kind: EventKind, *, restart: int = 0) -> list[Event]:
        return [e for e in self.events() if e.kind is kind and e.restart_count == restart]

    def wait_for(self, kind: EventKind, *, number: int = 1, restart: int = 0) -> None:
        what = f"{number} x {kind.value} of restart {restart}"
        wait_until(lambda: len(self.seen(kind, restart=restart)) >= number, f"{what}\n{self.log()}")

    def pause(self, number: int, *, by_slurm: bool) -> None:
        """Until it goes on."""
        self.slurm(*(("scontrol", "suspend") if by_slurm else _USR1), self.job_id)
        self.wait_for(EventKind.PARKED, number=number)
        self.slurm(*(("scontrol", "resume") if by_slurm else _USR2), self.job_id)
        self.wait_for(EventKind.RESUMED, number=number)

    def profile(self, *, restart: int) -> Profile:
        """Of an attempt that has ended: nsys says in the log that it has written it."""
        path = self.run.root / "profile" / f"rank-0-restart-{restart}.nsys-rep"
        wait_until(lambda: self.log().count("Generated:") > restart, f"{path}\n{self.log()}")
        return read_profile(path)


_USR1, _USR2 = ("scancel", "--signal=USR1"), ("scancel", "--signal=USR2")


@pytest.fixture(scope="module")
def cluster(nsys: str) -> Iterator[DevCluster]:
    """Slurm's own KillWait, or nearly: nsys writes its report after the rank has left."""
    require_slurm()
    with DevCluster.up(ClusterSpec(nodes=1, profile="requeue", kill_wait_s=20)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Paused several times, then asked to save and to be requeued, as ``hydroslurm requeue`` does:
    it is about to begin again."""
    job = Job(cluster, tmp_path_factory.mktemp("profiled"), epochs=1000)
    job.submit("--epochs", "1000", "--log-every", "5")
    try:
        job.wait_for(EventKind.FIRST_STEP)
        for number in range(1, SUSPENDS + SIGNALLED + 1):
            job.pause(number, by_slurm=number <= SUSPENDS)
        client = open_client(environ=cluster.environ())
        job.requeued = requeue_job(client, client.job(int(job.job_id)))
        with pytest.raises(WrongJobState, match="should be RUNNING"):
            requeue_job(client, client.job(int(job.job_id)))
        job.wait_for(EventKind.ATTEMPT_ENDED)
        yield job
    finally:
        job.end()


def agreement_ns(told: int | None, event: Event) -> int:
    assert told is not None
    return abs(told - event.mono_ns)


def test_pauses_of_a_suspended_job_agree_with_the_native_stamps(job: Job) -> None:
    """Each pause of the event log is in the report, by the very stamp of its request; parked and
    running differ by less than a millisecond, with the error of the clocks stated."""
    profile = job.profile(restart=0)
    pauses = {pause.requested_mono_ns: pause for pause in profile.pauses}
    parked = job.seen(EventKind.PARKED)
    assert [e.data["requested_mono_ns"] for e in parked] == list(pauses)
    numbers = [p.signal for p in pauses.values()]
    assert numbers == [20] * SUSPENDS + [10] * SIGNALLED
    apart = [agreement_ns(pauses[e.data["requested_mono_ns"]].parked_mono_ns, e) for e in parked]
    resumed = job.seen(EventKind.RESUMED)
    stamps = [p.resume_requested_mono_ns for p in pauses.values()]
    assert stamps == [e.data["requested_mono_ns"] for e in resumed]
    by_number = {pause.number: pause for pause in pauses.values()}
    apart += [
        agreement_ns(by_number[e.data["pause"]].running_mono_ns, e)
        for e in job.seen(EventKind.FIRST_OPERATOR_RELEASED)
    ]
    # but for one: between a stamp and its mark a thread may have to wait for a processor
    assert sorted(apart)[-2] < AGREEMENT_NS, apart
    assert all(_is_ordered(pause) for pause in pauses.values())
    assert profile.alignment_error_ns is not None
    assert profile.alignment_error_ns < AGREEMENT_NS


def _is_ordered(pause: ProfiledPause) -> bool:
    moments = (
        pause.requested_mono_ns,
        pause.parked_mono_ns,
        pause.resume_requested_mono_ns,
        pause.running_mono_ns,
    )
    known = [moment for moment in moments if moment is not None]
    return len(known) == len(moments) and known == sorted(known)


def test_the_stop_of_a_requeued_job_agrees_with_the_event_log(job: Job) -> None:
    """Request, save, commit and the answer to the requeue, which waits for the save."""
    (answer,) = job.requeued.answers
    assert answer.done
    assert f"step {job.attempts()[0].end_step} committed" in answer.message
    assert "as `hydroslurm requeue` does" in job.log()
    (stop,) = job.profile(restart=0).stops
    requested = job.seen(EventKind.STOP_REQUESTED)[0]  # SIGURG; SIGTERM comes with the requeue
    started = job.seen(EventKind.SAVE_STARTED)[-1]
    committed = job.seen(EventKind.SAVE_COMMITTED)[-1]
    assert stop.requested_mono_ns == requested.data["requested_mono_ns"]
    assert stop.step == committed.data["checkpoint_step"]
    apart = [
        agreement_ns(stop.saving_mono_ns, started),
        agreement_ns(stop.committed_mono_ns, committed),
    ]
    assert min(apart) < AGREEMENT_NS, apart
    assert stop.requeued_mono_ns is not None
    assert stop.requeued_mono_ns > committed.mono_ns


def test_every_attempt_leaves_a_report_of_its_own(job: Job) -> None:
    """Over a requeue, though all processes of the job step got each signal."""
    job.wait_for(EventKind.FIRST_STEP, restart=1)
    job.slurm("scancel", job.job_id)
    gone = ("squeue", "-h", "-j", job.job_id)
    wait_until(lambda: not job.slurm(*gone, check=False), "the end of the second attempt")
    names = [path.name for path in profiles_in(job.run.root / "profile")]
    assert names == ["rank-0-restart-0.nsys-rep", "rank-0-restart-1.nsys-rep"], job.log()
    pids = [e.pid for restart in (0, 1) for e in job.seen(EventKind.INSTALLED, restart=restart)]
    assert [job.profile(restart=restart).pids for restart in (0, 1)] == [(pid,) for pid in pids]


def test_the_report_of_the_requeued_and_cancelled_job(job: Job, cluster: DevCluster) -> None:
    """What the rank really writes makes complete stops, each part later than the one before; with
    scancel the state is committed and the job stays cancelled. Accounting has both attempts."""
    assert job.seen(EventKind.SAVE_COMMITTED, restart=1)
    assert not job.seen(EventKind.REQUEUE_ASKED, restart=1)
    assert job.attempts()[1].ending == "cancelled"
    client = open_client("commands", environ=cluster.child_environ())
    assert client.job(int(job.job_id)).state is JobState.CANCELLED
    history = read_history(job.run.root)
    requeued, cancelled = history.stops
    assert (requeued.missing, cancelled.missing) == ((), ())
    assert (requeued.left, cancelled.left) == ("asked", "cancelled")
    assert (requeued.attempt, cancelled.attempt) == (1, 2)
    assert (requeued.steps_lost, requeued.next_step) == (0, requeued.step)
    for stop in (requeued, cancelled):
        assert stop.staged_ms is None  # a stop writes the state itself
        parts = [stop.safe_point_ms, stop.written_ms, stop.durable_ms]
        parts += [stop.requeued_ms] if stop is requeued else []
        assert None not in parts
        assert parts == sorted(parts)  # type: ignore[type-var]
    assert requeued.first_step_s is not None
    assert len(history.stop_requests) >= 2

    def known() -> Accounting | None:
        answer = ask_slurm(lambda: client, history.attempts)
        ended = [attempt.end_epoch_s for attempt in answer.attempts]
        return answer if len(ended) == 2 and all(ended) else None

    wait_until(lambda: known() is not None, "both attempts with their ends in accounting")
    accounting = known() or Accounting()
    assert [attempt.state for attempt in accounting.attempts] == ["REQUEUED", "CANCELLED"]
    assert accounting.suspend_grace_s == 2
    found = [accounting.of(attempt) for attempt in history.attempts]
    assert found == list(accounting.attempts)
    first, _ = Report(history, accounting).figures.stops.every_stop
    assert first.samples_lost == 0  # the loader told how many a step has
    parts_s = [
        part for part in (first.eligible_s, first.queued_s, first.start_s) if part is not None
    ]
    assert len(parts_s) == 3
    assert sum(parts_s) < 300
    goodput = goodput_of(history, accounting)
    assert goodput is not None
    assert goodput.allocated_from == "slurm"
    assert goodput.allocated_s > history.observed_s - (requeued.waited_s or 0) - 2
    assert 0 < goodput.productive_s < goodput.allocated_s
