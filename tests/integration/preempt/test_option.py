"""``--preempt`` of a stock srun, sbatch and salloc, with the plugin of the dev cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import captured, text_of, wait_until

from hydroslurm.devcluster import DevCluster
from hydroslurm.slurm.spank.build import PLUGIN

pytestmark = pytest.mark.slurm

# what a job finds of ours; the batch script's own variable, and those of three job steps in it
SHOW = 'printf "%s\\n" "${HYDROSLURM_PREEMPT:-nothing}"'
BATCH = f"""#!/bin/bash
{SHOW}
srun -n1 /bin/sh -c '{SHOW}'
srun -n1 --preempt=requeue /bin/sh -c '{SHOW}'
HYDROSLURM_PREEMPT=off srun -n1 /bin/sh -c '{SHOW}'
echo end
"""


@pytest.fixture
def slurm(pause_cluster: DevCluster, tmp_path: Path):
    """Runs a program of Slurm's; returns how it ended."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environ = pause_cluster.child_environ(dict(os.environ))
        return captured(argv, cwd=tmp_path, env=environ, timeout=120)

    return run


@pytest.mark.parametrize("program", ["srun", "sbatch", "salloc"])
def test_everybody_knows_it(slurm, tmp_path: Path, program: str) -> None:
    """It stands in --help, and a bad value is refused at once, in our words; no job is made."""
    script = tmp_path / "job.sh"
    script.write_text(BATCH)
    script.chmod(0o755)
    assert "--preempt=[pause|vacate|requeue]" in slurm(program, "--help").stdout
    refused = slurm(program, "--preempt=nonsense", str(script))
    assert refused.returncode != 0
    assert f'{program}: error: --preempt=nonsense: wanted "pause"' in refused.stderr
    assert "Granted" not in refused.stderr
    assert refused.stdout == ""


SBATCH = {
    "--preempt": ["pause", "pause", "requeue", "off"],
    "--preempt=requeue": ["requeue", "requeue", "requeue", "off"],
    "--preempt --export=NONE": ["pause", "pause", "requeue", "pause"],
    "--comment=nothing": ["nothing", "nothing", "requeue", "off"],
}


def test_sbatch(slurm, tmp_path: Path) -> None:
    """Given to sbatch it reaches the sruns inside. They may ask for something else, or for nothing,
    unless --export=NONE keeps them from saying so."""
    (tmp_path / "job.sh").write_text(BATCH)
    for number, options in enumerate(SBATCH):
        done = slurm("sbatch", "-n1", "-o", f"out-{number}", *options.split(), "job.sh")
        assert done.returncode == 0, done.stderr
    outputs = [tmp_path / f"out-{number}" for number in range(len(SBATCH))]
    wait_until(lambda: all("end" in _lines(out) for out in outputs), "all jobs", limit_s=120)
    assert [_lines(out)[:-1] for out in outputs] == list(SBATCH.values())


def _lines(out: Path) -> list[str]:
    """What the job printed, without srun's own words about CPUs that are not free yet."""
    return [line for line in text_of(out).splitlines() if not line.startswith("srun:")]


def test_salloc(slurm) -> None:
    """The shell and its sruns have it."""
    done = slurm("salloc", "--preempt=requeue", "sh", "-c", f"{SHOW}; srun sh -c '{SHOW}'")
    assert done.stdout == "requeue\nrequeue\n", done.stderr


def test_a_plugin_that_has_gone_fails_nothing(
    pause_cluster: DevCluster, slurm, tmp_path: Path
) -> None:
    """Its line says optional: where the file is missing srun works, and knows no --preempt."""
    conf = pause_cluster.slurm_conf
    plugins = conf.with_name("plugstack.conf")
    assert PLUGIN in plugins.read_text()
    here = tmp_path / plugins.name  # of this srun alone: other tests use the cluster, too
    here.write_text(plugins.read_text().replace(PLUGIN, f"no-{PLUGIN}"))
    changed, times = re.subn("PlugStackConfig=.*", f"PlugStackConfig={here}", conf.read_text())
    assert times == 1
    (tmp_path / conf.name).write_text(changed)
    environ = {**pause_cluster.child_environ(), "SLURM_CONF": str(tmp_path / conf.name)}
    done = captured(["srun", "echo", "here"], env=environ, timeout=120)
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr
    assert "--preempt" not in captured(["srun", "--help"], env=environ, timeout=120).stdout
