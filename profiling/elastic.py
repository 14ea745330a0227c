"""What a change of size costs those who go on training, beside torchrun's restart.

Three members, each a process of this machine that trains a small network with gloo, steps of
0.2 s. A *stall* is the longest time between two steps of a survivor around the change, less the
median step. ``announced_leave_stall_s``: one gets SIGTERM; ``sigkill_stall_s``: SIGKILL, from the
signal to the survivors' next step, less a step; ``join_stall_steps``: one joins, in steps.
``torchrun_shrink_s``: the same three under torchrun with the rendezvous tuned
(``last_call_timeout=1, keep_alive_interval=1, keep_alive_max_attempt=3``), SIGKILL of one agent and
its worker; from the signal to the first step of the survivors, which restart and read a checkpoint
that is made at each step. All times are medians over the rounds.

The 0.2 s are spent asleep behind a step's own work of some milliseconds, so that a signal rarely
falls within a step: what repeating one costs is not in these figures. On a machine that has other
work they come out right under ``chrt -r 5`` (all arms inherit it).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import PROFILING, finish, interleaved, options, scratch  # makes the tests importable

# isort: split
from elasticstory import ElasticStory
from processes import child, descendants, free_port, wait_until

STEP_S = 0.2
AGENT = "from torch.distributed.run import main\nmain()"


def gaps(steps: list[dict[str, Any]]) -> list[float]:
    """The seconds between one step's end and the next one's."""
    return [two["at_s"] - one["at_s"] for one, two in itertools.pairwise(steps)]


def stall_s(steps: list[dict[str, Any]]) -> float:
    """The longest gap less the median one."""
    all_gaps = gaps(steps)
    return max(all_gaps) - statistics.median(all_gaps)


def members(folder: Path, names: str = "abc") -> ElasticStory:
    story = ElasticStory(folder, max=3)
    story.start_all(names, step_s=STEP_S)
    story.wait_for_step("a", size=len(names), times=4)
    return story


def logs_of(story: ElasticStory, names: str) -> list[list[dict[str, Any]]]:
    """The steps of these members, when they have ended well."""
    for name in names:
        story.done(name)
    return [story.steps(name) for name in names]


def leave(folder: Path) -> float:
    """One of three gets SIGTERM."""
    with members(folder) as story:
        story.signal("b", signal.SIGTERM)
        return max(map(stall_s, logs_of(story, "ac")))


def kill(folder: Path) -> float:
    """One of three gets SIGKILL."""
    with members(folder) as story:
        asked_s = time.monotonic()
        story.signal("b", signal.SIGKILL)
        logs = logs_of(story, "ac")
        first_s = float(min(one["at_s"] for log in logs for one in log if one["size"] == 2))
        return first_s - asked_s - statistics.median(gaps(logs[0]))


def join(folder: Path) -> float:
    """A third one comes."""
    with members(folder, "ab") as story:
        story.start("c", step_s=STEP_S)
        logs = logs_of(story, "abc")[:2]
        return max(map(stall_s, logs)) / statistics.median(gaps(logs[0]))


def steps_of(log: Path, size: int) -> list[dict[str, Any]]:
    """What workers have written of their steps in a world of this size."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [one for one in lines if one["size"] == size]


def torchrun(folder: Path) -> float:
    """torchrun's three agents, of which one is killed with its worker."""
    log, port, agents = folder / "steps", free_port(), []
    log.touch()
    environ = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "STEP_S": str(STEP_S),
    }
    with contextlib.ExitStack() as stack:
        for number in range(3):
            conf = f"is_host={int(number == 0)},last_call_timeout=1,keep_alive_interval=1"
            options = [
                *("--nnodes=2:3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=profile"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
                *(f"--rdzv-conf={conf},keep_alive_max_attempt=3", "--max-restarts=9"),
                *("--monitor-interval=0.1", str(PROFILING / "elastic_torchrun.py"), str(folder)),
            ]
            own = folder / f"agent-{number}"
            own.mkdir()
            agent = child(AGENT, own, *options, environ=environ)
            agents.append(stack.enter_context(agent))

        def said() -> str:
            return "\n".join(map(str, agents))

        wait_until(lambda: len(steps_of(log, 3)) > 12, said)
        asked_s = time.monotonic()
        for pid in [agents[2].pid, *descendants(agents[2].pid)]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: steps_of(log, 2), said)
        return float(min(one["at_s"] for one in steps_of(log, 2)) - asked_s - STEP_S)


ROUNDS = 5
CASES: dict[str, Callable[[Path], float]] = {
    "announced_leave_stall_s": leave,
    "sigkill_stall_s": kill,
    "join_stall_steps": join,
    "torchrun_shrink_s": torchrun,
}


def main() -> None:
    chosen = options(__doc__ or "")
    with scratch("elastic") as folder:

        def in_a_place(name: str, case: Callable[[Path], float]) -> float:
            return case(Path(tempfile.mkdtemp(prefix=name, dir=folder)))

        arms = {name: functools.partial(in_a_place, name, case) for name, case in CASES.items()}
        found = interleaved(arms, rounds=1 if chosen.quick else ROUNDS)
    result = {name: round(statistics.median(values), 4) for name, values in found.items()}
    finish(chosen, "a change of size", {"step_s": STEP_S, **result})


if __name__ == "__main__":
    main()
