"""Finding and building the native gate: races, missing compilers, caches that are broken."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hydroslurm.errors import GateError, GateSelfTestFailed, NoCompiler
from hydroslurm.gate import build
from hydroslurm.gate.compiler import (
    SITE_DIR_ENV,
    STANDARDS,
    find_compiler,
    installed_torch,
)
from hydroslurm.gate.native_gate import NativeGate

TORCH = installed_torch()


class FakeCompiler:
    """An executable that "compiles" by copying a prepared library to what follows ``-o``.

    Each run adds a line to a log, so that builds can be counted. Everything else is real: the
    self-test in a child, the lock, the manifest.
    """

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


def test_builds_once_and_finds_it_again(environ: dict[str, str], compiler: FakeCompiler) -> None:
    """The first call builds, the second finds; nothing but the library and its manifest is left."""
    first = build.ensure(environ, torch=TORCH)
    second = build.ensure(environ, torch=TORCH)
    assert (first.path, first.origin) == (second.path, "cache")
    assert first.built_s is not None
    assert second.built_s is None
    assert compiler.runs() == 1
    assert sorted(p.name for p in first.path.parent.iterdir()) == ["hs_gate.json", "hs_gate.so"]
    assert sorted(p.name for p in first.path.parent.parent.iterdir()) == [
        first.key,
        f"{first.key}.lock",
    ]


def test_two_processes_build_once(environ: dict[str, str], compiler: FakeCompiler) -> None:
    """Several processes that need the gate at once: one builds, all get it."""
    code = """
        import os
        from hydroslurm.gate.native_gate import NativeGate
        print(NativeGate().path)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    answers = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(answers) == 1
    assert compiler.runs() == 1


def test_real_compiler_builds_for_a_site(tmp_path: Path) -> None:
    """`gate build --out DIR` compiles with the real compiler, without a warning of ours, and a job
    that names the folder uses it; `gate info` says so."""
    cxx = find_compiler(os.environ)[0]
    site = tmp_path / "site"
    environ = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "empty"),
        "CXX": f"{cxx} -Werror",
    }

    def hydroslurm(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-m", "hydroslurm.cli", "gate", *arguments]
        done = subprocess.run(
            command, env={**environ, **more}, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "built and tested" in hydroslurm("build", "--out", str(site))
    assert "exists already" in hydroslurm("build", "--out", str(site))
    before = json.loads(hydroslurm("info", "--json"))
    assert (before["gate"], before["library"]) == ("native, built on first use", None)
    facts = json.loads(hydroslurm("info", "--json", HYDROSLURM_GATE_DIR=str(site)))
    assert (facts["gate"], facts["origin"]) == ("native", "site")
    assert facts["library"] == str(site / build.key_of(TORCH) / "hs_gate.so")
    assert not (tmp_path / "empty").exists()


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


@pytest.mark.parametrize("damage", ["truncated", "foreign", "no manifest", "empty manifest"])
def test_broken_library_is_not_believed(good_library: Path, tmp_path: Path, damage: str) -> None:
    """A library that is not the one its manifest describes is not found, and so never loaded: the
    loader itself would die of a truncated one."""
    folder = tmp_path / "cache" / "hydroslurm" / "gate" / good_library.parent.name
    shutil.copytree(good_library.parent, folder)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert build.find(environ, torch=TORCH)
    library, manifest = folder / "hs_gate.so", folder / "hs_gate.json"
    if damage == "truncated":
        os.truncate(library, library.stat().st_size // 2)
    elif damage == "foreign":
        library.write_bytes(b"\x7fELF, but of somebody else")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("")
    assert build.find(environ, torch=TORCH) is None


def test_whole_but_unloadable_is_rebuilt_once(
    environ: dict[str, str], compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with the right checksum that this machine cannot load is built again, once."""
    library = build.ensure(environ, torch=TORCH)
    library.path.write_bytes(b"not a library")
    manifest = library.path.with_name("hs_gate.json")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "sha256": build.checksum(library.path)}))
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
    root = build.cache_root(environ)
    assert [p for p in root.iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize("source", ["int nothing;", "#include <cstdlib>\nint x = (abort(), 0);"])
def test_library_that_does_not_work(tmp_path: Path, environ: dict[str, str], source: str) -> None:
    """What does not pass its self-test is not kept; a crash in it is a child's, not ours."""
    code, library = tmp_path / "other.cpp", tmp_path / "other.so"
    code.write_text(source)
    command = [
        *find_compiler(os.environ),
        "-shared",
        "-fPIC",
        str(code),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=60)
    environ["CXX"] = str(FakeCompiler(tmp_path / "wrong", library).path)
    with pytest.raises(GateSelfTestFailed, match="self-test ended with"):
        build.ensure(environ, torch=TORCH)
    assert build.find(environ, torch=TORCH) is None


def test_site_comes_first_and_a_damaged_one_is_passed_over(
    environ: dict[str, str], good_library: Path, compiler: FakeCompiler, tmp_path: Path
) -> None:
    """The site's gate is preferred; one that is broken there is not used, and not repaired."""
    site = tmp_path / "site" / good_library.parent.name
    shutil.copytree(good_library.parent, site)
    environ[SITE_DIR_ENV] = str(site.parent)
    found = build.ensure(environ, torch=TORCH)
    assert (found.origin, found.path) == ("site", site / "hs_gate.so")
    os.truncate(found.path, 1000)
    assert build.ensure(environ, torch=TORCH).origin == "cache"
    assert compiler.runs() == 1
    assert found.path.stat().st_size == 1000


def test_file_system_without_locks(
    environ: dict[str, str], compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no locks it is built all the same."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.ensure(environ, torch=TORCH).built_s is not None
    assert compiler.runs() == 1


def test_key_names_what_it_depends_on() -> None:
    """Another torch or another C++ ABI is another key."""
    key = build.key_of(TORCH)
    assert key == build.key_of(TORCH)
    assert TORCH.version.partition("+")[0] in key
    other = [
        dataclasses.replace(TORCH, version="2.4.0"),
        dataclasses.replace(TORCH, cxx11_abi=not TORCH.cxx11_abi),
    ]
    assert len({key, *map(build.key_of, other)}) == 3


def test_trace_of_a_script(tmp_path: Path) -> None:
    """`gate trace SCRIPT` runs the script with its arguments, keeps its exit status, and prints the
    operators by name, phase and thread."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nx = torch.ones(2, requires_grad=True)\n(x * 2).sum().backward()\n"
        "print(sys.argv[1:])\nsys.exit(3)\n"
    )
    command = [sys.executable, "-m", "hydroslurm.cli", "gate", "trace", "--keep", "200"]
    done = subprocess.run(
        [*command, str(script), "--flag", "x"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "['--flag', 'x']"
    phases = {line.split()[2]: line.split()[1] for line in lines[1:-1]}
    assert phases["aten::mul"] in ("forward", "backward")
    assert phases["SumBackward0"] == "backward"
    assert lines[-1].endswith(f"operators, {len(lines) - 2} shown")
