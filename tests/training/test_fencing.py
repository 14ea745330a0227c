"""Two attempts of one run that are alive at once: the newer one goes on, the older one leaves and
harms nothing. Real processes, and a real Slurm for what concerns requeues."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Child, child, wait_until
from training.trainings import ROOT, Training
from zygote import forked

from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import Fence, process_began_epoch_s
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import RunFolderError, StaleAttempt
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import JobState, open_client
from hydroslurm.slurm.stops import check_newest
from hydroslurm.slurm.values import Job
from hydroslurm.training.attempts import AttemptLog
from hydroslurm.training.claim import require_own

ATTEMPT = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
from training.loop import Training

training = Training(Path(sys.argv[1]), keep=1)
with training.run as run:
    run.resume()
    for batch in run.batches(epochs=int(sys.argv[2])):
        training.step(batch)
        print("step", run.step, flush=True)
        time.sleep(0.01)  # a step of some length, so that no long attempt gets to its end
    print("holds", flush=True)
    sys.stdin.readline()
"""
DEMO = ROOT / "examples" / "demo_train.py"


Begin = Callable[..., Child]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def begin(run: RunDir, tmp_path: Path) -> Iterator[Begin]:
    """Starts attempts on one folder."""
    with ExitStack() as stack:
        folders = iter(tmp_path / f"attempt{n}" for n in range(9))

        def start(epochs: int = 100_000) -> Child:
            folder = next(folders)
            folder.mkdir()
            given = (str(run.root), str(epochs))
            environ = {"OMP_NUM_THREADS": "1"}
            return stack.enter_context(forked(ATTEMPT, folder, *given, environ=environ))

        yield start


def reach(attempt: Child, *, further: int) -> None:
    """Wait until it has made so many steps more than it has shown."""
    first = int(attempt.expect("step"))
    wait_until(lambda: int(attempt.expect("step")) >= first + further, "steps")


def state_of(run: RunDir, *, stale: Child) -> tuple[dict[str, int], str, bool]:
    """Everything that a stale attempt must not touch. A save that it was held in is its own: its
    temporary folder, which has the pid in its name, goes with it."""
    theirs = [path for path in run.checkpoints.iterdir() if f".{stale.pid}." not in path.name]
    inodes = {path.name: path.stat().st_ino for path in theirs}
    return inodes, run.attempts_jsonl.read_text(), run.finished_json.exists()


def hang(attempt: Child) -> None:
    """Stop a process, and wait until each of its threads has stopped: one may be saving."""
    attempt.signal(signal.SIGSTOP)

    def states() -> set[str]:
        threads = Path(f"/proc/{attempt.pid}/task").glob("*/stat")
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in threads}

    wait_until(lambda: states() == {"T"}, "all threads to stop")


@pytest.mark.parametrize("told", [True, False])
def test_an_attempt_that_wakes_up_late_leaves_all_as_it_is(
    told: bool, begin: Begin, run: RunDir
) -> None:
    """It hung while its successor began, and hears SIGTERM then, or nothing at all: it leaves with
    93 and has neither committed, removed nor written anything; the newer one goes on."""
    old = begin()
    reach(old, further=10)
    hang(old)
    new = begin()
    reach(new, further=20)
    hang(new)
    before = state_of(run, stale=old)
    if told:
        old.signal(signal.SIGTERM)
    old.signal(signal.SIGCONT)
    assert old.wait() == MUST_NOT_RUN_AGAIN, str(old)
    assert "Only the newest attempt of a run may write" in str(old)
    assert state_of(run, stale=old) == before
    new.signal(signal.SIGCONT)
    reach(new, further=20)
    new.signal(signal.SIGTERM)
    assert new.wait() == RUN_AGAIN, str(new)
    attempts = AttemptLog(run.attempts_jsonl).attempts()
    assert [attempt.ending for attempt in attempts] == [None, "asked"]


def test_an_attempt_that_is_done_too_late_does_not_finish_the_run(
    begin: Begin, run: RunDir
) -> None:
    """It has trained to the end, and a newer one trains, whose restart the marker would end."""
    old = begin(epochs=1)
    old.expect("holds")
    new = begin()
    reach(new, further=8)
    old.say("go on")
    assert old.wait() == MUST_NOT_RUN_AGAIN, str(old)
    assert not run.finished_json.exists()


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    """Of another script, in whatever job, and of one that is at work in this start of the job; not
    of one that has ended, of another start, or where torchrun restarts its ranks. So is one that
    another line of this start has finished; a later job may train longer there."""
    folder = RunDir(tmp_path)

    def fence(**changes: Any) -> Fence:
        made = Fence(folder.claim_json, cluster="c", job_id=7, step_id="1")
        made.me = replace(made.me, **{"pid": -1, "script": "finetune.py", **changes})
        return made

    other = fence(script="pretrain.py", job_id=6)
    other.claim()
    with pytest.raises(RunFolderError, match=r"is the run folder of pretrain\.py .*directory="):
        require_own(folder, fence=fence())
    require_own(folder, fence=fence(), anew=True)
    with child("import time; print('on', flush=True); time.sleep(600)", tmp_path) as living:
        living.expect("on")
        began_epoch_s = process_began_epoch_s(living.pid)
        fence(pid=living.pid, began_epoch_s=began_epoch_s, step_id="0").claim()
        with pytest.raises(RunFolderError, match=r"another training of this job .*directory="):
            require_own(folder, fence=fence())
        require_own(folder, fence=fence(restart_count=1))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            require_own(folder, fence=fence())
        living.signal(signal.SIGKILL)
        living.wait()
        require_own(folder, fence=fence())
    fence(command="train --phase 1").claim()
    require_own(folder, fence=fence(command="train --phase 2"))
    folder.finished_json.touch()
    with pytest.raises(RunFolderError, match="nothing of it was loaded"):
        require_own(folder, fence=fence(command="train --phase 2"))
    require_own(folder, fence=fence(command="train --epochs 20", job_id=8))


# --- with Slurm
# --------------------------------------------------------------------------------------------------


def job(restarts: int, state: JobState = JobState.RUNNING, **fields: object) -> Job:
    given = {"start_epoch_s": 1000, "end_epoch_s": 5000, "time_limit_s": 3600, **fields}
    return Job(job_id=7, state=state, restart_count=restarts, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "restart_count", "began_epoch_s", "stale"),
    [
        (job(0), 0, 1001.0, False),
        (job(1), 1, 1001.0, False),
        (job(1), 0, 900.0, True),
        (job(1), 0, 1001.0, False),  # SLURM_RESTART_COUNT was lost
        (job(1, JobState.PENDING), 0, 900.0, False),
        (job(1, JobState.COMPLETING), 0, 900.0, False),  # being requeued
        (job(1, JobState.COMPLETING, end_epoch_s=1100), 0, 900.0, True),  # the living one ends
        (job(1, JobState.SUSPENDED), 0, 900.0, True),
    ],
)
def test_slurms_count_of_restarts_tells_a_dead_attempt(
    seen: Job, restart_count: int, began_epoch_s: float, stale: bool
) -> None:
    """A process is of a dead attempt when the job was started again since it began."""
    allocation = Allocation(job_id=7, restart_count=restart_count)
    left_alone = pytest.raises(StaleAttempt, match="is left alone")
    with left_alone if stale else nullcontext():
        check_newest(seen, allocation, began_epoch_s=began_epoch_s)


SCRIPT = """\
#!/bin/bash
if [ -z "${SLURM_RESTART_COUNT:-}" ]; then env -0 > env.tmp; mv env.tmp env; sleep 1000; fi
exec python3 -u PROGRAM
"""
SUSPENDING = """
import time
import hydroslurm
print("asks", hydroslurm.receive_suspend_command(), flush=True)
while not hydroslurm.receive_suspend_command():
    time.sleep(0.01)
hydroslurm.go_suspend()
"""
TRAINING = f"""
import runpy, sys
sys.argv = {[str(DEMO), "--think-s=0.01", "--log-every=5", "--every-steps=20", "--epochs=9999"]!r}
sys.path.insert(0, {str(DEMO.parent)!r})
runpy.run_path({str(DEMO)!r}, run_name="__main__")
"""


@pytest.mark.slurm
def test_a_rank_of_a_dead_attempt_leaves_the_living_one_alone(
    requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """The ranks of the first start escaped and hung, the job was requeued and runs: they hear
    SIGTERM, whether they saved by a Run or in a way of their own, and nobody requeues the job."""
    folder = tmp_path / "job"
    folder.mkdir()
    program = tmp_path / "by-run" / "program.py"  # the command line of the training, in both starts
    (folder / "job.sbatch").write_text(SCRIPT.replace("PROGRAM", str(program)))
    training = Training(requeue_cluster, folder, 0)
    options = ("--parsable", "--requeue", "--open-mode=append", "--output=job-%j.out")
    training.job_id = training.slurm("sbatch", *options, "job.sbatch")
    client = open_client(environ=requeue_cluster.environ())
    with ExitStack() as stack:
        stack.callback(training.end)
        wait_until((folder / "env").exists, "the first start")
        environ = dict(pair.split("=", 1) for pair in (folder / "env").read_text().split("\0")[:-1])
        ranks = []
        for name, code, shown in (
            ("by-run", TRAINING, "epoch 0 step 20"), ("by-hand", SUSPENDING, "asks False")
        ):  # fmt: skip
            (tmp_path / name).mkdir()
            # a process with the environment of a job, which Slurm does not know of
            orphan = child(code, tmp_path / name, environ=environ, prefix=("setsid",))
            ranks.append(stack.enter_context(orphan))
            ranks[-1].expect(shown)
            ranks[-1].signal(signal.SIGSTOP)
        client.requeue(client.job(int(training.job_id)))
        training.wait_for_attempt(2)
        for rank in ranks:
            rank.signal(signal.SIGTERM)
            rank.signal(signal.SIGCONT)
            assert rank.wait() == MUST_NOT_RUN_AGAIN, str(rank)
        assert "is not done" in str(ranks[0])
        assert "is left alone" in str(ranks[1])
        at = CheckpointStore(training.run.checkpoints).committed()[-1].step
        wait_until(
            lambda: CheckpointStore(training.run.checkpoints).committed()[-1].step > at,
            f"the living attempt to go on\n{training.log()}",
        )
        seen = client.job(int(training.job_id))
        assert (seen.state, seen.restart_count) == (JobState.RUNNING, 1)
        assert [attempt.ending for attempt in training.attempts()] == [None, None]
