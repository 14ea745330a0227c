"""The command line: help, words that it knows, and what it says to values that cannot be."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from processes import captured, child

from hydroslurm import cli
from hydroslurm.errors import UsageError
from hydroslurm.jobs.spec.sections import check_options
from hydroslurm.slurm.client import open_client

HYDROSLURM = [sys.executable, "-m", "hydroslurm.cli"]


@pytest.fixture(autouse=True)
def _one_tree_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer makes it for each command line, which takes most of the time that a refusal takes."""
    monkeypatch.setattr(typer.main, "get_command", TREE)


TREE = functools.cache(typer.main.get_command)


class Said(NamedTuple):
    status: int
    out: str
    err: str


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """What ``hydroslurm WORDS`` says and returns, run in this process."""
    before, sys.argv = sys.argv, ["hydroslurm", *words]
    try:
        cli.main()
    except SystemExit as end:
        return Said(int(end.code or 0), *capsys.readouterr())
    finally:
        sys.argv = before
    raise AssertionError("it did not exit")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one or two lines with which it refuses them."""
    status, _, err = said(capsys, *words)
    assert status != 0, words
    assert 1 <= len(err.splitlines()) <= 2, err
    return err


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def on_cluster(pause_cluster: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a folder with a script; no verb may leave a job that was not there before."""
    for name, value in pause_cluster.environ().items():
        monkeypatch.setenv(name, value)
    (empty / "train.py").write_text("import time; time.sleep(600)\n")

    def waiting() -> set[int]:
        jobs = [job for job in open_client().jobs() if not job.state.has_ended]
        return {job.job_id for job in jobs if str(empty) in f"{job.comment}{job.std_out}"}

    before = waiting()
    yield empty
    assert waiting() == before
    assert not (empty / "hydroslurm-runs").exists()


def test_it_answers_at_once() -> None:
    """--version and --help load no torch; the version is the installed one."""

    def printed(*words: str) -> str:
        command = [sys.executable, "-X", "importtime", "-m", "hydroslurm.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert not re.search(r"\| (torch|pydantic|rich|submitit)\n", done.stderr)
        return done.stdout

    assert printed("-V") == printed("--version") == f"hydroslurm {version('hydroslurm')}\n"
    assert "Make PyTorch training on Slurm preemptible" in printed("--help")


def test_the_first_page_lists_verbs_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 20, in groups; `help` lists each verb once, and explains one as -h does."""
    first, everything = (said(capsys, word).out for word in ("-h", "help"))
    assert first == said(capsys, "--help").out
    for page in (first, everything):
        titles = re.findall(r"^(\w[\w ]*):$", page, re.MULTILINE)
        assert titles[-5:] == ["Submit and run", "Control", "Look", "Check", "Admin"] or (
            titles == ["Submit and run", "Control", "Look", "Check", "Admin", "More"]
        )
    verbs = re.findall(r"^  ([a-z]+)  ", first[first.index("Submit and run:") :], re.MULTILINE)
    assert 10 < len(verbs) <= 20
    listed = re.findall(r"^  ([a-z]+)  ", everything, re.MULTILINE)
    assert sorted([*listed, "help"]) == sorted(typer.main.get_command(cli.app).commands)
    assert said(capsys, "help", "submit") == said(capsys, "submit", "-h")
    assert "hydroslurm submit [OPTIONS] SCRIPT [ARGS]..." in said(capsys, "submit", "--help").out
    complete = captured([*HYDROSLURM, "--show-completion", "bash"], timeout=60)
    assert "complete" in complete.stdout.lower()


MEANT = {
    "stop 3": "cancel (for good), requeue (save and start again) or pause",
    "ps": "list, status or top",
    "sumbit x.py": "submit",
    "submit --partiton low x.py": "--partition",
    "pause --vacat 3": "--vacate",
}


def test_a_wrong_word_gets_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Another tool's verb, and a typo of a verb or of an option."""
    for words, meant in MEANT.items():
        assert f"did you mean {meant}" in refused(capsys, *words.split())


SUBMISSIONS = {
    "--nodes": ("-1", "0", "x", "", "nan", "99999999999", "400"),
    "--time-min": ("-5", "0", "1.5", "99999999999"),
    "--tasks-per-node": ("-1", "0", "5000"),
    "--cpus-per-task": ("-1", "0", "100000", "999"),
    "--gpus-per-node": ("-1", "99", "5000"),
    "--mem-gb": ("-1", "0", "nan", "inf", "1e30", "1e9"),
    "--name": ("", "a\nb", "x" * 300, "\udcff"),
    "--partition": ("", "nowhere", "low;x", "low x"),
    "--account": ("", "a b"),
    "--qos": ("", "a b"),
    "--sbatch": ("", "nodes=-1", "signal=TERM", "array=0-3", "nosuch=1", "x y=1", "export=NONE"),
    "--folder": ("/dev/null", "/proc/x", "a\nb", "\udcff%"),
}
TOO_LARGE = "{template: {command: [python, train.py], resources: {nodes: 400}}, replicas: 400}"
SPECS = {
    "{template: {command: [python, nofile.py]}}": r"template\.command: there is no file .*nofile",
    "{template: {command: [python, -u, -W, error, no.py]}}": r"no file .*/no\.py",
    "{template: {command: [./no.sh]}}": r"no file .*/no\.sh",
    "{template: {command: [python], args: [no.py]}}": r"no file .*/no\.py",
    "{template: {command: [python, train.py], workingDirectory: gone}}": r"no file .*gone/train",
    TOO_LARGE: "400 nodes",
}


@pytest.mark.slurm
def test_what_no_job_can_have_is_refused(
    on_cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each value gets a line with the option or Slurm's words; no job, no folder. So do a script
    that is not there, a folder, a module that this Python does not have, and a spec whose script
    is not there or for which no partition is large enough."""
    for option, values in SUBMISSIONS.items():
        for value in values:
            refused(capsys, "submit", "--partition", "low", f"{option}={value}", "train.py")
    large = refused(capsys, "submit", "--partition", "low", "--nodes=400", "train.py")
    assert re.search(r"job \d+ was cancelled, .* it asked for 400 nodes of partition low", large)
    (on_cluster / "a.yaml").mkdir()
    for script in ("", "no.py", ".", "-m", "no.yaml", "a.yaml"):
        refused(capsys, "submit", script)
    refused(capsys, "submit", "-m", "no.such.module")
    for spec, why in SPECS.items():
        (on_cluster / "job.yaml").write_text(f"replicaSpecs: [{spec}]\n")
        assert re.search(why, refused(capsys, "submit", "job.yaml")), spec


def test_options_after_the_script_are_the_scripts(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line names those that the verb has, too; after -- nobody can mean the verb's."""
    (empty / "train.py").touch()
    monkeypatch.setenv("PATH", "")
    for verb, words in (("submit", ("train.py",)), ("prove", ("train.py",)), ("run", ("no",))):
        option = {"submit": "--nodes", "prove": "--steps", "run": "--mode"}[verb]
        err = said(capsys, verb, *words, "--lr", "1", f"{option}=3").err
        assert f"{option} after {words[0]}: an argument of the script" in err
        assert option not in said(capsys, verb, *words, "--", option, "3").err


HOSTILE = (
    "-1", "0", "nan", "99999999999999999999", "", "x", "/dev/null", "/nowhere", "/\udcff", "a\nb",
)  # fmt: skip
WITHOUT_SUBJECT = {
    "submit": "/nowhere/x.py", "run": "nosuchprogram", "batch": "nosuchprogram",
    "template": "nosuch", "agent": "", "pause": "99999",
    "resume": "99999", "requeue": "99999", "scale": "99999 2", "status": "99999",
    "top": "--once 99999", "metrics": "--textfile /nowhere/x.prom", "validate": "/nowhere/x.yaml",
    "render": "/nowhere/x.yaml", "schema": "x", "describe": "99999", "list": "x",
    "cancel": "99999", "logs": "99999", "attach": "99999 -- true", "doctor": "99999",
    "report": "/nowhere", "prove": "/nowhere/x.py", "help": "nosuch",
    "checkpoint ls": "/nowhere", "checkpoint verify": "/nowhere",
    "checkpoint export": "/nowhere --out /nowhere/x", "gate build": "--out /proc/x",
    "gate info": "x", "gate trace": "/nowhere/x.py", "cluster up": "--dir /proc/x",
    "cluster down": "x", "cluster status": "--dir /nowhere", "cluster env": "--dir /nowhere",
    "spank build": "--out /proc/x/y", "spank install": "--plugstack /dev/null/x",
    "spank uninstall": "--plugstack /dev/null/x",
}  # fmt: skip
"""Every verb, with words that name nothing."""


def _verbs(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, (*above, name))
        else:
            yield " ".join((*above, name)), command


VERBS = dict(_verbs(typer.main.get_command(cli.app)))


@pytest.mark.slurm
@pytest.mark.parametrize("verb", VERBS)
def test_no_option_of_any_verb_ends_in_a_traceback(
    on_cluster: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Every option with every hostile value, and each in the place of what it acts on: one or two
    lines and a failure, whatever is wrong with it."""
    words = WITHOUT_SUBJECT[verb].split()
    given = (one for one in VERBS[verb].params if one.param_type_name == "option")
    options = [one.opts[0] for one in given if not one.is_flag]
    refused(capsys, *verb.split(), *words)
    for value in HOSTILE:
        for option in options:
            refused(capsys, *verb.split(), option, value, *words)
        fine = (verb, value) == ("gate trace", "/dev/null")  # a script without operators
        if words and not words[0].startswith("-") and not fine:
            refused(capsys, *verb.split(), value, *words[1:])


def test_the_executor_checks_as_the_command_does() -> None:
    """One table: by submitit's names in Python, by the option's where it was typed."""
    with pytest.raises(UsageError, match=r"^nodes: wanted 1 or more, got -1; mem_gb: wanted a num"):
        check_options({"nodes": -1, "mem_gb": float("nan"), "qos": None})
    with pytest.raises(UsageError, match=r"^--timeout_min: wanted 1 or more, got 0$"):
        check_options({"timeout_min": 0}, spell=lambda name: f"--{name}")
    check_options({"nodes": 2, "gpus_per_node": "a100:2", "options": {"gres": "shard:1"}})


STARTS_LATE = """
import sys
print("up", flush=True)
sys.stdin.readline()
import hydroslurm, torch
hydroslurm.install()
while True:
    torch.ones(3).sum()
"""


def test_a_process_that_starts_is_waited_for(tmp_path: Path) -> None:
    """Until it has announced itself, in a temporary folder that is not that of the shell; it says
    that it waits."""
    environ = {name: text for name, text in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    (tmp_path / "of-the-job").mkdir()
    elsewhere = {**environ, "TMPDIR": str(tmp_path / "of-the-job")}
    with child(STARTS_LATE, tmp_path, environ=elsewhere) as trains:
        trains.expect("up")
        pause = [*HYDROSLURM, "pause", "--timeout", "600", "--pid", str(trains.pid)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(pause, env=environ, **pipes) as pauses:
            assert "is still starting; waiting up to 600 s" in pauses.stderr.readline()
            trains.say("")
            assert "parked after" in pauses.stdout.read()
        assert pauses.returncode == 0


NOBODY = 54321
"""A user without an entry in passwd."""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="becomes another uid")
@pytest.mark.slurm
def test_a_user_without_a_name_is_served(on_cluster: Path) -> None:
    """As in a container: by the number, and with the jobs of that number."""
    os.chown(on_cluster, NOBODY, NOBODY)
    reads = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    becomes = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reads]
    environ = {name: os.environ[name] for name in os.environ.keys() - {"HOME", "USER", "LOGNAME"}}

    def hydroslurm(*words: str) -> str:
        command = [*becomes, *HYDROSLURM, *words]
        done = captured(command, env=environ, timeout=120)
        assert "Traceback" not in done.stderr
        assert done.returncode == 0 or words == ("doctor",), done.stderr
        return done.stdout

    later = "--sbatch=begin=now+1hour"
    job = hydroslurm("submit", "-p", "low", later, "--folder=elsewhere", "train.py").split()[1]
    try:
        for verb in ("list", "status", "top"):
            assert re.search(rf"^(job )?{job}\b", hydroslurm(verb), re.MULTILINE), verb
        for verb in ("metrics", "doctor", "gate info"):
            hydroslurm(*verb.split())
    finally:
        hydroslurm("cancel", job)
