"""An agent above ranks that train with torch."""

from __future__ import annotations

import signal
from pathlib import Path

from jobs.agent.agentworkers import Scene, one_node
from processes import wait_until

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir

TRAIN = """
import os, signal, sys
from pathlib import Path

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
import torch
import hydroslurm

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
torch.set_num_threads(1)
controller = hydroslurm.install()
model = torch.nn.Linear(64, 64)
data = torch.randn(32, 64)
print("rank", rank, "trains", flush=True)
step = 0
while not asked:
    model.zero_grad()
    model(data).square().mean().backward()
    step += 1
    controller.step = step
(folder / f"saved-{rank}").write_text(str(step))
sys.exit(75)
"""


def joined(log: Path) -> list[Event]:
    """A rank has met the others."""
    return list(read_events(log, kinds=[EventKind.RANKS_JOINED])) if log.exists() else []


def last_resumed(log: Path) -> bool:
    """A rank is held for nobody any more."""
    kinds = [EventKind.PARKED, EventKind.CAUSES_CHANGED, EventKind.RESUMED]
    return [event.kind for event in read_events(log, kinds=kinds)][-1:] == [EventKind.RESUMED]


def test_ranks_that_train_are_parked_resumed_and_stopped(tmp_path: Path) -> None:
    """Real ranks below an agent are held at the gate between USR1 and USR2, a stop lets them save,
    and their events lie beside the agent's. They train together."""
    scene = Scene(tmp_path)
    scene.environ["HYDROSLURM_ALONE"] = ""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with scene.agent(*one_node(2), script=script) as agent:
        files = [RunDir(tmp_path / "run").rank_events(rank) for rank in range(2)]
        wait_until(lambda: all(map(joined, files)), "both ranks have met")
        agent.signal(signal.SIGUSR1)
        scene.wait_state("user_pause", "parked")
        agent.signal(signal.SIGTSTP)
        scene.wait_state("slurm_pause", "parked")
        agent.signal(signal.SIGCONT)
        scene.wait_state("slurm_resume", "parked")  # a person's pause is not Slurm's to end
        agent.signal(signal.SIGUSR2)
        # each is held for its peer until that one is resumed too: a node reports "mixed" meanwhile
        wait_until(lambda: all(map(last_resumed, files)), "both ranks have resumed")
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 75
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    for file in files:
        kinds = [event.kind for event in read_events(file)]
        assert kinds.count(EventKind.PARKED) == 1
        assert EventKind.RESUMED in kinds
