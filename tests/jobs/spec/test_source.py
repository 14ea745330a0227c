"""Files that are no job specs, hostile ones included: a SpecError that says where, soon, and never
anything else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.reading import JobSpec, load, loads
from hydroslurm.jobs.spec.source import MOST_BYTES, OF_A_FILE, parse_source

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
    "many-values": (f"a: [{'x,' * (OF_A_FILE.values + 1)}]\n", "is it a job spec?"),
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
    "merge-of-texts": (f"<<: [{{a: b}}, 3]\n{SPEC}", "merging"),
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


def test_dates_and_names_are_text() -> None:
    """What YAML 1.1 takes for a date is what it looks like, and a field's name always is text."""
    job = loads(f"name: 2026-11-22\nlabels: {{on: 'x', 1: 'y', =: z}}\n{SPEC}").job
    assert job.name == "2026-11-22"
    assert job.labels == {"on": "x", "1": "y", "=": "z"}


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


@settings(deadline=None, max_examples=150)
@given(
    content=st.binary(max_size=400)
    | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map(
        lambda words: "".join(words).encode(errors="surrogatepass")
    )
)
def test_any_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Also one that is nearly YAML, and nearly a spec: a job or a SpecError; nothing else."""
    path = tmp_path_factory.getbasetemp() / f"content-{os.getpid()}.yaml"
    path.write_bytes(content)
    with contextlib.suppress(SpecError):
        assert isinstance(load(path), JobSpec)
