"""Jobs of another user, with run folders full of what should not be there, beside a good one of
ours: each is a line at the most, nobody waits, and the good one is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kit.watched import Watched
from prometheus_client.parser import text_string_to_metric_families
from security.conftest import Stranger
from security.planting import python
from security.spoiled import SHOWN_NASTY, SPOIL, folder_of

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

NEIGHBOURS = ("fifos", "devices", "numbers", "words")
"""Every kind is read in test_spoiled_folders.py."""
HYDROSLURM = """
    import sys
    from hydroslurm.cli import main
    sys.exit(main())
"""
LIMIT_S = 120
"""Of one command, on a machine that is busy; one that waits for a FIFO waits for ever."""


@dataclass
class Scene(Watched):
    """A good job of ours, one of the other user for each kind of folder, and one of ours that
    points to a folder of theirs."""

    home: Path = Path()
    good: str = ""
    bad: dict[str, str] = field(default_factory=dict)

    def run_folder(self, kind: str) -> Path:
        return folder_of(self.home, kind)

    def call(self, *words: object, status: tuple[int, ...] = (0,)) -> str:
        """What a command says; it ends by itself, with no traceback and nothing for a terminal."""
        done = python(HYDROSLURM, *words, limit_s=LIMIT_S, **self.environ)
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
    stranger.python(SPOIL, str(home), str(target), *NEIGHBOURS)
    found = Scene(pause_cluster, tmp_path_factory.mktemp("jobs"), home=home)
    try:
        found.good = found.train("good", save_every=20, think_s=0.02)
        for kind in NEIGHBOURS:
            theirs = (f"--uid={stranger.uid}", f"--gid={stranger.gid}", f"--chdir={stranger.home}")
            folder = f"--comment=hydroslurm:{found.run_folder(kind)}"
            sleeps = (kind, "exec sleep 900", "-o", "/dev/null")
            found.bad[kind] = found.submit(*sleeps, *theirs, folder)
        folder = f"--comment=hydroslurm:{found.run_folder('numbers')}"
        found.bad["ours"] = found.submit("ours", "exec sleep 900", folder)
        found.wait_for_save(found.good)
        yield found
        assert not any(target.iterdir())
    finally:
        found.end()


def _good_row(rows: list[dict[str, Any]], scene: Scene) -> dict[str, Any]:
    assert {row["job"] for row in rows} >= {scene.good, *scene.bad.values()}
    assert len(rows) == len({row["job"] for row in rows})
    return next(row for row in rows if row["job"] == scene.good)


def test_what_is_shown(scene: Scene) -> None:
    """Every job has one line, and ours its step and checkpoint; also as JSON, which has finite
    numbers only, and as metrics, which can be parsed. The status is that of all jobs of ours, one
    of which has a folder of somebody else's, or of a job that is named."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    said = scene.call("top", "-a", "--once", "--json").splitlines()
    good = _good_row([json.loads(line, parse_constant=refuse) for line in said], scene)
    assert (good["ranks"], good["name"]) == (1, "good")
    assert good["step"] >= good["commit_step"] >= 20
    head, *lines = scene.call("top", "-a", "--once").splitlines()
    assert all(line.isprintable() for line in [head, *lines])
    _good_row([{"job": line.split()[0]} for line in lines], scene)

    families = text_string_to_metric_families(scene.call("metrics", "-a"))
    samples = {one.name: {s.labels.get("job_id"): s.value for s in one.samples} for one in families}
    assert samples["hydroslurm_job_step"][scene.good] >= 20
    assert scene.good in samples["hydroslurm_job_parked_ranks"]

    said = scene.call("status")
    assert f"job {scene.good} good: RUNNING" in said
    assert f"job {scene.bad['ours']} ours: " in said
    rows = [json.loads(line) for line in scene.call("status", "--json").splitlines()]
    good = next(row for row in rows if str(row["job_id"]) == scene.good)
    assert [rank["state"] for rank in good["ranks"]] == ["running"]
    for kind in ("fifos", "words", "ours"):
        job_id = scene.bad[kind]
        said = scene.call("status", job_id)
        assert said.startswith(f"job {job_id} {kind}: ")
        assert kind != "words" or SHOWN_NASTY in said
    scene.call("list")


def test_what_is_done(scene: Scene) -> None:
    """Ours is paused and goes on; each other is one message, at the end of the time at the latest.
    A report is shown, or one message says why not; and what the folder's links lead to stays as it
    is, which the end of the scene looks at."""
    assert "rank 0: parked after" in scene.call("pause", "--job", scene.good, "--timeout", 60)
    assert "rank 0: running again" in scene.call("resume", "--job", scene.good, "--timeout", 60)
    for job_id in (scene.bad["fifos"], scene.bad["numbers"], scene.bad["ours"]):
        said = scene.call("pause", "--job", job_id, "--timeout", 1, status=(0, 1))
        assert said.startswith(("hydroslurm: ", f"job {job_id}: "))
        scene.cluster.run(["scontrol", "resume", job_id], check=False)
    for kind in ("devices", "words"):
        scene.call("describe", scene.bad[kind], status=(0, 1))
        folder = scene.run_folder(kind)
        said = scene.call("report", "--no-slurm", folder, status=(1,))
        assert "cannot" in said or "is not a run folder" in said
        assert kind != "words" or SHOWN_NASTY in said
    scene.call("checkpoint", "verify", scene.run_folder("fifos"), status=(1,))
