"""The ranks of a node behind one connection: real relay, coordinator and sockets, no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordination.test_coordinator import KEY, SECRET, Team, all_at_once
from processes import wait_until

from hydroslurm.coordination.channel import connect
from hydroslurm.coordination.frames import (
    BadFrame,
    pack,
    unwrap_ranks,
    unwrap_up,
    wrap_ranks,
    wrap_up,
)
from hydroslurm.coordination.relay import (
    RELAY_ENV,
    RELAY_RANKS_ENV,
    Relay,
    find_through_relay,
    is_wanted,
)
from hydroslurm.coordination.rendezvous import start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.core.events import EventKind
from hydroslurm.errors import AgreementFailed, UsageError


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay that the ranks of this process use, as the workers of an agent would."""
    made = Relay(KEY)
    made.start()
    monkeypatch.setenv(RELAY_ENV, str(made.port))
    yield made
    made.stop()


@pytest.fixture
def team(relay: Relay) -> Iterator[Team]:
    """Ranks behind the relay; rank 0 connects by itself."""
    made = Team()
    yield made
    for one in made.ranks:
        one.leave()


def connections_to(port: int) -> int:
    """Established ones on loopback, counted at the end that connected."""
    wanted = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2] == wanted and line.split()[3] == "01" for line in lines)


def test_many_ranks_share_a_connection(team: Team) -> None:
    """Agreements, in parallel, give all ranks the same values; the coordinator has two connections:
    that of rank 0, and that of the relay."""
    ranks = team.join(6)
    port = start_coordinator(ranks[0]._world, SECRET)
    assert connections_to(port) == 2
    told = all_at_once(
        *(lambda one=one, topic=topic: one.agree(topic, [topic, one.rank, "x" * 300_000])
          for topic in "ab" for one in ranks)
    )  # fmt: skip
    for number, values in enumerate(told):
        assert {rank: value[:2] for rank, value in values.items()} == {
            rank: ["ab"[number // 6], rank] for rank in range(6)
        }
    assert not team.warned


def test_the_end_of_one_rank_is_its_own(team: Team) -> None:
    """A rank that is cut off is gone for all; those beside it in the relay stay connected."""
    ranks = team.join(4)
    ranks[2]._channel.close()
    wait_until(lambda: all(one.gone == {2: True} for one in (ranks[0], ranks[1], ranks[3])), "it")
    told = all_at_once(*(lambda one=one: one.agree("x", one.rank) for one in (ranks[1], ranks[3])))
    assert all(isinstance(one, AgreementFailed) and one.missing == (2,) for one in told)
    among = [0, 1, 3]
    left = [ranks[rank] for rank in among]
    told = all_at_once(*(lambda one=one: one.agree("y", one.rank, among=among) for one in left))
    assert told == [{rank: rank for rank in among}] * 3


def test_a_rank_that_leaves_is_done_for_all(team: Team) -> None:
    """Leaving in good order is told as such."""
    ranks = team.join(3)
    ranks[1].done = True
    ranks[1].leave()
    wait_until(lambda: ranks[0].gone == {1: False} == ranks[2].gone, "the others to know")


def test_nonsense_of_one_rank_concerns_nobody_else(team: Team) -> None:
    """The coordinator checks what a relay carries as it checks everything, and has that one rank
    cut off; so it does with messages in another rank's name."""
    ranks = team.join(4)
    for rank, nonsense in ((1, {"type": "nonsense"}), (2, {"type": "agree", "topic": 3})):
        ranks[rank]._channel.send(nonsense)
        wait_until(lambda rank=rank: rank in ranks[3].gone, "the coordinator to cut it off")
    assert ranks[3].gone == {1: True, 2: True} == ranks[0].gone
    told = all_at_once(*(lambda one=one: one.agree("y", 1, among=[0, 3]) for one in ranks[::3]))
    assert told == [{0: 1, 3: 1}] * 2


def test_strangers_learn_nothing(relay: Relay) -> None:
    """Without the key nobody gets through the greeting; with it, "reach" comes first, and a rank
    that is there already cannot be replaced."""
    world = World(rank=1, world_size=2, incarnation_id="x")
    stranger = Secret("environment", secrets.token_bytes(32))
    assert connect([(LOOPBACK, relay.port)], world, stranger) is None
    known = connect([(LOOPBACK, relay.port)], world, SECRET)
    assert known is not None
    known.socket.sendall(known.sealer.seal(pack({"type": "join"})))
    assert known.socket.recv(10) == b""
    known.socket.close()
    with socket.create_connection((LOOPBACK, relay.port)) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert plain.recv(10) == b""


def test_ranks_that_cannot_use_the_relay_connect_by_themselves(
    team: Team, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay is gone, or another process has its port: the ranks find the coordinator."""
    relay.stop()
    wait_until(lambda: not connections_to(relay.port), "the relay to stop")
    ranks = team.join(3)
    assert all_at_once(*(lambda one=one: one.agree("x", one.rank) for one in ranks))[0] == {
        0: 0, 1: 1, 2: 2,
    }  # fmt: skip


def test_a_killed_coordinator_is_replaced_behind_the_relay(team: Team) -> None:
    """The ranks meet at the next one, through the same relay."""
    ranks = team.join(4)
    before = start_coordinator(ranks[0]._world, SECRET)
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            line = (process / "cmdline").read_bytes()
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if b"coordination.coordinator" in line and parent == os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
    wait_until(lambda: not connections_to(before), "the connections to end")
    lost = EventKind.COORDINATOR_LOST
    wait_until(lambda: all((rank, lost) in team.told for rank in range(4)), "all to notice")
    wait_until(lambda: all(one._connected for one in ranks), "the ranks to meet again")
    told = all_at_once(*(lambda one=one: one.agree("y", one.rank) for one in ranks))
    assert told == [{rank: rank for rank in range(4)}] * 4


def test_a_search_ends_with_the_rank_that_wanted_it(relay: Relay) -> None:
    """Nobody listens at the coordinator's ports: the rank gives up, and the relay forgets it."""
    world = World(rank=1, world_size=2, incarnation_id="nobody is there")
    environ = {RELAY_ENV: str(relay.port)}
    begun_s = time.monotonic()
    found = find_through_relay(world, SECRET, environ, timeout_s=0.3, stop=lambda: False)
    assert found is None
    assert time.monotonic() - begun_s < 60
    wait_until(lambda: not relay._upstreams, "the relay to forget the search")


def test_who_shares_a_connection() -> None:
    """Large worlds with several ranks on a node; a bad number is named."""
    assert is_wanted({}, world_size=256, local_world_size=8)
    assert not is_wanted({}, world_size=255, local_world_size=8)
    assert not is_wanted({}, world_size=4096, local_world_size=1)
    assert is_wanted({RELAY_RANKS_ENV: "2"}, world_size=2, local_world_size=2)
    with pytest.raises(UsageError, match=r"HYDROSLURM_RELAY_RANKS='many' is not a number"):
        is_wanted({RELAY_RANKS_ENV: "many"}, world_size=2, local_world_size=2)


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_frames_of_a_relay(cut: int) -> None:
    """What is wrapped comes out again; what is cut short is refused."""
    up = wrap_up([(3, b"{}"), (1 << 19, b""), (3, b"[1]")])
    assert unwrap_up(up) == [(3, b"{}"), (1 << 19, b""), (3, b"[1]")]
    assert unwrap_ranks(wrap_ranks((5, 6))) == (5, 6)
    with pytest.raises(BadFrame):
        unwrap_up(up[:-1])
    with pytest.raises(BadFrame):
        unwrap_ranks(wrap_ranks((5, 6))[:cut])
