"""The coordinator as ranks meet it: real processes and sockets, no torch."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kit.team import KEY, SECRET, Team, all_at_once, coordinator_at
from processes import cpu_s, wait_until

from hydroslurm.coordination import channel, client
from hydroslurm.coordination.authentication import MAC_BYTES, Greeting, Sealer, pack
from hydroslurm.coordination.client import CoordinatorClient
from hydroslurm.coordination.messages import check_from_coordinator
from hydroslurm.coordination.rendezvous import start_coordinator
from hydroslurm.coordination.world import World
from hydroslurm.errors import CoordinatorLost, UsageError

WELCOME = {"type": "welcome"}
JOIN = {"type": "join", "incarnation_id": "", "rank": 1, "world_size": 2, "cut_off": []}


@pytest.fixture
def team() -> Iterator[Team]:
    """An incarnation without ranks; all have left afterwards."""
    made = Team()
    yield made
    for one in made.ranks:
        one.leave()


def test_all_get_all_values(team: Team) -> None:
    """The same mapping, in order of the ranks, to all; several agreements may go on at once. Two of
    three wait for nobody else; circles that differ fail for both."""
    ranks = first, second, third = team.join(3)
    calls = [
        lambda one=one, topic=topic: one.agree(topic, [topic, one.rank])
        for topic in ("a", "b")
        for one in ranks
    ]
    for number, told in enumerate(all_at_once(*calls)):
        topic = "ab"[number // 3]
        assert list(told.items()) == [(rank, [topic, rank]) for rank in range(3)]
    told = all_at_once(
        lambda: first.agree("x", 1, among=[0, 2]), lambda: third.agree("x", 3, among=[2, 0])
    )
    assert told == [{0: 1, 2: 3}] * 2
    failed = all_at_once(
        lambda: first.agree("y", 1, among=[0, 1]), lambda: second.agree("y", 2, among=[1, 2])
    )
    assert all("asked among" in str(error) for error in failed)


def test_a_value_that_only_one_rank_needs(team: Team) -> None:
    """With collect_at a value goes to the ranks that are named; one that is for all goes to all,
    in the same agreement. What many ranks have alike arrives at each of them."""
    first, second, third = team.join(3)
    told = all_at_once(
        lambda: first.agree("x", "told to all"),
        lambda: second.agree("x", [1.5], collect_at=[0]),
        lambda: third.agree("x", [True], collect_at=[0, 2]),
    )
    assert told == [
        {0: "told to all", 1: [1.5], 2: [True]},
        {0: "told to all"},
        {0: "told to all", 2: [True]},
    ]
    told = all_at_once(
        lambda: first.agree("y", 1), lambda: second.agree("y", True), lambda: third.agree("y", 1)
    )
    assert [list(map(repr, one.values())) for one in told] == [["1", "True", "1"]] * 3
    with pytest.raises(UsageError, match="at most 4"):
        first.agree("z", 1, collect_at=range(5))


def test_a_value_that_cannot_be_read_fails_its_agreement_only(team: Team) -> None:
    """The coordinator does not read values, so what a broken rank submits reaches the others: they
    stay connected."""
    first, second = team.join(2)
    asking = {"type": "agree", "topic": "x", "value": "[" * 99, "among": None, "collect_at": None}
    second._send(asking)
    (failed,) = all_at_once(lambda: first.agree("x", 1))
    assert "cannot be read" in str(failed)
    assert all_at_once(lambda: first.agree("y", 1), lambda: second.agree("y", 1))[0] == {0: 1, 1: 1}


def test_a_rank_with_thousands_of_open_files(team: Team) -> None:
    """Descriptors above 1023, as a rank with many files of data has them, are nothing special."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        ranks = team.join(2)
        assert all(one._channel and one._channel._connection.fileno() > 1023 for one in ranks)
        told = all_at_once(lambda: ranks[0].agree("y", 0), lambda: ranks[1].agree("y", 1))
        assert told == [{0: 0, 1: 1}] * 2
    finally:
        for fd in files:
            os.close(fd)
        for one in team.ranks:
            one.leave()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_circles_of_thousands_that_differ() -> None:
    """What says so stays short enough to be sent, and the connections live on."""
    world = World(rank=0, world_size=9000, incarnation_id="many")
    port = start_coordinator(world, SECRET)
    with Visitor(port) as first, Visitor(port) as second:
        join(world, first, second)
        first.send(ask_among([[rank, rank] for rank in range(0, 9000, 2)]))
        second.send(ask_among([[rank, rank] for rank in range(1, 9000, 2)]))
        (failed,) = second.receive()
        assert check_from_coordinator(failed)["message"].startswith("asked among ranks [")
    os.kill(coordinator_at(port), signal.SIGKILL)


def test_who_gives_up_fails_it_for_all(team: Team) -> None:
    """A time-out, or a cancel, of one rank is the same failure for all, those who come later
    included."""
    first, second, third = team.join(3)
    cancel = threading.Event()
    cancel.set()
    failed = all_at_once(
        lambda: first.agree("slow", 1, timeout_s=0.2), lambda: second.agree("slow", 2)
    )
    failed += all_at_once(lambda: third.agree("slow", 3))
    assert [error.withdrawn for error in failed] == [(0,)] * 3
    assert len({str(error) for error in failed}) == 1
    failed = all_at_once(
        lambda: first.agree("off", 1, cancel=cancel), lambda: second.agree("off", 2)
    )
    assert [error.withdrawn for error in failed] == [(0,)] * 2


def test_a_rank_that_is_gone_is_missed_by_all(team: Team) -> None:
    """Cut off in the middle of an agreement, or gone before it: the others get its number."""
    first, second, third = team.join(3)
    waiting = threading.Thread(target=cut_off, args=(third, lambda: "x" in first._agreements._open))
    waiting.start()
    failed = all_at_once(lambda: first.agree("x", 1), lambda: second.agree("x", 2))
    waiting.join()
    failed += all_at_once(lambda: second.agree("y", 1))
    assert [error.missing for error in failed] == [(2,)] * 3
    assert first.gone == {2: True}


def cut_off(rank: CoordinatorClient, when: Callable[[], bool]) -> None:
    """As if its process had been killed."""
    wait_until(when, "the moment")
    rank._leaving = True
    assert rank._channel is not None
    rank._channel._connection.shutdown(socket.SHUT_RDWR)


def test_what_a_rank_had_said_counts_when_it_dies_then(team: Team) -> None:
    """A value that was handed in stays, so that what all have acknowledged can be finished."""
    first, second = team.join(2)
    threading.Thread(
        target=lambda: all_at_once(lambda: second.agree("x", "mine", timeout_s=5.0)), daemon=True
    ).start()
    wait_until(lambda: "x" in second._agreements._open, "its question")
    second.agree("after", 2, among=[1])  # has gone the same way, behind it
    cut_off(second, lambda: True)
    wait_until(lambda: first.gone, "the death")
    assert first.agree("x", "ours") == {0: "ours", 1: "mine"}


def test_a_stop_that_the_coordinator_took_along_is_called_again(team: Team) -> None:
    """Called on the coordinator that is killed before all have proposed: the barrier is held
    through the next one."""
    ranks = team.join(2)
    port = port_of(ranks[0])
    os.kill(coordinator_at(port), signal.SIGSTOP)
    ranks[1].call("stop", "SIGTERM")
    os.kill(coordinator_at(port), signal.SIGKILL)
    wait_until(lambda: all(one.stop_barriers.is_called for one in ranks), "the stop to be heard of")
    held = all_at_once(*(one.stop_barriers.arrive for one in ranks))
    assert [barrier.message for (barrier,) in held] == ["SIGTERM"] * 2


def test_without_all_ranks_there_is_no_other_coordinator(team: Team) -> None:
    """A rank is gone when the coordinator is killed: the others are told once, and warned."""
    first, second, third = team.join(3)
    cut_off(third, lambda: True)
    wait_until(lambda: first.gone and second.gone, "the death")
    os.kill(coordinator_at(port_of(first)), signal.SIGKILL)
    wait_until(lambda: first.lost and second.lost, "both to know")
    assert len(team.warned) == 2
    with pytest.raises(CoordinatorLost):
        first.agree("y", 1)


def port_of(rank: CoordinatorClient) -> int:
    """Of the coordinator that it is connected with."""
    assert rank._channel is not None
    return int(rank._channel._connection.getpeername()[1])


# --- who may come in
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def coordinator() -> Iterator[tuple[World, int]]:
    """A coordinator of two ranks that nobody has joined; gone afterwards."""
    world = World(rank=0, world_size=2, incarnation_id=f"door {uuid.uuid4()}")
    port = start_coordinator(world, SECRET)
    yield world, port
    with suppress(ValueError):
        os.kill(coordinator_at(port), signal.SIGKILL)


class Visitor:
    """A connection to the coordinator, with the key or without."""

    def __init__(self, port: int) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), timeout=60)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def greet(self) -> None:
        """Prove that we know the key."""
        greeting = Greeting.of_rank(key=KEY, open_credential=lambda _: pytest.fail("has the key"))
        self.line.sendall(greeting.hello)
        while greeting.session is None:
            data = self.line.recv(1 << 16)
            assert data, "hung up on"
            self.line.sendall(greeting.feed(data))
        self.sealer = greeting.session.sealer
        self.unsealer = greeting.session.unsealer

    def send(self, *messages: Any) -> None:
        self.line.sendall(b"".join(self.sealer.seal(pack(one)) for one in messages))

    def receive(self) -> list[Any]:
        """What the coordinator says next; nothing when it has hung up."""
        while True:
            try:
                data = self.line.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return []
            if answers := self.unsealer.feed(data):
                return answers

    def is_closed(self) -> bool:
        """Whether the coordinator hangs up."""
        with suppress(ConnectionResetError):
            while self.line.recv(1 << 16):
                pass
        return True


def join(world: World, *visitors: Visitor) -> None:
    """As the first ranks."""
    for rank, visitor in enumerate(visitors):
        visitor.greet()
        visitor.send(hello(world, rank=rank))
        assert visitor.receive()[0] == WELCOME


def until(visitor: Visitor, kind: str) -> Any:
    """The next message of this kind; what comes before it is passed over."""
    while True:
        found = [one for one in visitor.receive() if one["type"] == kind]
        if found:
            return found[-1]


def ask_among(runs: list[list[int]]) -> dict[str, Any]:
    return {"type": "agree", "topic": "t", "value": "1", "among": runs, "collect_at": None}


def ask(port: int, *messages: Any) -> list[Any]:
    """What the coordinator answers to a rank, until it has answered once or hung up."""
    with Visitor(port) as visitor:
        visitor.greet()
        visitor.send(*messages)
        return visitor.receive()


def hello(world: World, rank: int = 1, **changes: Any) -> dict[str, Any]:
    known = {"incarnation_id": world.incarnation_id, "world_size": world.world_size}
    return {**JOIN, **known, "rank": rank, **changes}


@pytest.mark.parametrize(
    ("changes", "same_incarnation"),
    [
        ({"incarnation_id": "the last one"}, False),
        ({"rank": 1 << 20}, True),
        ({"world_size": 3}, True),
    ],
)
def test_a_stranger_is_refused_with_a_reason(
    changes: dict[str, Any], same_incarnation: bool, coordinator: tuple[World, int]
) -> None:
    """Another incarnation, a rank that does not exist, another number of ranks: each gets the
    reason, and the coordinator goes on."""
    world, port = coordinator
    (answer,) = ask(port, hello(world, **changes))
    assert answer["type"] == "refused"
    assert answer["same_incarnation"] is same_incarnation
    assert ask(port, hello(world))[0] == WELCOME


def _said(message: Any) -> Callable[[Sealer], bytes]:
    return lambda sealer: sealer.seal(pack(message))


def _recoded(frame: bytes) -> bytes:
    return frame[:4] + bytes(MAC_BYTES) + frame[4 + MAC_BYTES :]


JSON = b'\x00\x00\x00\x2a{"type":"join","rank":Infinity,"incarnation_id":"","cut_off":[]}'
GREETING = b"hydroslurm 1\n"
NONSENSE: dict[str, bytes | Callable[[Sealer], bytes]] = {
    # of one that does not know the key
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "deep, without the key": b"[" * 60_000,
    "a message, without the key": JSON,
    "no credential": GREETING + b"m" + b"\0" * 34,
    "no way to greet": GREETING + b"?" + b"\0" * 34,
    "another key, and much": GREETING + b"k" + b"\0" * 34 + b"\0" * 100_000,
    # of one that does
    "list": _said([1, 2]),
    "nothing": _said(None),
    "agree without words": _said({"type": "agree"}),
    "join without words": _said({"type": "join"}),
    "type that is a list": _said({"type": ["join"]}),
    "a word more": _said({**JOIN, "more": 1}),
    "rank that is no integer": _said({**JOIN, "rank": 1.0}),
    "rank that is true": _said({**JOIN, "rank": True}),
    "numbers for groups": _said({**JOIN, "cut_off": [1]}),
    "deep": lambda sealer: sealer.seal(b"[" * 60_000),
    "endless": lambda sealer: sealer.seal(b'{"type": "join", "rank": Infinity}'),
    "400 digits": lambda sealer: sealer.seal(b"9" * 400),
    "too long": lambda sealer: sealer.seal(b"," * (1 << 21)),
    # of whoever sits between, and changes a frame
    "changed": lambda sealer: sealer.seal(pack(JOIN))[:-1] + b" ",
    "with another code": lambda sealer: _recoded(sealer.seal(pack(JOIN))),
    "repeated": lambda sealer: 2 * sealer.seal(pack({**JOIN, "incarnation_id": "refused"})),
    "of a length that nobody sends": lambda _: b"\xff" * 4 + bytes(MAC_BYTES),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_ends_its_own_connection(nonsense: str, coordinator: tuple[World, int]) -> None:
    """Before it joins and after; ranks come in as before."""
    world, port = coordinator
    said = NONSENSE[nonsense]
    with Visitor(port) as visitor, Visitor(port) as other:
        if callable(said):
            visitor.greet()
            said = said(visitor.sealer)
        with suppress(ConnectionError):
            visitor.line.sendall(said)
        is_greeted = callable(NONSENSE[nonsense])
        assert visitor.receive() == [] if is_greeted else visitor.is_closed()
        join(world, other)
        other.send(ask_among([[0, 0], [7, 7]]))
        assert other.receive() == []
    assert ask(port, hello(world))[0] == WELCOME


def test_a_fault_of_the_coordinators_own_is_told(
    team: Team, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends the connection of the rank whose message it was, and a rank says what it was."""
    (tmp_path / "sitecustomize.py").write_text(
        "from hydroslurm.coordination.state import CoordinatorState\n"
        "CoordinatorState._call_barrier = lambda self, rank, message: 1 // 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ranks = team.join(3)
    ranks[0].call("save")
    wait_until(lambda: ranks[1].gone == {0: True}, "the end of rank 0")
    wait_until(lambda: any("ZeroDivisionError" in one for one in team.warned), "the fault")


@contextmanager
def coordinator_of_its_own(
    *patches: str, parent_pid: int = os.getpid()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A coordinator of two ranks in which something is other than usual, and its port."""
    code = "\n".join(
        [
            "import resource, sys",
            "from hydroslurm.coordination import coordinator, server",
            *patches,
            "sys.exit(coordinator.main())",
        ]
    )
    options = {
        "incarnation_id": "own", "world_size": 2, "host": "127.0.0.1", "ports": [0],
        "parent_pid": parent_pid, "key": KEY.hex(), "credentials": [],
    }  # fmt: skip
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(options) + "\n")
        process.stdin.flush()
        yield process, json.loads(process.stdout.readline())["port"]
        process.kill()


def test_of_many_silent_connections_the_oldest_go() -> None:
    """Of more than there are places for; ranks join meanwhile."""
    with coordinator_of_its_own("server.GREETING_S = 600.0") as (_, port):
        silent = [Visitor(port) for _ in range(400)]
        with Visitor(port) as first, Visitor(port) as second:
            join(World(rank=0, world_size=2, incarnation_id="own"), first, second)
            assert silent[0].is_closed()
        for one in silent:
            one.line.close()


def test_a_coordinator_without_descriptors_waits_and_does_not_spin() -> None:
    """With fewer files than connections it drops those that say nothing, and goes on; its
    processor time stays that of a sleeper."""
    world = World(rank=0, world_size=2, incarnation_id="own")
    few = (
        "server.MAX_UNAUTHENTICATED = 10_000",  # so that the descriptors are what runs out
        "server.GREETING_S = 600.0",
        "few = lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))",
        "coordinator.allow_descriptors = few",
    )
    with coordinator_of_its_own(*few) as (process, port):
        silent = [Visitor(port) for _ in range(120)]
        with Visitor(port) as first, Visitor(port) as second:
            join(world, first, second)
            # those that wait in the queue are more than it can take
            silent += [Visitor(port) for _ in range(60)]
            before_s, begin_s = cpu_s(process.pid), time.monotonic()
            first.send(ask_among([[0, 0]]))
            until(first, "agreed")
            wait_until(lambda: time.monotonic() - begin_s > 1.0, "a second")
            spun = (cpu_s(process.pid) - before_s) / (time.monotonic() - begin_s)
            assert spun < 0.5
        for one in silent:
            one.line.close()


def test_too_few_descriptors_for_the_ranks_are_said() -> None:
    """A hard limit below the number of ranks: what it is, and where it is raised."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)); "
        "from hydroslurm.coordination.world import World; "
        "from hydroslurm.coordination.rendezvous import start_coordinator; "
        "from hydroslurm.coordination.secret import Secret; "
        "start_coordinator(World(rank=0, world_size=4096, incarnation_id='many'), "
        "Secret('environment', bytes(32)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "this node allows 300" in done.stderr
    assert "LimitNOFILE" in done.stderr


def squatted() -> tuple[Team, tuple[int, ...], list[socket.socket]]:
    """A team whose candidate ports nobody else has taken, and listeners at all of them but one."""
    while True:
        team, squatters = Team(), []
        world = World(rank=0, world_size=2, incarnation_id=team.incarnation_id)
        *taken, free = ports = world.coordinator_ports(KEY)
        try:
            socket.create_server(("127.0.0.1", free)).close()
            for port in taken:
                squatters.append(socket.create_server(("127.0.0.1", port)))
            return team, ports, squatters
        except OSError:  # another process has one of them
            for one in squatters:
                one.close()


def test_a_listener_at_the_first_ports_is_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others listen at all candidate ports but one, silently or talking: the coordinator is found
    at once, and nobody is told anything."""
    monkeypatch.setattr(channel, "CONNECT_S", 1.0)  # what a silent listener costs
    team, ports, squatters = squatted()
    heard: list[bytes] = []

    def listen(one: socket.socket) -> None:
        with suppress(OSError):
            while True:
                line, _ = one.accept()
                with line, suppress(ConnectionError):
                    heard.append(line.recv(1 << 16))
                    line.sendall(b"\0" * 66)

    for one in squatters[::2]:
        threading.Thread(target=listen, args=(one,), daemon=True).start()
    ranks = team.join(2)
    assert port_of(ranks[1]) == ports[-1]
    assert heard
    assert all(team.incarnation_id.encode() not in data and KEY not in data for data in heard)
    for rank in ranks:
        rank.leave()
    for one in squatters:
        one.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        one.close()


def test_a_report_that_refers_to_none_is_asked_for_in_full(coordinator: tuple[World, int]) -> None:
    """Ranks with nothing new to report say so in the same bytes; what one has told another
    coordinator, or none, this one does not take for any number."""
    world, port = coordinator
    with Visitor(port) as first, Visitor(port) as second:
        join(world, first, second)
        until(first, "all_joined")  # or the second may join a pause that is in its second round
        first.send({"type": "pause"})
        hold = until(second, "hold")
        said = {"type": "counts", "pause": hold["pause"], "in_flight": 0, "allowance": 0}
        first.send({**said, "round": 1, "groups": {"w": 1}})
        second.send({**said, "round": 1, "groups": None})
        assert until(second, "hold") == hold
        second.send({**said, "round": 1, "groups": {"w": 2}})
        first.send({"type": "members", "groups": {"w": [[0, 1]]}})
        assert until(first, "let_through")["n"] == 1
        assert until(second, "count")["round"] == 2
        first.send({**said, "round": 2, "groups": {"w": 2}})
        second.send({**said, "round": 2, "groups": None})
        assert until(second, "count")["round"] == 3
        first.send({**said, "round": 3, "groups": None})
        second.send({**said, "round": 3, "groups": None, "in_flight": None})
        assert until(second, "all_parked")["in_flight"] is None  # one does not know


def test_a_rank_that_has_joined_cannot_come_twice(coordinator: tuple[World, int]) -> None:
    """The second process with the same number is refused, also when the first has died."""
    world, port = coordinator

    def reason() -> str:
        return str(ask(port, hello(world))[0].get("reason"))

    with Visitor(port) as visitor:
        visitor.greet()
        visitor.send(hello(world))
        assert visitor.receive()
        assert "joined already" in reason()
    wait_until(lambda: "have ended" in reason(), "the coordinator to see the end")


def test_the_process_of_the_coordinator(coordinator: tuple[World, int]) -> None:
    """It lives on through everything that a job step gets but SIGKILL. Neither the key nor the
    attempt is in its command line, which everybody can read, nor in its environment."""
    world, port = coordinator
    process = Path(f"/proc/{coordinator_at(port)}")
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    for secret in (KEY.hex(), world.incarnation_id, "HYDROSLURM_STEP_KEY"):
        assert secret.encode() not in shown
    for signo in (signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(coordinator_at(port), signo)
    assert ask(port, hello(world))[0] == WELCOME


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, team: Team) -> None:
    """A rank that finds no coordinator trains alone, and says where it looked."""
    monkeypatch.setattr(client, "JOIN_S", 0.5)
    (lonely,) = team.join(2, 1)
    wait_until(lambda: lonely.lost, "it to give up")
    assert "MASTER_ADDR" in str(lonely.lost)
    assert "pauses alone" in team.warned[0]


def test_a_coordinator_that_nobody_joined_ends_after_its_parent() -> None:
    """Rank 0 starts the coordinator and ends at once, as a short program does: no process stays
    behind."""
    # its parent is another process than the one that has asked for it
    with coordinator_of_its_own("coordinator.LINGER_S = 0.2", parent_pid=os.getppid()) as (
        process,
        _,
    ):
        assert process.wait(60) == 0
