"""How far this rank has come in torch.distributed: what it has issued on each process group, and
what of that is not complete.

The only module that reaches private names of torch.distributed, all of them looked up when they are
used: what an installed torch does not have makes an answer None or empty, never an error. Seen in
torch 2.13, from whose files the facts are: the registry of groups is ``_world`` in
``torch/distributed/distributed_c10d.py``; sequence numbers are kept by each backend
(``torch/csrc/distributed/c10d/Backend.hpp``); the flight recorder is
``torch/csrc/distributed/c10d/FlightRecorder.hpp``, a ring of the last ``TORCH_FR_BUFFER_SIZE``
(2000) entries of all groups.

Every function may be called from any thread while the training threads are held at any operator: it
imports nothing, issues no operator, and waits for no lock of theirs. torch's own, the recorder's
mutex, is never held at an operator.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, ModuleType
from typing import Any

_DISTRIBUTED = "torch.distributed.distributed_c10d"
_NATIVE = "torch._C._distributed_c10d"
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
"""NCCL has a recorder of its own; the others share one."""
_RECORDED = {"gloo", "nccl"}
_MEETING_S = 1800.0
"""torch's default, of all backends but NCCL."""
_NETWORK_ERRORS = ("DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class GroupCount:
    """One process group of this rank.

    Attributes:
        ranks: its members, by their global rank, in the group's order.
        issued: how many collectives this rank has issued on it. On gloo sends and receives count,
            and a few operators count twice (``reduce_scatter`` of a list, ``monitored_barrier``),
            on all members alike.
    """

    ranks: tuple[int, ...]
    issued: int


@dataclass(frozen=True)
class _Added:
    ranks: tuple[int, ...]
    issued: Callable[[], int]
    in_flight: Callable[[], int]


_added: dict[str, _Added] = {}


def add_group(
    name: str,
    ranks: tuple[int, ...],
    *,
    issued: Callable[[], int],
    in_flight: Callable[[], int],
) -> None:
    """Count collectives that are not torch.distributed's like those of one more group.

    A pause holds a rank before one only if it is issued by an operator whose name begins with
    ``c10d::``; and it has to complete while ranks are held.

    Args:
        name: the same on all members.
        ranks: its members, by their global rank.
        issued, in_flight: how many this rank has issued, and how many of these are not complete;
            from any thread, at once.
    """
    _added[_key(name, ranks)] = _Added(ranks, issued, in_flight)


def remove_group(name: str) -> None:
    """Take :func:`add_group` back."""
    for key in [key for key in _added if key.rpartition("#")[0] == name]:
        _added.pop(key, None)


def groups() -> dict[str, GroupCount]:
    """The process groups of more than one rank that this rank is in.

    Keys are ``NAME#CHECKSUM``: torch's name of the group, which all members create in the same
    order and so by the same name, and a checksum of the members' ranks, which keeps groups apart
    that are of the same name because not all ranks created them. The same on all members.

    Empty when torch.distributed is not imported or not initialised. A group whose backend keeps no
    sequence numbers (MPI, custom ones) is left out.
    """
    found: dict[str, GroupCount] = {}
    for group, ranks in _registered():
        name, issued = _name(group), _sequence_number(group)
        if name is not None and issued is not None and len(ranks) > 1:
            found[_key(name, ranks)] = GroupCount(ranks, issued)
    for key, added in _added.copy().items():
        found[key] = GroupCount(added.ranks, added.issued())
    return found


@dataclass(frozen=True)
class Progress:
    """Of a rank on the largest of its groups, which mostly is that of all ranks.

    Attributes:
        key: of the group, as in :func:`groups`.
        issued: as in :class:`GroupCount`.
        timeout_s: after so long a collective there fails; None where the backend does not say.
    """

    key: str
    issued: int
    timeout_s: float | None


def progress() -> Progress | None:
    """How far this rank has come; None outside of a group of several ranks. Some microseconds."""
    group, ranks = max(_registered(), key=lambda one: len(one[1]), default=(None, ()))
    name, issued = _name(group), _sequence_number(group)
    if len(ranks) < 2 or name is None or issued is None:
        return None
    return Progress(_key(name, ranks), issued, _timeout_s(group))


def is_of_meeting(error: BaseException) -> bool:
    """Whether a script ended by this because its ranks could not reach each other at the begin: it
    came out of ``init_process_group``, or from torch's networking before the second collective."""
    kind = getattr(_loaded("torch.distributed"), "DistError", None)
    if kind is not None and isinstance(error, kind):
        reached = progress()
        return reached is None or reached.issued <= 1
    return any(_is_meeting(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def meeting_timeout_s() -> float | None:
    """After how long the ``init_process_group`` fails in which the main thread is; None: it is in
    none. Some microseconds."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    while frame is not None and not _is_meeting(frame):
        frame = frame.f_back
    if frame is None:
        return None
    # an argument, which torch sets where it was not given: for the backend, before it waits
    timeout = frame.f_locals.get("timeout")
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _MEETING_S


def _is_meeting(frame: FrameType) -> bool:
    is_named_so = frame.f_code.co_name == "init_process_group"
    return is_named_so and frame.f_globals.get("__name__") == _DISTRIBUTED


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether this is torch's word for a connection to another rank that has ended, or was never
    made: mostly that rank knows the cause."""
    kinds = [getattr(_loaded("torch.distributed"), name, None) for name in _NETWORK_ERRORS]
    return any(kind is not None and isinstance(error, kind) for kind in kinds)


def issued_exact() -> dict[str, int] | None:
    """How many collectives this rank has issued on each group of :func:`groups`, without sends and
    receives, which need not be as many on all members.

    Reads the flight recorder, with the GIL: 20 ms when 2000 entries are full. gloo numbers its
    collectives there apart (``collective_seq_id``) and does not record sends and receives at all
    (``ProcessGroupGloo::enqueue``).

    None where the recorder is missing, off, or has lost all entries of a group: it cannot tell.
    """
    registered = _registered()
    entries = _recorded() if registered else []
    if entries is None:
        return None
    counts: dict[str, int] = {}
    # whether the first entry that was ever made is still there
    whole = min((entry.get("record_id", 1) for entry in entries), default=1) == 0
    for group, ranks in registered:
        name, number = _name(group), _sequence_number(group)
        if name is None or number is None or len(ranks) < 2:
            continue
        exact = _collectives(_of_group(entries, name), number=number, whole=whole)
        if exact is None:
            return None
        counts[_key(name, ranks)] = exact
    return counts


def in_flight() -> int | None:
    """How many collectives this rank has issued that are not complete, over all groups.

    Cost as :func:`issued_exact`. An entry is complete when it is retired; the recorder's
    ``last_completed_collective`` is the last to complete, not the last of all that have, for gloo's
    threads complete in any order. A collective is retired some microseconds after its ``wait()``
    has returned. Sends and receives of gloo are not seen.

    0 where torch.distributed is not in use; None where nobody can know: the recorder is missing or
    off, or it does not know the backend of a group.
    """
    counts = groups()
    own = sum(added.in_flight() for added in _added.copy().values())
    names = {key.rpartition("#")[0] for key in counts.keys() - _added.keys() if counts[key].issued}
    if _has_unrecorded():
        return own or None
    if not names:
        return own
    entries = _recorded() or []
    mine = [_of_group(entries, name) for name in names]
    if not all(mine) and not are_complete():  # entries of a group that has long been quiet are gone
        return own or None
    return own + sum(not entry.get("retired", False) for one in mine for entry in one)


def are_complete() -> bool | None:
    """Whether the newest collective that this rank has issued is complete, on each group. 60 us.

    On gloo an older one may still be on its way, for its threads complete in any order. Where all
    members have issued it, it needs nobody's help to complete.

    None where nobody can know, as for :func:`in_flight`.
    """
    if any(added.in_flight() for added in _added.copy().values()):
        return False
    if _has_unrecorded():
        return None
    if not any(group.issued for key, group in groups().items() if key not in _added):
        return True
    seen = [one for trace in _traces(entries=False) for one in trace.get("pg_status", {}).values()]
    if not seen:
        return None
    return all(
        one.get("last_completed_collective", -1) >= one.get("last_enqueued_collective", -1)
        for one in seen
    )


def is_alone() -> bool:
    """Whether this rank is in no process group with others."""
    return not _added and all(len(ranks) < 2 for _, ranks in _registered())


def _has_unrecorded() -> bool:
    """Whether a group of several ranks has a backend that torch's recorders do not know."""
    return any(
        len(ranks) > 1 and not _backends(group) <= _RECORDED for group, ranks in _registered()
    )


def _backends(group: Any) -> set[str]:
    """The names of those of its devices; "" where it does not say."""
    try:
        return {str(group._get_backend(one).name()) for one in group._device_types} or {""}
    except (AttributeError, RuntimeError):
        return {""}


def _registered() -> list[tuple[Any, tuple[int, ...]]]:
    """The groups of this process and their ranks; one copy, for a thread may be adding to them."""
    world = getattr(_loaded(_DISTRIBUTED), "_world", None)
    ranks_of: Any = getattr(world, "pg_group_ranks", None)
    if not isinstance(ranks_of, dict):
        return []
    # _world maps a rank of the job to a rank of the group, in the group's order, and has an entry
    # for the groups that this rank is not in
    return [
        (group, tuple(ranks))
        for group, ranks in ranks_of.copy().items()
        if hasattr(group, "_get_sequence_number_for_group")
    ]


def _loaded(name: str) -> ModuleType | None:
    return sys.modules.get(name)


def _name(group: Any) -> str | None:
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return None  # not a member, or a torch that names its groups elsewhere


def _key(name: str, ranks: Sequence[int]) -> str:
    return f"{name}#{zlib.crc32(','.join(map(str, ranks)).encode()):08x}"


def _sequence_number(group: Any) -> int | None:
    ask = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if ask is None else int(ask())
    except RuntimeError:
        return None  # this backend keeps none, or the group was destroyed


def _timeout_s(group: Any) -> float | None:
    """Of its backend; of several, as with ``cpu:gloo,cuda:nccl``, the shortest."""
    found = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError):
            found.append(group._get_backend(device).options._timeout.total_seconds())
    return min(found, default=None)


def _recorded() -> list[dict[str, Any]] | None:
    """The recorder's entries, oldest first; None where there is no recorder."""
    traces = _traces(entries=True)
    return [entry for trace in traces for entry in trace.get("entries", [])] if traces else None


def _traces(*, entries: bool) -> list[dict[str, Any]]:
    """What each recorder tells, with or without its entries.

    As a pickle made by torch in this very process: 20 ms where its JSON takes 80, and 180 to read.
    """
    native = _loaded(_NATIVE)
    traces = []
    for dump in (getattr(native, name, None) for name in _DUMPS):
        if dump is not None:
            # an older torch has other arguments, or a backend that is not built in
            with contextlib.suppress(RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
                traces.append(pickle.loads(dump(entries, False, False)))
    return traces


def _of_group(entries: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The entries of the group that has this name now: a number tells it from one that was
    destroyed."""
    named = [entry for entry in entries if (entry.get("process_group") or ("",))[0] == name]
    newest = max((entry.get("pg_id", 0) for entry in named), default=0)
    return [entry for entry in named if entry.get("pg_id", 0) == newest]


def _collectives(mine: Sequence[Mapping[str, Any]], *, number: int, whole: bool) -> int | None:
    """How many collectives a group has issued that has these entries and this sequence number."""
    collectives = [entry for entry in mine if not entry.get("is_p2p", False)]
    if collectives:
        return max(int(entry.get("collective_seq_id", 0)) for entry in collectives)
    if number == 0 or mine or whole:
        return 0  # nothing was issued, or sends and receives only
    return None
