"""What Slurm's error messages mean, and how long to retry while its controller is away.

Both backends get the messages of ``slurm_strerror``: the programs print them, pyslurm raises them.
Source: src/common/slurm_errno.c in 22.05.8 and 25.11.7.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hydroslurm.errors import (
    ControllerUnreachable,
    NoSuchJob,
    NotPermitted,
    SlurmError,
    SlurmMissing,
    WrongJobState,
)

# in order: the first that is found counts. A missing slurm.conf also fails to reach the controller.
_MEANINGS: tuple[tuple[type[SlurmError], tuple[str, ...]], ...] = (
    (
        SlurmMissing,
        (
            "Could not establish a configuration source",
            "Unable to process configuration file",
            "failed to fetch config",
        ),
    ),
    (
        ControllerUnreachable,
        (
            "Unable to contact slurm controller",
            "Communication connection failure",
            "Message send failure",
            "Message receive failure",
            "Socket timed out",
            "Zero Bytes were transmitted",
            "Connection refused",
            "Connection timed out",
            "Connection reset",
            "No route to host",
            "Network is unreachable",
            "in standby mode",
            "Rate limit exceeded",
            "Unable to connect to database",
            "failed to send persistent connection init message",
            # munged is restarted now and then; a key that differs will still be reported in the end
            "Protocol authentication error",
            "Munge encode failed",
        ),
    ),
    (NoSuchJob, ("Invalid job id specified", "Invalid job array specification")),
    # "Invalid user id" is what holding another user's job gives on 22.05
    (NotPermitted, ("Access/permission denied", "Invalid user id", "Operation not permitted")),
    (
        WrongJobState,
        (
            "Job is pending execution",
            "Job/step already completing or completed",
            "Job has already finished",
            "Job is not running",
            "Job is not pending nor running",
            "Job is not suspended",
            "Job is not finished",
            "Job is no longer pending execution",
            "Job is current suspended",
            "Job is in held state",
            "Job can not be altered now",
            "Job script not specified",
            "Only batch jobs are accepted",
            "Requested operation is presently disabled",
            "Job step is suspended",
            "Job step not running",
        ),
    ),
)

ALREADY_PENDING = "Job is pending execution"

# scontrol of 22.05 says this for "no such job" and for "the controller is away" alike
_SAYS_NOTHING = ("Unexpected message received", "Unspecified error")

_NEVER_ARRIVED = re.compile(
    r"connect failure|connection failure|Connection refused|No route to host"
)

_HINTS: dict[type[SlurmError], str] = {
    SlurmMissing: "set SLURM_CONF to this cluster's slurm.conf, or run where Slurm is configured",
    NoSuchJob: "ended jobs stay known for MinJobAge only; look at `sacct -D -j ID`",
    NotPermitted: "only the owner, operators and administrators may; suspend is for the last two",
    WrongJobState: "look at `scontrol show job ID`",
    ControllerUnreachable: "look at `scontrol ping`",
}


def meaning(sentence: str) -> type[SlurmError] | None:
    """The error class for a message of Slurm's; None if it is unknown."""
    lowered = sentence.lower()
    for error, phrases in _MEANINGS:
        if any(phrase.lower() in lowered for phrase in phrases):
            return error
    return None


def is_unconfigured(sentence: str) -> bool:
    """Whether a program has found no slurm.conf, and no controller by DNS that it could get it
    from. It says so in four lines."""
    return "DNS SRV lookup failed" in sentence


def refusal(sentence: str, *, doing: str) -> SlurmError:
    """The error to raise: what was being done, Slurm's message, and what to do next."""
    message = " / ".join(line.strip() for line in sentence.splitlines() if line.strip())[:500]
    error = meaning(sentence) or SlurmError
    hint = f"; {_HINTS[error]}" if error in _HINTS else ""
    return error(f"{doing}: {message or 'no reason given'}{hint}")


def says_nothing(error: SlurmError) -> bool:
    """Whether Slurm's message fits several causes, so that one has to ask further."""
    return type(error) is SlurmError and any(words in str(error) for words in _SAYS_NOTHING)


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Time-outs and retries, with the clock, sleep and random source that tests replace.

    Attributes:
        call_timeout_s: for one call. Slurm's programs give up on an absent controller after 9 to
            18 s (twice MessageTimeout), so less than 20 s hides the reason.
        give_up_after_s: no retry starts later than this after the first call.
        first_delay_s, longest_delay_s: the delay before the first retry, which doubles each time,
            and its maximum. Each delay is drawn from its upper half, so that ranks spread out.
        monotonic, sleep, uniform: the clock (s), the sleep (s) and the random source.
    """

    call_timeout_s: float = 30.0
    give_up_after_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def retry(
        self,
        call: Callable[[], Result],
        *,
        may_repeat: bool = True,
    ) -> Result:
        """Call until it does not raise ControllerUnreachable.

        Args:
            may_repeat: False for a request that must not be made twice: it is repeated only if
                it cannot have reached the controller.

        Raises:
            ControllerUnreachable: the last one, with the number of attempts and the time spent.
        """
        begin = self.monotonic()
        delay_s = self.first_delay_s
        attempts = 0
        while True:
            attempts += 1
            try:
                return call()
            except ControllerUnreachable as error:
                pause_s = self.uniform(delay_s / 2, delay_s)
                spent_s = self.monotonic() - begin
                arrived = not _NEVER_ARRIVED.search(str(error))
                if (arrived and not may_repeat) or spent_s + pause_s > self.give_up_after_s:
                    raise ControllerUnreachable(
                        f"{error} (attempts: {attempts}, in {spent_s:.1f} s)"
                    ) from error
            self.sleep(pause_s)
            delay_s = min(2 * delay_s, self.longest_delay_s)
