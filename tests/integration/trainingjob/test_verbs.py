"""describe, list, status, cancel, logs and attach on real jobs."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import require_slurm
from integration.trainingjob.scene import LIMIT_S, Scene, matches
from processes import captured, has_ended

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = pytest.mark.slurm

ATTACH = (sys.executable, "-m", "hydroslurm.cli", "attach")
SECRET = "hunter2-hunter2"
DEBUG = f"""\
name: parked
labels: {{team: vision}}
replicaSpecs:
  - type: worker
    replicas: 2
    template: {{command: [python, train.py], env: {{TOKEN: {SECRET}}}}}
  - {{type: master, template: {{command: [python, train.py], workingDirectory: work}}}}
runMode: {{debug: {{enable: true, replicaSpecs: [{{type: master, command: [sh, daemon.sh]}}]}}}}
runPolicy: {{activeDeadlineSeconds: 3000, preemptionLimit: 4}}
"""
DAEMON = b"sleep\x001234\0"
TOLD = """\
name: told
replicaSpecs:
  - replicas: 2
    template: {ACTOR, init: [{command: [echo, looks around]}], env: {TOKEN: SECRET}}
scheduler: {options: {hold: true}}
""".replace("SECRET", SECRET)


@pytest.fixture(scope="module")
def debug(jobs_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A job of three replicas in debug mode, which runs; its master's command has left a daemon
    behind, as sshd does."""
    scene = Scene(jobs_cluster, tmp_path_factory.mktemp("verbs") / "debug")
    (scene.folder / "work").mkdir(parents=True)
    (scene.folder / "debug.yaml").write_text(DEBUG)
    (scene.folder / "work/daemon.sh").write_text("setsid sleep 1234 >/dev/null 2>&1 &\n")
    scene.submit_file(scene.folder / "debug.yaml")
    try:
        scene.wait(lambda: len(_sleepers(scene)) == 3, "three sleeping replicas")
        yield scene
    finally:
        jobs_cluster.run(["scancel", str(scene.job_id)], check=False)


def _sleepers(scene: Scene, words: bytes = b"sleep\0infinity\0") -> list[int]:
    """The processes of the replicas, past their exec."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found_words = (folder / "cmdline").read_bytes()
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        run = f"HYDROSLURM_RUN_DIR={scene.run.root}".encode()
        if found_words == words and run in environ:
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def told(jobs_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A job that was followed with `logs -f` from before its start, over a requeue, to its end."""
    scene = Scene(jobs_cluster, tmp_path_factory.mktemp("verbs") / "told")
    scene.acts.update({"worker-0": ["forever", 0], "worker-1": ["forever", 0]})  # type: ignore[attr-defined]
    scene.submit(TOLD)
    scene.seen["describe held"] = scene.hydroslurm("describe", str(scene.job_id))
    followers = {
        name: subprocess.Popen(
            [sys.executable, "-m", "hydroslurm.cli", "logs", "-f", str(scene.job_id), *options],
            cwd=scene.folder,
            env=jobs_cluster.child_environ(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, options in (("master", ()), ("worker-1", ("--replica", "worker-1")))
    }
    scene.slurm("scontrol", "release", str(scene.job_id))
    scene.wait_until_playing(1, replicas=2)
    scene.slurm("scontrol", "requeue", str(scene.job_id))
    for name, follower in followers.items():
        scene.seen[name] = follower.communicate(timeout=LIMIT_S)[0]
    scene.seen["verdict when they ended"] = [one.type for one in scene.conditions][-1]
    return scene


def test_attach_runs_a_command_as_the_replica(debug: Scene) -> None:
    """On its node, in its folder, with its rank, the job's rendezvous and the variables of the
    spec; the status comes back, and so does what is typed into it. A wrong replica is answered with
    the right ones."""
    show = "echo $RANK/$WORLD_SIZE $MASTER_PORT $SLURMD_NODENAME $PWD [$TOKEN]; cat; exit 7"
    ranks = {}
    for replica in ("master-0", "worker-1"):
        done = captured(
            [*ATTACH, str(debug.job_id), "--replica", replica, "--", "sh", "-c", show],
            cwd=debug.folder,
            env=debug.cluster.child_environ(),
            input="typed\n",
            timeout=LIMIT_S,
        )
        assert done.returncode == 7, done.stderr
        first, typed = done.stdout.splitlines()
        assert typed == "typed"
        ranks[replica] = first.split()
    assert [words[0] for words in ranks.values()] == ["0/3", "2/3"]
    assert len({words[1] for words in ranks.values()}) == 1
    assert len({words[2] for words in ranks.values()}) == 2
    assert ranks["master-0"][3:] == [str(debug.folder / "work"), "[]"]
    assert ranks["worker-1"][3:] == [str(debug.folder), f"[{SECRET}]"]
    for verb in ("logs", "attach"):
        done = debug.hydroslurm(verb, str(debug.job_id), "--replica", "worker-7")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no replica 'worker-7'; wanted one of master-0, worker-0, worker-1" in done.stderr


def test_attach_gives_a_shell_on_a_terminal(debug: Scene) -> None:
    """Without a command it is the person's shell, on a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(debug.folder)
        os.execvpe(
            ATTACH[0],
            [*ATTACH, str(debug.job_id), "--replica", "worker-0"],
            {
                **debug.cluster.child_environ(),
                "SHELL": "/bin/sh",
                "TERM": "vt100",
                "PS1": "ready> ",
            },
        )
    said = _read_until(terminal, rb"[$#>] ")
    os.write(terminal, b"test -t 0 && echo on=$RANK=$TERM=$(basename $(tty | xargs dirname))\n")
    said += _read_until(terminal, rb"on=\d=[^$]")
    assert re.search(rb"on=1=vt100=pts", said), said
    os.write(terminal, b"exit 5\n")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 5


def _read_until(terminal: int, pattern: bytes) -> bytes:
    said = b""
    deadline_s = time.monotonic() + LIMIT_S
    while not re.search(pattern, said):
        assert time.monotonic() < deadline_s, said
        if select.select([terminal], [], [], 1.0)[0]:
            said += os.read(terminal, 4096)
    return said


def test_describe_running_and_suspended(debug: Scene) -> None:
    """Policy, states, limits and conditions of a job that runs, and the pause that its supervisor
    cannot write; list and status say the same in short. A secret stands nowhere."""
    job = str(debug.job_id)
    running = debug.hydroslurm("describe", job).stdout
    debug.slurm("scontrol", "suspend", job)
    refused = debug.hydroslurm("attach", job, "--", "true")
    told = {
        "running": running,
        "described": debug.hydroslurm("describe", str(debug.run.root)).stdout,
        "listed": debug.hydroslurm("list").stdout,
        "status": debug.hydroslurm("status", job).stdout,
        "json": debug.hydroslurm("status", "--json", job).stdout,
        "rendered": debug.hydroslurm("render", "debug.yaml").stdout,
        "logs": debug.hydroslurm("logs", job, "--supervisor").stdout,
        "submitted": debug.said,
    }
    debug.slurm("scontrol", "resume", job)
    matches(
        running,
        r"Name: +parked",
        rf"Slurm: +job {job}, RUNNING on \S+",
        rf"Run folder: +{re.escape(str(debug.run.root))}",
        r"Label: +team=vision",
        r"Replicas: +2 worker, restartPolicy OnFailure",
        r"  Command: +sleep infinity \(debug mode: hydroslurm attach gives a shell\)",
        r"  Variables: +TOKEN \(values are not shown\)\n  2: +worker-0, worker-1 running",
        r"Restarts: +0 of backoffLimit 3",
        r"Preemptions: +0 of preemptionLimit 4, mode both",
        r"Active: +\d+ s of activeDeadlineSeconds 3000",
        r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  Queued Pending: as job \d+",
        r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  Running Started: attempt 1 .*",
    )
    paused = r"  \S+ \S+  Paused Suspended: suspended by Slurm.*"
    matches(told["described"], r"Slurm: +job \d+, SUSPENDED.*", paused)
    matches(told["listed"], rf"{job} +parked +Paused +SUSPENDED +3 +0/3 +0 .*")
    assert "\n  Paused Suspended since " in told["status"]
    assert json.loads(told["json"])["condition"]["type"] == "Paused"
    assert refused.returncode == 1
    assert "the job is SUSPENDED; a shell can be had only while it is RUNNING" in refused.stderr
    for name, text in told.items():
        assert text, name
        assert SECRET not in text, name


def test_logs_follow_over_a_requeue_to_the_verdict(told: Scene) -> None:
    """From before the file is there, init steps and both attempts, each replica its own; they end
    by themselves, behind the verdict."""
    assert told.seen["verdict when they ended"] == "Succeeded"
    for replica, name in (("worker-0", "master"), ("worker-1", "worker-1")):
        words = re.findall(r"^looks around$|^\S+ attempt \d: \S+", told.seen[name], re.MULTILINE)
        init, begun = "looks around", f"{replica} attempt"
        assert words == [init, f"{begun} 1: forever", init, f"{begun} 2: 0"], told.seen[name]


def test_logs_of_an_ended_job(told: Scene) -> None:
    """All of it, its last lines, or what the supervisor said, which is not what the janitor did."""
    job = str(told.job_id)
    assert told.hydroslurm("logs", "-f", job).stdout == told.seen["master"] == told.printed(0)
    last = told.hydroslurm("logs", "--tail", "1", job).stdout
    assert last.startswith("worker-0 attempt 2: 0 ")
    assert last.count("\n") == 1
    said = told.hydroslurm("logs", "--supervisor", job).stdout
    assert "Succeeded: worker-0 has ended with status 0" in said


def test_describe_before_and_after(told: Scene) -> None:
    """Held, it says why it waits; ended, how each replica has, with its attempts; and from the
    folder alone where there is no Slurm."""
    held = told.seen["describe held"].stdout
    assert re.search(r"Slurm: +job \d+, PENDING \(JobHeldUser\)", held)
    assert "worker-0, worker-1 not started yet" in held
    assert re.search(r"Attempts: +starts of the ranks, .*\n  none yet\n", held)
    ended = told.hydroslurm("describe", str(told.job_id)).stdout
    matches(
        ended,
        r"Slurm: +job \d+, COMPLETED.*",
        r"  2: +worker-0, worker-1 ended with status 0",
        r"Preemptions: +1, mode both",
        r"  1  \S+ \S+ to \S+ \S+: preempted.*",
        r"  2  \S+ \S+ to \S+ \S+: succeeded by worker-0",
        r"  \S+ \S+  Preempted Requeued.*",
        r"  \S+ \S+  Succeeded MasterSucceeded: worker-0 has ended with status 0",
    )
    describe = [sys.executable, "-m", "hydroslurm.cli", "describe", str(told.run.root)]
    alone = captured(describe, env={"PATH": str(told.folder)}, timeout=LIMIT_S).stdout
    assert "Slurm:        does not know it, or cannot be asked" in alone
    assert alone.partition("Run folder:")[2] == ended.partition("Run folder:")[2]


def test_what_is_no_job_of_hydroslurms(jobs_cluster: DevCluster, tmp_path: Path) -> None:
    """Another job, an unknown id and another folder each get a sentence of their own."""
    scene = Scene(jobs_cluster, tmp_path)
    plain = jobs_cluster.run(["sbatch", "--parsable", "--hold", "--wrap=true"]).stdout.strip()
    try:
        for which, words in (
            (plain, f"job {plain} has no run folder"),
            ("99999", "give that in place of its id"),
            ("nowhere", "'nowhere' is neither the id of a job nor a run folder"),
            (f"{plain}_3", f"slurmctld knows a job {plain}, but no {plain}_3"),
            (str(tmp_path), "is not a run folder: neither events/ nor submission.json is in it"),
        ):
            for verb in ("describe", "cancel", "logs", "attach") if which == plain else ("logs",):
                done = scene.hydroslurm(verb, which)
                assert (done.returncode, done.stdout) == (1, ""), (verb, which)
                assert words in done.stderr, (verb, which, done.stderr)
                assert "Traceback" not in done.stderr
        assert "JobState=PENDING" in scene.slurm("scontrol", "show", "job", plain)
    finally:
        jobs_cluster.run(["scancel", plain])


@pytest.mark.long  # a cluster of its own
def test_describe_what_slurmctld_has_forgotten(tmp_path: Path) -> None:
    """Accounting keeps the words of sbatch, which lead from the id to the run folder; describe,
    status and logs need no more."""
    require_slurm()
    lines = "MinJobAge=2\nPartitionName=low Nodes=n1 Default=YES\n"
    with DevCluster.up(ClusterSpec(nodes=1, partitions=lines)) as cluster:
        scene = Scene(cluster, tmp_path / "forgotten").submit("replicaSpecs: [{template: {ACTOR}}]")
        scene.final_condition()
        job = str(scene.job_id)
        scene.wait(
            lambda: cluster.run(["scontrol", "show", "job", job], check=False).returncode != 0,
            "forgetting",
        )
        described = scene.hydroslurm("describe", job).stdout
        assert re.search(rf"Slurm: +job {job}, COMPLETED on n1\n", described)
        assert f"Run folder:   {scene.run.root}\n" in described
        assert "Succeeded MasterSucceeded since " in scene.hydroslurm("status", job).stdout
        assert scene.hydroslurm("logs", job).stdout == scene.printed(0) != ""


def test_cancel_of_a_waiting_and_of_a_suspended_job(
    debug: Scene, jobs_cluster: DevCluster, tmp_path: Path
) -> None:
    """Both end for good, at once, and somebody writes it down; the second time nothing happens.
    The last test of the debug job."""
    waiting = Scene(jobs_cluster, tmp_path / "waiting").submit(TOLD)
    debug.slurm("scontrol", "suspend", str(debug.job_id))
    sleepers = _sleepers(debug)
    daemons = _sleepers(debug, DAEMON)
    assert (len(sleepers), len(daemons)) == (3, 1)
    for scene in (waiting, debug):
        done = scene.hydroslurm("cancel", str(scene.job_id))
        assert done.returncode == 0, done.stderr
        assert f"job {scene.job_id} is cancelled" in done.stdout
    for scene in (waiting, debug):
        found = scene.final_condition()
        assert (found.type, found.reason) == ("Failed", "Cancelled"), found
        state = scene.slurm("squeue", "-h", "-t", "all", "-j", str(scene.job_id), "-o", "%T")
        assert state.strip() == "CANCELLED"
        assert "has ended already" in scene.hydroslurm("cancel", str(scene.run.root)).stdout
    debug.wait(lambda: all(map(has_ended, sleepers + daemons)), "end of the replicas")
    assert len(debug.attempts) == 1
    assert waiting.attempts == ()
