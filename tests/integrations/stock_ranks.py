"""Scripts of Hugging Face and accelerate with several ranks, each stopped and resumed as told:
``stock_ranks.py SCRIPT WORLD FOLDER STOP...``. Prints what all ranks have written in all attempts,
beside an undisturbed run's, as JSON.

A stop is ``N@R``: rank R gets a SIGTERM behind the N-th batch of its attempt, from 1, where the
script sleeps.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - loaded before the fork
import torch
import transformers.trainer
from attempts import attempts
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.integrations.transformers import install

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"


def attempt(name: str, folder: Path, stop: str) -> None:
    """One rank's training, from its beginning or from where the last one was stopped."""
    torch.set_num_threads(1)
    begin = DistributedDataParallel.__init__
    # these models are so small that all of one would else be in one bucket, before and after
    DistributedDataParallel.__init__ = lambda *args, **kw: begin(  # type: ignore[method-assign]
        *args, **{**kw, "bucket_cap_mb": 0.0001, "find_unused_parameters": False}
    )
    install(transformers.trainer)
    os.environ["HYDROSLURM_RUN_DIR"] = str(folder / "run")
    number, _, whose = stop.partition("@")
    left = [int(number) if whose == os.environ["RANK"] else 0]

    def sleep(_: float) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    time.sleep, own = sleep, time.sleep
    sys.argv = [name, str(folder / "out"), "--pause-s=0.01"]
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    finally:
        time.sleep = own


def main(name: str, world: str, folder: Path, *stops: str) -> None:
    warnings.filterwarnings("ignore")
    made = functools.partial(attempts, attempt, name, world=int(world), notes="out/*s*-*")
    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", (*stops, ""))):
        found[f"{run}_exits"], found[run] = made(folder / run, told)
        found[run] += (folder / run / "out" / "result.txt").read_text().splitlines()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
