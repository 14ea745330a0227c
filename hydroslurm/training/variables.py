"""The variables of the functions that run a loop: the best loss so far, a meter, a batch that was
fetched ahead. They are state as an object's attributes are.

A variable counts if the next step may read it before it writes it: a loss that each step computes
anew does not. That is read off the bytecode of the function, from where it stands in the loop.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import itertools
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.census import Variables, names_in

_LIBRARIES = (
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
)


def place() -> tuple[tuple[types.CodeType, int], ...]:
    """The functions of the script that are under way, and where each is: those within which a loop
    begins here."""
    return tuple((one.f_code, one.f_lasti) for one in _frames())


def in_reach(functions: Sequence[types.CodeType]) -> dict[str, Variables]:
    """Those of the functions within which a loop has begun, from the loop outwards, and of their
    modules, by the names of the functions. What is called instead or within has begun later."""
    found: dict[str, Variables] = {}
    under_way = zip(_frames(), functions, strict=False)
    frames = [one for one, _ in itertools.takewhile(lambda it: it[0].f_code is it[1], under_way)]
    for frame in reversed(frames):
        if frame.f_code.co_name != "<module>":
            name = f"{frame.f_code.co_name}()"
            found[_unused(name, found)] = _variables_of(frame)
    modules: set[str] = set()  # of which the innermost counts: a script may run another one
    for frame in reversed(frames):
        name = f"{frame.f_globals.get('__name__')}()"
        is_module = frame.f_code.co_name == "<module>"
        if name not in found or (is_module and name not in modules):
            found[name] = _variables_of_module(frame)
        if is_module:
            modules.add(name)
    return found


def _unused(name: str, found: Mapping[str, Any]) -> str:
    while name in found:  # a function that calls itself
        name = f"outer {name}"
    return name


def _frames() -> list[types.FrameType]:
    """Of the script, the outermost first."""
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _variables_of(frame: types.FrameType) -> Variables:
    local = frame.f_locals
    live = _live(frame.f_code, frame.f_lasti)
    entries = {name: local[name] for name in live if name in local}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        local.clear()  # a copy, which the frame would keep until it returns, and the batch with it
    return Variables(entries, functools.partial(_write, frame))


def _variables_of_module(frame: types.FrameType) -> Variables:
    """Those that its functions name, and those that the loop reads, if it is not in a function."""
    space = frame.f_globals
    names = _named_in_functions(space)
    if frame.f_code.co_name == "<module>":
        names = names | _live(frame.f_code, frame.f_lasti)
    entries = {name: space[name] for name in names if name in space and name[:2] != "__"}
    return Variables(entries, space.__setitem__)


def _write(frame: types.FrameType, name: str, value: Any) -> None:
    """Before Python 3.13 what is written to the copy has to be taken over: debuggers do it so."""
    local = frame.f_locals
    local[name] = value
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        local.clear()


@functools.lru_cache(maxsize=1024)
def _is_library(path: str) -> bool:
    """Whether no script has this file: ours, Python's, or what is installed."""
    real = Path(path).resolve()
    if real.is_relative_to(_LIBRARIES[0] / "examples"):
        return False
    return path.startswith("<frozen") or any(real.is_relative_to(one) for one in _LIBRARIES)


def _named_in_functions(space: Mapping[str, Any]) -> set[str]:
    """The variables of a module that its functions and classes may read."""
    found: set[str] = set()
    for value in list(space.values()):
        functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for one in functions:
            if isinstance(one, types.FunctionType) and one.__globals__ is space:
                found.update(names_in(one.__code__))
    return found


# --- which variables are read before they are written
# ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _live(code: types.CodeType, at: int) -> set[str]:
    """The variables that may be read before they are written, from the instruction behind ``at``.
    Those that functions within this one share are always among them."""
    steps = list(dis.get_instructions(code))
    place = {step.offset: number for number, step in enumerate(steps)}
    follow = [_followers(steps, number, place) for number in range(len(steps))]
    for number, target in _handlers(code, steps, place):
        follow[number].append(target)
    names = dict.fromkeys((*code.co_varnames, *code.co_names, *code.co_cellvars, *code.co_freevars))
    bits = {name: 1 << n for n, name in enumerate(names)}
    effects = [_effect(step, bits) for step in steps]
    live = [0] * (len(steps) + 1)
    changed = True
    while changed:
        changed = False
        for number in range(len(steps) - 1, -1, -1):
            reads, writes = effects[number]
            after = 0
            for one in follow[number]:
                after |= live[one]
            now = reads | (after & ~writes)
            if now != live[number]:
                live[number], changed = now, True
    here = max((number for number, step in enumerate(steps) if step.offset <= at), default=0)
    after = functools.reduce(lambda found, one: found | live[one], follow[here], 0)
    shared = {*code.co_cellvars, *code.co_freevars}
    return {name for name, bit in bits.items() if after & bit} | shared


def _followers(steps: list[Any], number: int, place: Mapping[int, int]) -> list[int]:
    step = steps[number]
    found = []
    is_jump = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    if (is_jump or "JUMP" in step.opname) and step.argval in place:
        found.append(place[step.argval])
    ends = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    if not step.opname.startswith(ends) and number + 1 < len(steps):
        found.append(number + 1)
    return found


def _handlers(
    code: types.CodeType, steps: list[Any], place: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """What an exception leads to; before Python 3.11 an instruction says so itself."""
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end and entry.target in place:
                yield number, place[entry.target]


def _effect(step: Any, bits: Mapping[str, int]) -> tuple[int, int]:
    """The variables that an instruction reads, and those that it writes."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    known = [bits[name] for name in names if isinstance(name, str) and name in bits]
    if not known or "ATTR" in step.opname or "METHOD" in step.opname or "IMPORT" in step.opname:
        return 0, 0
    if step.opname == "STORE_FAST_LOAD_FAST":
        return known[-1], known[0]
    if step.opname.startswith("STORE_"):
        return 0, functools.reduce(int.__or__, known)
    if step.opname.startswith(("LOAD_", "DELETE_")):
        return functools.reduce(int.__or__, known), 0
    return 0, 0
