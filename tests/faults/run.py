"""Randomised fault rounds: ranks of a run are signalled, killed, frozen and delayed at moments that
are drawn from a seed, and nothing may hang or be lost.

    run.py --rounds 200 --seed 1     everything, about ten minutes
    run.py --only 17 --seed 1        one round again, with all that its ranks have said

Prints one line per round, and at the end the figures as JSON. The status is 1 when there is
anything to be said against a round; what that round has left behind is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.plans import draw
from faults.rounds import Outcome, as_json, players


def main() -> int:
    parser = argparse.ArgumentParser(description="Randomised fault rounds.")
    parser.add_argument("--rounds", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (0)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (1)")
    parser.add_argument("--only", type=int, action="append", help="this round; may be given again")
    chosen = parser.parse_args()
    numbers = chosen.only or range(chosen.first, chosen.first + chosen.rounds)
    folder = Path(tempfile.mkdtemp(prefix="hydroslurm-faults-"))
    outcomes = []
    with players(folder) as player:
        for number in numbers:
            outcomes.append(player.play(draw(chosen.seed, number)))
            tell(outcomes[-1], loud=bool(chosen.only))
    figures = as_json(outcomes, seed=chosen.seed)
    if figures["bad_rounds"]:
        print(f"what they have left behind is in {folder}")
    print(json.dumps(figures))
    return 1 if figures["bad_rounds"] else 0


def tell(outcome: Outcome, *, loud: bool) -> None:
    plan = outcome.plan
    print(
        f"round {plan.number:4}  {plan.world} ranks {plan.model:4}  "
        f"attempts {len(outcome.attempts)}  faults {outcome.faults}/{outcome.planned}  "
        f"{outcome.seconds:5.1f} s  {'BAD' if outcome.complaints else 'ok'}",
        flush=True,
    )
    if not (outcome.complaints or loud):
        return
    print(f"    {plan.options}")
    for attempt, faults in enumerate(plan.attempts, start=1):
        for fault in faults:
            print(f"    attempt {attempt}: {fault}")
    for complaint in outcome.complaints:
        print(f"    {complaint.kind.upper()}: {complaint.message}")
    print("\n".join(f"        {line}" for line in outcome.said.splitlines() if line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
