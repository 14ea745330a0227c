"""What the elastic training scripts of the tests say, into one file. It lies beside the script."""

import json
import os
import sys
import time

options = json.loads(sys.argv[1])
member = options.get("member") or "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)


def say(kind: str, **more: object) -> None:
    more |= {"member": member, "pid": os.getpid(), "at_s": time.monotonic()}
    line = json.dumps({"kind": kind, **more})
    with open(os.path.join(options["folder"], "said"), "a") as file:
        file.write(line + "\n")


def say_step(*, step: int, epoch: int, ids: list[int]) -> None:
    """The samples of one rank in one step."""
    generation, size = int(os.environ["HYDROSLURM_GENERATION"]), int(os.environ["WORLD_SIZE"])
    say("step", step=step, epoch=epoch, generation=generation, ids=ids, size=size)
