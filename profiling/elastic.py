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

import functools
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import PROFILING, finish, interleaved, parser, scratch  # makes the tests importable

# isort: split
from elasticstory import ElasticStory
from processes import wait_until

STEP_S = 0.2


def gaps(steps: list[dict[str, Any]]) -> list[float]:
    """The seconds between one step's end and the next one's."""
    return [two["at_s"] - one["at_s"] for one, two in itertools.pairwise(steps)]


def stall_s(steps: list[dict[str, Any]]) -> float:
    """The longest gap less the median one."""
    all_gaps = gaps(steps)
    return max(all_gaps) - statistics.median(all_gaps)


def members(folder: Path) -> ElasticStory:
    story = ElasticStory(folder, max=3)
    for name in "abc":
        story.start(name, step_s=STEP_S)
    story.wait_for_step("a", size=3, times=4)
    return story


def leave(folder: Path) -> float:
    """One of three gets SIGTERM."""
    story = members(folder)
    try:
        story.signal("b", signal.SIGTERM)
        for name in "ac":
            story.done(name)
        return max(stall_s(story.steps(name)) for name in "ac")
    finally:
        story.close()


def kill(folder: Path) -> float:
    """One of three gets SIGKILL."""
    story = members(folder)
    try:
        asked_s = time.monotonic()
        story.signal("b", signal.SIGKILL)
        for name in "ac":
            story.done(name)
        logs = [story.steps(name) for name in "ac"]
        first_s = float(min(one["at_s"] for log in logs for one in log if one["size"] == 2))
        return first_s - asked_s - statistics.median(gaps(logs[0]))
    finally:
        story.close()


def join(folder: Path) -> float:
    """A third one comes."""
    story = ElasticStory(folder, max=3)
    try:
        for name in "ab":
            story.start(name, step_s=STEP_S)
        story.wait_for_step("a", size=2, times=4)
        story.start("c", step_s=STEP_S)
        for name in "abc":
            story.done(name)
        logs = [story.steps(name) for name in "ab"]
        return max(map(stall_s, logs)) / statistics.median(gaps(logs[0]))
    finally:
        story.close()


def steps_of(log: Path, size: int) -> list[dict[str, Any]]:
    """What workers have written of their steps in a world of this size."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [one for one in lines if one["size"] == size]


def torchrun(folder: Path) -> float:
    """torchrun's three agents, of which one is killed."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    agents = []
    environ = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "STEP_S": str(STEP_S),
    }
    log = folder / "steps"
    log.touch()
    for number in range(3):
        conf = f"is_host={int(number == 0)},last_call_timeout=1,keep_alive_interval=1"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=profile"),
            *("--local-addr=127.0.0.1", "--max-restarts=9", "--monitor-interval=0.1"),
            f"--rdzv-conf={conf},keep_alive_max_attempt=3",
            *(str(PROFILING / "elastic_torchrun.py"), str(folder)),
        ]
        with (folder / f"agent-{number}").open("w") as said:
            agents.append(
                subprocess.Popen(
                    command, env=environ, stdout=said, stderr=said, start_new_session=True
                )
            )

    def said() -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("agent-*")))

    try:
        wait_until(lambda: len(steps_of(log, 3)) > 12, said)
        asked_s = time.monotonic()
        os.killpg(agents[2].pid, signal.SIGKILL)
        for path in folder.glob("worker-*"):
            if path.read_text() == str(agents[2].pid):
                os.kill(int(path.name.removeprefix("worker-")), signal.SIGKILL)
        wait_until(lambda: steps_of(log, 2), said)
        return float(min(one["at_s"] for one in steps_of(log, 2)) - asked_s - STEP_S)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait(60)


ROUNDS = 5
CASES: dict[str, Callable[[Path], float]] = {
    "announced_leave_stall_s": leave,
    "sigkill_stall_s": kill,
    "join_stall_steps": join,
    "torchrun_shrink_s": torchrun,
}


def main() -> None:
    chosen = parser(__doc__).parse_args()
    with scratch("elastic", chosen) as folder:

        def in_a_place(name: str, case: Callable[[Path], float]) -> float:
            return case(Path(tempfile.mkdtemp(prefix=name, dir=folder)))

        arms = {name: functools.partial(in_a_place, name, case) for name, case in CASES.items()}
        found = interleaved(arms, rounds=1 if chosen.quick else ROUNDS)
    result = {name: round(statistics.median(values), 4) for name, values in found.items()}
    finish(chosen, "a change of size", {"step_s": STEP_S, **result})


if __name__ == "__main__":
    main()
