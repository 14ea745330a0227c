"""A TrainingJob on a real Slurm, submitted as a user would, and what is done to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import patience, text_of, wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.supervisor.attempts import Attempt, Attempts
from hydroslurm.jobs.supervisor.conditions import Condition, final_condition, read_conditions

HERE = Path(__file__).parent
LIMIT_S = 240.0
OF_THE_USER = """import sys
if "agent" in sys.orig_argv or any(".jobs." in word for word in sys.orig_argv):
    raise SystemExit("a process of hydroslurm's imports from the user's folder")
"""
"""A module that pathlib looks for, beside the spec."""
Acts = Mapping[str, list[int | str]]


@dataclass
class Scene:
    """One job. ``folder`` is its own: job.yaml, acts.json (see actor.py) and the run folder are in
    it; ``said``: what submit has printed; ``seen``: what the test wants to remember."""

    cluster: DevCluster
    folder: Path
    acts: Acts = field(default_factory=dict)
    job_id: int = 0
    run: RunDir = field(default_factory=lambda: RunDir(Path()))
    said: str = ""
    seen: dict[str, Any] = field(default_factory=dict)

    def submit(self, spec: str) -> Scene:
        """`hydroslurm submit job.yaml`; in the spec, ACTOR stands for a command that plays."""
        self.folder.mkdir(parents=True)
        shutil.copy(HERE / "actor.py", self.folder)
        (self.folder / "acts.json").write_text(json.dumps(self.acts))
        (self.folder / "nt.py").write_text(OF_THE_USER)
        file = self.folder / "job.yaml"
        file.write_text(spec.replace("ACTOR", "command: [python, actor.py, acts.json]"))
        return self.submit_file(file)

    def submit_file(self, file: Path) -> Scene:
        """The same of a spec that is there."""
        done = self.hydroslurm("submit", file.name)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stdout + done.stderr
        first = done.stdout.splitlines()[0].split()
        self.job_id, self.run = int(first[1]), RunDir(Path(first[-1]))
        return self

    def hydroslurm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line, from the spec's folder."""
        given = self.cluster.child_environ()
        return subprocess.run(
            [sys.executable, "-m", "hydroslurm.cli", *arguments],
            cwd=self.folder,
            # that a person may have it is not what makes ranks print at once
            env={name: value for name, value in given.items() if name != "PYTHONUNBUFFERED"},
            capture_output=True,
            text=True,
            timeout=patience(LIMIT_S),
        )

    # --- what has become of it

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return read_conditions(self.run.conditions_jsonl)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return Attempts(self.run.starts_jsonl).all()

    def final_condition(self) -> Condition:
        """Wait for it."""
        self.wait(lambda: final_condition(self.conditions) is not None, "a verdict")
        found = final_condition(self.conditions)
        assert found is not None
        return found

    def printed(self, task: int) -> str:
        """All that a task has, in all attempts."""
        return text_of(self.run.task_log(task))

    def supervisor_said(self) -> str:
        return "".join(path.read_text() for path in self.run.logs.glob(f"{self.job_id}_*_log.out"))

    # --- what is done to it

    def wait(self, condition: Callable[[], bool], words: str) -> None:
        def state() -> str:
            conditions = "\n".join(map(str, self.conditions))
            queue = self.slurm("squeue", "--noheader", "--array", "--format=%i %P %T %N %r")
            nodes = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T %E")
            return f"{words}\n{conditions}\n{self.supervisor_said()[-3000:]}\n{queue}\n{nodes}"

        wait_until(condition, state, limit_s=LIMIT_S)

    def wait_until_playing(self, attempt: int, *, replicas: int) -> None:
        """Until all tasks say what they do in this attempt."""
        self.wait(
            lambda: all(f" attempt {attempt}: " in self.printed(n) for n in range(replicas)),
            f"attempt {attempt} of {replicas} replicas",
        )

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def slurm(self, *words: str) -> str:
        return self.cluster.run(words, timeout_s=patience(LIMIT_S)).stdout

    def processes(self, word: str) -> list[int]:
        """Of this machine, those whose command line has the run folder and a word in it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in line and str(self.run.root) in line:
                found.append(int(path.parent.name))
        return found

    def kill_supervisor(self, *, with_shell: bool) -> None:
        """SIGKILL, to it alone or first to the batch shell that would start it again."""
        (pid,) = self.processes("hydroslurm.jobs.supervisor.main")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for victim in [*([parent] if with_shell else []), pid]:
            os.kill(victim, signal.SIGKILL)


def matches(said: str, *lines: str) -> None:
    """Each of these expressions is a line of it."""
    for line in lines:
        assert re.search(rf"^{line}$", said, re.MULTILINE), f"{line}\n{said}"
