"""The gate's C++ core without torch: compiled with every warning an error, and sanitized."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import captured

from hydroslurm.gate import binding, protocol
from hydroslurm.gate.library import SOURCES, source_files

HERE = Path(__file__).parent
BUILDS = {
    "threads": "-fsanitize=thread",
    "memory": "-fsanitize=address,undefined",
}
# Some of what is tested here are children forked from several threads. Where ThreadSanitizer cannot
# follow, the sources leave the test out; the search for leaks at exit hangs in such a child.
ENVIRON = {"TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
FLAGS = ("-std=c++17", "-pthread", "-O1", "-g1", "-Wall", "-Wextra", "-Werror")
LIMIT_S = 120.0


Runner = Callable[[str, str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(native_compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs one C++ test in one kind of build; each kind is compiled once."""
    folder = tmp_path_factory.mktemp("native")

    @functools.cache
    def program(kind: str) -> str:
        core = [p for p in source_files() if p.suffix == ".cpp" and p.name != "torch_gate.cpp"]
        command = [
            *(*native_compiler, *FLAGS, BUILDS[kind], "-fno-sanitize-recover=all", f"-I{SOURCES}"),
            *(str(source) for source in [*sorted(HERE.glob("*.cpp")), *core]),
            *("-o", str(folder / kind), "-ldl"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return str(folder / kind)

    def run_one(kind: str, argument: str) -> subprocess.CompletedProcess[str]:
        # ThreadSanitizer wants its shadow memory where a randomised layout may have put something
        command = ["setarch", "-R", program(kind), argument]
        environ = {**os.environ, **ENVIRON}
        return captured(command, timeout=LIMIT_S, env=environ, stdin=subprocess.DEVNULL)

    return run_one


def _names() -> list[str]:
    sources = "".join(path.read_text() for path in sorted(HERE.glob("test_*.cpp")))
    return re.findall(r"^TEST\((\w+)\)", sources, re.MULTILINE)


@pytest.mark.parametrize("name", _names())
def test_core(run: Runner, name: str) -> None:
    """Each C++ test passes, what it must show is said above it in its source, and makes neither
    AddressSanitizer nor UBSan complain."""
    done = run("memory", name)
    assert done.returncode == 0, done.stderr


def test_core_under_thread_sanitizer(run: Runner) -> None:
    """No test makes ThreadSanitizer complain."""
    said = ""
    for name in run("threads", "--list").stdout.split():
        done = run("threads", name)
        if done.returncode != 0:
            said += f"{name}: {done.returncode}\n{done.stderr[:4000]}\n"
    assert not said, said


def test_binding_matches_header(native_compiler: list[str], tmp_path: Path) -> None:
    """The structures of the Python binding have the sizes and the fields that the header gives."""
    source = tmp_path / "sizes.cpp"
    structures = {
        "hs_signal": binding.Signal,
        "hs_event": binding.Event,
        "hs_status": binding.Status,
        "hs_traced": binding.Traced,
        "hs_launch_ahead": binding.LaunchAhead,
    }
    facts = [f"sizeof({name}) == {ctypes.sizeof(one)}" for name, one in structures.items()]
    for name, one in structures.items():
        for field, *_ in one._fields_:
            of_header = "text" if field == "name" else field
            facts.append(f"offsetof({name}, {of_header}) == {getattr(one, field).offset}")
    checks = [f'static_assert({fact}, "");' for fact in facts]
    source.write_text("\n".join(["#include <cstddef>", '#include "gate.h"', *checks, ""]))
    subprocess.run([*native_compiler, f"-I{SOURCES}", "-fsyntax-only", str(source)], check=True)


def test_event_kinds_are_those_of_the_header() -> None:
    """Each kind of gate event has one name: ``HS_EVENT_PARKED = 4`` is the fourth of the kinds."""
    header = (SOURCES / "gate.h").read_text()
    kinds = [kind.name for kind in protocol.GATE_EVENT_KINDS]
    numbered = dict(re.findall(r"HS_EVENT_(\w+) = (\d+)", header))
    assert numbered == {name: str(number) for number, name in enumerate(kinds, 1)}
