"""What no ``state_dict()`` has: what the script has changed in its objects and variables since the
run began.

The variables of the functions that run a loop are among it: the best loss so far, a meter, a batch
that was fetched ahead. Such a variable counts if the next step may read it before it writes it: a
loss that each step computes anew does not. That is read off the bytecode of the function, from
where it stands in the loop.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.census import Census, Unkept, shown
from hydroslurm.checkpoint.tree import local_of
from hydroslurm.checkpoint.walk import KNOWN, Variables, arrays_in, names_in
from hydroslurm.training.objects import modules_in

_MUCH_BYTES = 2**28
_NOT_GIVEN = (
    "has stepped and is not part of this run: resumed, it would begin anew. Make it before the run "
    "begins, and register it"
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Key = TypeVar("Key")


class Script:
    """What one rank saves of its script.

    Args:
        models: those whose weights are saved, by name, with or without wrappers; asked for when
            they are there.
        roots: what else the training has, by name; the variables of a loop come by themselves.
        saved, known, without, all_buffers: see :class:`Census`.
        world_size: of the ranks that train.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, Any]] = dict,
        roots: Callable[[], Mapping[str, Any]] = dict,
        *,
        saved: Callable[[], Iterable[Any]] = tuple,
        known: Mapping[str, str] = KNOWN,
        without: Mapping[str, Collection[str]] = _NOTHING,
        world_size: int = 1,
        all_buffers: bool = False,
    ) -> None:
        self._models, self._roots = models, roots
        self._world_size = world_size
        self._versions: dict[int, int] = {}
        self._functions: Sequence[CodeType] = ()
        self._loops: set[object] = set()
        self._waits: Mapping[str, Any] = {}
        self._known: set[int] | None = None
        self._new_rank: int | None = None
        self._census = Census(
            self._all_roots,
            models=self._modules,
            saved=saved,
            known=known,
            without=without,
            device=self._device,
            all_buffers=all_buffers,
        )

    def note(self) -> None:
        """What will not have changed from now on is as the script makes it."""
        self._census.note()

    def enter_loop(self) -> None:
        """A loop of the script begins: from here on its variables count, and those of the functions
        around it."""
        here = place()
        self._functions = [code for code, _ in here]
        if here not in self._loops:  # an epoch after another begins at the same place
            self._loops.add(here)
            self._census.note()

    def begin(self) -> None:
        """The first step comes next; see :meth:`Census.begin`."""
        self._census.begin()
        self.follow_frozen()

    def state_dict(self) -> dict[str, Any]:
        """Empty, if nothing has changed."""
        found = self._census.state()
        return {"objects": found, "world_size": self._world_size} if found else {}

    def restore(self, state: Mapping[str, Any], *, new_rank: int | None = None) -> None:
        """Put back what has a place by now; the variables of a loop have to wait for it.

        Args:
            new_rank: as of :meth:`Census.restore`.
        """
        if not state:
            return
        self._new_rank = new_rank
        is_resized = state["world_size"] != self._world_size
        rest = self._census.restore(state["objects"], is_resized=is_resized, new_rank=new_rank)
        self._waits = {**state, "objects": rest} if rest else {}

    def restore_waiting(self) -> None:
        """In a loop that goes on where the run was stopped: put the rest back."""
        if self._waits:
            self.restore(self._waits, new_rank=self._new_rank)

    def unkept(self) -> list[Unkept]:
        """As :meth:`Census.unkept`; with what was saved of variables that this script does not
        have."""
        waits, self._waits = self._waits, {}
        why = "is in the checkpoint, and this script has no such object any more"
        lost = [Unkept(path, "saved", why) for path in waits.get("objects", ())]
        return [*lost, *self._census.unkept()]

    def take_lost(self) -> list[Unkept]:
        """As :meth:`Census.take_lost`; with optimizers that were made since the first step."""
        new = [*self._new_optimizers()]
        return [*self._census.take_lost(), *new]

    def accept_optimizers(self) -> None:
        """The first step is checked: what it has is known."""
        self._known = {id(one) for one in self._census.optimizers.values()}

    def _new_optimizers(self) -> Iterator[Unkept]:
        if self._known is None:
            return
        given = list(self._models().values())
        self._known.update(map(id, [*given, *(getattr(one, "optimizer", None) for one in given)]))
        for path, one in self._census.optimizers.items():
            if one.state and id(one) not in self._known:
                self._known.add(id(one))
                yield Unkept(path, type(one).__name__, _NOT_GIVEN)

    def follow_frozen(self) -> None:
        """From here on a frozen weight does not change."""
        self._versions.clear()
        self.frozen()

    def frozen(self) -> set[int]:
        """Where in memory the weights are that are not trained, and that nothing else has changed
        since they were seen here first, as it would a teacher's."""
        found = set()
        for model in self._modules().values():
            for weight in model.parameters():
                if weight.requires_grad or is_lazy(weight):
                    continue
                place, version = local_of(weight).data_ptr(), weight._version
                if self._versions.setdefault(place, version) == version:
                    found.add(place)
        return found

    def _all_roots(self) -> dict[str, Any]:
        variables = in_reach(self._functions)
        return {**self._roots(), **variables}

    def _modules(self) -> dict[str, torch.nn.Module]:
        return modules_in(self._models())

    def _device(self) -> torch.device:
        for model in self._modules().values():
            for some in (*model.parameters(), *model.buffers()):
                return some.device
        return torch.device("cpu")


def names_of(state: Mapping[str, Any], *, without: Collection[str], most: int = 8) -> str:
    """Of what is saved so, but for what is in the roots of these names."""
    names = [
        f"{shown(path)}.{name}".lstrip(".")
        for path, values in state.get("objects", {}).items()
        for name in values
        if path.partition(".")[0] not in without
    ]
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def largest(state: Mapping[str, Any]) -> str | None:
    """The values that are most of what is saved so, in words, if it is much: each rank writes its
    own into each checkpoint."""
    sizes = {
        f"{shown(path)}.{name}": size
        for path, values in state.get("objects", {}).items()
        for name, (value, _) in values.items()
        if (size := sum(one.nbytes for one in arrays_in(value)))
    }
    if (total := sum(sizes.values())) < _MUCH_BYTES:
        return None
    most = sorted(sizes, key=lambda name: -sizes[name])[:3]
    names = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in most)
    return f"{names}, of {total / 2**20:.0f} MiB in attributes"


def fingerprint(weights: Mapping[Key, Any]) -> dict[Key, int]:
    """A sum of the bits of each weight and buffer, which differs once something else is in their
    place. Counters of versions would not see a write through ``.data``, nor BatchNorm's own."""
    sums: dict[Key, torch.Tensor] = {}
    for name, value in weights.items():
        local = local_of(value)
        plain = isinstance(local, torch.Tensor) and local.layout is torch.strided
        if plain and local.numel() and not local.is_quantized:
            flat = local.detach().reshape(-1)
            integers = _INTEGERS.get(flat.element_size(), torch.uint8)  # of wider ones, bytes
            sums[name] = flat.view(integers).sum(dtype=torch.int64)
    found = torch.stack([one.cpu() for one in sums.values()]).tolist() if sums else []
    return dict(zip(sums, found, strict=True))


# --- the variables of a loop
# ------------------------------------------------------------------------------------------------

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
