"""What a rank of a restarted generation says beside its step: whether anything moves, and where it
stands.

Its agent compares this with what the other ranks say, to tell the one that they wait for; see
:mod:`hydroslurm.jobs.agent.progress`. The training pays nothing: the controller's thread reads one
number of torch's with each heartbeat, and looks at the stack of the main thread only when that has
not changed.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Mapping
from typing import Any

from hydroslurm.coordination import collectives
from hydroslurm.core.rundir import GENERATION_ENV

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Watch:
    """Looks at this process, from one thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Only below an agent that starts its ranks anew is anybody interested."""
        self._is_wanted = bool(environ.get(GENERATION_ENV))
        self._before: tuple[int | None, int | None, float | None] | None = None

    def look(self, step: int | None) -> Mapping[str, Any]:
        """At a heartbeat: fields of a :class:`~hydroslurm.core.status.RankStatus`; none where
        nobody is interested."""
        if not self._is_wanted:
            return {}
        found = collectives.progress()
        # not yet, or not any more, in a group: then nobody waits for it in a collective
        issued, timeout_s = (None, None) if found is None else (found.issued, found.timeout_s)
        meeting_timeout_s = collectives.meeting_timeout_s() if found is None else None
        now = (step, issued, meeting_timeout_s)
        stands = now == self._before
        self._before = now
        if found is not None and stands:
            # gloo counts sends and receives, which need not be as many on all ranks: then the
            # numbers cannot be compared. To find out takes 20 ms, and is done only where nothing
            # moves
            exact = (collectives.issued_exact() or {}).get(found.key, found.issued)
            issued = found.issued if exact == found.issued else None
        return {
            "collectives": issued,
            "collective_timeout_s": timeout_s,
            "meeting_timeout_s": meeting_timeout_s,
            "stands_at": place_of_main_thread() if stands else "",
        }


def place_of_main_thread() -> str:
    """``train.py:41 in evaluate``: the innermost line that is not of a library, for that is what
    the reader has written; the innermost at all where all are."""
    main = threading.main_thread().ident
    innermost = frame = sys._current_frames().get(main) if main is not None else None
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"[:1000]
