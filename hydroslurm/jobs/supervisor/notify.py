"""Tell the user's command or webhook of each stop, resume, failure and end of a job.

A thread beside the supervisor reads the journal of conditions, so that nothing waits for it but the
end of the supervisor, a few seconds. A failure is logged once and never raised.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.core.threads import thread
from hydroslurm.jobs import submission
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.jobs.supervisor.conditions import Condition, read_conditions

LIMIT_S = 5.0
"""How long one command or request may take."""
_POLL_S = 0.2
_MOST_TEXT = 2000
_EVENTS = {
    "Preempted": ("stop", "requeue"),
    "Suspended": ("stop", "wait for members"),
    "Restarting": ("failure", "restart"),
    "Running": ("resume", "train"),
    "Failed": ("failure", "nothing"),
    "Succeeded": ("end", "nothing"),
}
"""Type of a condition -> what happened, and what comes next."""


@contextlib.contextmanager
def notifying(plan: Plan, run: RunDir, *, log: Callable[[str], None]) -> Iterator[None]:
    """Tell whom the plan names what becomes true of the job inside the block."""
    if not plan.notify:
        yield
        return
    is_over, told = threading.Event(), len(read_conditions(run.conditions_jsonl))
    follower = thread(_follow, plan, run, told, is_over, log, name="hydroslurm-notify")
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join(2 * LIMIT_S)


def _follow(
    plan: Plan, run: RunDir, told: int, is_over: threading.Event, log: Callable[[str], None]
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the job's; commands inherit it
    failures: set[str] = set()
    is_last = False
    while not is_last:
        is_last = is_over.wait(_POLL_S)
        conditions = read_conditions(run.conditions_jsonl)
        for number, condition in enumerate(conditions[told:], told):
            is_start = all(one.type != "Running" for one in conditions[:number])
            if condition.type not in _EVENTS or (condition.type == "Running" and is_start):
                continue
            try:
                _send(plan, json.dumps(document(run, condition)).encode())
            except Exception as error:  # of whatever answers there
                # that of a program repeats its command
                why = str(error) if isinstance(error, OSError) else type(error).__name__
                if why not in failures:
                    log(f"notify failed: {why!a}. The job runs on")
                failures.add(why)
        told = len(conditions)


def document(run: RunDir, condition: Condition) -> dict[str, Any]:
    """Make what is sent of a condition. It has no command, path or variable of the job."""
    event, following = _EVENTS[condition.type]
    if condition.reason in ("Cancelled", "Always"):  # by a person; by restartPolicy
        event = "end"
    job, status = submission.read(run.root), read_status(run.rank_status(0))
    numbers = (one.number for one in Attempts(run.starts_jsonl).all())
    return {
        "job_id": job.job_id,
        "name": job.name,
        "attempt": max(numbers, default=condition.restart_count + 1),
        "event": event,
        "reason": condition.reason,
        "message": condition.message[:_MOST_TEXT],
        "step": None if status is None else status.step,
        "time": datetime.fromtimestamp(condition.epoch_ns / 1e9, timezone.utc).isoformat(),
        "next": following,
    }


def _send(plan: Plan, text: bytes) -> None:
    if not plan.notify[0].startswith(("http://", "https://")):
        folder = plan.tasks[0].working_directory
        subprocess.run(plan.notify, input=text, cwd=folder, timeout=LIMIT_S, check=True)
        return
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(plan.notify[0], data=text, headers=headers)
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=LIMIT_S):
        pass  # the answer is not read


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect is an error: the document is for the address in the spec alone."""
