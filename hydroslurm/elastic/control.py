"""Tell the coordinator of an elastic run how many members are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination.channel import ask_first, connect
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World
from hydroslurm.core.trust import user_name
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.messages import check_from_coordinator
from hydroslurm.errors import CoordinatorLost, UsageError

ANSWER_S = 10.0


@dataclass(frozen=True)
class Answer:
    """What the coordinator says: in words, and how the run stands (``status.json``)."""

    message: str
    status: dict[str, Any]


def scale(folder: ElasticFolder, size: int, *, leave: Sequence[str] = ()) -> Answer:
    """Have another number of members train.

    Args:
        leave: members that go first, by their names; then the newest.

    Raises:
        UsageError: the run may not have so many, or there is no such member.
        CoordinatorLost: nobody answers.
        RunFolderError: this is not the folder of an elastic run of this user.
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
    found = connect([address], World(), Secret("file", key))
    if isinstance(found, str):
        raise CoordinatorLost(
            f"the coordinator of this run does not answer at {address[0]}:{address[1]}, where it "
            f"was on {place.get('node')} (job {place.get('job_id')}). It starts anew by itself "
            "unless its job was cancelled; try again in a moment"
        )
    answer, asked = ask_first(found, message, check=check_from_coordinator, timeout_s=ANSWER_S)
    asked.socket.close()
    if not answer["ok"]:
        raise UsageError(answer["message"])
    return Answer(answer["message"], answer["status"])
