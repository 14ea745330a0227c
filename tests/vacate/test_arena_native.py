"""The arena in C++ with real memory, under AddressSanitizer and UBSan: every failure and every hang
of its driver, threads that touch what is away, forked children, copies that are spilled."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from hydroslurm.gate.compiler import source_files
from hydroslurm.vacate.arena import RECIPE, Numbers

HERE = Path(__file__).parent / "native"
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
LIMIT_S = 90.0


def test_arena(native_compiler: list[str], tmp_path: Path) -> None:
    """Each C++ test passes; what it must show is said above it in its source."""
    core = [p for p in source_files(RECIPE) if p.suffix == ".cpp" and p.stem != "torch_allocators"]
    program = tmp_path / "test_arena"
    command = [*native_compiler, *FLAGS, f"-I{RECIPE.sources}", *map(str, core)]
    command += [str(HERE / "test_arena.cpp"), "-o", str(program), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    names = subprocess.run([program], capture_output=True, text=True, timeout=30).stdout.split()
    assert len(names) > 8
    said = ""
    for name in names:
        one = subprocess.run(
            [program, name], capture_output=True, text=True, timeout=LIMIT_S, env=environ
        )
        if one.returncode:
            said += f"{name}: {one.returncode}\n{one.stderr[:3000]}\n"
    assert not said, said


def test_binding_matches_header(native_compiler: list[str], tmp_path: Path) -> None:
    """The structure of the Python binding has the size that the C++ compiler gives it."""
    source = tmp_path / "size.cpp"
    source.write_text(
        '#include "arena.h"\n'
        f'static_assert(sizeof(hs_arena_numbers) == {ctypes.sizeof(Numbers)}, "");\n'
    )
    command = [*native_compiler, "-std=c++17", "-fsyntax-only", f"-I{RECIPE.sources}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
