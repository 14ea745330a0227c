"""The jobs that the tests of this folder look at: one function for each, which comes back when its
job has ended. They run side by side; nearly all of their time is waiting."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from clusters import Part
from integration.trainingjob.scene import HERE, Scene, is_alive

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.jobs.supervisor.attempts import Ending
from hydroslurm.jobs.supervisor.supervise import PEERS_S

EXAMPLES = HERE.parent.parent.parent / "examples"
PREEMPTED, SAVING = -2, -1
"""Those of the part's nodes that are preempted, by the scene that does it."""


def replicas(
    cluster: Part, count: int, policy: str = "OnFailure", *, node: int | None = None
) -> str:
    """A spec's only kind of replica, on a node of its own or where nobody is preempted."""
    one = f"{{replicas: {count}, restartPolicy: {policy}, template: {{ACTOR}}}}"
    where = elsewhere(cluster) if node is None else f"nodelist: {cluster.nodes[node]}"
    return f"replicaSpecs: [{one}]\nscheduler: {{options: {{{where}}}}}\n"


def elsewhere(cluster: Part) -> str:
    """Where nobody is preempted."""
    return f"exclude: '{','.join(cluster.nodes[PREEMPTED:])}'"


def exit_code_torchrun(cluster: Part, folder: Path) -> Scene:
    """Nobody does anything to it."""
    agent = "torchrunConfig: {enable: true}\nrunPolicy: {backoffLimit: 5}\n"
    scene = Scene(cluster, folder, {"worker-0": ["kill SIGKILL", 1]})
    scene.submit(replicas(cluster, 1, "ExitCode") + agent).final_condition()
    return scene


def shared_limit(cluster: Part, folder: Path) -> Scene:
    """Four failures: two spend the limit, a worker's is not followed by a restart, and the job is
    over with the master's."""
    acts: dict[str, list[int | str]] = {
        "worker-0": ["forever", "forever", "forever"],
        "worker-1": [3, "forever", 5],
        "worker-2": ["forever", 4, "forever"],
    }
    scene = Scene(cluster, folder, acts)
    scene.submit(replicas(cluster, 3) + "runPolicy: {backoffLimit: 2}\n")
    scene.wait_until_playing(3, replicas=3)
    scene.wait(lambda: "exit code 5" in _text(scene.run.srun_log(3)), "the worker's failure")
    master = re.findall(r"pid (\d+)", scene.printed(0))[-1]
    os.kill(int(master), signal.SIGKILL)
    scene.final_condition()
    return scene


def preempted(cluster: Part, folder: Path) -> Scene:
    """Preempted, then its master leaves with 75 unasked, then it is preempted once too often."""
    ends: list[int | str] = ["forever"] * 3
    scene = Scene(cluster, folder, {"worker-0": ["forever", 75, "forever"], "worker-1": ends})
    spec = replicas(cluster, 2, node=PREEMPTED)
    scene.submit(spec + "runPolicy: {backoffLimit: 1, preemptionLimit: 1}\n")
    for attempt in (1, 3):
        scene.wait_until_playing(attempt, replicas=2)
        scene.preempt([cluster.nodes[PREEMPTED]])
    scene.final_condition()
    return scene


def saved(cluster: Part, folder: Path) -> Scene:
    """A script with a Run: a person has its ranks save and leave, then it is preempted."""
    scene = saving(cluster, folder, f"nodelist: {cluster.nodes[SAVING]}")
    scene.slurm("scancel", "--signal=TERM", str(scene.job_id))
    events = scene.run.rank_events(0)
    scene.wait(lambda: kinds(events).count(EventKind.FIRST_STEP) >= 2, "a second attempt")
    scene.preempt([cluster.nodes[SAVING]])
    scene.touch("hurry")
    scene.final_condition()
    return scene


def saving(cluster: Part, folder: Path, where: str) -> Scene:
    """A script with a Run that has saved twice."""
    folder.mkdir()
    shutil.copy(HERE.parents[1] / "jobs/launch/submitted.py", folder)
    shutil.copy(HERE / "slowly.py", folder)
    file = folder / "saved.yaml"
    file.write_text(
        f"""\
name: saved
replicaSpecs: [{{template: {{command: [python, slowly.py]}}}}]
scheduler: {{options: {{{where}}}}}
runPolicy: {{backoffLimit: 0}}
preemption: {{checkpointDirectory: kept here, saveEverySeconds: 1, attemptsWithoutProgress: 7}}
"""
    )
    scene = Scene(cluster, folder).submit_file(file)
    events = scene.run.rank_events(0)
    scene.wait(lambda: kinds(events).count(EventKind.SAVE_COMMITTED) >= 2, "two periodic saves")
    return scene


def kinds(events: Path) -> list[EventKind]:
    """Of a rank's event file."""
    return [event.kind for event in read_events(events)] if events.exists() else []


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
        scene.seen["worker lived"] = is_alive(worker)
        scene.touch("end")
    scene.final_condition()
    scene.wait(lambda: not is_alive(worker), "end of the worker")
    janitor = re.findall(r"job (\d+) cleans up after it", scene.said)[0]
    log = scene.run.logs / f"{janitor}_0_log.out"
    scene.wait(lambda: "cleaned up: " in _text(log), "end of the janitor")
    scene.seen["scratch"] = (scratch / "kept").exists()
    return scene


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


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
    scene.wait(lambda: not any(map(is_alive, workers)), "end of the workers")
    return scene


def manifest(cluster: Part, folder: Path) -> Scene:
    """T9k's, as it is."""
    folder.mkdir()
    for name in ("dist_digits.py", "t9k-manifest.yaml"):
        shutil.copy(EXAMPLES / name, folder)
    scene = Scene(cluster, folder).submit_file(folder / "t9k-manifest.yaml")
    scene.final_condition()
    return scene


SCENES: dict[str, Callable[[Part, Path], Scene]] = {
    # the longest first
    "preempted": preempted,
    "saved": saved,
    "exit_code_torchrun": exit_code_torchrun,
    "clean_None": functools.partial(cleaned, policy="None", with_shell=False),
    "clean_All": functools.partial(cleaned, policy="All", with_shell=True),
    "shared_limit": shared_limit,
    "uneven": uneven,
    "manifest": manifest,
}
