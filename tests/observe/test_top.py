"""``top`` and ``metrics`` of real jobs: in a real terminal, in a pipe, for Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import Part
from kit.terminal import Open
from kit.watched import Watched
from processes import captured, free_port, wait_until
from prometheus_client.parser import text_string_to_metric_families

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.report.external_sources import Accounting
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.reading import read_history

pytestmark = pytest.mark.slurm

HYDROSLURM = [sys.executable, "-m", "hydroslurm.cli"]
GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
HOSTILE = "\x1b[2J\x1b]0;title\x07"


@dataclass
class Scene(Watched):
    """Three jobs of one cluster: one trains, one is suspended, one has no run folder."""

    trains: str = ""
    suspended: str = ""
    foreign: str = ""

    def top(self) -> list[dict[str, Any]]:
        done = captured([*HYDROSLURM, "top", "--json", *self.ids], env=self.environ, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def scene(requeue_cluster: Part, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    found = Scene(requeue_cluster, tmp_path_factory.mktemp("jobs"))
    try:
        found.suspended = found.train("suspended", save_every=0, think_s=0.05)
        found.trains = found.train("trains", save_every=20, think_s=0.05)
        found.foreign = found.submit(HOSTILE, "exec sleep 600")
        found.wait_for_save(found.suspended)
        requeue_cluster.run(["scontrol", "suspend", found.suspended])
        found.wait_for_save(found.trains)
        yield found
    finally:
        found.end()


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


def test_in_a_terminal(scene: Scene, terminal: Open, tmp_path: Path) -> None:
    """At 80 by 24 and after a resize nothing is wrapped; slurmctld's absence is told and outlived;
    after q and after Ctrl-C the terminal is as it was."""
    conf = tmp_path / "slurm.conf"  # of programs that give up on an absent controller sooner
    present = scene.cluster.slurm_conf.read_text().replace("Timeout=30", "Timeout=2")
    conf.write_text(present)
    commands = {"SLURM_CONF": str(conf), "HYDROSLURM_SLURM_BACKEND": "commands"}
    there = terminal({**scene.environ, **commands})
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

    conf.write_text(re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={free_port()}", present))
    there.until(lambda: "Slurm " in there.lines()[1], "word of Slurm's absence")
    assert scene.trains in there.text()
    conf.write_text(present)
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
    """The text file and the port tell the same jobs; dashboard and alerts ask for nothing else.
    Both can be parsed."""
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
    dashboard = json.loads((GRAFANA / "hydroslurm.json").read_text())
    rules = yaml.safe_load((GRAFANA / "hydroslurm.rules.yml").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [one["query"]["query"] for one in dashboard["templating"]["list"][1:]]
    asked += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    wanted = {name for one in asked for name in re.findall(r"hydroslurm_\w+", one)}
    assert len(wanted) > 15
    for text in (file.read_text(), served):
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        assert wanted <= {sample.name for sample in samples}
        of = {(s.name, s.labels.get("job_id")): s for s in samples}
        assert of["hydroslurm_job_parked_ranks", scene.suspended].value == 1
        assert of["hydroslurm_job_step", scene.trains].value >= 20
        assert of["hydroslurm_park_seconds_count", scene.suspended].value == 1
        foreign = of["hydroslurm_job_preemptions_total", scene.foreign]
        assert (foreign.value, foreign.labels["name"]) == (0, HOSTILE)
        assert of["hydroslurm_slurm_up", None].value == 1


def test_goodput_while_it_runs(scene: Scene) -> None:
    """A job that was requeued tells what it has lost and what the restart took: what the report
    reads from its events."""

    def told() -> dict[str, Any]:
        done = captured(
            [*HYDROSLURM, "status", "--json", scene.trains], env=scene.environ, timeout=60
        )
        ranks = json.loads(done.stdout)["ranks"]
        return (ranks and ranks[0]["goodput"]) or {}

    before = told()
    assert (before["restarts"], before["steps_lost"]) == (0, 0)
    assert 0 < before["of_allocated"] < 1
    scene.cluster.run(["scontrol", "requeue", scene.trains])
    run = RunDir(scene.folder / "hydroslurm-runs" / scene.trains)

    def has_restarted() -> bool:
        status = read_status(run.rank_status(0))
        live = status and status.goodput()
        return bool(live and live.restarts)

    wait_until(has_restarted, "a step behind the requeue", limit_s=120)
    for verb in ("status", "describe"):
        done = captured([*HYDROSLURM, verb, scene.trains], env=scene.environ, timeout=60)
        assert re.search(r"goodput 0\.\d\d of \d+ s, steps lost: 0, restarts: 1", done.stdout), verb
    live = told()
    report = goodput_of(read_history(run.root), Accounting())
    assert (live["restarts"], live["steps_lost"], live["at_most"]) == (1, 0, False)
    assert live["steps"] > before["steps"]
    assert live["restart_s"] > 0
    for part in ("restart_s", "starting_s", "leaving_s", "queued_s"):
        assert live[part] == pytest.approx(getattr(report, part), abs=0.5), part
