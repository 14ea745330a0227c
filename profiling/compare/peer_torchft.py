"""torchft, as its train_ddp.py has it: ``peer_torchft.py attempts|spared ...``. With 0.2.0 and gloo
its DistributedDataParallel also ends the group whose peer dies; the one in pure Python does not.
Two replica groups, each a job on a node of its own; events strike one of them, and the other, with
the lighthouse, trains on and gives it its state when it comes back."""

from __future__ import annotations

import datetime
import itertools
import sys
import time
from typing import Any

from digits import Parts, arguments
from observer import Observer
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.ddp import PureDistributedDataParallel

TIMEOUT = datetime.timedelta(seconds=5)
"""Of a collective. With the default, a minute, the other group waits that long for a dead one."""


def main() -> None:
    config, group = arguments(), sys.argv[1]
    parts, found = Parts(config), config.folder / "lighthouse"
    if group == "spared":  # join_timeout_ms and quorum_tick_ms as in torchft's README
        lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=10_000, quorum_tick_ms=100)
        found.write_text(lighthouse.address())
    while not found.exists():
        time.sleep(0.1)
    kept = parts.kept()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, one in kept.items():
            one.load_state_dict(state[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        state_dict=lambda: {name: one.state_dict() for name, one in kept.items()},
        load_state_dict=load_state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=found.read_text(),
        replica_id=f"{group}_{int(group == 'spared')}",
        hostname="localhost",
    )
    parts.model = PureDistributedDataParallel(manager, parts.model)
    parts.optimizer = Optimizer(manager, parts.optimizer)
    batches = (
        batch
        for epoch in itertools.count()
        for batch in parts.loader(2 * epoch + (group == "spared"))
    )
    parts.learn(next(batches))  # which also takes the state of the other group
    with Observer(config.folder / group, manager.batches_committed()) as observer:
        while manager.batches_committed() < config.epochs * parts.steps_per_epoch:
            parts.learn(next(batches))
            observer.made(manager.batches_committed())
    parts.finished(manager.batches_committed())
    manager.shutdown()


if __name__ == "__main__":
    main()
