"""What a change of size costs those who go on training, beside torchrun's restart.

Three members, each a process of this machine that trains a small network with gloo, steps of
0.2 s. A *stall* is the longest time between two steps of a survivor around the change, less the
median step. ``announced_leave_stall_s``: one gets SIGTERM; ``sigkill_stall_s``: SIGKILL, from the
signal to the survivors' next step, less a step; ``join_stall_steps``: one joins, in steps;
``join_s``: from the start of a process that has torch loaded to its first step.
``torchrun_shrink_s``: the same three under torchrun with the rendezvous tuned
(``last_call_timeout=1, keep_alive_interval=1, keep_alive_max_attempt=3``), SIGKILL of one agent and
its worker; from the signal to the first step of the survivors, which restart and read a checkpoint
that is made at each step.
``spare_stall_steps``: two train and one is a spare, which takes the place of one that gets SIGKILL
(``spare_leave_stall_steps``: SIGTERM); the survivor's stall.

``restart_shrink_s``: the same worker, signal and clock below our agents, ``engine: restart``;
``restart_leave_s``: one agent gets SIGTERM, and its workers and the others', with a ``Run``, stop
together, save, and those that stay are started anew: to their first step, less a step.

``steps_lost_*`` are those of the ledger; ``samples_wrong``: samples of an epoch that were trained
on more than once, or never. All times are medians over the rounds.

The 0.2 s are spent asleep behind a step's own work of some milliseconds, so that a signal rarely
falls within a step: what repeating one costs is not in these figures. On a machine that has other
work they come out right under ``chrt -r 5`` (all arms inherit it).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness  # noqa: F401 - puts the tests on the path
from elasticstory import SAMPLES, ElasticStory, times_seen
from harness import PROFILING, finish, parser, scratch
from processes import wait_until
from restartstory import TRAIN, RestartStory

STEP_S = 0.2


def gaps(steps: list[dict[str, Any]]) -> list[float]:
    """The seconds between one step's end and the next one's."""
    return [two["at_s"] - one["at_s"] for one, two in itertools.pairwise(steps)]


def stall_s(steps: list[dict[str, Any]]) -> float:
    """The longest gap less the median one."""
    all_gaps = gaps(steps)
    return max(all_gaps) - statistics.median(all_gaps)


def wrong(story: ElasticStory) -> int:
    """Samples of an epoch that did not come once."""
    epochs = times_seen(*story.all_steps("BEGUN")).values()
    return sum(sum(1 for one in range(SAMPLES) if seen[one] != 1) for seen in epochs)


def members(folder: Path) -> ElasticStory:
    story = ElasticStory(folder, max=3)
    for name in "abc":
        story.start(name, step_s=STEP_S)
    story.wait_for_step("a", size=3, times=4)
    return story


def leave(folder: Path, signo: int) -> dict[str, float]:
    """One of three goes."""
    story = members(folder)
    try:
        asked_s = time.monotonic()
        story.signal("b", signo)
        for name in "ac":
            story.done(name)
        logs = [story.steps(name) for name in "ac"]
        change = story.entries("generation")[1]
        found = {"steps_lost": change["steps_lost"], "pause_s": change["pause_s"]}
        if signo == signal.SIGKILL:
            median_s = statistics.median(gaps(logs[0]))
            first_s = min(one["at_s"] for log in logs for one in log if one["size"] == 2)
            found["stall_s"] = first_s - asked_s - median_s
        else:
            found["stall_s"] = max(map(stall_s, logs))
        return {**found, "wrong": wrong(story)}
    finally:
        story.close()


def join(folder: Path) -> dict[str, float]:
    """A third one comes."""
    story = ElasticStory(folder, max=3)
    try:
        for name in "ab":
            story.start(name, step_s=STEP_S)
        story.wait_for_step("a", size=2, times=4)
        began_s = time.monotonic()
        story.start("c", step_s=STEP_S)
        for name in "abc":
            story.done(name)
        logs = [story.steps(name) for name in "abc"]
        median_s = statistics.median(gaps(logs[0]))
        return {
            "stall_steps": max(stall_s(logs[0]), stall_s(logs[1])) / median_s,
            "join_s": logs[2][0]["at_s"] - began_s,
            "wrong": wrong(story),
        }
    finally:
        story.close()


SAME_WORKER = f"""
import json, os, runpy, sys
options = json.loads(sys.argv[1])
os.environ["STEP_S"] = str(options["step_s"])
sys.argv = ["elastic_torchrun.py", options["folder"]]
runpy.run_path({str(PROFILING / "elastic_torchrun.py")!r}, run_name="__main__")
"""


def restart(folder: Path, signo: int) -> float:
    """Three agents, of which one gets the signal; SIGKILL also its worker."""
    killed = signo == signal.SIGKILL
    (folder / "steps").touch()
    story = RestartStory(folder, script=SAME_WORKER if killed else TRAIN, max=3, gather_s=60.0)

    def steps(size: int) -> list[dict[str, Any]]:
        if not killed:
            return story.said("step", size=size)
        lines = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
        return [one for one in lines if one["size"] == size]

    try:
        for name in "abc":
            story.start(name, step_s=STEP_S, samples=10_000)
        wait_until(lambda: len(steps(3)) > 12, lambda: str(story))
        asked_s = time.monotonic()
        story.signal("c", signo)
        for path in folder.glob("worker-*") if killed else ():
            if path.read_text() == str(story.members["c"].pid):
                os.kill(int(path.name.removeprefix("worker-")), signal.SIGKILL)
        wait_until(lambda: steps(2), lambda: str(story))
        return float(min(one["at_s"] for one in steps(2)) - asked_s - STEP_S)
    finally:
        story.close()
        for path in folder.glob("worker-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.removeprefix("worker-")), signal.SIGKILL)


def spare(folder: Path, signo: int) -> dict[str, float]:
    """One of two goes, and a spare takes its place."""
    story = ElasticStory(folder, max=2, spares=1)
    try:
        for name in "abc":
            story.start(name, step_s=STEP_S, epochs=1)
        trained = list(story.wait_for("generation")["members"])
        (waiting,) = set("abc") - set(trained)

        def is_ready() -> bool:
            return '"Ready"' in json.dumps(story.folder.read(story.folder.status_json))

        wait_until(is_ready, lambda: f"the spare\n{story}")
        story.wait_for_step(trained[0], size=2, times=4)
        story.signal(trained[1], signo)
        for name in (trained[0], waiting):
            story.done(name)
        survivor = story.steps(trained[0])
        assert {one["size"] for one in survivor} == {2}, story
        return {
            "stall_steps": stall_s(survivor) / statistics.median(gaps(survivor)),
            "wrong": wrong(story),
        }
    finally:
        story.close()


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

    def steps(size: int) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [one for one in lines if one["size"] == size]

    def said() -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("agent-*")))

    try:
        wait_until(lambda: len(steps(3)) > 12, said)
        asked_s = time.monotonic()
        os.killpg(agents[2].pid, signal.SIGKILL)
        for path in folder.glob("worker-*"):
            if path.read_text() == str(agents[2].pid):
                os.kill(int(path.name.removeprefix("worker-")), signal.SIGKILL)
        wait_until(lambda: steps(2), said)
        return float(min(one["at_s"] for one in steps(2)) - asked_s - STEP_S)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait(60)


ROUNDS = 5
OURS: dict[str, Callable[[Path], dict[str, float]]] = {
    "leave": lambda folder: leave(folder, signal.SIGTERM),
    "kill": lambda folder: leave(folder, signal.SIGKILL),
    "join": join,
    "spare": lambda folder: spare(folder, signal.SIGKILL),
    "spare_leave": lambda folder: spare(folder, signal.SIGTERM),
}
TIMES: dict[str, Callable[[Path], float]] = {
    "torchrun_shrink_s": torchrun,
    "restart_shrink_s": lambda folder: restart(folder, signal.SIGKILL),
    "restart_leave_s": lambda folder: restart(folder, signal.SIGTERM),
}


def main() -> None:
    made = parser(__doc__)
    words = "a file to which what is measured is appended; what it holds is not measured again, so"
    made.add_argument("--kept-in", type=Path, help=f"{words} that a run that was ended goes on")
    chosen = made.parse_args()
    cases: dict[str, Callable[[Path], Any]] = {**OURS, **TIMES}
    found: dict[str, list[Any]] = {case: [] for case in cases}
    if chosen.kept_in is not None and chosen.kept_in.exists():
        for line in chosen.kept_in.read_text().splitlines():
            for case, value in json.loads(line).items():
                found[case].append(value)
    rounds = 1 if chosen.quick else ROUNDS
    with scratch("elastic", chosen) as folder:
        while any(len(values) < rounds for values in found.values()):
            case = min(
                found, key=lambda one: len(found[one])
            )  # the first of a round's that are left
            place = folder / f"{case}-{len(found[case])}"
            place.mkdir()
            found[case].append(cases[case](place))
            if chosen.kept_in is not None:
                with chosen.kept_in.open("a") as file:
                    file.write(json.dumps({case: found[case][-1]}) + "\n")
    finish(chosen, "a change of size", figures(found))


def figures(found: dict[str, list[Any]]) -> dict[str, Any]:
    def median(what: str, key: str) -> float:
        return round(statistics.median(one[key] for one in found[what]), 4)

    return {
        "rounds": min(map(len, found.values())),
        "step_s": STEP_S,
        "announced_leave_stall_s": median("leave", "stall_s"),
        "sigkill_stall_s": median("kill", "stall_s"),
        "join_stall_steps": median("join", "stall_steps"),
        "join_s": median("join", "join_s"),
        "spare_stall_steps": median("spare", "stall_steps"),
        "spare_leave_stall_steps": median("spare_leave", "stall_steps"),
        "steps_lost_announced": sum(int(one["steps_lost"]) for one in found["leave"]),
        "steps_lost_unannounced": max(int(one["steps_lost"]) for one in found["kill"]),
        "samples_wrong": sum(int(one["wrong"]) for what in OURS for one in found[what]),
        **{name: round(statistics.median(found[name]), 3) for name in TIMES if name in found},
    }


if __name__ == "__main__":
    main()
