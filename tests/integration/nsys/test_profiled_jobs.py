"""A real job on a real Slurm below a real nsys: what its reports say, against the event log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import require_slurm
from processes import wait_until
from training.trainings import ROOT, Training

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.report.nsys.export import profiles_in
from hydroslurm.report.nsys.profile import Profile, ProfiledPause
from hydroslurm.report.nsys.reader import read_profile

pytestmark = pytest.mark.slurm

PROFILE_SH = str(ROOT / "sbatch" / "nsys_profile.sh")
AGREEMENT_NS = 1_000_000
SUSPENDS, SIGNALLED = 2, 3


class Job(Training):
    """sbatch/profile.sbatch on a real Slurm."""

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
def torchrun_folder(
    nsys: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """torchrun with two ranks below nsys, which start while the Slurm job is waited for."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(
        "import hydroslurm, os, pathlib, torch\n"
        "rank = os.environ['RANK']\n"
        "with hydroslurm.installed(run_dir='run', gate='native'):\n"
        "    pathlib.Path(f'ready-{rank}').write_text(str(os.getpid()))\n"
        "    a = torch.ones(8)\n"
        "    while not os.path.exists(f'enough-{rank}'):\n"
        "        a = a * 1\n"
    )
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "train.py"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [PROFILE_SH, sys.executable, *command],
            cwd=folder,
            env={**os.environ, "HYDROSLURM_RUN_DIR": "run", "PYTHON": sys.executable},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield folder, process
    for rank in range(2):
        (folder / f"enough-{rank}").touch()
    process.wait(60)


@pytest.fixture(scope="module")
def cluster(torchrun_folder: object) -> Iterator[DevCluster]:
    """Slurm's own KillWait, or nearly: nsys writes its report after the rank has left."""
    require_slurm()
    with DevCluster.up(ClusterSpec(nodes=1, profile="requeue", kill_wait_s=20)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Paused several times, then asked to save and leave: it is about to begin again."""
    job = Job(cluster, tmp_path_factory.mktemp("profiled"), epochs=1000)
    job.submit("--epochs", "1000", "--log-every", "5")
    try:
        job.wait_for(EventKind.FIRST_STEP)
        for number in range(1, SUSPENDS + SIGNALLED + 1):
            job.pause(number, by_slurm=number <= SUSPENDS)
        job.slurm("scancel", "--signal=URG", job.job_id)
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
    """Request, save, commit and the answer to the requeue."""
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


def test_ranks_below_torchrun_are_told_apart_in_one_report(
    job: Job, torchrun_folder: tuple[Path, subprocess.Popen[str]]
) -> None:
    """nsys around torchrun: both ranks' pauses, each with its own process."""
    folder, process = torchrun_folder
    ready = [folder / f"ready-{rank}" for rank in range(2)]

    def said() -> str:
        return (folder / "log").read_text()

    wait_until(lambda: all(path.exists() and path.read_text() for path in ready), said())
    pids = [int(path.read_text()) for path in ready]
    events = [RunDir(folder / "run").rank_events(rank) for rank in range(2)]

    def wait_for(word: str) -> None:
        wait_until(lambda: all(word in path.read_text() for path in events), f"{word} {said()}")

    for signal_name, word in (("USR1", '"parked"'), ("USR2", '"resumed"')):
        subprocess.run(["kill", f"-{signal_name}", *map(str, pids)], check=True)
        wait_for(word)
    for rank in range(2):
        (folder / f"enough-{rank}").touch()
    assert process.wait(120) == 0, said()
    profile = read_profile(folder / "run" / "profile" / "rank-0-restart-0.nsys-rep")
    assert profile.pids == tuple(sorted(pids))
    paused = {
        pause.pid: pause.requested_mono_ns for pause in profile.pauses if pause.running_mono_ns
    }
    logged = {
        e.pid: e.data["requested_mono_ns"]
        for path in events
        for e in read_events(path)
        if e.kind is EventKind.PARKED
    }
    assert paused == logged
    assert not re.search("Traceback", said())


def test_every_attempt_leaves_a_report_of_its_own(job: Job) -> None:
    """Over a requeue, though all processes of the job step got each signal."""
    job.wait_for(EventKind.FIRST_STEP, restart=1)
    job.slurm("scancel", "--signal=INT", job.job_id)
    gone = ("squeue", "-h", "-j", job.job_id)
    wait_until(lambda: not job.slurm(*gone, check=False), "the end of the second attempt")
    names = [path.name for path in profiles_in(job.run.root / "profile")]
    assert names == ["rank-0-restart-0.nsys-rep", "rank-0-restart-1.nsys-rep"], job.log()
    pids = [e.pid for restart in (0, 1) for e in job.seen(EventKind.INSTALLED, restart=restart)]
    assert [job.profile(restart=restart).pids for restart in (0, 1)] == [(pid,) for pid in pids]
