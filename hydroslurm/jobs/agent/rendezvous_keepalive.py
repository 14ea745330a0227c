"""A rendezvous that outlives a suspended job.

Torch's dynamic rendezvous (c10d, etcd-v2) takes a node for dead whose last heartbeat is older than
``keep_alive_interval * keep_alive_max_attempt``, 15 s unless said otherwise. After a suspend of
more, every node finds every other dead, and itself too, and forgets them all; nobody is told. The
workers go on, but a worker that fails later is not started again: its agent waits for others who
do not know that they are waited for, and gives up after ``join_timeout``.

A larger ``keep_alive_max_attempt`` would hide nodes that are really dead. So time in which this
process was stopped is not counted instead: nobody is given up within ``ALLOWANCE_S`` of a gap in
our own heartbeats. And from SIGTSTP on the store is not asked, so that no call is cut in two by the
SIGSTOP that follows: a client of the store that wakes up behind its time-out takes the late answer
for that of its next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ALLOWANCE_S = 30.0
"""After a gap: the nodes of a job are not woken in the same moment."""
STORE_LOST_S = 30.0
"""How long a lost store is borne while the workers go on. The agent that has it may have left
because its workers have, and ours may be about to hear of it."""


class RendezvousKeepalive:
    """Keeps one agent's rendezvous handler from giving up on suspended nodes. Any thread."""

    def __init__(
        self, handler: Any, *, leaving: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        """Teach the handler, in place.

        Args:
            handler: torch's; one without heartbeats is left as it is.
            leaving: whether the workers of this node are on their way out: from then on the other
                nodes do not matter.
            say: told what cannot be done with this torch.
        """
        self._leaving = leaving
        self._held = False
        self._lost_since_s: float | None = None
        self._seen_s = time.monotonic()
        self._allow_until_s = 0.0
        self._interval_s = 5.0
        self._nodes_waiting: Callable[[], int] = handler.num_nodes_waiting
        handler.num_nodes_waiting = self.num_nodes_waiting
        holder = getattr(handler, "_state_holder", None)
        if holder is not None and not self._teach(handler, holder):
            say(
                "this torch's rendezvous is not known: after a suspend longer than its keep-alive "
                "(15 s by default; --rdzv-conf keep_alive_max_attempt=N) failed workers are not "
                "restarted"
            )

    def suspend(self, begins: bool) -> None:
        """Slurm is about to stop this process, or it goes on."""
        self._held = begins

    def num_nodes_waiting(self) -> int:
        """Torch's, but for a node whose workers leave, or whose store has just gone: 0.

        Raises:
            RendezvousConnectionError: the store has been gone for long.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        if self._leaving():
            return 0
        try:
            waiting = self._nodes_waiting()
        except RendezvousConnectionError:
            now_s = time.monotonic()
            if self._lost_since_s is None:
                self._lost_since_s = now_s
            if now_s - self._lost_since_s > STORE_LOST_S:
                raise
            return 0
        self._lost_since_s = None
        return waiting

    def _teach(self, handler: Any, holder: Any) -> bool:
        settings = getattr(handler, "settings", None)
        interval = getattr(settings, "keep_alive_interval", None)
        sanitize, sync = getattr(holder, "_sanitize", None), getattr(holder, "sync", None)
        if interval is None or not callable(sanitize) or not callable(sync):
            return False
        self._interval_s = interval.total_seconds()

        def sanitize_unless_suspended() -> None:
            if not self._allows():
                sanitize()

        def sync_unless_suspended() -> bool | None:
            """None is torch's own answer where it takes the state that it has."""
            result: bool | None = None if self._held else sync()
            return result

        # torch has no public place for either
        holder._sanitize = sanitize_unless_suspended
        holder.sync = sync_unless_suspended
        return True

    def _allows(self) -> bool:
        """Whether silence is to be excused now. Called at each exchange with the store, about once
        a second and at least once in each interval of the heartbeat."""
        now_s = time.monotonic()
        if now_s - self._seen_s > self._interval_s + 1.0:
            self._allow_until_s = now_s + ALLOWANCE_S
        self._seen_s = now_s
        return now_s < self._allow_until_s
