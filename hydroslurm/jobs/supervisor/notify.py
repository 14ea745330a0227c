"""Tell the user's command or webhook of each stop, resume, failure and end of a job.

A thread beside the supervisor reads the journal of conditions, so that nothing waits for it but the
end of the supervisor, a few seconds. A failure is logged once and never raised. A webhook is called
by a process, too (``python -m ...``), which ends in time however slowly the answer comes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.core.threads import thread
from hydroslurm.errors import RunFolderError
from hydroslurm.jobs.plan import Plan, read_submission
from hydroslurm.jobs.supervisor.attempts import Attempts
from hydroslurm.jobs.supervisor.conditions import Condition, read_conditions
from hydroslurm.jobs.supervisor.exit_policy import format_status

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
                why = _send(plan, run, json.dumps(document(run, condition)))
            except (OSError, RunFolderError) as error:
                why = str(error)
            if why and why not in failures:
                log(
                    f"notify failed: {why!a}; {run.logs}/notify.log has its output. The job runs on"
                )
                failures.add(why)
        told = len(conditions)


def document(run: RunDir, condition: Condition) -> dict[str, Any]:
    """Make what is sent of a condition. It has no command, path or variable of the job."""
    event, following = _EVENTS[condition.type]
    if condition.reason in ("Cancelled", "Always"):  # by a person; by restartPolicy
        event = "end"
    job, status = read_submission(run.root), read_status(run.rank_status(0))
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


def _send(plan: Plan, run: RunDir, text: str) -> str:
    """Return why nobody was told; "" otherwise."""
    command: Sequence[str] = plan.notify
    if command[0].startswith(("http://", "https://")):
        # the URL goes to stdin: others see arguments, and it may be a secret
        text = f"{command[0]}\n{text}"
        command = module_command(sys.executable, "hydroslurm.jobs.supervisor.notify")
    with (run.logs / "notify.log").open("wb") as output:
        try:
            done = subprocess.run(
                command, input=text.encode(), cwd=plan.tasks[0].working_directory,
                timeout=LIMIT_S, check=False, stdout=output, stderr=output,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_S:g} s"
    return f"exit status {format_status(done.returncode)}" if done.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect is an error: the document is for the address in the spec alone."""


def main() -> None:
    """Post what follows the first line of stdin to the URL in that line."""
    url, _, text = sys.stdin.buffer.read().partition(b"\n")
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url.decode(), data=text, headers=headers)
    with urllib.request.build_opener(_NoRedirect).open(request):
        pass  # the answer is not read


if __name__ == "__main__":
    main()
