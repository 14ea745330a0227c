"""Print the SLURM_* variables that the product reads, with their values in a job of the Slurm here.

    python docs/variables.py
    tests/slurms.sh sid .venv/bin/python docs/variables.py

One row for each variable: in a batch script of two nodes, element 3 of an array, after a requeue;
in the second task of a job step there; in what salloc starts. partitions.md has the table.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

from hydroslurm.devcluster import ClusterSpec, DevCluster

ROOT = Path(__file__).resolve().parents[1]
READ = re.compile(r"""(?:["'$]|\$\{)(SLURM_[A-Z_]+[A-Z])\b""")
SCRIPT = """\
#!/bin/bash
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || { touch began; sleep 300; }
env >batch
srun --nodes=2 --ntasks=2 bash -c '[ $SLURM_PROCID = 0 ] || env >task'
touch done
"""


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line.startswith("SLURM_"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, DevCluster.up(ClusterSpec(nodes=2)) as cluster:
        base = Path(folder)

        def wait_for(name: str) -> None:
            while not (base / name).exists():
                time.sleep(0.2)

        (base / "job.sh").write_text(SCRIPT)
        options = ["--parsable", "--array=3", "--nodes=2", "--requeue", f"--chdir={folder}"]
        job = cluster.run(["sbatch", *options, f"{folder}/job.sh"]).stdout.strip()
        wait_for("began")
        cluster.run(["scontrol", "requeue", f"{job}_3"])
        wait_for("done")
        places = [variables((base / name).read_text()) for name in ("batch", "task")]
        places.append(variables(cluster.run(["salloc", "--quiet", "--nodes=1", "env"]).stdout))
        sys.stdout.write(cluster.run(["scontrol", "--version"]).stdout)
        sources = [*ROOT.glob("hydroslurm/**/*.py"), *ROOT.glob("sbatch/*.sbatch")]
        for name in sorted({name for path in sources for name in READ.findall(path.read_text())}):
            values = [place.get(name, "-").replace(folder, "DIR") for place in places]
            sys.stdout.write(f"| `{name}` | {' | '.join(values)} |\n")


if __name__ == "__main__":
    main()
