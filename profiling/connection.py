"""What it costs that ranks prove who they are: once per connection, and on every message.

`frame_ratio`: sealing, opening and reading one message of the usual size (a rank's report in a
pause) to the same bytes with a length and JSON alone, which is what they were without a key.
`greeting_ms`: processor time of both ends of one connection; with MUNGE the daemon's is not in it,
and `munge_greeting_ms` is the time that passes. `join_ms`: from the start of 64 ranks in one
process, their coordinator running, until all have heard that all are there; divided by 64.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import struct
import threading
import time
from collections.abc import Callable

from harness import finish, options

from hydroslurm.coordination.authentication import CoordinatorGreeting, RankGreeting
from hydroslurm.coordination.channel import find_coordinator, join_coordinator
from hydroslurm.coordination.frames import Sealer, Unsealer, pack
from hydroslurm.coordination.rendezvous import start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World
from hydroslurm.slurm.munge import Munge, MungeError, socket_of

RANKS = 64
MESSAGE = {
    "type": "counts",
    "pause": 3,
    "round": 2,
    "groups": {f"group {key}": 1234 + key for key in range(4)},
    "in_flight": 0,
    "allowance": 0,
}


def plain_pass(count: int) -> None:
    """Messages with their length, as JSON."""
    head = struct.Struct(">I")
    for _ in range(count):
        body = json.dumps(MESSAGE, separators=(",", ":")).encode()
        frame = head.pack(len(body)) + body
        (length,) = head.unpack_from(frame)
        json.loads(frame[head.size : head.size + length])


def sealed_pass(count: int) -> None:
    """The same as ranks send them."""
    key = secrets.token_bytes(32)
    sealer, unsealer = Sealer(key), Unsealer(key)
    for _ in range(count):
        unsealer.feed(sealer.seal(pack(MESSAGE)))


def greet(key: bytes, munge: Munge | None) -> None:
    """Both ends of one greeting; by MUNGE where it is given."""
    rank = RankGreeting(attempt="measured", key=None if munge else key, munge=munge)
    coordinator = CoordinatorGreeting()
    coordinator.feed(rank.hello)
    proof = rank.feed(coordinator.answer(key, attempt="measured", munge=munge))
    assert proof is not None
    coordinator.feed(proof)
    assert coordinator.session is not None


def seconds(act: Callable[[], object], clock: Callable[[], float]) -> float:
    begin_s = clock()
    act()
    return clock() - begin_s


def join_all() -> float:
    """Seconds until all ranks of one attempt have joined."""
    secret = Secret("environment", secrets.token_bytes(32))
    incarnation_id = f"measured {secrets.token_hex(4)}"
    worlds = [
        World(rank=rank, world_size=RANKS, local_rank=rank, incarnation_id=incarnation_id)
        for rank in range(RANKS)
    ]
    port = start_coordinator(worlds[0], secret)
    began_s, together = time.perf_counter(), threading.Barrier(RANKS + 1)

    def come(world: World) -> None:
        found = find_coordinator(world, secret, ports=[port], timeout_s=120)
        line = join_coordinator(found, world, [])
        messages = list(line.first)
        while not any(one["type"] == "all_joined" for one in messages):
            messages += line.unsealer.feed(line.socket.recv(1 << 16))
        together.wait()
        line.socket.close()

    for world in worlds:
        threading.Thread(target=come, args=(world,), daemon=True).start()
    together.wait(120)
    return time.perf_counter() - began_s


def munge_greetings(rounds: int) -> list[float]:
    """Milliseconds; none where there is no MUNGE."""
    try:
        munge = Munge(socket_of(os.environ))
        munge.encode(b"")
    except MungeError:
        return []
    key = secrets.token_bytes(32)
    return [seconds(lambda: greet(key, munge), time.perf_counter) * 1e3 for _ in range(rounds)]


def main() -> None:
    chosen = options("What it costs that ranks prove who they are.")
    rounds, messages = (5, 200) if chosen.quick else (60, 2000)
    frames = [
        (
            seconds(lambda: sealed_pass(messages), time.process_time) / messages,
            seconds(lambda: plain_pass(messages), time.process_time) / messages,
        )
        for _ in range(rounds)
    ]
    key = secrets.token_bytes(32)
    greetings = [seconds(lambda: greet(key, None), time.process_time) for _ in range(rounds * 4)]
    joins = [join_all() for _ in range(2 if chosen.quick else 7)]
    by_munge = munge_greetings(rounds)
    finish(
        chosen,
        "connection: per message, per greeting, per rank that joins",
        {
            "frame_us": statistics.median(sealed for sealed, _ in frames) * 1e6,
            "plain_frame_us": statistics.median(plain for _, plain in frames) * 1e6,
            "frame_ratio": statistics.median(sealed / plain for sealed, plain in frames),
            "greeting_ms": statistics.median(greetings) * 1e3,
            "munge_greeting_ms": statistics.median(by_munge) if by_munge else None,
            "join_ms": statistics.median(joins) / RANKS * 1e3,
            "ranks": RANKS,
        },
    )


if __name__ == "__main__":
    main()
