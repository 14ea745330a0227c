"""The same training, the same storm of preemptions, eight ways to meet it: one run, one JSON line,
one table, one picture.

    run.py                       everything, about half an hour; into profiling/results/
    run.py --quick --out DIR     one suspend and one requeue each: to see that it runs
    run.py --peers hydroslurm,bare --seed 2
    run.py --resume              after one that ended early: peers that are done are kept

The storm has suspends, preemptions by an urgent job (PreemptMode=REQUEUE without grace, with
preempt_send_user_signal) and an operator's requeues, at moments that are the seed's. Two peers
train at a time, each on one core and one node of its own. All save once per epoch, each in its own
way.

    goodput   the time that bare takes for these steps, undisturbed, over the time from the
              submission to the last step

A peer whose packages are missing is left out, with a word.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comparison import FULL, QUICK, compare
from harness import environment, finish, parser
from peers import PEERS
from picture import draw
from readme_table import text_of
from table import table

RESULTS = Path(__file__).resolve().parent.parent / "results"
IMAGES = RESULTS.parent.parent / "docs/images"
_WHOLE, _PART = "compare.json", "compare.json.tmp"


def main() -> None:
    options = parser("hydroslurm and its peers in one storm.")
    options.add_argument("--peers", default=",".join(PEERS), help="some of %(default)s")
    options.add_argument("--seed", type=int, default=6, help="of the storm (6)")
    options.add_argument("--out", type=Path, help="folder for compare.json and compare.png")
    options.add_argument(
        "--resume", action="store_true", help="do not run peers again that are done in --out"
    )
    options.add_argument("--directory", type=Path, help="of the runs, kept; else a temporary one")
    chosen = options.parse_args()
    unknown = set(chosen.peers.split(",")) - set(PEERS)
    if unknown:
        options.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    out = chosen.out or (None if chosen.quick else RESULTS)
    earlier = _earlier(out) if chosen.resume else None
    if chosen.resume and earlier is None:
        options.error(f"nothing to resume: wanted compare.json, or its .tmp, in --out ({out})")
    wanted = [peer for name, peer in PEERS.items() if name in chosen.peers.split(",")]
    with tempfile.TemporaryDirectory(prefix="hydroslurm-compare-") as temporary:
        result = compare(
            wanted,
            QUICK if chosen.quick else FULL,
            chosen.directory or Path(temporary),
            seed=chosen.seed,
            keep=None if out is None else out / _PART,
            earlier=earlier,
        )
    if out is not None:
        _publish({"script": "run.py", "quick": chosen.quick, **result}, out)
    if not chosen.json:
        print(table({**result, "environment": environment()}))
        chosen.json = True
    finish(chosen, "", result)


def _earlier(out: Path | None) -> dict[str, Any] | None:
    """What a run has left that ended early, or with fewer peers."""
    found = [path for name in (_PART, _WHOLE) if out and (path := out / name).exists()]
    return dict(json.loads(found[0].read_text())) if found else None


def _publish(result: Mapping[str, Any], out: Path) -> None:
    """The result and its picture, in the place of older ones."""
    part = out / _PART
    part.write_text(text_of({**result, "environment": environment()}))
    part.replace(out / _WHOLE)
    draw(result, (IMAGES if out == RESULTS else out) / "compare.png")


if __name__ == "__main__":
    main()
