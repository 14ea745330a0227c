"""Which engine an elastic job gets, and what its members then run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hydroslurm.core.rundir import RunDir
from hydroslurm.elastic.autoscale import AutoscalePolicy, Behavior
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.elastic_job import member_script, of_one_member, prepare
from hydroslurm.jobs.launch.training_job import plan_for
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.reading import JobSpec, dumps, load

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


def load_text(text: str, folder: Path) -> TrainingJob:
    (folder / "again.yaml").write_text(text)
    return load(folder / "again.yaml").job


@pytest.mark.parametrize(
    ("script", "elastic", "engine", "why"),
    [
        (PLAIN, "min: 2", "in_place", ""),
        (PLAIN, "engine: restart", "restart", "the spec names it"),
        (PLAIN, "engine: in_place", "in_place", "the spec names it"),
        (SHARDED, "min: 2", "restart", "train.py shards its model (fully_shard)"),
        (IN_MEMBERS, "min: 2", "in_place", ""),
        (IN_MEMBERS, "engine: in_place", "in_place", "the spec names it"),
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
    with pytest.raises(UsageError, match=r"train\.py shards its model .* say engine: restart"):
        of_one_member(spec_of(tmp_path, SHARDED, "engine: in_place"))
    with pytest.raises(UsageError, match=r"restart \(train\.py shards .*elastic\.summation: fixed"):
        of_one_member(spec_of(tmp_path, SHARDED, "summation: fixed_order"))


def test_torchrun_means_agents(tmp_path: Path) -> None:
    """With torchrunConfig procPerNode says how many ranks they start."""
    spec = spec_of(tmp_path, PLAIN, "min: 1", "torchrunConfig: {enable: true, procPerNode: 2}")
    assert load_text(dumps(spec.job), tmp_path) == spec.job
    one = of_one_member(spec)
    assert one.job.elastic is not None
    assert one.job.elastic.engine == "restart"
    assert "torchrunConfig.enable" in one.engine_why
    plan, _ = plan_for(one, environ={})
    assert "agent -- --nproc-per-node=2" in shlex.join(plan.tasks[0].argv)


def test_a_member_is_one_agent(tmp_path: Path) -> None:
    """It starts as many ranks as srun would; the coordinator knows how many."""
    spec = of_one_member(spec_of(tmp_path, PLAIN, "engine: restart"))
    assert load_text(dumps(spec.job), tmp_path) == spec.job
    plan, _ = plan_for(spec, environ={})
    assert (len(plan.tasks), plan.cpus_per_node) == (1, 6)
    words = shlex.join(plan.tasks[0].argv)
    assert "agent -- --nproc-per-node=3 --max-restarts=0 -- train.py --lr 1" in words
    run = RunDir(tmp_path / "run")
    run.root.mkdir(mode=0o700)
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
    assert load_text(dumps(spec.job), tmp_path) == spec.job
    run = RunDir(tmp_path / "run")
    run.root.mkdir(mode=0o700)
    prepare(spec.job, plan_for(spec, environ={})[0], run)
    down = Behavior(stabilization_window_s=300, cooldown_s=180, step=1)
    assert ElasticFolder(run=run.root).options().autoscale == AutoscalePolicy(
        **{"step_time_s": 2.0, "cpu": 0.7, "queue_length": 0}, partition="low", scale_down=down
    )
