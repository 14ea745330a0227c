"""Which entries of a global offset table are taken, of real libraries: those that are the
function's own and may be written. Elsewhere the watcher arms (``watcher_arms`` of tests/native)."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.errors import NoCompiler
from hydroslurm.gate.compiler import SOURCES, find_compiler

Link = Callable[..., ctypes.CDLL]


@pytest.fixture
def link(tmp_path: Path) -> Link:
    try:
        compiler = find_compiler(os.environ)
    except NoCompiler as error:
        pytest.skip(str(error))

    def linked(*options: str) -> ctypes.CDLL:
        target = tmp_path / "asking.so"
        sources = (Path(__file__).with_name("import_slot.cpp"), SOURCES / "import_slot.cpp")
        flags = ("-std=c++17", "-O1", "-fPIC", "-fno-inline", "-shared", f"-I{SOURCES}")
        command = [*compiler, *flags, "-fsemantic-interposition", *map(str, sources), *options]
        subprocess.run([*command, "-o", str(target), "-ldl"], check=True, timeout=60)
        library = ctypes.CDLL(str(target))
        library.slot_of.argtypes, library.slot_of.restype = (ctypes.c_void_p,), ctypes.c_void_p
        return library

    return linked


def address_of(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(library[name], ctypes.c_void_p).value
    assert address is not None
    return address


def test_entry_of_somebody_else_is_left_alone(link: Link) -> None:
    """What is written into the entry is called; an address of another library, which another tool
    has put there, is not taken for ours."""
    library = link("-Wl,-z,lazy")
    asked = address_of(library, "asked")
    slot = library.slot_of(asked)
    assert slot, "no entry where there is one"
    entry = ctypes.c_void_p.from_address(slot)
    assert entry.value == asked
    entry.value = address_of(library, "somebody_elses")
    assert library.ask() == 2
    entry.value = foreign = address_of(ctypes.CDLL(None), "getpid")
    assert library.slot_of(asked) is None
    assert entry.value == foreign
    entry.value = asked


def test_entry_that_is_read_only_is_refused(link: Link) -> None:
    """Where the loader has made the table read-only, nothing is written: that would end the
    process."""
    library = link("-Wl,-z,now,-z,relro")
    assert library.slot_of(address_of(library, "asked")) is None
    assert library.ask() == 1


def test_address_of_no_library(link: Link) -> None:
    """An address that belongs to no library has no entry."""
    nowhere = ctypes.create_string_buffer(8)
    assert link("-Wl,-z,lazy").slot_of(ctypes.addressof(nowhere)) is None
