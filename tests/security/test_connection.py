"""The connection between ranks, as another user of the machine attacks it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoint.states import write
from kit.team import Team, all_at_once, coordinators_at
from processes import captured, wait_until

import hydroslurm
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.coordination.authentication import (
    MAGIC,
    Greeting,
    GreetingFailed,
    pack,
)
from hydroslurm.coordination.channel import find_coordinator, join_coordinator
from hydroslurm.coordination.rendezvous import start_coordinator
from hydroslurm.coordination.secret import KEYS, Secret, find_secret
from hydroslurm.coordination.world import KEY_ENV, World
from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import NoSecret, SaveFailed, UntrustedFile, UsageError
from hydroslurm.slurm.munge import Munge

PACKAGE = Path(hydroslurm.__file__).parent

ATTACKS = """
    import json, socket, struct, sys, time
    port = int(sys.argv[1])
    def frame(body): return struct.pack(">I", len(body)) + body
    hello = {"type": "join", "incarnation_id": sys.argv[2], "rank": 1, "world_size": 2}
    hello["cut_off"] = []
    bodies = [
        json.dumps({**hello, "rank": float("inf")}).encode(),
        b"[" * 60000,
        json.dumps(hello).encode(),
        json.dumps({"type": "pause"}).encode(),
        json.dumps({"type": "call_barrier", "kind": "stop", "message": "x"}).encode(),
        json.dumps({"type": "agree", "topic": "save/1/open", "value": {"folder": "/"}}).encode(),
    ]
    heads = [b"", b"hydroslurm 1\\n" + b"k" + bytes(34), b"hydroslurm 1\\n" + b"m" + bytes(34)]
    for head in heads:
        for body in bodies:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
                    line.sendall(head + frame(body) + frame(body))
                    while line.recv(1 << 16):
                        pass
            except ConnectionError:
                pass
    print("all refused", flush=True)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(800)]
    print("holding", flush=True)
    sys.stdin.readline()
"""


def test_a_stranger_can_neither_end_nor_steer_nor_crowd_out(stranger: Any) -> None:
    """All that ended, stopped or starved a job before: the ranks notice nothing of it."""
    team = Team()
    ranks = team.join(2)
    channel = ranks[0]._channel
    assert channel is not None
    port = channel._connection.getpeername()[1]
    with stranger.popen(
        "/usr/bin/python3", "-c", textwrap.dedent(ATTACKS), str(port), team.incarnation_id,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as attack:  # fmt: skip
        assert attack.stdout.readline() == "all refused\n"
        told = all_at_once(*(lambda one=one: one.agree("one", one.rank) for one in ranks))
        assert told == [{0: 0, 1: 1}] * 2
        assert attack.stdout.readline() == "holding\n"
        told = all_at_once(*(lambda one=one: one.agree("two", one.rank) for one in ranks))
        assert told == [{0: 0, 1: 1}] * 2
        assert [one.gone for one in ranks] == [{}, {}]
        assert not any(one.stop_barriers.is_called or one.lost for one in ranks)
        for one in ranks:
            one.done = True
            one.leave()
        # the stranger still holds its connections: they keep nothing alive
        wait_until(lambda: not coordinators_at(port), "the coordinator to end")
        attack.stdin.write("\n")


# --- what a peer says


class ForgingPeers:
    """Rank 1 of two; rank 0 answers what it likes."""

    rank, world_size = 1, 2

    def __init__(self, forged: Mapping[str, Any]) -> None:
        self._forged = forged

    def agree(self, topic: str, value: Any, **_: Any) -> Mapping[int, Any]:
        what = topic.rpartition("/")[2]
        mine = value if value is not None else {}
        answer = (
            {**mine, **self._forged} if what == "open" else {"failed": ["failed", "on purpose"]}
        )
        return {0: answer, 1: mine}


JOINT = ".tmp-step-000000003.0123abcd.17.0123abcd.joint"


@pytest.mark.parametrize(
    "folder",
    [
        "{victim}",
        "../victim",
        "victim",
        ".",
        f"{JOINT}/../../victim",
        JOINT.replace("3.", "4."),
        17,
    ],
)
def test_a_peer_cannot_name_any_folder(folder: Any, tmp_path: Path) -> None:
    """What is not the name of a save of this step ends the save, and no file is touched."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    shutil.copytree(victim, tmp_path / "run" / "victim")
    if isinstance(folder, str):
        folder = folder.format(victim=victim)
    forged = {"folder": folder, "header": "{}"}
    store = CheckpointStore(tmp_path / "run", peers=ForgingPeers(forged))
    with pytest.raises(SaveFailed, match="rank 0"):
        write(store, State(shared={}, own={}), step=3, kind="manual")
    assert (victim / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "run" / "victim" / "thesis.tex").exists()


# --- how the key comes to the ranks


@pytest.fixture(scope="module")
def munged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon of MUNGE that every user of the machine can ask, as on a real cluster."""
    program = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("needs munged (Debian: munge)")
    folder = Path("/tmp") / f"hs-munge-{os.getpid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    private = tmp_path_factory.mktemp("munge")
    key = private / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    command = [program, "--foreground", "--force", f"--key-file={key}"]
    command += [f"--socket={folder}/socket", f"--pid-file={private}/pid"]
    command += [f"--seed-file={private}/seed", f"--log-file={private}/log"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until((folder / "socket").exists, "munged's socket")
        yield str(folder / "socket")
        process.terminate()
    shutil.rmtree(folder, ignore_errors=True)


def greeting_of(secret: Secret, world: World) -> Greeting:
    greeting = secret.greeting(world)
    assert greeting is not None
    return greeting


def world_of(attempt: str, rank: int = 0) -> World:
    return World(rank=rank, world_size=2, local_rank=rank, incarnation_id=attempt)


def test_munge_gives_the_key_to_this_user_only(stranger: Any, munged: str, tmp_path: Path) -> None:
    """A rank without a key gets it; a stranger with a credential of its own does not, nor does one
    that has seen ours."""
    attempt = f"munge {secrets.token_hex(4)}"
    environ = {"HYDROSLURM_MUNGE_SOCKET": munged}
    first, second = world_of(attempt), world_of(attempt, rank=1)
    secret = find_secret(first, environ, folder=None)
    assert secret.source == "munge"
    port = start_coordinator(first, secret)
    assert find_secret(second, environ, folder=None).key is None
    found = find_coordinator(
        second, find_secret(second, environ, folder=None), ports=[port], timeout_s=30
    )
    assert found.session.key == secret.key

    public = stranger.home / "code"
    for package in (PACKAGE, Path(msgspec.__file__).parent):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, public / package.name, ignore=ignored)
    code = """
        import sys
        from hydroslurm.coordination.channel import find_coordinator
        from hydroslurm.coordination.secret import find_secret
        from hydroslurm.coordination.world import World
        world = World(rank=1, world_size=2, local_rank=1, incarnation_id=sys.argv[3])
        secret = find_secret(world, {"HYDROSLURM_MUNGE_SOCKET": sys.argv[1]}, folder=None)
        try:
            found = find_coordinator(world, secret, ports=[int(sys.argv[2])], timeout_s=2)
            print("has the key", found.session.key.hex())
        except Exception as error:
            print(error)
    """
    tried = stranger.python(code, munged, str(port), attempt, env={"PYTHONPATH": str(public)})
    assert "has the key" not in tried
    assert "refuses this rank" in tried
    found.socket.close()
    joined = join_coordinator(
        find_coordinator(first, secret, ports=[port], timeout_s=30), first, {"pid": os.getpid()}
    )
    joined.socket.close()


def test_strangers_cost_munged_nothing_and_keep_no_rank_out(munged: str, tmp_path: Path) -> None:
    """The coordinator asks munged for nothing once it listens, so that no flood of greetings stands
    before a rank's. A flood that stays connected drives out its own connections only."""
    attempt = f"flood {secrets.token_hex(4)}"
    first, second = world_of(attempt), world_of(attempt, rank=1)
    link = tmp_path / "munged"
    link.symlink_to(munged)
    secret = find_secret(first, {"HYDROSLURM_MUNGE_SOCKET": str(link)}, folder=None)
    port = start_coordinator(first, secret)
    link.unlink()
    hello = MAGIC + b"m" + bytes(34)
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(hello)
    theirs = find_secret(second, {"HYDROSLURM_MUNGE_SOCKET": munged}, folder=None)
    slow = greeting_of(theirs, second)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as rank:
        rank.sendall(slow.hello)
        answer = rank.recv(1 << 16)
        flood = [socket.create_connection(("127.0.0.1", port), 60, ("127.0.0.2", 0))
                 for _ in range(600)]  # fmt: skip
        flood[-1].sendall(hello)
        assert flood[-1].recv(1), "the last of the flood has been served"
        rank.sendall(slow.feed(answer))
        assert slow.session is not None
        assert slow.session.key == secret.key
        join = {"type": "join", "incarnation_id": attempt, "rank": 1, "world_size": 2}
        rank.sendall(slow.session.sealer.seal(pack({**join, "cut_off": []})))
        assert slow.session.unsealer.feed(rank.recv(1 << 16)) == [{"type": "welcome"}]
    for line in flood:
        line.close()


def test_a_credential_is_for_one_attempt_and_proves_nothing_alone(munged: str) -> None:
    """One that is heard on the way opens nothing: ranks of another attempt refuse it, and whoever
    repeats it without its key is no coordinator."""
    environ, attempt = {"HYDROSLURM_MUNGE_SOCKET": munged}, secrets.token_hex(4)
    first, second = world_of(attempt), world_of(attempt, rank=1)
    credentials = find_secret(first, environ, folder=None).credentials(first)
    secret = find_secret(second, environ, folder=None)
    other = greeting_of(secret, world_of("other", rank=1))
    with pytest.raises(GreetingFailed, match="not the coordinator of this job"):
        other.feed(Greeting.of_coordinator(secrets.token_bytes(32), credentials).feed(other.hello))
    for _ in range(2):  # without the key, and when it has come
        rank = greeting_of(secret, second)
        forger = Greeting.of_coordinator(secrets.token_bytes(32), credentials)
        with pytest.raises(GreetingFailed, match="does not know the key"):
            rank.feed(forger.feed(rank.hello))
    made_up = [Munge(munged).encode(b"hydroslurm key\0" + bytes(64))]
    third = greeting_of(find_secret(world_of("third", 1), environ, folder=None), world_of("third"))
    with pytest.raises(GreetingFailed, match="not the coordinator of this job"):
        third.feed(Greeting.of_coordinator(bytes(32), made_up).feed(third.hello))


def test_a_rank_proves_that_it_has_the_key_before_anything_of_it_is_read() -> None:
    """Each end has a proof of its own: what the coordinator has just sent is none of a rank's."""
    key = secrets.token_bytes(32)

    def wrong(answer: bytes, right: bytes) -> Iterator[bytes]:
        yield from (right[::-1], answer[-len(right) :], bytes(len(right)))

    for number in range(3):
        coordinator = Greeting.of_coordinator(key, ())
        rank = Greeting.of_rank(key=key, open_credential=lambda _: pytest.fail("it has the key"))
        answer = coordinator.feed(rank.hello)
        proof = list(wrong(answer, rank.feed(answer)))[number]
        with pytest.raises(GreetingFailed, match="does not know the key"):
            coordinator.feed(proof)
        assert coordinator.session is None


NO_MUNGE = {"HYDROSLURM_MUNGE_SOCKET": "/nowhere/munge.socket"}


def test_a_key_file_is_for_the_owner_only(tmp_path: Path, stranger: Any) -> None:
    """Written with mode 0600 below the run folder, read by the other ranks, gone at the end. A
    folder of a stranger, who could read and replace what is written there, is refused."""
    attempt = "file"
    first = find_secret(world_of(attempt), NO_MUNGE, folder=tmp_path)
    second = find_secret(world_of(attempt, rank=1), NO_MUNGE, folder=tmp_path)
    assert first.source == second.source == "file"
    (path,) = (tmp_path / KEYS).iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / KEYS).stat().st_mode & 0o777 == 0o700
    assert first.key is not None
    rank = greeting_of(second, world_of(attempt))
    rank.feed(Greeting.of_coordinator(first.key, ()).feed(rank.hello))
    assert rank.session is not None
    os.chown(path, stranger.uid, stranger.gid)
    with pytest.raises(UntrustedFile, match=f"uid {stranger.uid}"):
        second.greeting(world_of(attempt))
    first.forget()
    assert second.greeting(world_of(attempt)) is None
    os.chown(tmp_path / KEYS, stranger.uid, stranger.gid)
    with pytest.raises(NoSecret, match=f"belongs to uid {stranger.uid}"):
        find_secret(world_of("planted"), NO_MUNGE, folder=tmp_path)


def test_without_a_key_nobody_connects() -> None:
    """Where there is no way to one, the message says what is missing, and each thing that would
    help; a key that is none is refused, and not repeated: it may be half of a real one."""
    with pytest.raises(NoSecret) as raised:
        find_secret(world_of("nothing"), NO_MUNGE, folder=None)
    for word in (KEY_ENV, "MUNGE", "srun --preempt", "HYDROSLURM_RUN_DIR", "munged"):
        assert word in str(raised.value)
    with pytest.raises(UsageError, match="64 hexadecimal digits") as refused:
        find_secret(world_of("bad"), {KEY_ENV: "abc123"}, folder=None)
    assert "abc123" not in str(refused.value)


# --- on a real Slurm

RANK = """
import contextlib, json, os
import hydroslurm
world = hydroslurm.set_torch_environment()
import torch, torch.distributed as dist
mine = hydroslurm.install() if not hydroslurm.is_installed() else hydroslurm.controller()
assert mine.ranks.wait_for_all(timeout_s=120)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
port = int(os.environ["MASTER_PORT"])
listen = [l.split() for n in ("tcp", "tcp6") for l in list(open(f"/proc/net/{n}"))[1:]]
at = [l[1].split(":")[0] for l in listen if l[3] == "0A" and int(l[1].split(":")[1], 16) == port]
cmdlines = ""
for pid in filter(str.isdecimal, os.listdir("/proc")):
    with contextlib.suppress(OSError):
        cmdlines += open(f"/proc/{pid}/cmdline").read()
key = os.environ.get("HYDROSLURM_STEP_KEY")
said = {"rank": world.rank, "sum": ones.item(), "port": port, "at": at,
        "shown": bool(key) and key in cmdlines}
dist.barrier()
hydroslurm.uninstall()
dist.destroy_process_group()
print(json.dumps(said), flush=True)
"""


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("options", "source"),
    [((), "munge"), (("--preempt",), "environment")],
    ids=["plain", "preempt"],
)
def test_where_the_key_is_from(
    options: tuple[str, ...], source: str, pause_cluster: DevCluster, tmp_path: Path
) -> None:
    """srun alone: MUNGE; ``srun --preempt``: its environment. Torch's store listens at one
    address, which is Slurm's where the node's name does not resolve, the ranks meet at a port that
    nobody can guess, and the key is in no command line."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environ = {**pause_cluster.child_environ(), "HYDROSLURM_RUN_DIR": str(tmp_path / "run")}
    command = ["srun", *options, "-N2", "-n2", sys.executable, str(script)]
    done = captured(command, env=environ, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["sum"] for one in said] == [2.0, 2.0]
    assert {tuple(one["at"]) for one in said} == {("0100007F",)}
    assert not any(one["shown"] for one in said)
    events = (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines()
    joined = [json.loads(line)["data"] for line in events if '"ranks_joined"' in line]
    assert [one["key_from"] for one in joined][-1] == source
