"""``hydroslurm submit | run | agent``: start a job, a program of this machine, torchrun's ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydroslurm.core.garbage import without_gc

if TYPE_CHECKING:
    from hydroslurm.jobs.launch.executor import PausableJob

CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Everything after the script belongs to the script; after ``agent``, to torchrun."""


def submit(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A job spec (.yaml), or a Python script to run in every rank."
        ),
    ],
    folder: Annotated[
        Path, typer.Option(help="Where to create run folders; all nodes must see it.")
    ] = Path("runs"),
    module: Annotated[
        bool, typer.Option("--module", "-m", help="FILE is a module, as in python -m.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Job name. Default: the script's.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    time_min: Annotated[int, typer.Option("--time-min", "-t", help="Time limit, minutes.")] = 60,
    nodes: Annotated[int, typer.Option("--nodes", "-N")] = 1,
    tasks_per_node: Annotated[int, typer.Option(help="Ranks per node.")] = 1,
    cpus_per_task: Annotated[int, typer.Option("--cpus-per-task", "-c")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node; 0 asks for none.")] = 0,
    mem_gb: Annotated[
        float | None, typer.Option(help="Memory per node, GB. Default: the site's.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Another sbatch option, as NAME=VALUE; may be repeated."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; exit 1 if the job fails.")
    ] = False,
) -> None:
    """Submit a job spec, or a script, through submitit: preemptible from its first operator on.

    A spec is complete: the only options besides it are --folder and --wait.
    """
    if not module and Path(script).suffix in (".yaml", ".yml"):
        _submit_spec(context, Path(script), folder, wait=wait)
        return
    parameters = {
        "name": name,
        "partition": partition,
        "account": account,
        "qos": qos,
        "timeout_min": time_min,
        "nodes": nodes,
        "tasks_per_node": tasks_per_node,
        "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node or None,
        "mem_gb": mem_gb,
        "additional_parameters": _pairs(sbatch or []),
    }
    given = {key: value for key, value in parameters.items() if value is not None}
    job = _submit_script(folder, given, script, context.args, module=module)
    typer.echo(f"job {job.job_id}  run folder {job.run_dir.root}")
    typer.echo(f"  hydroslurm status {job.job_id}          hydroslurm pause --job {job.job_id}")
    _warn_if_never_starts(int(job.job_id), nodes)
    if wait:
        _wait(job)


@without_gc()  # it would only walk over what submitit has just made, for 20 ms
def _submit_script(
    folder: Path, parameters: dict[str, Any], script: str, args: Sequence[str], *, module: bool
) -> PausableJob:
    from hydroslurm.jobs.launch.executor import Executor

    executor = Executor(folder)
    executor.update_parameters(**parameters)
    return executor.submit_script(script, *args, module=module)


def _submit_spec(context: typer.Context, file: Path, folder: Path, *, wait: bool) -> None:
    from hydroslurm.errors import UsageError

    beside = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("script", "folder", "wait")
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if beside or context.args:
        raise UsageError(
            f"{' '.join([*beside, *context.args])} cannot be combined with {file}: put it into the "
            "spec (hydroslurm schema lists its fields)"
        )
    with without_gc():  # as above, and what pydantic makes
        from hydroslurm.jobs.launch.training_job import submit_job, wait_for_end
        from hydroslurm.jobs.spec.reading import load

        job = submit_job(load(file), folder=folder, environ=os.environ)
    for note in job.notes:
        typer.echo(f"hydroslurm: {note}", err=True)
    typer.echo(f"job {job.job_id}  run folder {job.run.root}")
    typer.echo(f"  hydroslurm describe {job.job_id}        hydroslurm logs -f {job.job_id}")
    _warn_if_never_starts(job.job_id, job.plan.nodes)
    if wait:
        verdict = wait_for_end(job)
        typer.echo(f"job {job.job_id} {verdict.type}: {verdict.message}", err=verdict.is_failure)
        if verdict.is_failure:
            raise typer.Exit(1)


def _warn_if_never_starts(job_id: int, nodes: int) -> None:
    from hydroslurm.jobs.launch.sbatch import never_starts
    from hydroslurm.slurm.client import RetryPolicy, open_client

    retry_policy = RetryPolicy(call_timeout_s=5.0, give_up_after_s=0.0)
    why = never_starts(open_client(retry_policy=retry_policy), job_id, nodes=nodes)
    if why is not None:
        typer.echo(f"hydroslurm: {why}", err=True)


def _pairs(options: list[str]) -> dict[str, str | bool]:
    from hydroslurm.errors import UsageError

    pairs: dict[str, str | bool] = {}
    for option in options:
        key, equals, value = option.lstrip("-").partition("=")
        if not key.replace("-", "").replace("_", "").isalnum():
            raise UsageError(
                f"--sbatch {option!r} is not NAME=VALUE, as in --sbatch constraint=a100"
            )
        pairs[key] = value if equals else True
    return pairs


def _wait(job: PausableJob) -> None:
    from submitit.core.utils import UncompletedJobError

    try:
        job.results()
    except UncompletedJobError as error:
        typer.echo(f"job {job.job_id} failed: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"job {job.job_id} completed")


RUN_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything from the command on belongs to it; of ``prove`` from the script on."""


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The program and its arguments, after --."),
    ],
    mode: Annotated[
        str,
        typer.Option(
            metavar="pause|vacate|requeue",
            help="vacate: each pause also frees the GPU. requeue is for scripts with a "
            "hydroslurm.Run: a stop makes them save and exit. SIGTERM ends any other script.",
        ),
    ] = "pause",
    bind_numa: Annotated[
        bool,
        typer.Option("--bind-numa", help="Keep each rank on the NUMA node of its device."),
    ] = False,
) -> None:
    """Run an unmodified PyTorch program so that it can be paused at every operator.

    hydroslurm run -- python train.py --lr 0.1

    hydroslurm run -- torchrun --nproc-per-node=2 train.py

    The program replaces this process: same pid, same terminal, its own exit status. hydroslurm
    pause --pid PID (or Ctrl-Z, or kill -USR1 PID) parks it between two operators, hydroslurm resume
    --pid PID resumes it. With torchrun, use the pids of its workers. DataLoader workers are left
    alone.

    hydroslurm must be installed in the program's Python. HYDROSLURM_PREEMPT=pause in the
    environment of any command does the same; srun --preempt sets it for a job.
    """
    import shutil

    from hydroslurm.errors import UsageError
    from hydroslurm.runtime.autoload import (
        BIND_ENV,
        MODES,
        PREEMPT_ENV,
        TAKEN_ENV,
        hold,
        killing,
    )

    if mode not in MODES:
        raise UsageError(f"unknown --mode {mode!r}; wanted one of {', '.join(MODES)}")
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"there is no program {command[0]!r} on the PATH")
    os.environ[PREEMPT_ENV] = mode
    if bind_numa:
        os.environ[BIND_ENV] = "1"
    os.environ.pop(TAKEN_ENV, None)
    if os.path.basename(program).startswith("python"):  # noqa: PTH119 - the name as it was given
        _require_hook(program)
    hold(killing(os.environ))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, command)
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from error


def _require_hook(program: str) -> None:
    """Make sure that this Python reads HYDROSLURM_PREEMPT: one without hydroslurm would run the
    program as if nothing had been asked for.

    Raises:
        UsageError: it does not.
    """
    import subprocess

    from hydroslurm.errors import UsageError

    looks = "import sys; sys.exit('hydroslurm.runtime.autoload' not in sys.modules)"
    if subprocess.run([program, "-c", looks], capture_output=True, check=False).returncode == 0:
        return
    raise UsageError(
        f"hydroslurm is not installed in {program}, so the program could not be paused. Install it "
        f"there ({program} -m pip install hydroslurm), or use a Python that has it; this one is "
        f"{sys.executable}"
    )


def agent(context: typer.Context) -> None:
    """Start ranks as torchrun does, and forward Slurm's signals to them: pause, resume, stop.

    srun --ntasks-per-node=1 hydroslurm agent -- --nproc-per-node=8 train.py

    Takes torchrun's options (hydroslurm agent -- --help). Without --nnodes, --rdzv-* and --master-*
    the tasks of a job step find each other. The ranks are preemptible, as below srun --preempt,
    unless HYDROSLURM_PREEMPT=off.

    Exit status: 0; 75 saved, run it again; 93 must not be run again; 143 cancelled. A worker that
    exits with one of these is not restarted. Otherwise the status of the first worker that failed
    for good, 128+N for signal N.
    """
    if not context.args:
        typer.echo(context.get_usage(), err=True)
        typer.echo(
            "hydroslurm agent: wanted torchrun's arguments, such as\n"
            "  hydroslurm agent -- --nproc-per-node=8 train.py",
            err=True,
        )
        raise typer.Exit(2)
    from hydroslurm.jobs.agent.node import run_agent

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("hydroslurm agent: %(message)s"))
    logger = logging.getLogger("hydroslurm.jobs.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    sys.exit(run_agent(context.args, environ=os.environ))
