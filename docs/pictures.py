"""The pictures of preempted runs on the how-to pages: real runs of scripts that the tests prove
too, on a dev cluster, each stopped as its page says, drawn by ``hydroslurm report``.

    pictures.py                     all of them into docs/images/, about six minutes
    pictures.py --only lightning    one of them
    pictures.py --out DIR           elsewhere
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from integration.scripts.with_diff import changed  # noqa: E402
from integrations.stockjobs import ALONE, SCRIPTS, StockJob, steps_of_attempt  # noqa: E402

from hydroslurm.devcluster import ClusterSpec, DevCluster  # noqa: E402

DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
NODE = "n1"
STEPS = 5
"""So many at least in each attempt: fewer cannot be seen."""
AGENT = (
    f"--preempt=requeue --ntasks-per-node=1 --kill-on-bad-exit=1 {sys.executable} "
    "-m hydroslurm.cli agent -- --nproc-per-node=2"
)
"""``hydroslurm agent``, as the pages have it."""
BY_SRUN = ("lightning_digits.py", "fabric_digits.py")
"""Their ranks are srun's tasks; those of the others find each other by torchrun's variables."""


@dataclass(frozen=True)
class Picture:
    """A run to be drawn: a script, of this folder or of the tests, and how it is stopped."""

    script: str
    arguments: str
    ranks: int
    stops: tuple[str, ...]


PICTURES = {
    "lightning": Picture(
        "lightning_digits.py",
        "--epochs=1 --workers=2 --devices=2 --pause-s=0.2",
        2,
        ("urgent", "signal", "requeue"),
    ),
    "fabric": Picture(
        "fabric_digits.py",
        "--devices=2 --workers=2 --accumulate=4 --pause-s=0.2",
        2,
        ("signal", "requeue"),
    ),
    "transformers": Picture(
        "hf_causal_lm.py",
        "out --workers=2 --items=240 --pause-s=0.2",
        2,
        ("urgent", "signal"),
    ),
    "accelerate": Picture(
        "accelerate_loop.py",
        "out --workers=2 --accumulate=4 --items=360 --pause-s=0.1",
        1,
        ("requeue", "signal", "urgent", "requeue", "signal", "requeue"),
    ),
    "own-loop": Picture(
        "get_batch.py",
        "max_iters=40 gradient_accumulation_steps=4 pause_s=0.2",
        2,
        ("signal", "urgent"),
    ),
}


def submitted(picture: Picture, cluster: DevCluster, folder: Path, *, by_agent: bool) -> StockJob:
    """The script on one node. That with a ``get_batch()`` is changed as its page says."""
    path = next(p for place in (DOCS, SCRIPTS) if (p := place / picture.script).exists())
    if picture.script == "get_batch.py":
        path = folder.with_suffix(".py")
        path.write_text(changed((SCRIPTS / picture.script).read_text(), "own-loop.md"))
    srun = AGENT if by_agent else ALONE
    job = StockJob(cluster, folder, str(path), *picture.arguments.split(), srun=srun)
    tasks = 1 if by_agent else picture.ranks
    return job.submit(f"--nodelist={NODE}", "--nodes=1", f"--ntasks-per-node={tasks}")


def draw(name: str, cluster: DevCluster, folder: Path, out: Path) -> None:
    """One picture.

    Raises:
        RuntimeError: the run did not come to its end.
    """
    picture = PICTURES[name]
    by_agent = picture.ranks > 1 and picture.script not in BY_SRUN
    job = submitted(picture, cluster, folder, by_agent=by_agent)
    for number, by in enumerate(picture.stops, start=1):
        job.wait_for(lambda number=number: steps_of_attempt(job.output(), number) >= STEPS)
        if by == "requeue":
            job.slurm("scontrol", "requeue", job.job_id)
        elif by == "signal":
            os.kill(job.pid_of(picture.ranks - 1, attempt=number), signal.SIGTERM)
        else:
            urgent = ("--partition=urgent", "--exclusive", "--time=1", f"--nodelist={NODE}")
            job.slurm("srun", *urgent, "--ntasks=1", "true")
    if (state := job.wait_for_end()) != "COMPLETED":
        raise RuntimeError(f"{name}: the job ended {state}: {job.output()[-2000:]}")
    run = folder / "hydroslurm-runs" / job.job_id
    report = [sys.executable, "-m", "hydroslurm.cli", "report", "--no-slurm", str(run)]
    shown = subprocess.run(report, check=True, text=True, capture_output=True, timeout=300).stdout
    print(f"{name}: {len(picture.stops)} stops\n{shown}")
    shutil.copyfile(run / "report/timeline.png", out / f"{name}-preempted.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=PICTURES, action="append", help="may be given again")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    spec = ClusterSpec(nodes=1, profile="requeue", kill_wait_s=10)
    with tempfile.TemporaryDirectory() as temporary, DevCluster.up(spec) as cluster:
        for name in chosen.only or PICTURES:
            draw(name, cluster, Path(temporary) / name, chosen.out)


if __name__ == "__main__":
    main()
