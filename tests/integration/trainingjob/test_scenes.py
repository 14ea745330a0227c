"""What becomes of TrainingJobs on a real Slurm: how their replicas end, what they save, and what is
cleaned up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import zygote
from integration.trainingjob.scene import HERE, Scene

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.jobs.supervisor.attempts import Ending
from hydroslurm.report.reading import read_history

pytestmark = pytest.mark.slurm


def statuses(scene: Scene) -> list[int | None]:
    return [one.decision and one.decision.status for one in scene.attempts]


@pytest.mark.scene("exit_code_torchrun")
def test_exit_code_sees_through_torchrun(scene: Scene) -> None:
    """What a worker of the agent ended with is what the policy judges: a SIGKILL is retried, a
    plain 1 is final."""
    assert statuses(scene) == [137, 1]
    assert scene.final_condition().reason == "MasterFailed"


@pytest.mark.scene("shared_limit")
def test_all_replicas_share_one_limit(scene: Scene) -> None:
    """backoffLimit=2 is spent by failures of two replicas: a third that fails is not restarted, and
    the job goes on until its master fails."""
    assert [one.decision and one.decision.replica for one in scene.attempts] == [
        "worker-1",
        "worker-2",
        "worker-0",
    ]
    assert statuses(scene) == [3, 4, 137]
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert verdict.message == (
        "worker-0 failed with status 137 (SIGKILL), after worker-1 failed with status 5; "
        "backoffLimit 2 allows no more restarts"
    )
    asked = ("sacct", "-X", "-n", "-P", "-j", str(scene.job_id), "-o", "State,ExitCode")
    scene.wait(lambda: "RUNNING" not in scene.slurm(*asked), "end in the accounting")
    assert scene.slurm(*asked).splitlines()[-1] == "FAILED|93:0"


@pytest.mark.scene("preempted")
def test_preemptions_are_no_failures(scene: Scene) -> None:
    """A preemption leaves backoffLimit=1 to the master that leaves with 75 unasked, which is a
    failure, started again in the same allocation; preemptionLimit=1 ends the job at the second."""
    endings = [one.ending for one in scene.attempts]
    assert endings == [Ending.PREEMPTED, Ending.FAILED, Ending.PREEMPTED]
    assert [one.restart_count for one in scene.attempts] == [0, 1, 1]
    assert statuses(scene)[1] == 75
    (restarting,) = [one for one in scene.conditions if one.type == "Restarting"]
    assert "nobody has asked it to stop" in restarting.message
    assert [one.type for one in scene.conditions].count("Preempted") == 2
    assert scene.final_condition().reason == "PreemptionLimitExceeded"


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


@pytest.mark.scene("uneven")
def test_unfinished_ends_those_that_still_run(scene: Scene) -> None:
    """After the master has ended, those that still run are ended, and their scratch folders
    stay."""
    assert scene.final_condition().type == "Succeeded"
    assert len(scene.attempts) == 1
    ended = ["came to its own end" in scene.printed(task) for task in (0, 7, 8)]
    assert ended == [True, False, False]
    assert (scene.run.scratch / "worker-3/kept").exists()


@pytest.mark.scene("clean_None")
def test_none_lets_the_others_come_to_their_own_end(scene: Scene) -> None:
    """A supervisor that is started again finds the attempt that runs; the worker runs on behind a
    master that has succeeded, as long as it likes."""
    assert len(scene.attempts) == 1
    assert scene.seen["worker lived"]
    assert "came to its own end" in scene.printed(1)
    assert scene.final_condition().type == "Succeeded"
    assert scene.seen["scratch"]


@pytest.mark.scene("clean_All")
def test_a_job_whose_shell_is_killed_too_is_cleaned_behind(scene: Scene) -> None:
    """Slurm ends the job and all its ranks; the janitor says so and removes what is to go."""
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "SupervisorLost")
    assert "came to its own end" not in scene.printed(1)
    assert not scene.seen["scratch"]


@pytest.mark.scene("manifest")
def test_a_manifest(scene: Scene) -> None:
    """After the init container four ranks train together, in the order of their replicas: started
    by four agents, although one would do. One warning lists what has no effect."""
    assert scene.final_condition().type == "Succeeded"
    trained = set()
    for task in range(4):
        text = scene.printed(task)
        assert text.startswith("ready\n")
        assert "4 nodes meet at" in text
        said = re.search(rf"rank {task} of (4), local 0: accuracy (\S+), weights (\S+)", text)
        assert said, text
        trained.add(said.groups())
    assert len(trained) == 1
    warning = scene.said.partition("no effect on this Slurm")[2]
    for field in ("priority", "volumes", "volumeMounts", "image pytorch/pytorch:2.0.0"):
        assert field in warning
    assert scene.said.count("no effect") == 1


@pytest.mark.scene("saved")
def test_a_run_that_is_stopped_goes_on_where_it_was(scene: Scene, tmp_path: Path) -> None:
    """Asked to stop by a person, then preempted: with a backoffLimit of 0 it ends with the weights
    of a run left alone. The ranks' events tell the first from the second: Slurm has no reason for a
    signal of `scancel --signal`."""
    assert scene.final_condition().type == "Succeeded"
    endings = [Ending.PREEMPTED, Ending.PREEMPTED, Ending.SUCCEEDED]
    assert [one.ending for one in scene.attempts] == endings
    asked, preempted = (one for one in scene.conditions if one.type == "Preempted")
    assert (asked.reason, preempted.reason) == ("Asked", "Preempted")
    # the next attempt's supervisor writes it down where the job's end was faster than this one's
    assert "SIGTERM received: Slurm names no cause" in asked.message
    alone = zygote.ran([HERE.parents[1] / "jobs/launch/submitted.py", tmp_path])
    assert json.loads(scene.printed(0).splitlines()[-1]) == json.loads(alone.stdout)
    # pausable from the start, then by its Run: one attempt of a report each
    attempts = read_history(scene.run.root).attempts
    assert [one.restart_count for one in attempts] == [0, 1, 2]
    assert all(one.progress is not None for one in attempts)


@pytest.mark.scene("saved")
def test_the_spec_decides_where_and_how_often_it_saves(scene: Scene) -> None:
    """checkpointDirectory and saveEverySeconds count above what the script says, which is never."""
    events = list(read_events(scene.run.rank_events(0)))
    first_attempt = [event for event in events if event.restart_count == 0]
    stopped = next(n for n, one in enumerate(first_attempt) if one.kind is EventKind.STOP_REQUESTED)
    saves = [one for one in first_attempt[:stopped] if one.kind is EventKind.SAVE_COMMITTED]
    assert len(saves) >= 2
    kept = scene.folder / "kept here"
    assert list(kept.glob("step-*"))
    listed = scene.hydroslurm("checkpoint", "ls", str(scene.run.root))
    assert all(str(int(path.stem[5:])) in listed.stdout for path in kept.glob("step-*"))
