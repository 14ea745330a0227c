"""The messages between an elastic run's coordinator and its ranks, and those who ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydroslurm.coordination.messages import (
    Check,
    Message,
    check_form,
    is_bool,
    is_count,
    is_number,
    is_text,
    list_of,
)
from hydroslurm.elastic.autoscale import UTILIZATIONS

MAX_STORE_BYTES = 1 << 20
"""Of one value in the store that process groups meet by; addresses and ids have a few hundred."""


def _is_value(value: Any) -> bool:
    return type(value) is str and len(value) <= 2 * MAX_STORE_BYTES


def _is_use(value: Any) -> bool:
    return type(value) is dict and all(
        name in UTILIZATIONS and is_number(one) for name, one in value.items()
    )


def _is_count_or_none(value: Any) -> bool:
    return value is None or is_count(value)


FROM_RANK: Mapping[str, Mapping[str, Check]] = {
    "join": {
        "member": is_text,
        "local_rank": is_count,
        "local_size": is_count,
        "node": is_text,
        "generation": is_count,
        "holding": is_bool,
    },
    "ready": {},
    "beat": {
        "step": is_count,
        "waits": is_bool,
        "paused": is_bool,
        "step_s": is_number,
        "samples_per_s": is_number,
        "use": _is_use,
        "collectives": _is_count_or_none,
        "meeting_s": is_number,
        "ended": is_bool,
    },
    "propose": {"change": is_count, "step": is_count},
    "arrived": {
        "change": is_count,
        "step": is_count,
        "has_state": is_bool,
        "failed": is_bool,
        "final": is_bool,
    },
    "failed": {"generation": is_count, "reason": is_text, "met": is_bool, "lost_peer": is_bool},
    "resumed": {"generation": is_count, "step": is_count},
    "saved": {"change": is_count},
    "formed": {
        "change": is_count,
        "ok": is_bool,
        "pause_s": is_number,
        "error": is_text,
        "step": _is_count_or_none,
    },
    "leave": {"reason": is_text},
    "done": {"id": is_count},
    "set": {"key": is_text, "value": _is_value},
    "get": {"keys": list_of(is_text), "id": is_count},
    "add": {"key": is_text, "amount": is_count, "id": is_count},
    # not of ranks, but of whoever controls the run
    "scale": {"size": is_count, "leave": list_of(is_text), "by": is_text},
    "status": {},
}
"""``type`` -> the fields of such a message, all of them and no others."""

FROM_COORDINATOR: Mapping[str, Mapping[str, Check]] = {
    "welcome": {"generation": is_count},
    "alive": {},
    "paused": {"member": is_text, "node": is_text},
    "refused": {"reason": is_text, "again": is_bool},
    "hold": {"change": is_count},
    "hold_at": {"change": is_count, "step": is_count},
    "abort": {"change": is_count, "generation": is_count, "culprit": is_text},
    "awaited": {
        "generation": is_count,
        "collectives": is_count,
        "meeting_s": is_number,
        "ended": is_bool,
    },
    "save": {"change": is_count},
    "wait": {"change": is_count},
    "form": {
        "change": is_count,
        "generation": is_count,
        "rank": is_count,
        "world_size": is_count,
        "members": is_count,
        "source": is_count,
        "needs": list_of(is_count),
        "fresh": is_bool,
        "cause": is_text,
    },
    "depart": {"reason": is_text, "failed": is_bool},
    "trained": {"step": is_count},
    "finished": {"step": is_count},
    "values": {"id": is_count, "values": list_of(_is_value)},
    "added": {"id": is_count, "value": is_count},
    "answer": {"ok": is_bool, "message": is_text, "status": lambda value: type(value) is dict},
}
"""The same of the coordinator's."""


def check_from_rank(message: Any) -> Message:
    """A message as a rank sends it; raises BadMessage."""
    return check_form(message, FROM_RANK)


def check_from_coordinator(message: Any) -> Message:
    """A message as the coordinator sends it; raises BadMessage."""
    return check_form(message, FROM_COORDINATOR)
