"""Messages between an elastic run's coordinator, its ranks, and the commands that control it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from hydroslurm.coordination.channel import ask_first, connect
from hydroslurm.coordination.messages import Count, Message, Number, Text, checker
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World
from hydroslurm.core.trust import user_name
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import CoordinatorLost, UsageError

ANSWER_S = 10.0
MAX_STORE_BYTES = 1 << 20
"""Of one value in the store that process groups meet through; addresses take a few hundred."""


_Value = Annotated[str, Meta(max_length=2 * MAX_STORE_BYTES)]
_Use = dict[Literal["cpu", "memory", "gpu"], Number]

check_from_rank = checker(
    {
        "join": {
            "member": Text,
            "local_rank": Count,
            "local_size": Count,
            "node": Text,
            "generation": Count,
            "holding": bool,
        },
        "ready": {},
        "beat": {
            "step": Count,
            "waits": bool,
            "paused": bool,
            "step_s": Number,
            "samples_per_s": Number,
            "use": _Use,
            "collectives": Count | None,
            "meeting_s": Number,
            "ended": bool,
        },
        "propose": {"change": Count, "step": Count},
        "arrived": {
            "change": Count,
            "step": Count,
            "has_state": bool,
            "failed": bool,
            "final": bool,
        },
        "failed": {"generation": Count, "reason": Text, "met": bool, "lost_peer": bool},
        "resumed": {"generation": Count, "step": Count},
        "saved": {"change": Count},
        "formed": {
            "change": Count,
            "ok": bool,
            "pause_s": Number,
            "error": Text,
            "step": Count | None,
        },
        "leave": {"reason": Text},
        "done": {"id": Count},
        "set": {"key": Text, "value": _Value},
        "get": {"keys": list[Text], "id": Count},
        "add": {"key": Text, "amount": Count, "id": Count},
        # not from ranks: from a command that controls the run
        "scale": {"size": Count, "leave": list[Text], "by": Text},
    }
)

check_from_coordinator = checker(
    {
        "welcome": {"generation": Count},
        "alive": {},
        "paused": {"member": Text, "node": Text},
        "refused": {"reason": Text, "again": bool},
        "hold": {"change": Count},
        "hold_at": {"change": Count, "step": Count},
        "abort": {"change": Count, "generation": Count, "culprit": Text},
        "awaited": {
            "generation": Count,
            "collectives": Count,
            "meeting_s": Number,
            "ended": bool,
        },
        "save": {"change": Count},
        "wait": {"change": Count},
        "form": {
            "change": Count,
            "generation": Count,
            "rank": Count,
            "world_size": Count,
            "members": Count,
            "source": Count,
            "needs": list[Count],
            "fresh": bool,
            "cause": Text,
        },
        "depart": {"reason": Text, "failed": bool},
        "trained": {"step": Count},
        "finished": {"step": Count},
        "values": {"id": Count, "values": list[_Value]},
        "added": {"id": Count, "value": Count},
        "answer": {"ok": bool, "message": Text, "status": dict[str, Any]},
    }
)


def scale(folder: ElasticFolder, size: int, *, leave: Sequence[str] = ()) -> Message:
    """Tell the coordinator how many members to use; return its ``answer``.

    Args:
        leave: names of members that go first; then the newest go.

    Raises:
        UsageError: the run does not allow this size, or has no such member.
        CoordinatorLost: the coordinator does not answer.
        RunFolderError: not the folder of an elastic run of this user.
    """
    message = {"type": "scale", "size": size, "leave": list(leave), "by": user_name()}
    key = folder.key()
    place = folder.read(folder.coordinator_json)
    if place is None:
        raise CoordinatorLost(
            f"{folder.coordinator_json} is not there: the coordinator of this run has not begun "
            "yet. `hydroslurm describe` shows whether its job waits"
        )
    address = (str(place.get("host")), int(place.get("port", 0)))
    connection = connect([address], World(), Secret("file", key))
    if isinstance(connection, str):
        raise CoordinatorLost(
            f"the coordinator of this run does not answer at {address[0]}:{address[1]}, where it "
            f"was on {place.get('node')} (job {place.get('job_id')}). It starts again by itself "
            "unless its job was cancelled; try again in a moment"
        )
    answer, opened = ask_first(
        connection, message, check=check_from_coordinator, timeout_s=ANSWER_S
    )
    opened.socket.close()
    if not answer["ok"]:
        raise UsageError(answer["message"])
    return answer
