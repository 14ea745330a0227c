"""Print the SLURM_* variables that the product reads, with their values in a job of the Slurm here.

    python tests/slurm/print_variables.py
    tests/slurms.sh sid .venv/bin/python tests/slurm/print_variables.py

One row for each variable: in a batch script of two nodes, element 3 of an array, after a requeue;
in the second task of a job step there; in what salloc starts. docs/partitions.md has the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hydroslurm.devcluster import ClusterSpec, DevCluster

ROOT = Path(__file__).resolve().parents[2]
READ = re.compile(r"""(?:["'$]|\$\{)(SLURM_[A-Z_]+[A-Z])\b""")
SCRIPT = """\
#!/bin/bash
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || sleep 300
env >batch
srun --nodes=2 --ntasks=2 bash -c '[ $SLURM_PROCID = 0 ] || env >task'
touch done
"""


def names() -> list[str]:
    """All that is read in the product."""
    sources = [*ROOT.glob("hydroslurm/**/*.py"), *ROOT.glob("sbatch/*.sbatch")]
    found = {name for path in sources for name in READ.findall(path.read_text())}
    return sorted(found)


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line.startswith("SLURM_"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, DevCluster.up(ClusterSpec(nodes=2)) as cluster:

        def slurm(*words: str) -> str:
            return subprocess.run(
                words,
                env=cluster.child_environ(),
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
            ).stdout

        base = Path(folder)
        (base / "job.sh").write_text(SCRIPT)
        job = slurm("sbatch", "--parsable", "--array=3", "--nodes=2", "--requeue", "job.sh").strip()
        while "RUNNING" not in slurm("squeue", "--noheader", "--format=%T"):
            time.sleep(0.2)
        slurm("scontrol", "requeue", f"{job}_3")
        while not (base / "done").exists():
            time.sleep(0.2)
        places = [variables((base / name).read_text()) for name in ("batch", "task")]
        places.append(variables(slurm("salloc", "--quiet", "--nodes=1", "env")))
        sys.stdout.write(slurm("scontrol", "--version"))
        for name in names():
            values = [place.get(name, "-").replace(folder, "DIR") for place in places]
            sys.stdout.write(f"| `{name}` | {' | '.join(values)} |\n")


if __name__ == "__main__":
    main()
