"""Trainings that nobody stops, without Slurm: torch is loaded once, and the ranks are forked.

Arguments: one line of JSON for each, {"script", "world", "options"}.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def be_rank(rank: int, training: dict[str, Any], port: int) -> int:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(training["world"]),
        LOCAL_WORLD_SIZE=str(training["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    sys.argv = [training["script"], *training["options"]]
    try:
        runpy.run_path(training["script"], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def train(training: dict[str, Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(training["world"]):
        pid = os.fork()
        if pid == 0:
            code = be_rank(rank, training, port)
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"{training['script']} ended with {codes}")


def main() -> None:
    warnings.simplefilter("error")
    for training in map(json.loads, sys.argv[1:]):
        sys.path.insert(0, str(Path(training["script"]).parent))
        import torch
        import train_fsdp  # noqa: F401 - loaded before the fork

        torch.set_num_threads(1)
        torch.optim.AdamW([torch.ones(1)])  # imports most of what torch has
        train(training)


if __name__ == "__main__":
    main()
