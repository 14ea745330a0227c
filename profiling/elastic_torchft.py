"""Three replicas of bare torchft for profiling/elastic.py: the loop of its members, with torchft's
own Manager, lighthouse, DistributedDataParallel and optimizer, as its examples have them.

    unshare --net --map-root-user python elastic_torchft.py FOLDER

torchft listens at all addresses and authenticates nobody, hence the network of its own, in which
only the loopback device is. ``FOLDER/pids`` has the replicas' pids, ``FOLDER/steps`` their steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

HEARTBEAT_MS = 1000
"""A replica counts as gone when it has said nothing for so long; 5000 by default."""
REPLICAS = 3
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def all_of_them(folder: Path) -> None:
    """The lighthouse and the replicas, until SIGTERM."""
    from torchft.coordination import LighthouseServer

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    port = server.address().rpartition(":")[2]
    own = [sys.executable, __file__, str(folder), f"http://localhost:{port}"]
    replicas = [subprocess.Popen([*own, f"replica{number}"]) for number in range(REPLICAS)]
    (folder / "pids").write_text(json.dumps([one.pid for one in replicas]))
    signal.sigwait({signal.SIGTERM})
    for one in replicas:
        one.kill()
        one.wait()


def replica(folder: Path, lighthouse: str, name: str) -> None:
    """One replica group, of one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)

    def load(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < 1000:
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        before = manager.current_step()
        optimizer.step()
        said = {
            "step": manager.current_step(),
            "completed": manager.current_step() > before,
            "size": manager.num_participants(),
            "name": name,
            "at_s": time.monotonic(),
        }
        with (folder / "steps").open("a") as log:
            log.write(json.dumps(said) + "\n")
        time.sleep(float(os.environ["STEP_S"]))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        all_of_them(Path(sys.argv[1]))
    else:
        replica(Path(sys.argv[1]), *sys.argv[2:])
