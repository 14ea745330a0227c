"""A job spec is data: no shell reads its strings, and they arrive as they are written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes import wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import LaunchError, RunFolderError, SpecError
from hydroslurm.jobs.launch.scripts import job_script
from hydroslurm.jobs.launch.training_job import SubmittedJob, plan_for, submit_job
from hydroslurm.jobs.spec.reading import JobSpec, load, loads
from hydroslurm.slurm.client import open_client

pytestmark = pytest.mark.slurm

# what each of them would do if a shell, sbatch, srun, YAML, JSON or a format string read it
NASTY = [
    "$(touch canary)", "`touch canary`", "; touch canary #", "' ; touch canary ; '",
    '"; touch canary; "', "|| touch canary", "& touch canary &", "> canary", "${HOME}", "$HOME",
    "~", "~root", "*", "?", "[a-z]*", "{a,b}", "!!", "\\", "\\\\", "\\n", "a\\", "'", '"', "''",
    '""', "`", "'\"'\"'", "#SBATCH --wrap=x", "#", "%j", "%t", "%%", "%s", "%N-%x", "-", "--", "-c",
    "--help", "-m", "--signal=KILL@1", "=", "a=b", ":", "- a", "key: value", "[x]", "{x}", "&a",
    "*a", "!tag", "|", ">", "@", "{}", "{0}", "{job}", "null", "true", "1", "1e3", "0x10", "1:30",
    "2026-11-22", "yes", "<<", "ü", "日本語", "🙂", "e\u0301", "\u200d", "\u202e", "\ufeff", " ",
    "  a  ", "a b", "../..", "/", "/dev/null", "$IFS", "$0", "$@", "$SLURM_JOB_ID",
    "hydroslurm:/tmp", "x" * 150,
]  # fmt: skip
# what no line of a batch script could hold, and no printable line
WILD = [
    "\n", "\r\n", "\n#SBATCH --wrap=x\n", "\ntouch canary\n", "\t", "\x1b[2J", "\x07", "\x7f",
    "\x85", "\u2028", "\u2029", "\nEOF\n", "a\nb", "x" * 500,
]  # fmt: skip

characters = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
text = st.lists(
    st.sampled_from(NASTY) | st.sampled_from(WILD) | st.text(characters, max_size=8), max_size=5
).map("".join)
line = (
    st.lists(st.sampled_from(NASTY) | st.text(characters, max_size=8), min_size=1, max_size=4)
    .map("".join)
    .map(lambda words: "".join(c for c in words if c.isprintable()))
    .map(lambda words: words.encode()[:180].decode(errors="ignore"))
    .filter(str.strip)
)
words = st.lists(text, max_size=4)
folder_name = (
    text.map(lambda words: words.replace("/", "_").encode()[:120].decode(errors="ignore"))
    .filter(lambda words: words.strip(". \n\r\t") != "")
)  # fmt: skip
env_name = st.from_regex(r"H_[A-Za-z0-9_]{0,20}", fullmatch=True)
slurm_word = st.from_regex(r"[A-Za-z0-9_.,:@+*/=()\[\]|&-]{1,40}", fullmatch=True)

DUMP = """
import json, os, sys
told = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
with open(os.environ["DUMP_TO"], "a") as file:
    file.write(json.dumps(told) + "\\n")
"""


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A spec with something hostile in every string that is free, and a word where a word is
    wanted; the places that the test knows of are filled in later."""
    env = draw(st.dictionaries(env_name, text, max_size=4))
    return {
        "name": draw(line),
        "labels": draw(st.dictionaries(line, line, max_size=2)),
        "scheduler": {"partition": "low", "options": {"mail-user": draw(slurm_word)}},
        "preemption": {"checkpointDirectory": draw(folder_name)},
        "torchrunConfig": {"extraOptions": [f"x{word}" for word in draw(words)]},
        "runMode": {"debug": {"replicaSpecs": [{"command": ["sleep", *draw(words)]}]}},
        "runPolicy": {"backoffLimit": 0},
        "replicaSpecs": [
            {
                "restartPolicy": "Never",
                "template": {
                    "args": draw(words),
                    "env": env,
                    "workingDirectory": draw(folder_name),
                    "init": [{"name": draw(line), "args": draw(words)}],
                },
            }
        ],
    }


@pytest.fixture
def on_cluster(ranks_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process talks to the dev cluster."""
    for name, value in ranks_cluster.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that canaries would be found in, with a spec's folder of an unlucky name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump.py").write_text(DUMP)
    return tmp_path


UNLUCKY = 'it\'s "here" $(touch canary) `touch canary`; ü # *'


def submitted(value: dict[str, Any], place: Path, number: int) -> tuple[SubmittedJob, Path]:
    """The spec as a file in a folder of its own; its job, and where its program tells what it
    got."""
    folder = place / f"{number} {UNLUCKY}"
    folder.mkdir(exist_ok=True)
    told = folder / "told.jsonl"
    template = value["replicaSpecs"][0]["template"]
    template["command"] = ["python", str(place / "dump.py")]
    template["init"][0]["command"] = ["python", str(place / "dump.py")]
    template["env"]["DUMP_TO"] = str(told)
    (folder / template["workingDirectory"]).mkdir(exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    job = submit_job(load(path), folder=place / f"runs {UNLUCKY}", environ=os.environ)
    return job, told


@settings(
    max_examples=2,  # the first of all examples is always the simplest
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(drawn=st.lists(specs(), min_size=5, max_size=5))
def test_what_is_written_is_what_arrives(
    on_cluster: None, place: Path, drawn: list[dict[str, Any]]
) -> None:
    """Through sbatch, srun and exec, every argument, variable and folder is what the file says;
    Slurm shows the job by its name; and nothing was run on the way."""
    client = open_client()
    different = {json.dumps(value): value for value in drawn}.values()
    first = len(list(place.iterdir()))
    cases = [(value, *submitted(value, place, n)) for n, value in enumerate(different, first)]
    try:
        for value, submission, _ in cases:
            job = client.job(submission.job_id)
            assert (job.name, job.partition) == (value["name"], "low")
            assert job.comment == f"hydroslurm:{submission.run.root}"
        for value, _, path in cases:
            wait_until(
                lambda path=path: len(_told(path)) == 2,
                f"both programs of {value!r} have run",
                limit_s=120,
            )
    finally:
        for _, submission, _ in cases:
            client.cancel(client.job(submission.job_id))
    for value, _, path in cases:
        init, main = _told(path)
        template = value["replicaSpecs"][0]["template"]
        assert init["argv"] == template["init"][0]["args"]
        assert main["argv"] == template["args"]
        for told in (init, main):
            assert Path(told["cwd"]) == path.parent / template["workingDirectory"]
            assert {name: told["env"].get(name) for name in template["env"]} == template["env"]
    assert _canaries(place) == []


def _told(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def _canaries(place: Path) -> list[Path]:
    return list(place.rglob("canary"))


@pytest.mark.parametrize(
    "field", ["partition", "qos", "account", "reservation", "options.constraint", "options"]
)
@settings(deadline=None, max_examples=40)
@given(value=st.sampled_from(NASTY + WILD) | text)
def test_what_becomes_an_option_of_sbatch_is_one_word(field: str, value: str) -> None:
    """Anything else is refused before sbatch, with the name of the field. No name of an option
    could end early and begin another one."""
    outer, _, inner = field.partition(".")
    option = {inner: value} if inner else {value: "x"}
    scheduler = {outer: option if outer == "options" else value}
    spec = {"scheduler": scheduler, "replicaSpecs": [{"template": {"command": ["true"]}}]}
    told = _refusal(spec)
    if told:
        assert f"scheduler.{field}" in told
        return
    word = r"[a-z][a-z0-9_-]*" if field == "options" else r"[A-Za-z0-9_.,:@+*/=()\[\]|&-]+"
    assert re.fullmatch(word, value)
    made = loads(yaml.safe_dump(spec)).job.scheduler
    assert (made.options if outer == "options" else getattr(made, outer)) == scheduler[outer]


def _refusal(spec: dict[str, Any]) -> str:
    try:
        loads(yaml.safe_dump(spec))
    except SpecError as error:
        return str(error)
    return ""


@settings(deadline=None, max_examples=25)
@given(drawn=specs())
def test_the_batch_script_is_the_same_but_for_its_words(
    drawn: dict[str, Any],
) -> None:
    """Every line that a shell reads is one of ours, whatever the spec holds."""
    drawn["replicaSpecs"][0]["template"] |= {"command": ["python"], "init": []}
    spec = loads(yaml.safe_dump(drawn), folder=Path("/") / UNLUCKY)
    plain = loads("name: x\nreplicaSpecs:\n- template: {command: [python]}\n")
    assert _shell_lines(spec) == _shell_lines(plain)


def _shell_lines(spec: JobSpec) -> list[str]:
    plan, _ = plan_for(spec, environ=os.environ)
    script = job_script(spec.job, plan, RunDir(Path("/run")))
    return [line for line in script.split("\n") if not line.startswith("#SBATCH ")]


@pytest.mark.parametrize("folder", ["a\ntouch canary\n", "%j", "a\\b", "a\x1b"])
def test_run_folders_that_sbatch_would_misread(on_cluster: None, place: Path, folder: str) -> None:
    """The name of a log file is a pattern to Slurm, and a line of the batch script. An image that
    nothing can run is named in one line."""
    (place / "job.yaml").write_text("replicaSpecs:\n- template: {command: [python]}\n")
    with pytest.raises(RunFolderError, match="Choose another folder"):
        submit_job(load(place / "job.yaml"), folder=place / folder, environ=os.environ)
    text = "replicaSpecs:\n- template: {command: [python], image: '$(touch canary) \"x'}\n"
    with pytest.raises(LaunchError, match=r"^.*touch canary.*$"):
        submit_job(loads(text), folder=place / "runs", environ=os.environ)
    assert _canaries(place) == []
