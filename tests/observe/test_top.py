"""``top`` and ``metrics`` of real jobs: in a real terminal, in a pipe, for Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clusters import require_slurm
from observe.conftest import Terminal
from processes import captured, wait_until
from prometheus_client.parser import text_string_to_metric_families

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import ClusterSpec, DevCluster

pytestmark = pytest.mark.slurm

HYDROSLURM = [sys.executable, "-m", "hydroslurm.cli"]
HOSTILE = "\x1b[2J\x1b]0;title\x07"
TRAIN = Path(__file__).parents[1] / "training" / "endless.py"


@dataclass
class Scene:
    """Three jobs of one cluster: one trains, one is suspended, one has no run folder."""

    cluster: DevCluster
    folder: Path
    trains: str = ""
    suspended: str = ""
    foreign: str = ""

    @property
    def ids(self) -> list[str]:
        return [self.trains, self.suspended, self.foreign]

    @property
    def environ(self) -> dict[str, str]:
        return self.cluster.child_environ()

    def top(self, *options: str) -> list[dict[str, Any]]:
        command = [*HYDROSLURM, "top", "--json", *options, *self.ids]
        done = captured(command, env=self.environ, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def has_saved(self, job_id: str) -> bool:
        run = RunDir(self.folder / "hydroslurm-runs" / job_id)
        status = read_status(run.rank_status(0))
        has_rate = status is not None and status.steps_per_s is not None and (status.step or 0) > 20
        return has_rate and any(run.checkpoints.glob("step-*"))

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("*.out"))

    def submit(self, *words: str) -> str:
        command = ["sbatch", "-n1", "--parsable", "-o", str(self.folder / "%j.out"), *words]
        done = captured(command, env=self.environ, cwd=self.folder, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def daemon(self, name: str) -> int:
        return next(one.pid for one in self.cluster.status().daemons if one.name == name)

    def requests(self) -> dict[str, int]:
        """How often slurmctld was asked what, by all."""
        told = self.cluster.run(["sdiag"]).stdout
        part = told.partition("statistics by message type")[2].partition("statistics by user")[0]
        return {name: int(n) for name, n in re.findall(r"(\w+)\s+\(\s*\d+\) count:(\d+)", part)}


@pytest.fixture(scope="module")
def requeue_cluster() -> Iterator[DevCluster]:
    """Its own: slurmctld is stopped, and what it is asked by all is counted."""
    require_slurm()
    with DevCluster.up(ClusterSpec(nodes=2, profile="requeue", kill_wait_s=5)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scene(requeue_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("jobs")
    found = Scene(requeue_cluster, folder)
    # Within SPREAD_S of its start a rank asks slurmctld for the site's policy, at a random moment,
    # and requests are counted below for all who ask: these ranks find no Slurm.
    alone = "env PATH=/nowhere HYDROSLURM_SLURM_BACKEND=commands"
    settings = "export HYDROSLURM_HEARTBEAT_S=0.3 OMP_NUM_THREADS=1"
    srun = f"{settings}; srun {alone} {sys.executable} {TRAIN}"
    try:
        found.suspended = found.submit("-J", "suspended", "--wrap", f"{srun} 0 0.05")
        found.trains = found.submit("-J", "trains", "--wrap", f"{srun} 20 0.05")
        found.foreign = found.submit("-J", HOSTILE, "--wrap", "exec sleep 600")
        wait_until(lambda: found.has_saved(found.suspended), f"a save: {found.logs()}")
        requeue_cluster.run(["scontrol", "suspend", found.suspended])
        wait_until(lambda: found.has_saved(found.trains), f"a save: {found.logs()}")
        yield found
    finally:
        for job_id in filter(None, found.ids):
            requeue_cluster.run(["scontrol", "resume", job_id], check=False)
            requeue_cluster.run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"], check=False)
            requeue_cluster.run(["scancel", "--full", "-s", "KILL", job_id], check=False)
            requeue_cluster.run(["scancel", job_id], check=False)


def test_what_is_known_of_each(scene: Scene) -> None:
    """A training tells its step, rate and checkpoint and would lose nothing; a suspended one is
    parked, and cannot save; one that is not ours would lose all since its start."""
    rows = {row["job"]: row for row in scene.top()}
    trains = rows[scene.trains]
    assert (trains["state"], trains["parked"], trains["ranks"]) == ("RUNNING", 0, 1)
    assert trains["step"] >= trains["commit_step"] >= 20
    assert 0 < trains["steps_per_s"] < 20
    assert 0 < trains["left_s"] <= 3600
    slow = "a step and a save may take" in trains["lost_why"]  # on a machine that is busy
    assert trains["lost_steps"] == 0 or slow, trains["lost_why"]
    held = rows[scene.suspended]
    assert (held["state"], held["parked"], held["ranks"]) == ("SUSPENDED", 1, 1)
    assert held["lost_s"] > 0
    assert held["lost_steps"] == held["step"] - 20 > 0
    foreign = rows[scene.foreign]
    assert (foreign["name"], foreign["ranks"], foreign["step"]) == (HOSTILE, None, None)
    assert (foreign["lost_steps"], foreign["lost_s"] > 0) == (None, True)
    # what cannot be saved first, then what has the most at stake
    assert [row["job"] for row in scene.top()] == [scene.suspended, scene.foreign, scene.trains]


def test_one_request_each_time(scene: Scene) -> None:
    """In a pipe that goes on, slurmctld is asked for jobs once each time; and nothing of a name
    reaches the pipe that is no printable character."""
    before = scene.requests()
    with subprocess.Popen(
        [*HYDROSLURM, "top", "-n", "0.3", *scene.ids],
        env=scene.environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip("\n") for _ in range(4 * 5)]
        os.kill(process.pid, signal.SIGINT)
        rest = process.stdout.read().splitlines()
    assert process.returncode == 0
    looks = sum(line.startswith("JOB ") for line in [*lines, *rest])
    made = {name: n - before.get(name, 0) for name, n in scene.requests().items()}
    asked = {name: n for name, n in made.items() if n and name.startswith("REQUEST_JOB_INFO")}
    assert set(asked) == {"REQUEST_JOB_INFO"}
    assert looks <= asked["REQUEST_JOB_INFO"] <= looks + 1  # the last may not have been printed
    assert made.get("REQUEST_PARTITION_INFO", 0) <= 1
    assert all(line.isprintable() for line in lines)
    assert {line.split()[0] for line in lines} == {"JOB", *scene.ids}


def test_in_a_terminal(
    scene: Scene, terminal: Callable[[Mapping[str, str]], Terminal], tmp_path: Path
) -> None:
    """At 80 by 24 and after a resize nothing is wrapped; slurmctld's absence is told and outlived;
    after q and after Ctrl-C the terminal is as it was."""
    conf = tmp_path / "slurm.conf"  # of programs that give up on an absent controller sooner
    conf.write_text(scene.cluster.slurm_conf.read_text().replace("Timeout=30", "Timeout=2"))
    there = terminal({**scene.environ, "SLURM_CONF": str(conf)})
    there.type(["stty", "-g"])
    there.until(lambda: re.search(r"^[0-9a-f:]{40,}$", there.text(), re.M), "the settings")
    settings = re.findall(r"^[0-9a-f:]{40,}$", there.text(), re.M)[0]

    there.type([*HYDROSLURM, "top", "-n", "0.5", *scene.ids])
    there.until(lambda: "q quit" in there.lines()[-1], "a screen")
    lines = there.lines()
    assert (len(lines), there.modes()) == (24, ("0", "1"))
    assert [line.split()[0] for line in lines[3:6]] == [
        scene.suspended, scene.foreign, scene.trains,
    ]  # fmt: skip
    assert "1/1" in lines[3]
    assert r"\x1b[2J" in lines[4]
    assert re.search(r"0/1 +\d+ +\d+\.\d+ ", lines[5])
    there.resize(100, 10)
    there.until(lambda: len(there.lines()) == 10 and "q quit" in there.lines()[-1], "10 lines")

    slurmctld = scene.daemon("slurmctld")
    os.kill(slurmctld, signal.SIGSTOP)
    try:
        there.until(lambda: "Slurm " in there.lines()[1], "word of Slurm's absence")
        assert scene.trains in there.text()
    finally:
        os.kill(slurmctld, signal.SIGCONT)
    there.until(lambda: "Slurm " not in there.lines()[1], "an answer again")

    for leave in ("q", "C-c"):
        there.press(leave)
        there.until(lambda: there.modes() == ("1", "0"), "the old screen")
        there.type(["clear"])
        there.type(["stty", "-g"])
        there.until(lambda: settings in there.text(), "the old settings")
        if leave == "q":
            there.type([*HYDROSLURM, "top", *scene.ids])
            there.until(lambda: there.modes() == ("0", "1"), "a screen")


def test_for_prometheus(scene: Scene, tmp_path: Path) -> None:
    """The text file and the port tell the same jobs, and can be parsed."""
    file = tmp_path / "hydroslurm.prom"
    command = [*HYDROSLURM, "metrics"]
    subprocess.run([*command, "--textfile", str(file)], env=scene.environ, check=True, timeout=120)
    with subprocess.Popen(
        [*command, "--port", "0"], env=scene.environ, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                served = answer.read().decode()
        finally:
            os.kill(server.pid, signal.SIGINT)
    assert server.returncode == 0
    for text in (file.read_text(), served):
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        of = {(s.name, s.labels.get("job_id")): s for s in samples}
        assert of["hydroslurm_job_parked_ranks", scene.suspended].value == 1
        assert of["hydroslurm_job_step", scene.trains].value >= 20
        assert of["hydroslurm_park_seconds_count", scene.suspended].value == 1
        foreign = of["hydroslurm_job_preemptions_total", scene.foreign]
        assert (foreign.value, foreign.labels["name"]) == (0, HOSTILE)
        assert of["hydroslurm_slurm_up", None].value == 1
