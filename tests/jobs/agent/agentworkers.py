"""Workers for an agent under test, and agents as children of the test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from processes import Child, child, wait_until
from zygote import forked

from hydroslurm.core.events import Event, read_events
from hydroslurm.core.files import write_atomically
from hydroslurm.core.status import RankStatus, read_status

WORKER = """
import os, signal, sys, time
from pathlib import Path
from hydroslurm.core import registry
from hydroslurm.core.events import Event, EventKind, EventLog, clocks
from hydroslurm.core.status import status_of
from hydroslurm.runtime.status_writer import StatusWriter

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
        path = self.folder / f"told-{rank}"
        return path.read_text().splitlines() if path.exists() else []


def one_node(workers: int, *, restarts: int = 3) -> list[str]:
    """Options of an agent that is alone."""
    return [f"--nproc-per-node={workers}", f"--max-restarts={restarts}"]
