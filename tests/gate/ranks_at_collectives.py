"""Scenes of two forked ranks. Options, beside those of forkedranks.py: ``scene``.

In each scene both ranks train in the main thread, and a thread of each plays the controller: it
pauses the rank, tells the other how far it has come, lets it through to where the further one is,
and looks whether they stand at the same collective with none in flight.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from forkedranks import serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.coordination import collectives
from hydroslurm.core.events import EventKind
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import Action, Cause, GateState

WORLD = 2
ROUNDS = 8
LIMIT_S = 60.0


class Board:
    """Where one rank's controller writes a number for the other to read."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def all(self, topic: str, mine: int) -> list[int]:
        """Everybody's number for this topic, by rank."""
        part = self._folder / f"{topic}.{self._rank}.part"
        part.write_text(str(mine))
        part.rename(part.with_suffix(""))
        return [self._read(self._folder / f"{topic}.{rank}") for rank in range(WORLD)]

    def _read(self, path: Path) -> int:
        until(path.exists, f"{path.name} is there")
        return int(path.read_text())


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.0005)


class Controller:
    """One rank's side of the meetings."""

    def __init__(self, gate: NativeGate, board: Board, rank: int) -> None:
        self._gate, self._board, self._rank = gate, board, rank
        self._kinds: list[EventKind] = []
        self.ended = False

    def run(self) -> None:
        try:
            with self._gate.exempt():
                rest = random.Random(self._rank)
                for number in range(ROUNDS):
                    time.sleep(rest.random() * 0.02)  # so that the ranks are at different places
                    self._meet(number)
        except BaseException:
            print(f"rank {self._rank}: {traceback.format_exc()}", flush=True)
            os._exit(1)  # or the other rank would wait in a collective
        self.ended = True

    def _meet(self, number: int) -> None:
        gate, board = self._gate, self._board
        gate.request(Action.PAUSE, Cause.PEERS)
        self._until(EventKind.PARKED)
        furthest = self._catch_up(f"{number}.first")
        for more in (1, 4):
            board.all(f"{number}.more{more}", 0)
            gate.let_through(more)
            furthest += more
            self._arrive(furthest)
            assert max(board.all(f"{number}.at{more}", issued())) == furthest, "one too many"
        until(lambda: collectives.in_flight() == 0, "no collective is in flight")
        status = gate.status()
        assert (status.window_open, status.allowance) == (True, 0), status
        if collectives.issued_exact() is not None:
            assert len(set(board.all(f"{number}.exact", sum(exact())))) == 1
        assert sum(board.all(f"{number}.equal", issued())) == WORLD * furthest
        gate.request(Action.RESUME, Cause.PEERS)
        self._until(EventKind.RESUMED)
        assert EventKind.LET_THROUGH in self._kinds
        self._kinds.clear()
        board.all(f"{number}.opened", 0)

    def _catch_up(self, topic: str) -> int:
        counts = self._board.all(topic, issued())
        self._gate.let_through(max(counts) - counts[self._rank])
        self._arrive(max(counts))
        return max(counts)

    def _arrive(self, at: int) -> None:
        def arrived() -> bool:
            return issued() == at and self._gate.status().state is GateState.PARKED

        until(arrived, f"parked with {at} issued; {issued()} are, {self._gate.status()}")

    def _until(self, kind: EventKind) -> None:
        deadline = time.monotonic() + LIMIT_S
        while kind not in self._kinds:
            assert time.monotonic() < deadline, f"no {kind.name}; saw {self._kinds}"
            self._kinds += [event.kind for event in self._gate.wait_events(1.0)]


def issued() -> int:
    return sum(group.issued for group in collectives.groups().values())


def exact() -> list[int]:
    return list((collectives.issued_exact() or {}).values())


# --- what the ranks train -------------------------------------------------------------------------


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))


def _training(model: torch.nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(rank: int) -> Callable[[], object]:
    return _training(DistributedDataParallel(_model()))


def fsdp(rank: int) -> Callable[[], object]:
    mesh, model = init_device_mesh("cpu", (WORLD,)), _model()
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return _training(fully_shard(model, mesh=mesh))


def functional_and_two_groups(rank: int) -> Callable[[], object]:
    other = dist.new_group(list(range(WORLD)))
    x = torch.ones(8)

    def step() -> None:
        functional.all_gather_tensor(x, 0, dist.group.WORLD).sum().item()
        dist.all_reduce(x.clone(), group=other)
        functional.all_reduce(x, "sum", other).sum().item()

    return step


def both_ways(rank: int) -> Callable[[], object]:
    """As many sends and receives on one rank as on the other."""
    x = torch.ones(8)

    def step() -> None:
        send, receive = dist.isend(x, 1 - rank), dist.irecv(torch.empty(8), 1 - rank)
        for work in (send, receive):
            assert work is not None
            work.wait()

    return step


SCENES = {scene.__name__: scene for scene in (ddp, fsdp, functional_and_two_groups, both_ways)}


def be_rank(options: dict[str, Any], rank: int) -> None:
    warnings.simplefilter("ignore")
    gate, folder = NativeGate(), Path(f"{options['meet']}-board")
    folder.mkdir(exist_ok=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{options['meet']}", rank=rank, world_size=WORLD
    )
    step = SCENES[options["scene"]](rank)
    step()
    board = Board(folder, rank)
    controller = Controller(gate, board, rank)
    gate.start([])
    thread = threading.Thread(target=controller.run)
    thread.start()
    end = torch.zeros(1)
    while not bool(end.item()):  # the step at which both leave is agreed in the training itself
        step()
        end.fill_(float(controller.ended))
        dist.all_reduce(end, op=dist.ReduceOp.MIN)
    thread.join()
    gate.stop()
    board.all("end", 0)  # whoever leaves first breaks the connections of the other
    os._exit(0)  # torch may hang where a group goes with its last reference: it joins, with the GIL


if __name__ == "__main__":
    serve(be_rank)
