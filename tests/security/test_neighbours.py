"""Jobs of another user, with run folders full of what should not be there, beside a good one of
ours: each is a line at the most, nobody waits, and the good one is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from processes import captured, wait_until
from prometheus_client.parser import text_string_to_metric_families
from security.conftest import Stranger
from security.planting import python
from security.spoiled import KINDS, SHOWN_NASTY, SPOIL, folder_of

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

HYDROSLURM = """
    import sys
    from hydroslurm.cli import main
    sys.exit(main())
"""
LIMIT_S = 120
"""Of one command, on a machine that is busy; one that waits for a FIFO waits for ever."""

TRAIN = Path(__file__).parents[1] / "training" / "endless.py"


@dataclass
class Scene:
    """A good job of ours, one of the other user for each kind of folder, and one of ours that
    points to a folder of theirs."""

    cluster: DevCluster
    folder: Path
    home: Path
    good: str = ""
    bad: dict[str, str] = field(default_factory=dict)

    def run_folder(self, kind: str) -> Path:
        return folder_of(self.home, kind)

    @property
    def good_run(self) -> RunDir:
        return RunDir(self.folder / "hydroslurm-runs" / self.good)

    def submit(self, *words: str) -> str:
        command = ["sbatch", "-n1", "--parsable", "--overcommit", *words]
        done = captured(command, env=self.cluster.child_environ(), cwd=self.folder, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def call(self, *words: object, status: tuple[int, ...] = (0,)) -> str:
        """What a command says; it ends by itself, with no traceback and nothing for a terminal."""
        environ = self.cluster.child_environ()
        done = python(HYDROSLURM, *words, limit_s=LIMIT_S, **environ)
        said = done.stdout
        assert done.returncode in status, said
        assert "Traceback" not in said, said
        odd = {c for c in said if not c.isprintable() and c not in "\n\t"}
        assert not odd, said
        return said


@pytest.fixture(scope="module")
def scene(
    pause_cluster: DevCluster, stranger: Stranger, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    home = stranger.home / "jobs"
    stranger.run("mkdir", "-m", "755", str(home))
    target = tmp_path_factory.mktemp("ours")
    stranger.python(SPOIL, str(home), str(target), *KINDS)
    found = Scene(pause_cluster, tmp_path_factory.mktemp("jobs"), home)
    settings = "export HYDROSLURM_HEARTBEAT_S=0.3 OMP_NUM_THREADS=1"
    srun = f"{settings}; srun {sys.executable} {TRAIN} 20 0.02"
    out = ["-o", str(found.folder / "%j.out")]
    try:
        found.good = found.submit(*out, "-J", "good", "--wrap", srun)
        for kind in KINDS:
            theirs = (f"--uid={stranger.uid}", f"--gid={stranger.gid}", f"--chdir={stranger.home}")
            folder = f"--comment=hydroslurm:{found.run_folder(kind)}"
            job = ("-o", "/dev/null", "-J", kind, "--wrap", "exec sleep 900")
            found.bad[kind] = found.submit(*theirs, folder, *job)
        folder = f"--comment=hydroslurm:{found.run_folder('numbers')}"
        found.bad["ours"] = found.submit(*out, "-J", "ours", folder, "--wrap", "exec sleep 900")

        def logs() -> str:
            return "\n".join(file.read_text() for file in found.folder.glob("*.out"))

        def has_saved() -> bool:
            status = read_status(found.good_run.rank_status(0))
            is_told = status is not None and status.step is not None
            return is_told and any(found.good_run.checkpoints.glob("step-*"))

        wait_until(has_saved, f"a save of {found.good}: {logs()}")
        yield found
        assert not any(target.iterdir())
    finally:
        for job_id in filter(None, [found.good, *found.bad.values()]):
            pause_cluster.run(["scancel", "--full", "-s", "KILL", job_id], check=False)
            pause_cluster.run(["scancel", job_id], check=False)


def _good_row(rows: list[dict[str, Any]], scene: Scene) -> dict[str, Any]:
    assert {row["job"] for row in rows} >= {scene.good, *scene.bad.values()}
    assert len(rows) == len({row["job"] for row in rows})
    return next(row for row in rows if row["job"] == scene.good)


def test_top(scene: Scene) -> None:
    """Every job has one line, and ours its step and checkpoint; also as JSON, which has finite
    numbers only."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    said = scene.call("top", "-a", "--once", "--json").splitlines()
    good = _good_row([json.loads(line, parse_constant=refuse) for line in said], scene)
    assert (good["ranks"], good["name"]) == (1, "good")
    assert good["step"] >= good["commit_step"] >= 20
    head, *lines = scene.call("top", "-a", "--once").splitlines()
    assert all(line.isprintable() for line in [head, *lines])
    _good_row([{"job": line.split()[0]} for line in lines], scene)


def test_metrics(scene: Scene) -> None:
    """What is exposed can be parsed, and has the step of ours."""
    families = {
        one.name: one for one in text_string_to_metric_families(scene.call("metrics", "-a"))
    }
    steps = {one.labels["job_id"]: one.value for one in families["hydroslurm_job_step"].samples}
    assert steps[scene.good] >= 20
    parked = families["hydroslurm_job_parked_ranks"].samples
    assert scene.good in {one.labels["job_id"] for one in parked}


def test_status(scene: Scene) -> None:
    """Of all jobs of ours, one of which has a folder of somebody else's; and of each other one."""
    said = scene.call("status")
    assert f"job {scene.good} good: RUNNING" in said
    assert f"job {scene.bad['ours']} ours: " in said
    rows = [json.loads(line) for line in scene.call("status", "--json").splitlines()]
    good = next(row for row in rows if str(row["job_id"]) == scene.good)
    assert [rank["state"] for rank in good["ranks"]] == ["running"]
    for kind, job_id in scene.bad.items():
        said = scene.call("status", job_id)
        assert said.startswith(f"job {job_id} {kind}: ")
    assert SHOWN_NASTY in scene.call("status", scene.bad["words"])


def test_pause(scene: Scene) -> None:
    """Ours is paused and goes on; each other is one message, at the end of the time at the
    latest."""
    said = scene.call("pause", "--job", scene.good, "--timeout", 60)
    assert "rank 0: parked after" in said
    assert "rank 0: running again" in scene.call("resume", "--job", scene.good, "--timeout", 60)
    for job_id in scene.bad.values():
        said = scene.call("pause", "--job", job_id, "--timeout", 1, status=(0, 1))
        assert said.startswith(("hydroslurm: ", f"job {job_id}: "))
        scene.cluster.run(["scontrol", "resume", job_id], check=False)


def test_other_commands(scene: Scene) -> None:
    """Of jobs with specs, and of checkpoints: an answer or one message."""
    scene.call("list")
    for kind in ("fifos", "devices"):
        scene.call("checkpoint", "verify", scene.run_folder(kind), status=(1,))
    for kind in ("fifos", "numbers", "words"):
        scene.call("describe", scene.bad[kind], status=(0, 1))


@pytest.mark.parametrize("kind", ["fifos", "devices", "words"])
def test_report(kind: str, scene: Scene) -> None:
    """It is shown, or one message says why not; and what the folder's links lead to stays as it
    is, which the end of the scene looks at. All kinds are read in test_spoiled_folders.py."""
    said = scene.call("report", "--no-slurm", scene.run_folder(kind), status=(1,))
    assert "cannot" in said or "is not a run folder" in said
    if kind == "words":
        assert SHOWN_NASTY in said
