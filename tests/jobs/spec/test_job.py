"""What a job spec becomes, and files that are none, hostile ones included: a SpecError that says
where, soon, and never anything else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.reading import JobSpec, dumps, load, loads
from hydroslurm.jobs.spec.source import MOST_BYTES, parse_source

SPEC = "replicaSpecs:\n- template: {command: [python, train.py]}\n"


def refused(path: Path) -> str:
    """The message."""
    with pytest.raises(SpecError) as caught:
        load(path)
    return str(caught.value)


def chain(one: str, first: str = "[x]", count: int = 30) -> str:
    """Anchors of which each holds the one before, here ``{}``."""
    more = (f"a{n + 1}: &a{n + 1} {one.replace('{}', f'*a{n}')}\n" for n in range(count))
    return f"a0: &a0 {first}\n{''.join(more)}"


LIMIT = f"{SPEC}runPolicy: {{backoffLimit: %s}}\n"
HOSTILE = {
    "deep-flow": ("[" * 10_000, "nests deeper"),
    "deep-block": ("- " * 10_000, "nests deeper"),
    "deep-keys": ("? " * 10_000, "nests deeper"),
    "deep-by-aliases": (chain("[{}]", count=60), "nests deeper"),
    "deep-by-merges": (chain("{<<: {}}", "{x: 1}", 60), "nests deeper"),
    "bomb-of-lists": (chain("[{},{},{}]"), "aliases expanded"),
    "bomb-of-merges": (chain("{<<: [{}, {}]}", "{x: 1}"), "aliases expanded"),
    "bomb-of-text": (f"a: &a {'x' * 60_000}\nb: [{'*a, ' * 5000}]\n", "aliases expanded"),
    "within-itself": ("a: &a [*a]\n", "contains itself"),
    "merged-with-itself": ("a: &a\n  <<: *a\n", "contains itself"),
    "many-fields": ("".join(f"k{n}: 1\n" for n in range(5000)), "more than 30 problems"),
    "long-number": (LIMIT % ("9" * 5000), "5000 characters"),
    "long-hexadecimal": (LIMIT % ("0x" + "f" * 9000), "characters"),
    "long-sexagesimal": (LIMIT % ("1:" * 9000 + "1.5"), "characters"),
    "not-a-number": (LIMIT % ".nan", "wanted a whole number"),
    "infinite": ("replicaSpecs: [{template: {command: [a], resources: {cpus: .inf}}}]", "inf is"),
    "binary-tag": ("name: !!binary aGVsbG8=\n" + SPEC, "is not allowed"),
    "forced-tag": (LIMIT % "!!int many", "not a valid"),
    "unknown-alias": ("name: *nobody\n", "undefined alias"),
    "list-as-key": ("? [a, b]\n: c\n", "cannot be the name of a field"),
    "key-twice-as-number": (f"1: a\n'1': b\n{SPEC}", "duplicate key"),
    "key-twice-in-a-merge": ("a: {<<: {x: 1, x: 2}}\n", "duplicate key"),
    "key-twice-beside-a-merge": ("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}\n", "duplicate key"),
    "merge-of-texts": (f"<<: [{{a: b}}, 3]\n{SPEC}", "wanted a mapping"),
    "newlines": ("\n" * (MOST_BYTES - 1), "is empty; wanted a job spec (hydroslurm schema)"),
    "a-word": ("hello\n", "wanted the fields"),
    "a-list": ("- type: worker\n", "wanted the fields of a job spec, at least replicaSpecs; got a"),
    "a-bell": (f"name: \a\n{SPEC}", "U+0007; is it a text file?"),
    "another-yaml": (f"%YAML 9.9\n---\n{SPEC}", "is not YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts(tmp_path: Path, name: str) -> None:
    """Whatever its size and its depth; the suite's time limit would end a bomb."""
    text, message = HOSTILE[name]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    told = refused(path)
    assert message in told
    assert "job.yaml" in told.splitlines()[0]
    assert all(len(line) < 600 for line in told.splitlines())
    assert len(told.splitlines()) < 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\x02\x01\x01\x00", "is it a text file?"),
        (b"name: a\nlabels: {a: \xe9}\n", ":2: is not UTF-8"),
        ("name: ä\n".encode("utf-16"), "is not UTF-8"),
        (b"a" * 10_000_000, "is larger than 256 KiB"),
    ],
    ids=["program", "latin-1", "utf-16", "ten-megabytes"],
)
def test_what_is_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    """Bytes of another kind are said to be that, with their line where they have one."""
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert message in refused(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    """The name and the reason."""
    assert refused(tmp_path) == f"cannot read {tmp_path}: Is a directory"
    absent = tmp_path / "absent.yaml"
    assert refused(absent) == f"cannot read {absent}: No such file or directory"
    assert "larger" in refused(Path("/dev/zero"))
    assert "is empty" in refused(Path("/dev/null"))


@pytest.mark.parametrize(
    ("b", "c", "found"),
    [
        ("{<<: {x: 1, y: 2}, y: 3}", "{<<: *b, z: 4}", {"x": 1, "y": 3, "z": 4}),
        ("{y: 3, <<: {x: 1, y: 2}}", "{<<: *b, y: 4}", {"x": 1, "y": 4}),
        ("{<<: [{x: 1}, {x: 2, y: 3}]}", "{<<: [{z: 9}, *b, {y: 9}]}", {"x": 1, "y": 3, "z": 9}),
        ("\n  <<: {x: 1}\n  <<: {x: 2, y: 3}", "{<<: [{x: 9}, *b]}", {"x": 9, "y": 3}),
        ("{<<: {x: {p: 1}, y: 2}, x: 1, y: 3}", "{x: {<<: *b}}", {"x": {"x": 1, "y": 3}}),
    ],
)
def test_a_mapping_that_merges_and_overrides_is_used_again(
    b: str, c: str, found: dict[str, int]
) -> None:
    """As an alias, merged once more and overridden; each use leaves the others what they are."""
    value = parse_source(f"b: &b {b}\nc: {c}\nd: [*b, *b]\n", name="job.yaml").value
    once = {"x": 1, "y": 3}
    assert value == {"b": once, "c": found, "d": [once, once]}


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    """As editors on Windows write it, with their line ends."""
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SPEC.replace("\n", "\r\n").encode())
    assert load(path).job.replica_specs[0].template.command == ("python", "train.py")


@pytest.mark.parametrize("name", ["x" * 220, "\x1b[2J", "  "])
def test_a_file_whose_name_names_no_job(tmp_path: Path, name: str) -> None:
    """A job without a name takes the file's, where Slurm could show it."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(SPEC)
    assert load(path).job.name == "training"


PIECES = [
    "replicaSpecs:", "- template:", "command:", "name:", "env:", "kind: PyTorchTrainingJob",
    "spec:", "&a", "*a", "<<:", "!!int", "!!python/name:os.system", "? ", ": ", "- ", "[", "]",
    "{", "}", ",", "|", ">", "'", '"', "\\", "#", "%", "@", "`", "---", "...", "~", ".nan", ".inf",
    "0x1f", "1:30", "=", "\n", "\n  ", "\n    ", "\t", " ", "\r", "\x85", "\u2028", "\ufeff", "a",
    "null", "true",
]  # fmt: skip


NAMES = (
    "name", "replicaSpecs", "template", "command", "env", "resources", "memory", "kind",
    "apiVersion", "spec", "containers", "torchrunConfig", "scheduler", "options", "x",
)  # fmt: skip
MANIFEST = {"apiVersion": "batch.tensorstack.dev/v1beta1", "kind": "PyTorchTrainingJob"}
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
fields = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=20,
)
contents = (
    st.binary(max_size=400)
    | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)
    | fields.map(yaml.safe_dump)
    | st.dictionaries(st.sampled_from(NAMES), fields).map(lambda of: yaml.safe_dump(of | MANIFEST))
)


@settings(deadline=None, max_examples=250)
@given(content=contents)
def test_any_content(tmp_path_factory: pytest.TempPathFactory, content: bytes | str) -> None:
    """Also one that is nearly YAML, and nearly a spec or a manifest: a job or a SpecError; nothing
    else."""
    path = tmp_path_factory.getbasetemp() / f"content-{os.getpid()}.yaml"
    is_text = isinstance(content, str)
    path.write_bytes(content.encode(errors="surrogatepass") if is_text else content)
    with contextlib.suppress(SpecError):
        assert isinstance(load(path), JobSpec)


MINIMAL = """
replicaSpecs:
- replicas: 4
  restartPolicy: OnFailure
  template:
    command: [python, train.py]
"""


def test_a_minimal_spec(tmp_path: Path) -> None:
    """One command is enough: the job is called like its file, and starts in the folder of it."""
    path = tmp_path / "digits.yaml"
    path.write_text(MINIMAL)
    spec = load(path)
    assert (spec.job.name, spec.job.replica_specs[0].type) == ("digits", "worker")
    assert spec.folder == tmp_path


@pytest.mark.parametrize(
    ("amount", "bytes_"),
    [("512Mi", 512 << 20), ("2G", 2 * 10**9), (1024, 1024), ("1.5Gi", 3 << 29)],
)
def test_memory(amount: object, bytes_: int) -> None:
    """Kubernetes' suffixes: of 1024 with an i, of 1000 without."""
    text = MINIMAL + f"    resources: {{memory: {amount}}}\n"
    assert loads(text).job.replica_specs[0].template.resources.memory_bytes == bytes_


text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)
line = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)
count = st.integers(1, 2**31 - 1)
message = st.lists(text, max_size=3)
command = st.lists(text, min_size=1, max_size=3)
slurm_word = st.from_regex(r"[A-Za-z0-9_.,:@+*/=()\[\]|&-]{1,20}", fullmatch=True)
env_name = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
resources = st.fixed_dictionaries(
    {},
    optional={
        "cpus": st.integers(1, 999) | st.sampled_from(["500m", "1500m", "3", "2.5", 1.5]),
        "memory": st.integers(1, 2**60) | st.sampled_from(["8Gi", "512Mi", "2G", "1.5Gi", "1k"]),
        "gpus": st.integers(0, 1024),
    },
)
template = st.fixed_dictionaries(
    {"command": command},
    optional={
        "args": message,
        "env": st.dictionaries(env_name, text, max_size=3),
        "workingDirectory": text,
        "image": line,
        "resources": resources,
        "init": st.lists(
            st.fixed_dictionaries({"command": command}, optional={"name": line, "args": message}),
            max_size=2,
        ),
    },
)
replicas = st.fixed_dictionaries(
    {"template": template},
    optional={
        "replicas": st.integers(1, 10_000),
        "restartPolicy": st.sampled_from(["Never", "OnFailure", "Always", "ExitCode"]),
    },
)
jobs = st.fixed_dictionaries(
    {"replicaSpecs": replicas.map(lambda one: [one])},
    optional={
        "name": line,
        "labels": st.dictionaries(line, line, max_size=2),
        "torchrunConfig": st.fixed_dictionaries(
            {},
            optional={
                "enable": st.booleans(),
                "minNodes": st.just(1),
                "maxRestarts": count,
                "procPerNode": st.integers(1, 999) | st.sampled_from(["1", "8"]),
                "extraOptions": message.map(lambda found: [f"x{word}" for word in found]),
            },
        ),
        "runPolicy": st.fixed_dictionaries(
            {},
            optional={
                "backoffLimit": count,
                "preemptionLimit": count,
                "activeDeadlineSeconds": count,
                "cleanPolicy": st.sampled_from(["None", "All", "Unfinished"]),
            },
        ),
        "scheduler": st.fixed_dictionaries(
            {},
            optional={
                "partition": slurm_word,
                "qos": slurm_word,
                "account": slurm_word,
                "reservation": slurm_word,
                "nice": st.integers(0, 2147483645),
                "options": st.fixed_dictionaries(
                    {}, optional={"constraint": slurm_word, "exclusive": st.just(True)}
                ),
            },
        ),
        "tensorboard": st.fixed_dictionaries(
            {}, optional={"logDirectory": text, "port": st.integers(0, 65535), "host": line}
        ),
        "notify": st.just("https://host:8080/a?b=c") | command,
        "runMode": st.fixed_dictionaries(
            {
                "debug": st.fixed_dictionaries(
                    {"enable": st.booleans()},
                    optional={"replicaSpecs": command.map(lambda found: [{"command": found}])},
                )
            }
        ),
        "preemption": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["pause", "requeue", "both"]),
                "warningSeconds": st.integers(1, 65535),
                "checkpointDirectory": text,
                "saveEverySeconds": count,
                "attemptsWithoutProgress": count,
            },
        ),
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(value=jobs)
def test_every_job_comes_back_as_it_was(value: dict[str, Any]) -> None:
    """Quotes, newlines, $(...), every script of the world, every number: the resolved spec of a run
    folder is the job that was submitted, and has each text as it was written."""
    job = TrainingJob.model_validate(value)
    assert loads(dumps(job)).job == job
    value["replicaSpecs"][0]["template"].pop("resources", None)  # numbers by then
    assert texts(value) <= texts(job.model_dump(by_alias=True))


def texts(value: Any) -> set[str]:
    """All that are in it."""
    if isinstance(value, (dict, list, tuple)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return set().union(*map(texts, inner))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("option", ["--nnodes=2", "--rdzv_id", "--rdzv-end=x", "-m"])
def test_torchruns_options_that_are_ours(option: str) -> None:
    """Also abbreviated, as argparse would read them."""
    with pytest.raises(SpecError, match=r"job\.yaml:8: torchrunConfig\.extraOptions: .*set by"):
        loads(f"{MINIMAL}torchrunConfig:\n  extraOptions: ['{option}']\n")


def test_an_elastic_job_begins_with_the_replicas_or_with_the_most() -> None:
    """`size`, else more replicas than one, else `max`."""
    assert loads(MINIMAL + "elastic: {min: 2, max: 8}").job.members == 4
    assert loads(MINIMAL + "elastic: {min: 2, max: 8, size: 6}").job.members == 6
    one = MINIMAL.replace("replicas: 4", "replicas: 1")
    assert loads(one + "elastic: {min: 2, max: 8}").job.members == 8
    with pytest.raises(SpecError, match=r"replicas: 4 members to begin with, and elastic allows 5"):
        loads(MINIMAL + "elastic: {min: 5, max: 8}")
