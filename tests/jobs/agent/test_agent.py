"""Agents, their workers, and the signals that Slurm sends: one node, and two that meet in torch's
c10d rendezvous. Agents are children of the test; they and their workers talk through files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child, free_port, text_of, wait_until
from zygote import forked

from hydroslurm.core.events import Event, read_events
from hydroslurm.core.files import write_atomically
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.jobs.agent import workers

WORKER = """
import os, signal, sys, time
from pathlib import Path
from hydroslurm.core import registry
from hydroslurm.core.events import Event, EventKind, EventLog, clocks
from hydroslurm.core.status import status_of
from hydroslurm.runtime.journal import StatusWriter

# A rank as an agent sees it, without the seconds that torch takes to import: it announces itself,
# listens, answers with events, and leaves as the files in the test's folder say.
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
log = EventLog(folder / "run" / "events" / f"rank-{rank:05d}.jsonl")
status = StatusWriter(status_of(log.path), every_s=0.0)
pauses = 0

def record(kind, **data):
    event = Event(kind, *clocks(), rank=rank, pid=os.getpid(), data=data)
    log.append(event)
    status.note(event)
    status.write(None, at_once=True)

def tell(text):
    with (folder / f"told-{rank}").open("a") as file:
        file.write(f"{text} {os.getpid()}\\n")

# handlers may interrupt each other, and the event log has a lock
arrived = []

def take(signo):
    global pauses
    name = signal.Signals(signo).name
    if name in ("SIGTSTP", "SIGUSR1"):
        pauses += 1
        cause = "slurm" if name == "SIGTSTP" else "user"
        record(EventKind.PARKED, park_us=5.0, held=1, pause=pauses, causes=[cause])
    elif name in ("SIGCONT", "SIGUSR2"):
        record(EventKind.RESUMED, parked_s=1.0, held=1, pause=pauses, causes=[])
    else:
        record(EventKind.STOP_REQUESTED, signal=name)
    tell(name)

def wait_for(name):
    while arrived or not (folder / name).exists():
        if arrived:
            take(arrived.pop(0))
        time.sleep(0.01)
    return (folder / name).read_text()

tell("began " + os.environ.get("HYDROSLURM_INCARNATION", "stock"))
with (folder / f"places-{rank}").open("a") as file:
    file.write(f"task {os.environ.get('SLURM_PROCID')}, master {os.environ['MASTER_ADDR']}, "
               f"of {os.environ['WORLD_SIZE']}\\n")
if (folder / "late").exists():
    wait_for("announce")
plan = dict(slurm_pause="TSTP", slurm_resume="CONT", user_pause="USR1", user_resume="USR2",
            stop="TERM", warning="URG")
numbers = {name: int(getattr(signal, f"SIG{short}")) for name, short in plan.items()}
for signo in numbers.values():
    signal.signal(signo, lambda signo, frame: arrived.append(signo))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers.values())  # the agent holds pauses until now
record(EventKind.INSTALLED)
registry.announce(registry.folder(os.environ), registry.Entry(
    os.getpid(), registry.start_ticks(os.getpid()), rank, str(log.path), numbers))
tell("announced")
code = wait_for(f"leave-{rank}")
(folder / f"leave-{rank}").unlink()
tell(f"leaves {code}")
os._exit(int(code))
"""

AGENT = "from hydroslurm.cli import main\nmain()\n"


class Scene:
    """A folder in which agents and workers talk through files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.environ = {
            "HYDROSLURM_RUN_DIR": str(folder / "run"),
            "HYDROSLURM_ALONE": "1",
            "OMP_NUM_THREADS": "1",
        }

    @contextlib.contextmanager
    def agent(
        self, *options: str, name: str = "agent", script: Path | None = None, fresh: bool = False
    ) -> Iterator[Child]:
        """One agent; its workers are gone after the block too. ``fresh``: with its own interpreter,
        where the start of that, or a sitecustomize.py, is what matters."""
        place = self.folder / name
        place.mkdir()
        words = ["agent", "--", *options, str(script or self.script), str(self.folder)]
        start = child if fresh else forked
        with start(AGENT, place, *words, environ=self.environ) as started:
            try:
                yield started
            finally:
                for pid in self.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def told(self, rank: int) -> list[str]:
        """What a rank has told, without the process ids."""
        return [line.rpartition(" ")[0] for line in self._lines(rank)]

    def places(self, rank: int) -> list[str]:
        """Slurm's task, torch's MASTER_ADDR and WORLD_SIZE in each start of a rank."""
        return (self.folder / f"places-{rank}").read_text().splitlines()

    def pid(self, rank: int) -> int:
        """The process that told last as this rank."""
        return int(self._lines(rank)[-1].rpartition(" ")[2])

    def pids(self) -> set[int]:
        """Of every worker that has ever told something."""
        files = self.folder.glob("told-*")
        return {int(line.split()[-1]) for file in files for line in file.read_text().splitlines()}

    def attempts(self, rank: int) -> list[str]:
        """HYDROSLURM_INCARNATION of each start of a rank."""
        began = [line for line in self.told(rank) if line.startswith("began ")]
        return [line.removeprefix("began ") for line in began]

    def wait_told(self, rank: int, text: str, *, times: int = 1) -> None:
        """Until a rank has told something so often."""
        what = f"rank {rank} tells {text!r} {times} times"
        wait_until(lambda: self.told(rank).count(text) >= times, what)

    def leave(self, rank: int, status: int) -> None:
        """Have a rank exit."""
        write_atomically(self.folder / f"leave-{rank}", str(status))

    def events(self, kind: str, *, node: int = 0) -> list[Event]:
        """What the agent of a node has written down."""
        path = self.folder / "run" / "events" / f"agent-{node:05d}.jsonl"
        if not path.exists():
            return []
        return [event for event in read_events(path) if event.kind.value == kind]

    def statuses(self, *, node: int = 0) -> list[RankStatus | None]:
        """What each of the newest workers of a node says of itself; None: nothing yet."""
        pids = self.events("workers_started", node=node)[-1].data["pids"].values()
        told = (read_status(path) for path in (self.folder / "run/events").glob("rank-*.json"))
        found = {one.pid: one for one in told if one is not None}
        return [found.get(pid) for pid in pids]

    def wait_announced(self, ranks: int = 2, *, times: int = 1) -> None:
        """Until so many ranks listen."""
        for rank in range(ranks):
            self.wait_told(rank, "announced", times=times)

    def wait_state(self, state: str, *, node: int = 0, slurm: bool | None = None) -> None:
        """Until all workers of a node are in a state; ``slurm``: and held for Slurm, or not."""
        wait_until(
            lambda: all(
                one and one.state == state and slurm in (None, "slurm" in one.causes)
                for one in self.statuses(node=node)
            ),
            f"node {node} is {state}",
        )

    def _lines(self, rank: int) -> list[str]:
        return text_of(self.folder / f"told-{rank}").splitlines()


def one_node(workers: int, *, restarts: int = 3) -> list[str]:
    """Options of an agent that is alone."""
    return [f"--nproc-per-node={workers}", f"--max-restarts={restarts}"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_pause_and_resume_reach_the_workers_only(scene: Scene) -> None:
    """Only the agent is signalled: every worker is paused and resumed, in both ways, and the node
    reports one state; where it was started with pauses held, as `srun --preempt` does."""
    scene.environ["HYDROSLURM_PREEMPT"] = "pause"
    with scene.agent(*one_node(2)) as agent:
        scene.wait_announced()
        for pause, resume in ((signal.SIGUSR1, signal.SIGUSR2), (signal.SIGTSTP, signal.SIGCONT)):
            agent.signal(pause)
            scene.wait_state("parked")
            agent.signal(resume)
            scene.wait_state("running")
        told = [scene.told(rank)[2:] for rank in range(2)]
        assert told == [["SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT"]] * 2
        for rank in range(2):
            scene.leave(rank, 0)
        assert agent.wait() == 0
    assert [event.data["status"] for event in scene.events("agent_left")] == [0]


def test_a_worker_that_imports_gets_the_latest(scene: Scene) -> None:
    """What would kill a worker that does not listen yet is kept for it: the latest of each kind."""
    (scene.folder / "late").touch()
    with scene.agent(*one_node(1)) as agent:
        wait_until(lambda: scene.attempts(0), "the worker began")
        for signo in (signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR1):
            agent.signal(signo)
            wait_until(
                lambda signo=signo: (
                    signo.name
                    in [one.data["signal"] for one in scene.events("signal_passed_on")[-1:]]
                ),
                f"{signo.name} was taken",
            )
        assert len(scene.told(0)) == 1
        (scene.folder / "announce").touch()
        scene.wait_state("parked")
        scene.wait_told(0, "SIGUSR1")  # a moment later
        assert scene.told(0)[2:] == ["SIGUSR1"]
        scene.leave(0, 0)
        assert agent.wait() == 0


def test_workers_that_save_are_left_alone(scene: Scene) -> None:
    """After SIGTERM the first worker to leave with 75 ends no other; none is started again, and the
    node leaves with 75 when the last has."""
    with scene.agent(*one_node(2)) as agent:
        scene.wait_announced()
        agent.signal(signal.SIGCONT)
        agent.signal(signal.SIGTERM)
        for rank in range(2):
            scene.wait_told(rank, "SIGTERM")
        scene.wait_state("stopping")
        scene.leave(0, 75)
        scene.wait_told(0, "leaves 75")
        # torchrun would have sent the other one a SIGTERM by now
        agent.signal(signal.SIGTERM)
        scene.wait_told(1, "SIGTERM", times=2)
        scene.leave(1, 75)
        assert agent.wait() == 75
    assert scene.told(1).count("SIGTERM") == 2
    assert [len(scene.attempts(rank)) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize(("first", "second", "status"), [(93, 75, 93), (75, 1, 75)])
def test_leaving_on_purpose_without_a_signal(
    scene: Scene, first: int, second: int, status: int
) -> None:
    """Workers that another node's ranks have told to leave are not started again either; the most
    binding status is the node's."""
    with scene.agent(*one_node(2, restarts=0 if second == 1 else 3)) as agent:
        scene.wait_announced()
        for rank, code in enumerate((first, second)):  # the second would end the first
            scene.leave(rank, code)
            scene.wait_told(rank, f"leaves {code}")
        assert agent.wait() == status


def test_a_failure_is_restarted_and_nobody_takes_it_for_a_stop(scene: Scene) -> None:
    """A crashed worker is started again with all its siblings, of which none gets a SIGTERM; the
    new ones are of another attempt, and are paused like the old ones."""
    with scene.agent(*one_node(2, restarts=1)) as agent:
        scene.wait_announced()
        agent.signal(signal.SIGUSR1)
        scene.wait_state("parked")
        scene.leave(0, 3)
        for rank in range(2):
            scene.wait_told(rank, "announced", times=2)
            scene.wait_told(rank, "SIGUSR1", times=2)
            assert "SIGTERM" not in scene.told(rank)
            assert len(set(scene.attempts(rank))) == 2
        assert scene.attempts(0) == scene.attempts(1)
        scene.leave(0, 3)
        assert agent.wait() == 3
    assert "ChildFailedError" in str(agent)
    assert "exitcode" in str(agent)
    assert "Traceback" not in str(agent)


def test_the_first_failure_is_the_nodes_status(scene: Scene) -> None:
    """A restart policy can tell a killed worker from a crash: the node leaves with the status of
    the first, 128 + N for a signal, and not with that of the siblings that are killed for it."""
    with scene.agent(*one_node(2, restarts=0)) as agent:
        scene.wait_announced()
        os.kill(scene.pid(1), signal.SIGKILL)
        assert agent.wait() == 137
    assert [event.data["status"] for event in scene.events("agent_left")] == [137]


ASKED = """
import os
from pathlib import Path
blocked = Path("/proc/self/status").read_text().partition("SigBlk:")[2].split()[0]
print("asked", os.environ.get("HYDROSLURM_PREEMPT"), "held", int(blocked, 16) >> 9 & 1, flush=True)
"""


@pytest.mark.parametrize(
    ("said", "mode", "held"), [(None, "pause", 1), ("requeue", "requeue", 1), ("off", "off", 0)]
)
def test_workers_are_preemptible(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, said: str | None, mode: str, held: int
) -> None:
    """Without a further option; who said what they are to be is heard, and one who does not want
    them preemptible gets workers to which SIGUSR1 is a signal like any other."""
    monkeypatch.delenv("HYDROSLURM_PREEMPT", raising=False)
    if said is not None:
        scene.environ["HYDROSLURM_PREEMPT"] = said
    script = scene.folder / "asked.py"
    script.write_text(ASKED)
    with scene.agent(*one_node(1), script=script) as agent:
        agent.expect(f"asked {mode} held {held}")
        assert agent.wait() == 0


@pytest.mark.parametrize(
    ("options", "wanted", "status"),
    [([], "there is no script", 2), (["--no-python"], "there is no program", 127)],
)
def test_a_script_that_is_not_there(
    scene: Scene, options: list[str], wanted: str, status: int
) -> None:
    """One line says what was looked for and where; nothing is started for it, and the status is
    that of the same command below srun."""
    missing = scene.folder / "trian.py"
    with scene.agent(*one_node(2), *options, script=missing) as agent:
        assert agent.wait() == status
    (line,) = [each for each in str(agent).splitlines() if "trian.py" in each]
    assert wanted in line
    assert str(missing) in line
    assert "Traceback" not in str(agent)
    assert not scene.events("workers_started")


def test_a_stop_before_there_are_workers(scene: Scene) -> None:
    """An agent that waits for other nodes, or still imports torch, leaves with 143 on SIGTERM."""
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    with scene.agent(*options, "--rdzv-id=x", fresh=True) as agent:
        status = Path(f"/proc/{agent.pid}/status")
        bit = 1 << (signal.SIGTERM - 1)
        wait_until(
            lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & bit,
            "the agent listens",
        )
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143
    assert "Traceback" not in str(agent)


def test_a_program_that_does_not_listen(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that knows nothing of hydroslurm is not killed by a pause; a stop ends it, late."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import hydroslurm.jobs.agent.workers as w\nw.PATIENCE_S = 0.5\n"
    )
    assert workers.PATIENCE_S > 5
    plain = tmp_path / "plain.py"
    plain.write_text("import time\nprint('plain began', flush=True)\ntime.sleep(600)\n")
    with scene.agent(*one_node(1), script=plain, fresh=True) as agent:
        agent.expect("plain began")
        agent.signal(signal.SIGUSR1)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143


KEEP_ALIVE_S = 2
SUSPENDED_S = 4.0
LAST_CALL = ",last_call_timeout=6"
"""Long enough for two agents that start together, and what a restart alone waits."""


@contextlib.contextmanager
def two_nodes(
    scene: Scene, *, nodes: str = "2", restarts: int = 2, conf: str = ""
) -> Iterator[tuple[Child, Child]]:
    """Two agents with one worker each, which have announced themselves: of the first with the
    store, and rank 0, and of the second."""
    options = (
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        f"--max-restarts={restarts}",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=two-nodes",
    )
    conf = f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt={KEEP_ALIVE_S}{conf}"
    with (
        scene.agent(*options, f"{conf},is_host=1", name="a") as a,
        scene.agent(*options, f"{conf},is_host=0", name="b") as b,
    ):
        scene.wait_announced()
        yield (a, b) if _has_children(a.pid, scene.pid(0)) else (b, a)


def suspend(pids: list[int]) -> None:
    """What slurmd does to a job behind the SIGTSTP, for longer than the keep-alive."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("announced", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_suspend_longer_than_the_keep_alive(scene: Scene, announced: bool) -> None:
    """The workers go on in the same processes, and one that fails later is started again, with its
    peer on the other node; also where no SIGTSTP comes before."""
    with two_nodes(scene) as agents:
        before = scene.pids()
        for agent in agents if announced else ():
            agent.signal(signal.SIGTSTP)
        for node in range(2) if announced else ():
            scene.wait_state("parked", node=node)
        suspend([*before, *(agent.pid for agent in agents)])
        for node in range(2):
            scene.wait_told(node, "SIGCONT")
            scene.wait_state("running", node=node)
        # the heartbeats that follow are what would find the nodes dead
        time.sleep(KEEP_ALIVE_S)
        assert scene.pids() == before
        scene.leave(0, 3)
        scene.wait_announced(times=2)
        assert scene.attempts(0) == scene.attempts(1)
        assert len(set(scene.attempts(0))) == 2
        for rank in range(2):
            scene.leave(rank, 0)
        assert [agent.wait() for agent in agents] == [0, 0]


def test_a_node_that_goes_first_takes_no_other_with_it(scene: Scene) -> None:
    """The agent with the store is lost while the other node's worker has yet to hear of a stop:
    that one saves undisturbed, and its node leaves with its status."""
    with two_nodes(scene) as (with_store, other):
        scene.leave(0, 75)
        wait_until(lambda: "leaves 75" in scene.told(0), "rank 0 has left")
        with_store.signal(signal.SIGKILL)
        with_store.wait()
        # ten looks at the store that is gone
        time.sleep(1.0)
        scene.leave(1, 75)
        assert other.wait() == 75
        assert "SIGTERM" not in scene.told(1)


def test_a_stop_while_the_others_are_waited_for(scene: Scene) -> None:
    """A node whose workers have finished waits for the others; a stop ends that with 0."""
    with two_nodes(scene) as (first, _):
        _ends(scene, first, 0)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0


def _has_children(pid: int, child: int) -> bool:
    return child in list(workers.family(pid))


def _ends(scene: Scene, agent: Child, rank: int) -> None:
    """Have the only worker of an agent finish, and wait until the agent has seen it."""
    worker = scene.pid(rank)
    scene.leave(rank, 0)
    wait_until(lambda: not _has_children(agent.pid, worker), "the agent has seen it end")


@pytest.mark.parametrize(
    ("failing", "is_stopped"),
    [(1, False), *(pytest.param(node, True, marks=pytest.mark.long) for node in (0, 1))],
)
def test_a_worker_that_fails_after_the_others_have_ended(
    scene: Scene, failing: int, is_stopped: bool
) -> None:
    """It is restarted alone, as by stock torchrun; also if its node was stopped for longer than
    the keep-alive. The node that has ended waits for it."""
    with two_nodes(scene, nodes="1:2", conf=LAST_CALL) as agents:
        _ends(scene, agents[1 - failing], 1 - failing)
        if is_stopped:
            suspend([agents[failing].pid, scene.pid(failing)])
        scene.leave(failing, 3)
        scene.wait_told(0, "announced", times=2)
        assert [place.rpartition(" ")[2] for place in scene.places(0)] == ["2", "1"]
        assert agents[1 - failing].process.poll() is None
        scene.leave(0, 0)
        assert (agents[failing].wait(), agents[1 - failing].wait()) == (0, 0)
    assert len(scene.places(0) + scene.places(1)) == 3


@pytest.mark.parametrize(
    ("nodes", "restarts", "status"),
    [
        ("1:2", 2, -signal.SIGKILL),
        pytest.param("1:2", 0, 3, marks=pytest.mark.long),
        ("2", 2, 3),
    ],
)
def test_a_node_that_ends_badly_does_not_hold_those_that_have_ended(
    scene: Scene, nodes: str, restarts: int, status: int
) -> None:
    """Its agent is killed, or its worker fails without a restart left, or with too few nodes for
    one: the other leaves with 0, and not after torch's 300 s."""
    with two_nodes(scene, nodes=nodes, restarts=restarts) as (first, second):
        if status < 0:
            worker = scene.pid(1)
            second.signal(signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
        _ends(scene, first, 0)
        if status > 0:
            scene.leave(1, status)
        assert (first.wait(), second.wait()) == (0, status)
