"""What becomes of TrainingJobs on a real Slurm: how their replicas end, what they save, and what is
cleaned up. One function for each job, which comes back when that has ended; nearly all of its time
is waiting."""

from __future__ import annotations

import functools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zygote
from clusters import Part, preempt
from integration.trainingjob.scene import HERE, Scene
from processes import has_ended, text_of
from stories import Stories, marked, result_of, stories

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.supervisor.attempts import Ending
from hydroslurm.jobs.supervisor.supervise import PEERS_S
from hydroslurm.report.reading import read_history
from hydroslurm.slurm.text import expand_nodes

SUBMITTED = HERE.parents[1] / "jobs/launch/submitted.py"
PREEMPTED, SAVING = -2, -1
"""Those of the part's nodes that are preempted, by the scene that does it."""


def replicas(cluster: Part, count: int, *, node: int | None = None) -> str:
    """A spec's only kind of replica, on a node of its own or where nobody is preempted."""
    one = f"{{replicas: {count}, restartPolicy: OnFailure, template: {{ACTOR}}}}"
    where = elsewhere(cluster) if node is None else f"nodelist: {cluster.nodes[node]}"
    return f"replicaSpecs: [{one}]\nscheduler: {{options: {{{where}}}}}\n"


def elsewhere(cluster: Part) -> str:
    """Where nobody is preempted."""
    return f"exclude: '{','.join(cluster.nodes[PREEMPTED:])}'"


def preempted(cluster: Part, folder: Path) -> Scene:
    """Preempted, then its master leaves with 75 unasked, then it is preempted once too often."""
    ends: list[int | str] = ["forever"] * 3
    scene = Scene(cluster, folder, {"worker-0": ["forever", 75, "forever"], "worker-1": ends})
    spec = replicas(cluster, 2, node=PREEMPTED)
    scene.submit(spec + "runPolicy: {backoffLimit: 1, preemptionLimit: 1}\n")
    for attempt in (1, 3):
        scene.wait_until_playing(attempt, replicas=2)
        preempt(cluster, [cluster.nodes[PREEMPTED]])
    scene.final_condition()
    return scene


def saved(cluster: Part, folder: Path) -> Scene:
    """A script with a Run: when it has saved twice a person has its ranks save and leave, then it
    is preempted."""
    folder.mkdir()
    shutil.copy(SUBMITTED, folder)
    file = folder / "saved.yaml"
    file.write_text(
        f"""\
replicaSpecs: [{{template: {{command: [python, submitted.py, ".", "0.3"]}}}}]
scheduler: {{options: {{nodelist: {cluster.nodes[SAVING]}}}}}
runPolicy: {{backoffLimit: 0}}
preemption: {{checkpointDirectory: kept here, saveEverySeconds: 1, attemptsWithoutProgress: 7}}
"""
    )
    scene = Scene(cluster, folder).submit_file(file)
    scene.wait(lambda: _kinds(scene).count(EventKind.SAVE_COMMITTED) >= 2, "two periodic saves")
    scene.slurm("scancel", "--signal=TERM", str(scene.job_id))
    scene.wait(lambda: _kinds(scene).count(EventKind.FIRST_STEP) >= 2, "a second attempt")
    preempt(cluster, [cluster.nodes[SAVING]])
    scene.touch("hurry")
    scene.final_condition()
    return scene


def _kinds(scene: Scene) -> list[EventKind]:
    """Of the first rank's events."""
    path = scene.run.rank_events(0)
    return [event.kind for event in read_events(path)] if path.exists() else []


def cleaned(cluster: Part, folder: Path, *, policy: str, with_shell: bool) -> Scene:
    """The supervisor is killed, alone or with the shell that would start it again; then the master
    ends, if it still can, while the worker does not."""
    scene = Scene(cluster, folder, {"worker-0": ["until go"], "worker-1": ["until end"]})
    scene.submit(replicas(cluster, 2) + f"runPolicy: {{cleanPolicy: {policy}}}\n")
    scene.wait_until_playing(1, replicas=2)
    scratch = scene.run.scratch / "worker-1"
    (scratch / "kept").touch()
    worker = int(re.findall(r"pid (\d+)", scene.printed(1))[0])
    scene.kill_supervisor(with_shell=with_shell)
    if not with_shell:
        scene.wait(lambda: "goes on with attempt 1" in scene.supervisor_said(), "a new supervisor")
        scene.touch("go")
        scene.wait(lambda: scene.attempts[0].ending is Ending.SUCCEEDED, "the master's end")
        until_s = time.monotonic() + PEERS_S + 2.0
        scene.wait(lambda: time.monotonic() > until_s, "more than others are given")
        scene.seen["worker lived"] = not has_ended(worker)
        scene.touch("end")
    scene.final_condition()
    scene.wait(lambda: has_ended(worker), "end of the worker")
    janitor = re.findall(r"job (\d+) cleans up after it", scene.said)[0]
    log = scene.run.logs / f"{janitor}_0_log.out"
    scene.wait(lambda: "cleaned up: " in text_of(log), "end of the janitor")
    scene.seen["scratch"] = (scratch / "kept").exists()
    return scene


def uneven(cluster: Part, folder: Path) -> Scene:
    """A master alone on its node, and four workers of two ranks each on two others, of which the
    last ones do not end by themselves."""
    spec = f"""\
replicaSpecs:
  - {{type: worker, replicas: 4, template: {{ACTOR, resources: {{nodes: 2, tasks: 2}}}}}}
  - {{type: master, template: {{ACTOR}}}}
scheduler: {{options: {{{elsewhere(cluster)}}}}}
"""
    acts: dict[str, list[int | str]] = {"master-0": ["until go"], "worker-3": ["until end"]}
    scene = Scene(cluster, folder, acts).submit(spec)
    scene.wait_until_playing(1, replicas=9)
    (scene.run.scratch / "worker-3/kept").touch()
    scene.touch("go")
    scene.final_condition()
    workers = [int(re.findall(r"pid (\d+)", scene.printed(task))[0]) for task in (7, 8)]
    scene.wait(lambda: all(map(has_ended, workers)), "end of the workers")
    return scene


def left_nodes(cluster: Part, folder: Path) -> Scene:
    """The first node that is checked fails the preflight, and that of the second task fails it
    twice in a row, whichever nodes Slurm takes."""
    play = (
        "[ $SLURM_PROCID = 0 ] || [ -e failing ] || echo $SLURMD_NODENAME > failing; "
        '[ $SLURMD_NODENAME != "$(cat failing)" ] || exit 7; exec python actor.py acts.json'
    )
    scene = Scene(cluster, folder, {"worker-0": ["until go"] * 3, "worker-1": ["until go"] * 3})
    spec = replicas(cluster, 2).replace("{ACTOR}", f"{{command: [bash, -c, {play!r}]}}")
    check = (
        "mkdir bad && echo $SLURMD_NODENAME > bad/node; "
        'echo it is $SLURMD_NODENAME; [ $SLURMD_NODENAME != "$(cat bad/node)" ]'
    )
    scene.submit(spec + f"preflight: [bash, -c, {check!r}]\nrunPolicy: {{backoffLimit: 2}}\n")
    scene.wait_until_playing(3, replicas=2)
    scene.seen["job"] = scene.slurm("scontrol", "show", "job", str(scene.job_id))
    scene.touch("go")
    scene.final_condition()
    return scene


def no_licence(cluster: Part, folder: Path, *, spec: str = "") -> Scene:
    """A preflight that fails on every node."""
    scene = Scene(cluster, folder)
    check = "preflight: [bash, -c, 'echo no licence; exit 4']\n"
    scene.submit((spec or replicas(cluster, 1)) + check).final_condition()
    return scene


def pinned(cluster: Part, folder: Path) -> Scene:
    """The same in a job that can start on one node only."""
    return no_licence(cluster, folder, spec=replicas(cluster, 1, node=SAVING))


def mended(cluster: Part, folder: Path) -> Scene:
    """A script whose node a person mends and takes back, as describe says."""
    scene = Scene(cluster, folder)
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    done = scene.hydroslurm("submit", "--preflight", "test -e mended", "train.py")
    scene.job_id = int(done.stdout.split()[1])
    scene.run = RunDir(Path(done.stdout.splitlines()[0].split()[-1]))
    scene.wait(lambda: bool(scene.conditions), "a node that is left out")
    hold, asked = (("scontrol", *verb, str(scene.job_id)) for verb in (["hold"], ["show", "job"]))
    scene.wait(lambda: cluster.run(hold, check=False).returncode == 0, "a job that is held")
    scene.wait(lambda: "ExcNodeList=n" in scene.slurm(*asked), "the list")
    said = scene.hydroslurm("describe", str(scene.job_id)).stdout
    scene.seen["said"], undo = said, re.findall(r"`(scontrol [^`]+)`", said)[0]
    scene.touch("mended")
    scene.slurm(*undo.split())
    scene.seen["job"] = scene.slurm(*asked)
    scene.slurm("scontrol", "release", str(scene.job_id))
    scene.wait(lambda: "COMPLETED" in scene.slurm(*asked), "its end")
    return scene


SCENES: dict[str, Callable[[Part, Path], Scene]] = {
    # the longest first
    "preempted": preempted,
    "saved": saved,
    "clean_None": functools.partial(cleaned, policy="None", with_shell=False),
    "clean_All": functools.partial(cleaned, policy="All", with_shell=True),
    "left_nodes": left_nodes,
    "no_licence": no_licence,
    "pinned": pinned,
    "mended": mended,
    "uneven": uneven,
}


AT_A_TIME = 8
ENDS_WITHIN_S = 600.0


@pytest.fixture(scope="session")
def scenes(
    request: pytest.FixtureRequest, jobs_cluster: Part, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories[Scene]]:
    """All that the tests of this session look at, side by side, under way."""
    wanted = marked(request)
    told = {
        name: functools.partial(act, jobs_cluster) for name, act in SCENES.items() if name in wanted
    }
    base = tmp_path_factory.mktemp("jobs")
    with stories(told, base, clusters=(jobs_cluster,), at_a_time=AT_A_TIME) as scenes:
        yield scenes


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: Stories[Scene]) -> Scene:
    """The job that the test's mark names, ended."""
    return result_of(request, scenes, ENDS_WITHIN_S)


pytestmark = pytest.mark.slurm


def statuses(scene: Scene) -> list[int | None]:
    return [one.decision and one.decision.status for one in scene.attempts]


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
    asked = ("sacct", "-X", "-n", "-P", "-j", str(scene.job_id), "-o", "State,ExitCode")
    scene.wait(lambda: "RUNNING" not in scene.slurm(*asked), "end in the accounting")
    assert scene.slurm(*asked).splitlines()[-1] == "FAILED|93:0"


@pytest.mark.scene("left_nodes")
def test_bad_nodes_are_left_out(scene: Scene) -> None:
    """A failed preflight begins no attempt; two failures in a row on one node are its fault. The
    job goes on without both, and without the nodes that its spec excludes."""
    bad, failing = (text_of(scene.folder / one).strip() for one in ("bad/node", "failing"))
    assert [one.ending for one in scene.attempts] == [Ending.FAILED] * 2 + [Ending.SUCCEEDED]
    assert [one.restart_count for one in scene.attempts] == [1, 1, 2]
    first, second = [one.message for one in scene.conditions if one.reason == "NodeExcluded"]
    assert f"node {bad} is left out from now on: preflight: exit status 1; it is {bad}." in first
    assert f"node {failing} is left out from now on: 2 failures in a row there" in second
    assert _expanded(scene.seen["job"]) == {bad, failing, *scene.cluster.nodes[PREEMPTED:]}
    assert "ExcNodeList=n[" in first
    assert "NodeExcluded: node" in scene.hydroslurm("describe", str(scene.job_id)).stdout


def _expanded(job: str) -> set[str]:
    return {*expand_nodes(re.findall(r"ExcNodeList=(\S+)", job)[0])}


@pytest.mark.parametrize(
    ("left", "why"),
    [
        pytest.param(1, "it fails on every node", marks=pytest.mark.scene("no_licence")),
        pytest.param(0, "the job could not start elsewhere", marks=pytest.mark.scene("pinned")),
    ],
)
def test_no_node_is_to_blame(scene: Scene, left: int, why: str) -> None:
    """The job fails with the command's last words, after one node where it may leave that one, and
    without having begun an attempt."""
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "PreflightFailed")
    assert re.search(r"n\d+: preflight: exit status 4; no licence; the job", verdict.message)
    assert why in verdict.message
    assert [one.reason for one in scene.conditions].count("NodeExcluded") == left
    assert scene.attempts == ()


@pytest.mark.scene("mended")
def test_a_node_is_taken_back(scene: Scene) -> None:
    """The nodes of a script are checked, too; `describe` says how a node comes back."""
    assert "NodeExcluded: node n" in scene.seen["said"]
    assert "preflight: exit status 1" in scene.seen["said"]
    assert "ExcNodeList=(null)" in scene.seen["job"]
    assert "trained" in "".join(path.read_text() for path in scene.run.logs.glob("*_log.out"))


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
    alone = zygote.ran([SUBMITTED, tmp_path])
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
