"""Jobs that are preempted while Python imports, started in each way of the docs: a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import require_slurm
from processes import captured, wait_until
from sbatchfiles import multi_node_script
from stories import marked

from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = pytest.mark.slurm

SLOW = """
import os, time
print("imports", flush=True)
if not int(os.environ.get("SLURM_RESTART_COUNT", 0)):
    time.sleep(300)
print("imported", flush=True)
"""
SPEC = """\
replicaSpecs: [{template: {command: [python3, train.py]}}]
scheduler: {partition: low, timeLimitMinutes: 10}
"""
SRUN = "#!/bin/bash\nsrun {} python3 train.py\n"
SCRIPTS = {
    "the option of srun": SRUN.format("--preempt=requeue"),
    "two ranks": SRUN.format("--preempt=requeue --ntasks=2 --overcommit --kill-on-bad-exit=1"),
    "the variable": "#!/bin/bash\nexport HYDROSLURM_PREEMPT=requeue\nsrun python3 train.py\n",
    "the agent": "#!/bin/bash\nsrun --preempt=requeue hydroslurm agent -- train.py\n",
    "the verb": "#!/bin/bash\nexec hydroslurm batch -- srun python3 train.py\n",
    "a template": "",  # printed with this script
    "multi-node.sbatch": multi_node_script("python3 train.py", nodes=1),
    "the option of sbatch": SRUN.format(""),
}
COMMANDS = {
    "the option of sbatch": ["sbatch", "--preempt=requeue"],
    "a submitted script": ["hydroslurm", "submit", "--partition=low", "train.py"],
    "a job spec": ["hydroslurm", "submit", "job.yaml"],
}
WAYS = (*SCRIPTS, "a submitted script", "a job spec")
LONG = ("two ranks", "the variable", "the agent", "multi-node.sbatch")
"""Each is another one's mechanism, said or started in another way."""
LIMIT_S = 240.0


@pytest.fixture(scope="module", params=[20, pytest.param(0, marks=pytest.mark.long)])
def preempted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each way, whose job one urgent job has preempted while it imported."""
    require_slurm()
    base = tmp_path_factory.mktemp("imports")
    ways = [way for way in WAYS if way in marked(request)]
    nodes = len(ways)
    spec = ClusterSpec(nodes=nodes, profile="requeue", grace_s=request.param, kill_wait_s=10)
    with DevCluster.up(spec) as cluster:

        def run(*words: str, cwd: Path = base) -> None:
            done = captured(words, cwd=cwd, env=cluster.child_environ(), timeout=120)
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

        for way in ways:
            (base / way).mkdir()
            (base / way / "train.py").write_text(SLOW)
            (base / way / "job.yaml").write_text(SPEC)
            (base / way / "job.sh").write_text(SCRIPTS.get(way, ""))
            if way == "a template":
                printed = "hydroslurm template requeue train.py > job.sh"
                run("bash", "-c", printed, cwd=base / way)
            command = COMMANDS.get(way, ["sbatch"])
            options = ["--requeue", "--open-mode=append", "--output=job.out", "job.sh"]
            run(*command, *(options if way in SCRIPTS else []), cwd=base / way)
        wait_until(lambda: all(said(base / way) for way in ways), "imports", limit_s=LIMIT_S)
        run("srun", "--partition=urgent", f"--nodes={nodes}", "--exclusive", "true")
        wait_until(
            lambda: not cluster.run(["squeue", "--noheader"]).stdout,
            lambda: f"the end of all jobs:\n{cluster.run(['squeue']).stdout}",
            limit_s=LIMIT_S,
        )
    return base


def said(folder: Path) -> list[str]:
    """What the script printed in all attempts of a job."""
    logs = [path for path in folder.rglob("*") if path.suffix in (".out", ".log")]
    lines = "".join(log.read_text() for log in logs if log.is_file()).splitlines()
    return [line for line in lines if line in ("imports", "imported")]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.scene(way), *[pytest.mark.long] * (way in LONG)])
        for way in WAYS
    ],
)
def test_a_job_that_is_preempted_while_python_imports_starts_again(
    preempted: Path, way: str
) -> None:
    """Once, and gets through: Slurm 22.05 would count one that dies in its grace as failed."""
    once = ["imports", "imports", "imported"]
    assert sorted(said(preempted / way)) == sorted(once * (2 if way == "two ranks" else 1))
