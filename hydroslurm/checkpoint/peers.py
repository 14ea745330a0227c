"""What a joint checkpoint needs of the other ranks: to agree, all of them or none."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Peers(Protocol):
    """The ranks of a run, as one of them sees them. All methods from any thread."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def agree(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        among: Sequence[int] | None = None,
    ) -> Mapping[int, Any]:
        """Hand in a value and get everybody's, in order of the ranks.

        The outcome is one for all: either every rank gets all values, or every rank gets the same
        error. A rank that asks when it has been decided gets what was decided.

        Args:
            topic: of one agreement in the life of the job; a topic is used once.
            value: plain JSON, and small: all values go to all ranks.
            timeout_s: give up after so long, which fails it for all. Time in which this process was
                stopped does not count. None waits for ever, or until a rank is gone.
            cancel: gives up when it is set.
            among: the ranks that take part, this one among them and the same for all; default: all.

        Raises:
            AgreementFailed: a rank has died, left or given up.
            CoordinatorLost: nothing connects the ranks any more.
        """
