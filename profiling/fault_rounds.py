"""Randomised fault rounds of runs of 2 to 4 ranks: signals, kills, freezes and delays at moments
that are drawn from a seed. How many hung, and how many commits were lost.

The rounds are those of tests/faults/run.py, which also says what each of them did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from harness import Options, finish, percentile

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from faults.plans import draw  # noqa: E402 - a folder of tests, not a package
from faults.rounds import as_json, players  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Randomised fault rounds of several ranks.")
    parser.add_argument("--quick", action="store_true", help="two rounds: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--rounds", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (1)")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    begin_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="hydroslurm-faults-") as folder,
        players(Path(folder)) as player,
    ):
        outcomes = [player.play(draw(arguments.seed, number)) for number in range(rounds)]
    attempt_s = [attempt.seconds for outcome in outcomes for attempt in outcome.attempts]
    figures = as_json(outcomes, seed=arguments.seed)
    finish(
        Options(quick=arguments.quick, json_only=arguments.json),
        "fault_rounds: whatever is done to the ranks of a run",
        {
            **figures,
            "life_s_p50": percentile(attempt_s, 50),
            "attempt_s_max": max(attempt_s),
            "wall_s": time.monotonic() - begin_s,
        },
    )
    return 1 if figures["bad_rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
