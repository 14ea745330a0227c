"""Randomised fault rounds of runs of 2 to 4 ranks: signals, kills, freezes and delays at moments
that are drawn from a seed. How many hung, and how many commits were lost.

The rounds are those of tests/faults/run.py, which also says what each of them did.
"""

from __future__ import annotations

import sys
import time

from harness import finish, parser, percentile, scratch  # makes the tests importable

# isort: split
from faults.plans import draw
from faults.rounds import as_json, players


def main() -> int:
    wanted = parser("Randomised fault rounds of several ranks.")
    wanted.add_argument("--rounds", type=int, default=200, help="how many (200)")
    wanted.add_argument("--seed", type=int, default=1, help="what they are drawn from (1)")
    chosen = wanted.parse_args()
    rounds = 2 if chosen.quick else chosen.rounds
    begin_s = time.monotonic()
    with scratch("faults", chosen) as folder, players(folder) as player:
        outcomes = [player.play(draw(chosen.seed, number)) for number in range(rounds)]
    attempt_s = [attempt.seconds for outcome in outcomes for attempt in outcome.attempts]
    figures = as_json(outcomes, seed=chosen.seed)
    finish(
        chosen,
        "fault_rounds: whatever is done to the ranks of a run",
        {
            **figures,
            "attempt_s_p50": percentile(attempt_s, 50),
            "attempt_s_max": max(attempt_s),
            "wall_s": time.monotonic() - begin_s,
        },
    )
    return 1 if figures["bad_rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
