"""``hydroslurm batch``: what it makes of the status of the ranks, and of signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import captured
from sbatchfiles import SBATCH
from typer.testing import CliRunner, Result

from hydroslurm.cli import app
from hydroslurm.jobs.launch.batch import FORWARDED, requeue_if_due
from hydroslurm.slurm.client import BACKEND_ENV

OF_LIBC = 0b11 << 31
"""The signals 32 and 33, which posix_spawn ignores, in a mask of /proc/PID/status."""

SCONTROL = """#!/bin/bash
# Fake scontrol: writes down what it is asked. "show job" prints $STATE of job 7, which is an
# element of $ARRAY if that is not empty, and another state of its neighbours; "requeue" prints
# $ANSWER and fails when that is not empty, once.
echo "$*" >> "$CALLS"
case "$*" in
*"show config"*)
    printf '%s\\n' "SLURM_VERSION = $VERSION" "PreemptType = preempt/partition_prio" \\
        "PreemptMode = REQUEUE" "MaxBatchRequeue = $MOST" ;;
*"show partition"*)
    common="State=UP MaxTime=UNLIMITED Default=NO Nodes=n1"
    echo "PartitionName=low PriorityTier=1 PreemptMode=$MODE GraceTime=60 $common"
    echo "PartitionName=urgent PriorityTier=10 PreemptMode=OFF GraceTime=0 $common" ;;
*"show job"*)
    job() { printf '%s\\n' "JobId=$1 JobName=a" "   UserId=me(1000)" \\
        "   JobState=$2 Requeue=1 Restarts=$3 BatchFlag=1" \\
        "   StartTime=2100-01-01T00:00:00 EndTime=2100-01-01T00:05:00 TimeLimit=01:00:00" \\
        "   Partition=low SubmitTime=2026-11-26T20:00:00 NumNodes=1" ""; }
    ended="COMPLETING PreemptTime=2026-11-26T20:03:08"
    [ -z "$ARRAY" ] || job "5 ArrayJobId=$ARRAY ArrayTaskId=1" "$ended" 3
    job "7${ARRAY:+ ArrayJobId=$ARRAY ArrayTaskId=3}" "$STATE" "$RESTARTS"
    [ -z "$ARRAY" ] || job "6 ArrayJobId=$ARRAY ArrayTaskId=2" "$ended" 3 ;;
requeue*)
    if [ -n "$ANSWER" ] && [ "$(grep -c requeue "$CALLS")" = 1 ]; then
        echo "$ANSWER" >&2; exit 1
    fi ;;
esac
"""
GRACE = "RUNNING PreemptTime=2026-11-26T20:03:08"
AWAY = "Unable to contact slurm controller"
SCRIPTS = [path.stem for path in sorted(SBATCH.glob("*.sbatch"))]


@pytest.fixture
def slurm(programs: Callable[..., Path], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch script below the fake. Its array variables are those of an array
    whose element has submitted the job."""
    programs(scontrol=SCONTROL, scancel='echo "scancel $*" >> "$CALLS"')
    (tmp_path / "calls").touch()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    path = {"PATH": os.environ["PATH"], "CALLS": str(tmp_path / "calls")}
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "2", "SLURM_ARRAY_TASK_ID": "1"}
    says = {"STATE": "RUNNING", "RESTARTS": "0", "ANSWER": "", "ARRAY": ""}
    site = {"VERSION": "22.05.8", "MODE": "REQUEUE", "MOST": "5", BACKEND_ENV: "commands"}
    yield {**path, **job, **says, **site}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def requeues_of(slurm: dict[str, str]) -> list[str]:
    calls = Path(slurm["CALLS"]).read_text().splitlines()
    return [line for line in calls if line.startswith("requeue")]


@pytest.mark.parametrize(
    ("status", "state", "more", "requeues"),
    [
        (75, GRACE, {}, 1),
        (75, GRACE, {"ARRAY": "7"}, 1),
        (75, "SIGNALING", {}, 1),
        (75, "RUNNING", {"ANSWER": "Job is pending execution"}, 1),
        (75, "RUNNING", {"ANSWER": AWAY}, 2),
        (75, "RUNNING", {"ANSWER": "Requested operation is presently disabled for job 7"}, 1),
        (75, "RUNNING", {"RESTARTS": "1"}, 0),
        (75, "COMPLETING Reason=TimeLimit", {}, 1),
        (75, "COMPLETING", {}, 0),
        (143, GRACE, {}, 1),
        (143, GRACE, {"ANSWER": AWAY, "ARRAY": "7"}, 2),
        (143, GRACE, {"RESTARTS": "10"}, 0),
        (143, "RUNNING PreemptTime=None", {}, 0),
        (143, "RUNNING PreemptTime=None", {"ARRAY": "7"}, 0),
        (143, "COMPLETING PreemptTime=2026-11-26T20:03:08", {}, 0),
        (1, GRACE, {}, 0),
        (93, GRACE, {}, 0),
    ],
)
def test_the_status_of_the_ranks_becomes_a_requeue(
    slurm: dict[str, str], status: int, state: str, more: dict[str, str], requeues: int
) -> None:
    """75 asks for a requeue until it is granted, was before, or never will be; 143 only inside a
    grace; an attempt that Slurm has replaced never; the status itself is kept. Of the element of an
    array that has the array's number its own record counts, and it alone is requeued."""
    slurm |= {"STATE": state, **more}
    assert requeue_if_due(status, slurm) == status
    assert requeues_of(slurm) == ["requeue 7_3" if slurm["ARRAY"] else "requeue 7"] * requeues


@pytest.mark.parametrize(
    ("version", "mode", "most", "restarts", "requeues"),
    [
        ("22.05.8", "REQUEUE", "5", "0", 1),
        ("24.02.9", "REQUEUE", "5", "0", 1),
        ("24.05.0", "REQUEUE", "5", "2", 0),
        ("24.11.5", "REQUEUE", "5", "3", 1),
        ("25.11.7", "REQUEUE", "1", "0", 1),
        ("25.11.7", "REQUEUE", "9", "6", 0),
        ("24.11.5", "CANCEL", "5", "0", 1),
        ("26.05.5", "REQUEUE", "5", "0", 1),
    ],
)
def test_what_slurm_requeues_by_itself_is_left_to_it(
    slurm: dict[str, str], version: str, mode: str, most: str, restarts: str, requeues: int
) -> None:
    """Until it would hold the job instead, at the MaxBatchRequeue-th time."""
    slurm |= {"STATE": GRACE, "VERSION": version, "MODE": mode, "MOST": most}
    slurm |= {"RESTARTS": restarts, "SLURM_RESTART_COUNT": restarts}
    for status in (75, 143):
        requeue_if_due(status, slurm)
    assert requeues_of(slurm) == ["requeue 7"] * (2 * requeues)


def batch(slurm: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hydroslurm.cli", "batch", *words]
    return subprocess.Popen(
        command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_signals_reach_the_ranks_and_not_the_command(slurm: dict[str, str]) -> None:
    """Each goes to the job's steps, by Slurm; the command lives on, and gives its own status. It
    starts with an empty mask, and with the default action of what Python ignores."""
    masks = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
    with batch(slurm, "--", "bash", "-c", f"{masks}; sleep 60 & echo $!; wait; exit 3") as verb:
        assert verb.stdout is not None
        blocked, ignored, sleep = [verb.stdout.readline().split()[-1] for _ in range(3)]
        assert int(blocked, 16) == 0
        assert int(ignored, 16) & ~OF_LIBC == _ignored_by_parent()
        for signo in sorted(FORWARDED):
            verb.send_signal(signo)
            wanted = f"scancel --signal={int(signo)} 7"
            while wanted not in Path(slurm["CALLS"]).read_text():
                assert verb.poll() is None
                time.sleep(0.02)
        os.kill(int(sleep), signal.SIGKILL)
        assert verb.wait() == 3


def _ignored_by_parent() -> int:
    """The signals that whoever started the tests ignores, such as SIGHUP below nohup."""
    line = re.search(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    assert line is not None
    of_python = sum(1 << (signo - 1) for signo in (signal.SIGPIPE, signal.SIGXFSZ))
    return int(line[1], 16) & ~(of_python | OF_LIBC)


@pytest.mark.parametrize(
    ("words", "without", "message"),
    [
        (["--", "true"], "SLURM_JOB_ID", "there is no job here"),
        (["--", "no-such-srun"], "", "there is no program 'no-such-srun' on the PATH"),
        ([], "", "wanted a command: hydroslurm batch -- srun python train.py"),
    ],
)
def test_what_cannot_run_is_one_line(
    slurm: dict[str, str], words: list[str], without: str, message: str
) -> None:
    slurm.pop(without, None)
    with batch(slurm, *words) as verb:
        output = verb.communicate()[0]
    assert (verb.returncode, len(output.splitlines())) == (1, 1), output
    assert message in output


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_the_verb_says_so(name: str, tmp_path: Path) -> None:
    """In one line, with a status that nothing requeues."""
    environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = captured(["bash", str(SBATCH / f"{name}.sbatch")], env=environ, timeout=60)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("no hydroslurm on the PATH of ")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`hydroslurm template`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["template", *words])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_template_runs_the_given_script(
    name: str, template: Callable[..., Result], tmp_path: Path
) -> None:
    """With its arguments, under its name, in this environment; bash can read it, and nothing of the
    example is left."""
    (tmp_path / "my train.py").touch()
    text = template(name, "my train.py", "--lr", "$1").output
    assert text.endswith("""'my train.py' --lr '$1' "$@"\n""")
    assert "#SBATCH --job-name=my_train\n" in text
    assert "#SBATCH --output=my_train-%j.out\n" in text
    assert f"PATH={Path(sys.executable).parent}:$PATH\n" in text
    assert "examples/" not in text
    assert "sbatch/nsys" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_templates_are_listed_and_printed(template: Callable[..., Result]) -> None:
    """Each with what it is for; one without a script as it stands in sbatch/; examples, too."""
    listed = [line.split()[0] for line in template().output.splitlines()]
    batch_scripts = sorted(p.name for p in SBATCH.iterdir() if p.suffix not in (".md", ".py"))
    assert listed[: len(batch_scripts)] == batch_scripts
    examples = SBATCH.with_name("examples")
    trainings = {path.name for path in examples.glob("train*.py")}
    assert trainings < set(listed[len(batch_scripts) :])
    for name, path in (
        ("train_run.py", examples / "train_run.py"),
        ("pause", SBATCH / "pause.sbatch"),
        ("partitions", SBATCH / "partitions.conf"),
    ):
        assert template(name).output == path.read_text()
    for words, message in (
        (["paus"], "there is no template 'paus'; there are job_submit.lua, multi-node.sbatch"),
        (["partitions", "a.py"], "partitions.conf runs no script"),
        (["pause", "a.py"], "there is no script 'a.py' here"),
    ):
        refused = template(*words)
        assert refused.exit_code == 1
        assert message in f"{refused.output}{refused.exception}"
