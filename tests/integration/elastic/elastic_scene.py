"""An elastic job on a real Slurm, submitted as a user would, and what is done to it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from integration.trainingjob.scene import Scene

from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.devcluster import DevCluster
from hydroslurm.elastic.folder import ElasticFolder

HERE = Path(__file__).parent


def slurmd_of(cluster: DevCluster, node: str) -> int:
    """The daemon of that node."""
    (found,) = [one for one in cluster.status().daemons if one.name == f"slurmd-{node}"]
    return found.pid


SPEC = """
replicaSpecs:
- template:
    command: [python, {script}]
    env: {{HYDROSLURM_SAFE_DIRECTORY: {folder}, GLOO_SOCKET_IFNAME: lo}}
scheduler: {{partition: low, timeLimitMinutes: 10}}
elastic: {{min: {min}, max: {max}, size: {size}, engine: {engine}, {rules}}}
{more}
"""


class ElasticScene(Scene):
    """One elastic job whose members train nothing, see member.py."""

    def write_spec(self, *, base: bool = True, rules: str = "", **given: Any) -> None:
        """``script``: with its arguments, as items of a YAML list; ``rules``: further ones of
        `elastic`, ``more``: further parts of the spec."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "member.py", self.folder)
        told = {"min": 1, "max": 3, "size": 2, "script": "member.py", "engine": "auto", "more": ""}
        rules = ", ".join(filter(None, ("base: {partition: urgent}" if base else "", rules)))
        text = SPEC.format(**{"folder": self.folder, "rules": rules, **told, **given})
        (self.folder / "job.yaml").write_text(text)

    def submit_elastic(self, **given: Any) -> ElasticScene:
        self.write_spec(**given)
        self.submit_file(self.folder / "job.yaml")
        return self

    @property
    def elastic(self) -> ElasticFolder:
        return ElasticFolder(run=self.run.root)

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.elastic.ledger() if one["kind"] == kind]

    @property
    def members(self) -> list[str]:
        """Of the newest generation."""
        found = self.entries("generation")
        return [] if not found else list(found[-1]["members"])

    def states(self) -> dict[str, str]:
        """Member -> what the coordinator says of it, a spare too."""
        status = self.elastic.read(self.elastic.status_json) or {"members": ()}
        return {one["id"]: one["state"] for one in status["members"]}

    @property
    def base(self) -> list[str]:
        """Members of the base array, which nobody preempts."""
        return [name for one in self.entries("submitted") if one["base"] for name in one["members"]]

    @property
    def extra(self) -> list[str]:
        """The other members of the newest generation, the newest last."""
        return sorted(set(self.members) - set(self.base), key=lambda name: int(name.split("_")[0]))

    def wait_for_size(self, size: int, *, without: str = "") -> list[str]:
        """Until a generation of so many trains, from which this member is gone; its members."""
        self.wait(
            lambda: len(self.members) == size and without not in self.members,
            f"generation of {size} without {without or 'anybody in particular'}",
        )
        return self.members

    def wait_for(self, kind: str, times: int = 1) -> dict[str, Any]:
        self.wait(lambda: len(self.entries(kind)) >= times, f"{times} {kind}")
        return self.entries(kind)[times - 1]

    def finish(self) -> None:
        """Let the training end a little later; it ends well, and nothing of it is left."""
        status = self.elastic.read(self.elastic.status_json)
        assert status is not None
        made = self.folder / "until.new"
        made.write_text(str(status["step"] + 60))
        made.rename(self.folder / "until")
        self.assert_it_ends_well()

    def assert_it_ends_well(self) -> None:
        assert self.final_condition().type == "Succeeded"
        self.assert_nothing_is_left()

    def kill_coordinator(self, *, signo: signal.Signals = signal.SIGKILL) -> None:
        (pid,) = self.processes("-u -m hydroslurm.jobs.supervisor.main")
        os.kill(pid, signo)

    def member_processes(self) -> list[tuple[str, int]]:
        """The members that run on this machine, whatever Slurm knows of them."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_bytes()
                text = (path / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            variables = dict(one.split("=", 1) for one in text.split("\0") if "=" in one)
            if b"member.py" in line and variables.get(ELASTIC_ENV) == str(self.run.root):
                name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**variables)
                found.append((name, int(path.name)))
        return found

    def member_process(self, name: str) -> int:
        (found,) = [pid for member, pid in self.member_processes() if member == name]
        return found

    def nodes(self) -> dict[str, str]:
        """Member -> its node."""
        status = self.elastic.read(self.elastic.status_json)
        assert status is not None
        return {one["id"]: one["node"] for one in status["members"]}

    def jobs(self) -> list[str]:
        """All that Slurm has of this run and has not ended, its janitor included."""
        listed = self.slurm("squeue", "--noheader", "--format=%i %o").splitlines()
        mine = [line.split()[0] for line in listed if self.run.root.name in line]
        named = self.slurm("squeue", "--noheader", "--format=%i", f"--name={self.run.root.name}")
        return [*mine, *named.split()]

    def assert_nothing_is_left(self) -> None:
        """No job of it in Slurm, and no process on the nodes."""
        ids = [str(self.job_id), str(self.job_id + 1)]
        self.wait(
            lambda: (
                not set(self.slurm("squeue", "-h", "-o", "%i").split()) & set(ids)
                and not self.jobs()
            ),
            "end of all jobs",
        )
        self.wait(lambda: not self.processes(""), "end of all processes")
