"""What becomes of a job whose attempt is over: it has succeeded, it has failed, or it is started
again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hydroslurm.jobs.spec.policies import RunPolicy
from hydroslurm.jobs.supervisor.exit_policy import Judgement, Next

DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclass(frozen=True)
class Decision:
    """The end of a job.

    Attributes:
        failed: whether it has.
        reason, words: one word, one sentence.
    """

    failed: bool
    reason: str
    words: str


def decide(
    judgement: Judgement, policy: RunPolicy, *, earlier_restarts: int, is_over_deadline: bool
) -> Decision | None:
    """Compare what has happened with the limits of the job; None: it is started again."""
    if judgement.next is Next.SUCCEED:
        return Decision(False, judgement.reason, judgement.words)
    if is_over_deadline:
        words = f"activeDeadlineSeconds ({policy.active_deadline_seconds}) are over"
        return Decision(True, DEADLINE_EXCEEDED, words)
    if judgement.next is Next.FAIL:
        return Decision(True, judgement.reason, judgement.words)
    restarts = earlier_restarts + judgement.counts
    if judgement.counts and restarts > policy.backoff_limit:
        words = f"{judgement.words}: restart {restarts}, with backoffLimit {policy.backoff_limit}"
        return Decision(True, "BackoffLimitExceeded", words)
    return None
