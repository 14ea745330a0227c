"""The gate's C++ core without torch: compiled with every warning an error, plain and sanitized."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.gate import binding, protocol
from hydroslurm.gate.compiler import SOURCES, source_files

HERE = Path(__file__).parent
BUILDS = {
    "plain": ("-O2", "-DNDEBUG"),
    "threads": ("-O1", "-g", "-fsanitize=thread"),
    "memory": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
# Half of what is tested here are children forked from several threads. Where ThreadSanitizer cannot
# follow, the sources leave the test out; the search for leaks at exit hangs in such a child.
ENVIRON = {"TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
WARNINGS = ("-Wall", "-Wextra", "-Werror")
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
            *(*native_compiler, "-std=c++17", "-pthread", *WARNINGS, *BUILDS[kind], f"-I{SOURCES}"),
            *(str(source) for source in [*sorted(HERE.glob("*.cpp")), *core]),
            *("-o", str(folder / kind), "-ldl"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return str(folder / kind)

    def run_one(kind: str, argument: str) -> subprocess.CompletedProcess[str]:
        # ThreadSanitizer wants its shadow memory where a randomised layout may have put something
        prefix = ["setarch", "-R"] if kind == "threads" else []
        return subprocess.run(
            [*prefix, program(kind), argument],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, **ENVIRON},
            stdin=subprocess.DEVNULL,
        )

    return run_one


def _names() -> list[str]:
    lines = [line for p in sorted(HERE.glob("test_*.cpp")) for line in p.read_text().splitlines()]
    return [line[5 : line.index(")")] for line in lines if line.startswith("TEST(")]


@pytest.mark.parametrize("name", _names())
def test_core(run: Runner, name: str) -> None:
    """Each C++ test passes; what it must show is said above it in its source."""
    done = run("plain", name)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["threads", "memory"])
def test_core_under_sanitizer(run: Runner, kind: str) -> None:
    """No test makes ThreadSanitizer, AddressSanitizer or UBSan complain."""
    said = ""
    for name in run(kind, "--list").stdout.split():
        done = run(kind, name)
        if done.returncode != 0:
            said += f"{name}: {done.returncode}\n{done.stderr[:4000]}\n"
    assert not said, said


def test_binding_matches_header(native_compiler: list[str], tmp_path: Path) -> None:
    """The structures of the Python binding have the sizes that the C++ compiler gives them."""
    source = tmp_path / "sizes.cpp"
    source.write_text(
        '#include "gate.h"\n#include <cstdio>\nint main() { printf("%zu %zu %zu %zu %zu", '
        "sizeof(hs_signal), sizeof(hs_event), sizeof(hs_status), "
        "sizeof(hs_traced), sizeof(hs_launch_ahead)); }"
    )
    command = [*native_compiler, f"-I{SOURCES}", str(source), "-o", str(tmp_path / "sizes")]
    subprocess.run(command, timeout=60, check=True)
    done = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, timeout=60)
    structures = (
        *(binding.Signal, binding.Event, binding.Status),
        *(binding.Traced, binding.LaunchAhead),
    )
    assert [int(size) for size in done.stdout.split()] == [ctypes.sizeof(one) for one in structures]


def test_event_kinds_are_those_of_the_header() -> None:
    """Each kind of gate event has one name: ``HS_EVENT_PARKED = 4`` is the fourth of the kinds."""
    header = (SOURCES / "gate.h").read_text()
    kinds = [kind.name for kind in protocol.GATE_EVENT_KINDS]
    numbered = dict(re.findall(r"HS_EVENT_(\w+) = (\d+)", header))
    assert numbered == {name: str(number) for number, name in enumerate(kinds, 1)}
