"""How long to wait for Slurm: time-outs, and retries while its controller is away."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hydroslurm.errors import ControllerUnreachable

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The numbers, and the outside things that a test replaces.

    Attributes:
        call_timeout_s: for one call. Slurm's programs give up on an absent controller by themselves
            after 9 to 18 s (twice MessageTimeout), so less than 20 s hides why.
        give_up_after_s: no retry begins later than this after the first call.
        first_delay_s, longest_delay_s: the pause before the first retry, doubled for each next one.
            Each pause is drawn from its upper half, so that many ranks do not return together.
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
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> Result:
        """Call until it does not raise ControllerUnreachable.

        Args:
            may_repeat: False for a request that may have been heard and must not be made twice.

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
                if not may_repeat(error) or spent_s + pause_s > self.give_up_after_s:
                    raise ControllerUnreachable(
                        f"{error} (attempts: {attempts}, in {spent_s:.1f} s)"
                    ) from error
            self.sleep(pause_s)
            delay_s = min(2 * delay_s, self.longest_delay_s)
