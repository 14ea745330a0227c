"""Tell the coordinator of an elastic run how many members to use."""

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
    """The coordinator's answer: in words, and the run's status (``status.json``)."""

    message: str
    status: dict[str, Any]


def scale(folder: ElasticFolder, size: int, *, leave: Sequence[str] = ()) -> Answer:
    """Change how many members train.

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
    return Answer(answer["message"], answer["status"])
