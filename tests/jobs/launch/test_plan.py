"""What a job is on Slurm: its tasks, in which engine and in which image."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import captured
from torch.distributed.run import parse_args

from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.elastic.autoscale import AutoscalePolicy, Behavior
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import LaunchError, UsageError
from hydroslurm.jobs.images import (
    Runtime,
    apptainer_image,
    contained_argv,
    contained_environ,
    find_runtime,
    pyxis_image,
    pyxis_options,
)
from hydroslurm.jobs.launch.elastic_job import of_one_member, prepare
from hydroslurm.jobs.launch.scripts import member_script
from hydroslurm.jobs.launch.training_job import plan_for
from hydroslurm.jobs.layout import plan_job
from hydroslurm.jobs.plan import Plan, Step, TaskPlan, read_plan
from hydroslurm.jobs.spec.reading import JobSpec, dumps, load, loads
from hydroslurm.jobs.supervisor.job_step import srun_command

PYTHON = "/opt/python"


def planned(text: str) -> Plan:
    return plan_job(loads(text).job, folder=Path("/work"), python=PYTHON)


def job(*, template: str = "", torchrun: str = "") -> str:
    return f"""
replicaSpecs:
- type: worker
  replicas: 4
  template:
    command: [python]
    args: [train.py, --lr, "3"]
    {template}
torchrunConfig: {{{torchrun}}}
"""


def test_replicas_can_share_nodes(tmp_path: Path) -> None:
    """Two nodes with two replicas of two ranks each, and what they need of each node; without
    `nodes` a replica is one. What the tasks read is what was planned."""
    plan = planned(job(template="resources: {nodes: 2, tasks: 2, cpus: 3, memory: 1Gi, gpus: 1}"))
    assert plan.tasks_per_node == (4, 4)
    assert [task.node for task in plan.tasks] == [0] * 4 + [1] * 4
    assert (plan.cpus_per_node, plan.cpus_per_task) == (12, 3)
    assert (plan.memory_mib_per_node, plan.gpus_per_node) == (2048, 2)
    plan = planned(job(template='env: {A: "x\\ny"}\n    init: [{command: [sh, -c, "echo ok"]}]'))
    assert (plan.nodes, plan.tasks_per_node) == (4, (1, 1, 1, 1))
    assert [task.replica for task in plan.tasks] == [f"worker-{n}" for n in range(4)]
    assert plan.tasks[0].argv == (PYTHON, "train.py", "--lr", "3")
    assert plan.tasks[0].working_directory == "/work"
    (tmp_path / "plan.json").write_text(plan.dumps())
    assert read_plan(tmp_path / "plan.json") == plan


def test_nodes_are_as_large_as_the_largest_replica_needs() -> None:
    """A small master, which comes first, beside large workers."""
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


AGENT = (*module_command(PYTHON, "hydroslurm.cli", "agent"), "--")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
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
    plan = planned(text + "torchrunConfig: {enable: true}\n")
    assert plan.tasks[0].argv[: len(AGENT)] == AGENT
    assert plan.tasks[0].argv[-len(rest) :] == rest
    assert plan.tasks[0].is_agent
    chosen: Any = parse_args(list(plan.tasks[0].argv[len(AGENT) :]))
    words_of_script = [one for one in rest if one not in ("-m", "--", "--no-python")]
    assert [chosen.training_script, *chosen.training_script_args] == words_of_script
    assert not planned(text).tasks[0].is_agent


def test_torchruns_options() -> None:
    """As the spec says, with ours behind none of them."""
    more = 'maxRestarts: 5, procPerNode: 3, extraOptions: ["--log-dir", logs]'
    argv = planned(job(torchrun=f"enable: true, minNodes: 2, {more}")).tasks[0].argv
    assert {"--nnodes=2:4", "--nproc-per-node=3", "--max-restarts=5"} < {*argv}
    assert argv[argv.index("--log-dir") + 1] == "logs"
    with pytest.raises(UsageError, match="names no script"):  # torchrun would wait for one
        planned("replicaSpecs: [{template: {command: [python]}}]\ntorchrunConfig: {enable: true}\n")


def test_an_init_step_that_fails_fails_its_replica(tmp_path: Path) -> None:
    """Its status is the task's, and the replica itself is not started."""
    more = f"workingDirectory: {tmp_path}\n    init: [{{name: look, command: [sh, -c, exit 4]}}]"
    (tmp_path / "plan.json").write_text(planned(job(template=more)).dumps())
    command = module_command(sys.executable, "hydroslurm.jobs.task", str(tmp_path / "plan.json"))
    done = captured(command, env={**os.environ, "SLURM_PROCID": "0"}, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")
    assert "init step 'look' of worker-0 failed with status 4" in done.stderr


SHARDED = "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(net)\n"
IN_MEMBERS = SHARDED + "state = hydroslurm.elastic.State(model=model)\n"
PLAIN = "# not fully_shard(net), which is slower here\nmodel = DistributedDataParallel(net)\n"


def spec_of(folder: Path, script: str, elastic: str, more: str = "") -> JobSpec:
    (folder / "train.py").write_text(script)
    tasks = "" if "torchrun" in more else ", tasks: 3"
    (folder / "job.yaml").write_text(
        "replicaSpecs:\n- template:\n    command: [python, train.py, --lr, '1']\n"
        f"    resources: {{cpus: 2{tasks}}}\nelastic: {{max: 4, {elastic}}}\n{more}"
    )
    return load(folder / "job.yaml")


@pytest.mark.parametrize(
    ("script", "elastic", "engine", "why"),
    [
        (PLAIN, "min: 2", "in_place", ""),
        (PLAIN, "engine: restart", "restart", "the spec names it"),
        (SHARDED, "min: 2", "restart", "train.py shards its model (fully_shard)"),
        (IN_MEMBERS, "min: 2", "in_place", ""),
    ],
)
def test_the_engine_fits_the_script(
    tmp_path: Path, script: str, elastic: str, engine: str, why: str
) -> None:
    """A model whose weights are nowhere whole is saved and started anew, unless each member has it
    whole; comments count for nothing."""
    chosen = of_one_member(spec_of(tmp_path, script, elastic))
    assert chosen.job.elastic is not None
    assert chosen.job.elastic.engine == engine
    assert chosen.engine_why.startswith(why)


def test_an_engine_that_cannot_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    """A sharded model in place; what only engine in_place does, for a sharded model."""
    for elastic, said in (
        ("engine: in_place", r"train\.py shards its model .* say engine: restart"),
        ("summation: fixed_order", r"restart \(train\.py shards .*elastic\.summation: fixed"),
    ):
        with pytest.raises(UsageError, match=said):
            of_one_member(spec_of(tmp_path, SHARDED, elastic))


def test_torchrun_means_agents(tmp_path: Path) -> None:
    """With torchrunConfig procPerNode says how many ranks they start."""
    spec = spec_of(tmp_path, PLAIN, "min: 1", "torchrunConfig: {enable: true, procPerNode: 2}")
    one = of_one_member(spec)
    assert one.job.elastic is not None
    assert one.job.elastic.engine == "restart"
    assert "torchrunConfig.enable" in one.engine_why
    plan, _ = plan_for(one, environ={})
    assert "agent -- --nproc-per-node=2" in shlex.join(plan.tasks[0].argv)


def test_a_member_is_one_agent(tmp_path: Path) -> None:
    """It starts as many ranks as srun would; the coordinator knows how many."""
    spec = of_one_member(spec_of(tmp_path, PLAIN, "engine: restart"))
    plan, _ = plan_for(spec, environ={})
    assert (len(plan.tasks), plan.cpus_per_node) == (1, 6)
    words = shlex.join(plan.tasks[0].argv)
    assert "agent -- --nproc-per-node=3 --max-restarts=0 -- train.py --lr 1" in words
    run = RunDir(tmp_path / "run").create()
    made = prepare(spec.job, plan, run)
    options = ElasticFolder(run=run.root).options()
    assert (options.engine, options.ranks_each, options.batch) == ("restart", 3, "per_rank")
    script = member_script(spec.job, made, run, {})
    assert "--ntasks=1 --cpus-per-task=6" in script
    assert "export HYDROSLURM_PREEMPT=pause" in script  # or requeue, by which frameworks save


def test_the_coordinator_has_the_rules_of_the_spec(tmp_path: Path) -> None:
    """With the defaults of those that it leaves out, and the queue of the job's own partition."""
    rules = "{stepTimeSeconds: 2, cpu: 0.7, queueLength: 0, scaleDown: {step: 1}}"
    more = "scheduler: {partition: low}"
    spec = of_one_member(spec_of(tmp_path, PLAIN, f"autoscale: {rules}", more))
    (tmp_path / "again.yaml").write_text(dumps(spec.job))
    assert load(tmp_path / "again.yaml").job == spec.job
    run = RunDir(tmp_path / "run").create()
    prepare(spec.job, plan_for(spec, environ={})[0], run)
    down = Behavior(stabilization_window_s=300, cooldown_s=180, step=1)
    assert ElasticFolder(run=run.root).options().autoscale == AutoscalePolicy(
        **{"step_time_s": 2.0, "cpu": 0.7, "queue_length": 0}, partition="low", scale_down=down
    )


REFERENCE = "nvcr.io/nvidia/pytorch:24.05-py3"
# Takes the words of `apptainer exec [--nv] [--bind PATH]... --pwd PATH IMAGE COMMAND...`, prints
# them, and runs the command with what APPTAINERENV_* name, on the host.
APPTAINER = """#!/usr/bin/env python3
import os, sys
print("apptainer", *sys.argv[1:], flush=True)
rest = sys.argv[2:]
while rest[0].startswith("--"):
    rest = rest[1:] if rest[0] == "--nv" else rest[2:]
for name, value in list(os.environ.items()):
    if name.startswith("APPTAINERENV_"):
        os.environ[name.removeprefix("APPTAINERENV_")] = value
os.execvp(rest[1], rest[1:])
"""


def test_runtime_is_found_on_the_path(programs: Callable[..., Path]) -> None:
    """pyxis where srun says so, else Apptainer, else Singularity, else none."""
    path = {"PATH": f"{programs()}:/bin"}
    for name, text, runtime in (
        ("srun", "", None),
        ("singularity", APPTAINER, Runtime.APPTAINER),
        # as `srun --help` of a Slurm with pyxis
        ("srun", "echo '  --container-image=[USER@]IMAGE[:TAG]|PATH'", Runtime.PYXIS),
    ):
        programs(**{name: text})
        assert find_runtime(path) is runtime


@pytest.mark.parametrize(
    ("image", "apptainer", "pyxis"),
    [
        (REFERENCE, f"docker://{REFERENCE}", "nvcr.io#nvidia/pytorch:24.05-py3"),
        ("pytorch/pytorch:2.4", "docker://pytorch/pytorch:2.4", "pytorch/pytorch:2.4"),
        ("localhost:5000/a", "docker://localhost:5000/a", "localhost:5000#a"),
        ("/images/a b.sif", "/images/a b.sif", "/images/a b.sif"),
        ("nvcr.io#nvidia/cuda:12", "docker://nvcr.io#nvidia/cuda:12", "nvcr.io#nvidia/cuda:12"),
    ],
)
def test_image_names(image: str, apptainer: str, pyxis: str) -> None:
    """A reference is spelled as each runtime wants it; a path stays."""
    assert (apptainer_image(image), pyxis_image(image)) == (apptainer, pyxis)


def test_words_for_apptainer() -> None:
    """GPUs where there are any, each folder once. Variables count above the image's, and stand in
    no list of processes; a path that would be read as two is refused, not bound wrongly."""

    def words(*folders: str) -> tuple[str, ...]:
        where = {"folders": map(Path, folders), "working_directory": "/"}
        return contained_argv(["x"], image="i", program="/bin/apptainer", has_gpus=True, **where)

    assert words("/run/1", "/work", "/work")[1:7] == (
        "exec", "--nv", "--bind", "/run/1", "--bind", "/work",
    )  # fmt: skip
    made = contained_environ({"A": "1", "B": "2"}, {"A": "1", "B": "x"}, program="apptainer")
    assert made == {"A": "1", "B": "2", "APPTAINERENV_B": "2"}
    made = contained_environ({"B": "2"}, {}, program="/opt/bin/singularity")
    assert made == {"B": "2", "SINGULARITYENV_B": "2"}
    for bad in ("/data:ro", "/a,/etc"):
        with pytest.raises(LaunchError, match="has a : or a , in it"):
            words(bad)
        with pytest.raises(LaunchError, match="has a : or a , in it"):
            pyxis_options("i", folders=[Path(bad)], working_directory="/")


def contained(folder: Path, runtime: str | None) -> Plan:
    task = TaskPlan(
        replica="worker-0",
        node=0,
        argv=("python3", "-c", "import os; print('in', os.getcwd(), os.environ['COLOUR'])"),
        env=(("COLOUR", "deep blue"),),
        working_directory=str(folder),
        init=(Step("look", ("sh", "-c", "echo init $COLOUR")),),
        image=REFERENCE,
    )
    return Plan(1, 1, None, 0, (task,), runtime=runtime)


def test_task_becomes_apptainer(programs: Callable[..., Path], tmp_path: Path) -> None:
    """The task's program and its init steps run in the image, where the job does, with the spec's
    variables; on a node without Apptainer the task says so and fails."""
    (tmp_path / "plan.json").write_text(contained(tmp_path, "apptainer").dumps())
    programs(apptainer=APPTAINER)
    command = [sys.executable, "-m", "hydroslurm.jobs.task", str(tmp_path / "plan.json")]
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    environ = {**os.environ, **slurm, "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1"}
    done = captured(command, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    exec_in = f"apptainer exec --bind {tmp_path} --pwd {tmp_path} docker://{REFERENCE} "
    first, init, second, last = done.stdout.splitlines()
    assert (first, init) == (f"{exec_in}sh -c echo init $COLOUR", "init deep blue")
    assert second.startswith(f"{exec_in}python3 -c ")
    assert last == f"in {tmp_path} deep blue"
    done = captured(command, env={**environ, "PATH": "/bin"}, timeout=60)
    assert done.returncode == 126
    assert f"image '{REFERENCE}'" in done.stderr
    assert "neither pyxis (srun --container-image) nor Apptainer" in done.stderr


def test_step_of_pyxis(tmp_path: Path) -> None:
    """srun starts the tasks in the image, with the image's own Python; without pyxis it has none of
    its options."""
    made = {
        runtime: srun_command(contained(tmp_path, runtime), RunDir(tmp_path))
        for runtime in ("pyxis", "apptainer")
    }
    command = made["pyxis"]
    assert "--container-image=nvcr.io#nvidia/pytorch:24.05-py3" in command
    assert f"--container-mounts={tmp_path}:{tmp_path}" in command
    assert f"--container-workdir={tmp_path}" in command
    task = module_command("python3", "hydroslurm.jobs.task", str(RunDir(tmp_path).plan_json))
    assert command[-len(task) :] == task
    assert not any(word.startswith("--container") for word in made["apptainer"])
    assert sys.executable in made["apptainer"]
