"""What becomes of jobs whose replicas end in this way and that, on a real Slurm."""

from __future__ import annotations

import re

import pytest
from integration.trainingjob.scene import Scene
from integration.trainingjob.stage import ENDINGS, PREEMPTIONS

from hydroslurm.jobs.supervisor.attempts import Ending

pytestmark = pytest.mark.slurm

STATUSES = [1, 143, 137]
"""Of ENDINGS: a signal is 128 and its number."""


def statuses(scene: Scene) -> list[int | None]:
    return [one.status for one in scene.attempts]


def types(scene: Scene) -> list[str]:
    return [one.type for one in scene.conditions]


def slurms_state(scene: Scene) -> str:
    """Of its end, which accounting hears of after the verdict."""
    asked = ("sacct", "-X", "-n", "-P", "-j", str(scene.job_id), "-o", "State,ExitCode")
    scene.wait(lambda: "RUNNING" not in scene.slurm(*asked), "end in the accounting")
    return scene.slurm(*asked).splitlines()[-1]


@pytest.mark.scene("on_failure")
def test_on_failure_restarts_whatever_the_status(scene: Scene) -> None:
    """Every status but 0, and every signal, is followed by another start, until it succeeds."""
    assert len(ENDINGS) == len(STATUSES)
    assert statuses(scene) == [*STATUSES, 0]
    assert scene.final_condition().type == "Succeeded"
    assert types(scene).count("Restarting") == len(STATUSES)
    assert slurms_state(scene) == "COMPLETED|0:0"


@pytest.mark.scene("exit_code_torchrun")
def test_exit_code_sees_through_torchrun(scene: Scene) -> None:
    """What a worker of the agent ended with is what the policy judges: a SIGKILL is retried, a
    plain 1 is final."""
    assert statuses(scene) == [137, 1]
    assert scene.final_condition().reason == "MasterFailed"


@pytest.mark.scene("unrequested_exit")
def test_leaving_with_75_unasked_is_no_preemption(scene: Scene) -> None:
    """It is judged as a failure: started again in the same attempt, within backoffLimit."""
    assert statuses(scene) == [75, 75]
    assert [one.restart_count for one in scene.attempts] == [0, 0]
    assert scene.final_condition().reason == "BackoffLimitExceeded"
    assert "nobody has asked it to stop" in scene.final_condition().message


@pytest.mark.scene("srun_killed")
def test_a_killed_srun_is_no_failure_of_the_replicas(scene: Scene) -> None:
    """Never and backoffLimit=0 forbid a restart after a failure; this one is said to be none."""
    assert scene.final_condition().type == "Succeeded"
    assert [one.ending for one in scene.attempts] == [Ending.LOST, Ending.SUCCEEDED]
    (restarting,) = [one for one in scene.conditions if one.type == "Restarting"]
    assert restarting.reason == "SrunKilled"
    assert "srun was killed (137 (SIGKILL))" in restarting.message


@pytest.mark.scene("shared_limit")
def test_all_replicas_share_one_limit(scene: Scene) -> None:
    """backoffLimit=2 is spent by failures of two replicas: a third that fails is not restarted, and
    the job goes on until its master fails."""
    assert [one.replica for one in scene.attempts] == ["worker-1", "worker-2", "worker-0"]
    assert statuses(scene) == [3, 4, 137]
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert verdict.message == (
        "worker-0 failed with status 137 (SIGKILL), after worker-1 failed with status 5; "
        "backoffLimit 2 allows no more restarts"
    )


@pytest.mark.scene("preempted")
def test_preemptions_are_no_failures(scene: Scene) -> None:
    """Two preemptions and one failure, with backoffLimit=1: it lives, and succeeds."""
    endings = [one.ending for one in scene.attempts]
    assert endings == [*[Ending.PREEMPTED] * PREEMPTIONS, Ending.FAILED, Ending.SUCCEEDED]
    assert [one.restart_count for one in scene.attempts] == [*range(PREEMPTIONS + 1), PREEMPTIONS]
    assert types(scene).count("Preempted") == PREEMPTIONS
    assert scene.final_condition().type == "Succeeded"


@pytest.mark.scene("preempted_too_often")
def test_preemptions_have_a_limit_of_their_own(scene: Scene) -> None:
    """With preemptionLimit=1 the second one ends the job, and no replica is started again."""
    assert [one.ending for one in scene.attempts] == [Ending.PREEMPTED] * 2
    assert scene.final_condition().reason == "PreemptionLimitExceeded"


@pytest.mark.scene("deadline")
def test_the_deadline_counts_over_all_attempts(scene: Scene) -> None:
    """Some of activeDeadlineSeconds in one attempt, the rest in the next; then it is over for
    good."""
    assert [one.restart_count for one in scene.attempts] == [0, 1]
    assert [one.ending for one in scene.attempts] == [Ending.PREEMPTED, Ending.DEADLINE]
    second = scene.attempts[1]
    assert (second.ended_epoch_ns or 0) - second.began_epoch_ns < 15e9, "it had them all again"
    assert scene.final_condition().reason == "DeadlineExceeded"
    assert slurms_state(scene) == "FAILED|93:0"


@pytest.mark.scene("suspended")
def test_a_suspension_does_not_count_against_the_deadline(scene: Scene) -> None:
    """A job that was suspended for longer than activeDeadlineSeconds goes on to its end."""
    assert scene.seen["while suspended"].strip() == "SUSPENDED"
    assert scene.final_condition().type == "Succeeded"


@pytest.mark.scene("init_fails")
def test_an_init_step_that_fails_fails_its_replica(scene: Scene) -> None:
    """Its status is the replica's, and the replica itself is not started."""
    assert statuses(scene) == [4]
    assert "looking" in scene.printed(0)
    assert "init step 'look' of worker-0 failed with status 4" in scene.printed(0)
    assert "attempt" not in scene.printed(0)


@pytest.mark.scene("uneven")
def test_ranks_are_counted_from_the_master_on(scene: Scene) -> None:
    """Replicas of several ranks and several replicas on a node: each rank knows its place."""
    lines = [scene.printed(task).splitlines()[0] for task in range(9)]
    names = [line.split()[0] for line in lines]
    assert names == ["master-0", *[f"worker-{n}" for n in range(4) for _ in range(2)]]
    found = [re.search(r"RANK=(\d+) WORLD_SIZE=9 LOCAL_RANK=(\d+) LOCAL_WORLD_SIZE=(\d+) "
                       r"SLURMD_NODENAME=(\S+)", line) for line in lines]  # fmt: skip
    assert all(found)
    where = [tuple(one.groups()) for one in found if one]
    assert [int(rank) for rank, *_ in where] == list(range(9))
    assert [int(local) for _, local, *_ in where] == [0, 0, 1, 2, 3, 0, 1, 2, 3]
    assert [int(size) for _, _, size, _ in where] == [1, *[4] * 8]
    nodes = [node for *_, node in where]
    assert len({*nodes}) == 3
    assert len({*nodes[1:5]}) == len({*nodes[5:]}) == 1
