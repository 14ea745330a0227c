"""What a job is on Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import captured
from torch.distributed.run import parse_args

from hydroslurm.core.module_command import module_command
from hydroslurm.errors import UsageError
from hydroslurm.jobs.layout import plan_job
from hydroslurm.jobs.plan import Plan, read_plan
from hydroslurm.jobs.spec.reading import loads

PYTHON = "/opt/python"


def planned(text: str, *, use_images: bool = True) -> Plan:
    return plan_job(loads(text).job, folder=Path("/work"), python=PYTHON, use_images=use_images)


def job(more: str = "", *, template: str = "", torchrun: str = "") -> str:
    return f"""
replicaSpecs:
- type: worker
  replicas: 4
  {more}
  template:
    command: [python]
    args: [train.py, --lr, "3"]
    {template}
torchrunConfig: {{{torchrun}}}
"""


def test_a_replica_is_a_node() -> None:
    """Four replicas: four nodes, four tasks, in order."""
    plan = planned(job())
    assert (plan.nodes, plan.tasks_per_node) == (4, (1, 1, 1, 1))
    assert [task.replica for task in plan.tasks] == [f"worker-{n}" for n in range(4)]
    assert plan.tasks[0].argv == (PYTHON, "train.py", "--lr", "3")
    assert plan.tasks[0].working_directory == "/work"


def test_replicas_can_share_nodes() -> None:
    """Two nodes with two replicas of two ranks each, and what they need of each node."""
    plan = planned(job(template="resources: {nodes: 2, tasks: 2, cpus: 3, memory: 1Gi, gpus: 1}"))
    assert plan.tasks_per_node == (4, 4)
    assert [task.node for task in plan.tasks] == [0] * 4 + [1] * 4
    assert (plan.cpus_per_node, plan.cpus_per_task) == (12, 3)
    assert (plan.memory_mib_per_node, plan.gpus_per_node) == (2048, 2)


def test_nodes_are_as_large_as_the_largest_replica_needs() -> None:
    """A small master beside large workers."""
    plan = planned("""
replicaSpecs:
- type: worker
  replicas: 2
  template: {command: [python, a.py], resources: {tasks: 2, cpus: 4, memory: 4Gi}}
- type: master
  template: {command: [python, a.py], resources: {cpus: 1, memory: 1Gi}}
""")
    assert plan.replicas == ("master-0", "worker-0", "worker-1")
    assert plan.tasks_per_node == (1, 2, 2)
    assert (plan.cpus_per_node, plan.memory_mib_per_node) == (8, 4096)


def test_it_survives_its_file(tmp_path: Path) -> None:
    """What the tasks read is what was planned."""
    plan = planned(job(template='env: {A: "x\\ny"}\n    init: [{command: [sh, -c, "echo ok"]}]'))
    (tmp_path / "plan.json").write_text(plan.dumps())
    assert read_plan(tmp_path / "plan.json") == plan


AGENT = (*module_command(PYTHON, "hydroslurm.cli", "agent"), "--")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("[python, train.py]", ("--", "train.py")),
        ("[python, -u, train.py]", ("--", "train.py")),
        ("[python, train.py, --log, x, --n=4]", ("--", "train.py", "--log", "x", "--n=4")),
        ("[python3, -m, package.train, --rdzv]", ("-m", "--", "package.train", "--rdzv")),
        ("[python, -O, train.py]", ("--no-python", "--", PYTHON, "-O", "train.py")),
        ("[bash, run.sh]", ("--no-python", "--", "bash", "run.sh")),
    ],
)
def test_torchrun_is_one_word(words: str, rest: tuple[str, ...]) -> None:
    """The same command with and without, a module included; torchrun reads none of the script's
    arguments, although some look like its own."""
    text = f"replicaSpecs: [{{replicas: 2, template: {{command: {words}}}}}]\n"
    (plan, other) = (
        planned(text + f"torchrunConfig: {{enable: {on}}}\n") for on in ("true", "false")
    )
    assert plan.tasks[0].argv[: len(AGENT)] == AGENT
    assert plan.tasks[0].argv[-len(rest) :] == rest
    assert plan.tasks[0].is_agent
    chosen: Any = parse_args(list(plan.tasks[0].argv[len(AGENT) :]))
    words_of_script = [one for one in rest if one not in ("-m", "--", "--no-python")]
    assert [chosen.training_script, *chosen.training_script_args] == words_of_script
    assert not other.tasks[0].is_agent


def test_torchruns_options() -> None:
    """As the spec says, with ours behind none of them."""
    argv = planned(
        job(torchrun='enable: true, minNodes: 2, maxRestarts: 5, procPerNode: 3, '
                     'extraOptions: ["--log-dir", logs]')
    ).tasks[0].argv  # fmt: skip
    assert "--nnodes=2:4" in argv
    assert "--nproc-per-node=3" in argv
    assert "--max-restarts=5" in argv
    assert argv[argv.index("--log-dir") + 1] == "logs"


def test_a_python_without_a_script_is_refused() -> None:
    """torchrun would wait for a script that never comes."""
    with pytest.raises(UsageError, match="names no script"):
        planned("replicaSpecs: [{template: {command: [python]}}]\ntorchrunConfig: {enable: true}\n")


def test_debug_starts_nothing() -> None:
    """Everything is up, and sleeps; what was asked for instead is run."""
    text = job() + "runMode: {debug: {enable: true%s}}\n"
    assert planned(text % "").tasks[0].argv == ("sleep", "infinity")
    more = ", replicaSpecs: [{type: worker, command: [sleep, '9'], skipInit: true}]"
    assert planned(text % more).tasks[0].argv == ("sleep", "9")


def test_an_init_step_that_fails_fails_its_replica(tmp_path: Path) -> None:
    """Its status is the task's, and the replica itself is not started."""
    more = f"workingDirectory: {tmp_path}\n    init: [{{name: look, command: [sh, -c, exit 4]}}]"
    (tmp_path / "plan.json").write_text(planned(job(template=more)).dumps())
    command = module_command(sys.executable, "hydroslurm.jobs.task", str(tmp_path / "plan.json"))
    done = captured(command, env={**os.environ, "SLURM_PROCID": "0"}, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")
    assert "init step 'look' of worker-0 failed with status 4" in done.stderr
