"""Finding and building the native gate: races, missing compilers, caches that are broken."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured

from hydroslurm.errors import GateError, GateSelfTestFailed, NoCompiler
from hydroslurm.gate import build
from hydroslurm.gate import library as gates
from hydroslurm.gate.build import find_compiler
from hydroslurm.gate.library import SITE_DIR_ENV, STANDARDS, installed_torch
from hydroslurm.gate.native_gate import NativeGate

TORCH = installed_torch()


class FakeCompiler:
    """An executable that "compiles" by copying a prepared library to what follows ``-o``; its runs
    are counted. Everything else is real: the self-test in a child, the lock, the manifest."""

    def __init__(self, folder: Path, library: Path | None, *, exit_code: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "c++"
        self.log = folder / "log"
        self.log.touch()
        copy = f'cp "{library}" "$out"' if library else "true"
        self.path.write_text(
            "#!/bin/sh\n"
            f'echo run >> "{self.log}"\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
            f"{copy}\n"
            f"echo 'sixty errors about templates' >&2\nexit {exit_code}\n"
        )
        self.path.chmod(0o755)

    def runs(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture(scope="module")
def good_library() -> Path:
    """A gate that works, from the user's cache; built there when it is missing."""
    return NativeGate().path


@pytest.fixture
def compiler(tmp_path: Path, good_library: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "bin", good_library)


@pytest.fixture
def environ(tmp_path: Path, compiler: FakeCompiler) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(compiler.path)}


def _ensured(environ: dict[str, str]) -> Path:
    return build.ensure(environ, torch=TORCH).path


def test_several_processes_build_once(environ: dict[str, str], compiler: FakeCompiler) -> None:
    """They need the gate at once: one builds, all get it."""
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert len(set(pool.map(_ensured, [environ] * 3, chunksize=1))) == 1
    assert compiler.runs() == 1


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_build_for_a_site(real: bool, tmp_path: Path, compiler: FakeCompiler) -> None:
    """`gate build --out DIR` compiles, the real compiler without a warning of ours, and a job that
    names the folder uses it; `gate info` says so."""
    cxx = f"{find_compiler(os.environ)[0]} -Werror" if real else str(compiler.path)
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    environ = {**os.environ, "XDG_CACHE_HOME": str(empty), "CXX": cxx}

    def hydroslurm(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-m", "hydroslurm.cli", "gate", *arguments]
        done = captured(command, env={**environ, **more}, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "built and tested" in hydroslurm("build", "--out", str(site))
    assert "exists already" in hydroslurm("build", "--out", str(site))
    before = json.loads(hydroslurm("info", "--json"))
    assert (before["gate"], before["library"]) == ("native, built on first use", None)
    facts = json.loads(hydroslurm("info", "--json", HYDROSLURM_GATE_DIR=str(site)))
    assert (facts["gate"], facts["origin"]) == ("native", "site")
    assert facts["library"] == str(site / gates.key_of(TORCH) / "hs_gate.so")
    assert not empty.exists()


def test_without_a_compiler(tmp_path: Path) -> None:
    """No compiler and no gate: NoCompiler, which says what to install and how a site helps."""
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    with pytest.raises(NoCompiler, match=r"apt-get install g\+\+.*HYDROSLURM_GATE_DIR"):
        build.ensure(environ, torch=TORCH)
    with pytest.raises(NoCompiler, match="looked for no-such-compiler"):
        build.ensure({**environ, "CXX": "no-such-compiler -O1"}, torch=TORCH)


def test_cache_that_cannot_be_written(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in a private folder, with one warning that says what to do; the folder goes again."""
    (tmp_path / "file").touch()
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match="cannot be kept") as warned:
        gate = NativeGate()
    assert len(warned) == 1
    assert gate.status().closes == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty manifest"])
def test_broken_library_is_not_believed(good_library: Path, tmp_path: Path, damage: str) -> None:
    """A library that is not the one its manifest describes is not found, and so never loaded: the
    loader itself would die of a truncated one."""
    folder = tmp_path / "cache" / "hydroslurm" / "gate" / good_library.parent.name
    shutil.copytree(good_library.parent, folder)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert gates.find(environ, torch=TORCH)
    library, manifest = folder / "hs_gate.so", folder / "hs_gate.json"
    if damage == "truncated":
        os.truncate(library, library.stat().st_size // 2)
    elif damage == "foreign":
        library.write_bytes(b"\x7fELF, but of somebody else")
    else:
        manifest.write_text("")
    assert gates.find(environ, torch=TORCH) is None


def test_built_once_and_again_when_it_cannot_be_loaded(
    environ: dict[str, str], compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call builds, the second finds; nothing but the library and its manifest is left. A
    library with the right checksum that this machine cannot load is built again, once."""
    library = build.ensure(environ, torch=TORCH)
    again = build.ensure(environ, torch=TORCH)
    assert (library.path, library.origin) == (again.path, "cache")
    assert library.built_s is not None
    assert again.built_s is None
    assert compiler.runs() == 1
    left = {path.name for path in gates.cache_root(environ).rglob("*")}
    assert left == {library.key, f"{library.key}.lock", "hs_gate.json", "hs_gate.so"}
    library.path.write_bytes(b"not a library")
    manifest = library.path.with_name("hs_gate.json")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "sha256": gates.checksum(library.path)}))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert NativeGate().path == library.path
    assert compiler.runs() == 2


def test_compiler_that_fails(tmp_path: Path, environ: dict[str, str]) -> None:
    """Each known standard is tried; then the compiler's own words are in the error, and nothing is
    left in the cache."""
    broken = FakeCompiler(tmp_path / "broken", None, exit_code=1)
    environ["CXX"] = str(broken.path)
    with pytest.raises(GateError, match="sixty errors about templates"):
        build.ensure(environ, torch=TORCH)
    assert broken.runs() == len(STANDARDS)
    assert [p for p in gates.cache_root(environ).iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize("source", ["int nothing;", "#include <cstdlib>\nint x = (abort(), 0);"])
def test_library_that_does_not_work(tmp_path: Path, environ: dict[str, str], source: str) -> None:
    """What does not pass its self-test is not kept; a crash in it is a child's, not ours."""
    code, library = tmp_path / "other.cpp", tmp_path / "other.so"
    code.write_text(source)
    options = ["-shared", "-fPIC", str(code), "-o", str(library)]
    subprocess.run([*find_compiler(os.environ), *options], check=True, timeout=60)
    environ["CXX"] = str(FakeCompiler(tmp_path / "wrong", library).path)
    with pytest.raises(GateSelfTestFailed, match="self-test ended with"):
        build.ensure(environ, torch=TORCH)
    assert gates.find(environ, torch=TORCH) is None


def test_site_comes_first_and_a_damaged_one_is_passed_over(
    environ: dict[str, str], good_library: Path, compiler: FakeCompiler, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The site's gate is preferred; one that is broken there is not used, and not repaired. Where
    the file system has no locks one is built all the same."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    site = tmp_path / "site" / good_library.parent.name
    shutil.copytree(good_library.parent, site)
    environ[SITE_DIR_ENV] = str(site.parent)
    found = build.ensure(environ, torch=TORCH)
    assert (found.origin, found.path) == ("site", site / "hs_gate.so")
    os.truncate(found.path, 1000)
    assert build.ensure(environ, torch=TORCH).origin == "cache"
    assert compiler.runs() == 1
    assert found.path.stat().st_size == 1000


def test_key_names_what_it_depends_on() -> None:
    """Another torch or another C++ ABI is another key."""
    others = {"version": "2.4.0"}, {"cxx11_abi": not TORCH.cxx11_abi}
    keys = {gates.key_of(dataclasses.replace(TORCH, **other)) for other in ({}, *others)}  # type: ignore[arg-type]
    assert len(keys) == 3


def test_trace_of_a_script(tmp_path: Path) -> None:
    """`gate trace SCRIPT` runs the script with its arguments, keeps its exit status, and prints the
    operators by name, phase and thread."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nx = torch.ones(2, requires_grad=True)\n(x * 2).sum().backward()\n"
        "print(sys.argv[1:])\nsys.exit(3)\n"
    )
    command = [sys.executable, "-m", "hydroslurm.cli", "gate", "trace", "--keep", "200"]
    done = captured([*command, script, "--flag", "x"], timeout=60)
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "['--flag', 'x']"
    phases = {line.split()[2]: line.split()[1] for line in lines[1:-1]}
    assert phases["aten::mul"] in ("forward", "backward")
    assert phases["SumBackward0"] == "backward"
    assert lines[-1].endswith(f"operators, {len(lines) - 2} shown")
