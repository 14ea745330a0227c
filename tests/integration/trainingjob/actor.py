"""A replica that does what its script says, attempt by attempt: `actor.py ACTS.json`.

ACTS.json has for each replica what it does in its first attempt, its second ...; one that has no
more to do ends with 0. An act: a number to end with; ``kill SIGKILL``; ``forever``;
``until NAME``, until there is a file of that name beside ACTS.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    acts: dict[str, list[Any]] = json.loads(Path(sys.argv[1]).read_text())
    replica = os.environ["HYDROSLURM_REPLICA"]
    starts = Path(os.environ["HYDROSLURM_RUN_DIR"]) / "starts.jsonl"
    attempt = starts.read_text().count('"began_epoch_ns"')
    mine = acts.get(replica, [])
    act = mine[attempt - 1] if attempt <= len(mine) else 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME")
    where = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    print(f"{replica} attempt {attempt}: {act} {where} pid {os.getpid()}")  # and does not flush it
    if isinstance(act, int):
        return act
    verb, _, rest = act.partition(" ")
    if verb == "kill":
        os.kill(os.getpid(), signal.Signals[rest])
    while verb == "forever" or not (Path(sys.argv[1]).parent / rest).exists():
        time.sleep(0.05)
    print(f"{replica} attempt {attempt}: came to its own end")
    return 0


sys.exit(main())
