"""The pictures of preempted runs on the how-to pages: real runs of scripts that the tests prove
too, on a dev cluster, each stopped as its page says, drawn by ``hydroslurm report``.

    pictures.py                     all of them into docs/images/, about six minutes
    pictures.py --only lightning    one of them
    pictures.py --out DIR           elsewhere
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from integrations.stockjobs import submitted  # noqa: E402

from hydroslurm.devcluster import ClusterSpec, DevCluster  # noqa: E402

IMAGES = ROOT / "docs/images"
NODE = "n1"
STEPS = 5
"""So many at least in each attempt: fewer cannot be seen."""


@dataclass(frozen=True)
class Picture:
    """A run to be drawn: a script of tests/integration/scripts, and how it is stopped."""

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


def draw(name: str, cluster: DevCluster, folder: Path, out: Path) -> None:
    """One picture.

    Raises:
        RuntimeError: the run did not come to its end.
    """
    picture = PICTURES[name]
    job = submitted(
        cluster, folder, picture.script, picture.arguments, ranks=picture.ranks, node=NODE
    )
    for number, by in enumerate(picture.stops, start=1):
        job.wait_for_step(attempt=number, steps=STEPS)
        job.stop(by, rank=picture.ranks - 1, node=NODE)
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
