"""Act 3 of the demo: a training whose nodes come and go while it goes on.

train_elastic.py as `hydroslurm submit elastic.yaml` runs it: three members, of which one meets an
urgent job. The other two train on, another one is started at once, and joins. Every sample of every
epoch is trained on once, and the picture shows the size over time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from demo_stage import EXAMPLES, console, pace, private_slurm, say, submit_urgent, wait_for

from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import HydroslurmError
from hydroslurm.report.writing import write_sizes
from hydroslurm.slurm.client import open_client

SAMPLES = 1797
MEMBERS = 3
NODES = MEMBERS + 2
"""Of the private Slurm: the coordinator's, the members', and one that is free."""


def private_act(folder: Path, *, epochs: int) -> bool:
    with private_slurm("requeue", folder / "cluster", nodes=NODES):
        return slurm_act(folder, low="low", urgent="urgent", epochs=epochs)


def slurm_act(folder: Path, *, low: str, urgent: str, epochs: int) -> bool:
    """True when every sample was trained on once."""
    log = folder / "steps"
    client = open_client()
    job_id = _submit(folder, low, log, epochs, cpus=_cpus_of_a_node())
    run = _run_of(job_id)
    say(
        f"submitted job {job_id}, elastic: {MEMBERS} members wanted, {MEMBERS - 1} are enough; "
        f"run folder {run.run}"
    )
    _wait_for_generation(run, MEMBERS)
    first = _generations(run)[-1]["members"]
    say(f"generation 1: {', '.join(first)} train")
    (node,) = client.job(int(_slurm_id(first[-1]))).nodes
    urgent_job = submit_urgent(folder / "runs", partition=urgent, nodes=[node], seconds=3)
    wait_for(
        f"another member instead of {first[-1]}",
        lambda: _has_come_back(run, gone=first[-1]),
        run=run.run,
    )
    for change in _generations(run)[1:]:
        say(
            f"generation {change['generation']} at step {change['step']}: "
            f"{len(change['members'])} members: {change['cause']}; they waited "
            f"{1e3 * change['pause_s']:.0f} ms, {change['steps_lost']} steps lost"
        )
    urgent_job.result()
    wait_for(
        "the training to end",
        lambda: (run.read(run.status_json) or {}).get("state") == "Succeeded",
        run=run.run,
    )
    return _conclude(run, log, folder, epochs)


def _cpus_of_a_node() -> int:
    command = ["sinfo", "--noheader", "--format=%c"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\d+", told)[0])


def _submit(folder: Path, low: str, log: Path, epochs: int, *, cpus: int) -> str:
    spec = yaml.safe_load((EXAMPLES / "elastic.yaml").read_text())
    template = spec["replicaSpecs"][0]["template"]
    template["args"] = [
        str(EXAMPLES / "train_elastic.py"),
        *("--epochs", str(epochs), "--batch-size", "64", "--log", str(log)),
        *("--step-s", pace.nap(0.1)),
    ]
    template["command"] = [sys.executable]
    template["resources"] = {"cpus": cpus}  # a node each: the urgent job takes one member's
    spec["scheduler"]["partition"] = low
    spec["elastic"] = {"min": MEMBERS - 1, "max": MEMBERS}
    place = folder / "elastic.yaml"
    place.write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "hydroslurm.cli", "submit", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    found = re.search(r"\bjob (\d+)", done.stdout)
    if done.returncode or found is None:
        raise HydroslurmError(f"hydroslurm submit: {done.stdout}{done.stderr}")
    return found.group(1)


def _run_of(job_id: str) -> ElasticFolder:
    from hydroslurm.observe.find import locate

    run, _ = locate(open_client(), job_id)
    return ElasticFolder(run=run.root)


def _generations(run: ElasticFolder) -> list[dict[str, Any]]:
    return [one for one in run.ledger() if one["kind"] == "generation"]


def _wait_for_generation(run: ElasticFolder, size: int) -> None:
    def formed() -> bool:
        found = _generations(run)
        return bool(found) and len(found[-1]["members"]) == size

    wait_for(f"{size} members to train", formed, run=run.run)


def _has_come_back(run: ElasticFolder, *, gone: str) -> bool:
    last = _generations(run)[-1]["members"]
    return len(last) == MEMBERS and gone not in last


def _slurm_id(member: str) -> str:
    """Slurm's own number of an array element."""
    command = ["squeue", "--noheader", "--format=%A", f"--jobs={member}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _conclude(run: ElasticFolder, log: Path, folder: Path, epochs: int) -> bool:
    lines = [json.loads(one) for path in log.iterdir() for one in path.read_text().splitlines()]
    newest: dict[int, int] = {}
    for one in lines:
        newest[one["step"]] = max(newest.get(one["step"], 0), one["generation"])
    trained = Counter[int]()
    for one in lines:
        if one["generation"] == newest[one["step"]]:  # of a step that was repeated, the last
            trained.update(one["samples"])
    right = trained == dict.fromkeys(range(SAMPLES), epochs)
    picture = write_sizes(run.ledger(), folder / "sizes.png", title="members over time")
    words = "[green]yes[/]" if right else "[red]no[/]"
    console.print(
        f"every sample of {epochs} epochs trained on once: {words} "
        f"({trained.total()} of {epochs * SAMPLES}, in {len(newest)} steps)"
    )
    say(f"picture: {picture}")
    return right and picture is not None
