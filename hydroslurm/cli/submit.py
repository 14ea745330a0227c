"""``hydroslurm submit | run | agent``: start a job, a local program, or torchrun's ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydroslurm.cli.shared import ScriptArguments
from hydroslurm.core.garbage import without_gc

if TYPE_CHECKING:
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.jobs.launch.executor import Executor, PausableJob

_OWN_WORDS = {"allow_interspersed_args": False}
"""The script or command gets all words from itself on."""
CONTEXTS: dict[str, dict[str, Any]] = {
    "submit": _OWN_WORDS,
    "run": _OWN_WORDS,
    "batch": _OWN_WORDS,
    "template": _OWN_WORDS,
    "prove": _OWN_WORDS,
    "render": {"ignore_unknown_options": True},
    "agent": {**_OWN_WORDS, "allow_extra_args": True, "ignore_unknown_options": True},
}
"""Parser settings for verbs that pass words on; ``agent`` has no options itself."""

RENDER = "render"
"""The context's object when the script is printed rather than submitted."""
FOLDER = Path("hydroslurm-runs")
"""Default parent of run folders; srun --preempt uses the same."""


def submit(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="A Python script to run in every rank, or a job spec (.yaml)."
        ),
    ],
    arguments: ScriptArguments = None,
    folder: Annotated[
        Path, typer.Option(help="Where to create run folders; all nodes must see it.")
    ] = FOLDER,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Job name. Default: the script's.")] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Default: the site's.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", "-A", help="Account to charge.")
    ] = None,
    qos: Annotated[str | None, typer.Option("--qos", "-q", help="Quality of service.")] = None,
    time_min: Annotated[int, typer.Option("--time-min", "-t", help="Time limit, minutes.")] = 60,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="How many.")] = 1,
    tasks_per_node: Annotated[int, typer.Option(help="Ranks per node.")] = 1,
    cpus_per_task: Annotated[int, typer.Option("--cpus-per-task", "-c", help="CPUs per rank.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node; 0 asks for none.")] = 0,
    mem_gb: Annotated[
        float | None, typer.Option(help="Memory per node, GB. Default: the site's.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of sbatch; may be repeated."),
    ] = None,
    preflight: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Check each node before the ranks start, and leave out those that fail: folder, "
            "clock, memory, GPUs, and this shell command ('': none).",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; exit 1 if the job fails.")
    ] = False,
) -> None:
    """Submit a script or a job spec as a preemptible job.

    hydroslurm submit --partition low --nodes 2 train.py --lr 0.1

    What follows the script is the script's. A spec is complete: only --folder and --wait go with
    it.
    """
    words = arguments or []
    if not module and Path(script).suffix in (".yaml", ".yml"):
        _submit_spec(context, Path(script), words, folder, wait=wait)
        return
    note_misplaced(context, script, words)
    asked = {
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
        "preflight": preflight,
    }
    options = _pairs(sbatch or [])
    if context.obj == RENDER:
        executor = _executor(folder, asked, options)
        typer.echo(executor.render_script(script, *words, module=module), nl=False)
        return
    with without_gc():  # it would spend 20 ms on what submitit has just made
        job = _executor(folder, asked, options).submit_script(script, *words, module=module)
    _announce(int(job.job_id), job.run_dir)
    if wait:
        _wait(job)


def _executor(folder: Path, asked: dict[str, Any], options: dict[str, str | bool]) -> Executor:
    from hydroslurm.jobs.launch.executor import Executor
    from hydroslurm.jobs.spec.sections import check_options

    check_options({**asked, "options": options}, spell=_as_option)
    executor = Executor(folder)
    given = {name: value for name, value in asked.items() if value is not None}
    executor.preflight = given.pop("preflight", None)
    executor.update_parameters(**given, additional_parameters=options)
    return executor


def _as_option(name: str) -> str:
    renamed = {"timeout_min": "time_min", "options": "sbatch"}
    return f"--{renamed.get(name, name).replace('_', '-')}"


def _submit_spec(
    context: typer.Context, file: Path, words: Sequence[str], folder: Path, *, wait: bool
) -> None:
    from hydroslurm.errors import UsageError

    beside = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("script", "arguments", "folder", "wait")
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if beside or words:
        raise UsageError(
            f"{' '.join([*beside, *words])} cannot be combined with {file}: put it into the "
            "spec (hydroslurm schema lists its fields)"
        )
    with without_gc():  # as above, and for what pydantic makes
        from hydroslurm.jobs.launch.training_job import submit_job, wait_for_end
        from hydroslurm.jobs.spec.reading import load

        job = submit_job(load(file, to_submit=True), folder=folder, environ=os.environ)
    _announce(job.job_id, job.run)
    for note in job.notes:
        typer.echo(f"hydroslurm: {note}", err=True)
    if wait:
        verdict = wait_for_end(job)
        typer.echo(f"job {job.job_id} {verdict.type}: {verdict.message}", err=verdict.is_failure)
        if verdict.is_failure:
            raise typer.Exit(1)


def note_misplaced(context: typer.Context, script: str, words: Sequence[str]) -> None:
    """Name words after the script that are options of this verb: the script gets them."""
    own = {spelling for parameter in context.command.params for spelling in parameter.opts}
    own_words = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in own_words if word.startswith("-")]
    if taken := [name for name in dict.fromkeys(names) if name in own]:
        typer.echo(
            f"hydroslurm: {' '.join(taken)} after {script}: an argument of the script. For "
            f"hydroslurm {context.info_name}, write it before {script}",
            err=True,
        )


def _announce(job_id: int, run: RunDir) -> None:
    """Print the job and commands for it; on stderr if stdout fails."""
    lines = [f"job {job_id}  run folder {run.root}"]
    for command, does in (
        (f"logs -f {job_id}", "its output"),
        ("top", "my jobs, live"),
        (f"pause {job_id}", f"park it between two operators; resume {job_id} goes on in place"),
        (f"requeue {job_id}", "save, and start again from there"),
        (f"cancel {job_id}", "end it for good"),
    ):
        lines.append(f"  hydroslurm {command:<16} {does}")
    try:
        typer.echo("\n".join(lines))
    except OSError:  # a full disk, a reader that has left
        typer.echo(lines[0], err=True)
        raise


def _pairs(options: list[str]) -> dict[str, str | bool]:
    """Parse ``NAME=VALUE``, or NAME alone, as sbatch takes them."""
    split = (option.lstrip("-").partition("=") for option in options)
    return {name: value if equals else True for name, equals, value in split}


def _wait(job: PausableJob) -> None:
    from submitit.core.utils import UncompletedJobError

    try:
        job.results()
    except UncompletedJobError as error:
        typer.echo(f"job {job.job_id} failed: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"job {job.job_id} completed")


def run(
    context: typer.Context,
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
    """Run an unmodified PyTorch program so that it can be paused.

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

    note_misplaced(context, command[0], command[1:])
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
        hint = f"; for a script: hydroslurm run -- python {command[0]}"
        raise UsageError(
            f"there is no program {command[0]!r} on the PATH"
            f"{hint if command[0].endswith('.py') else ''}"
        )
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
    """Require that this Python reads HYDROSLURM_PREEMPT: one without hydroslurm would ignore it and
    run the program unpausable.

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
    """Start ranks as torchrun does, and forward Slurm's signals to them.

    srun --ntasks-per-node=1 hydroslurm agent -- --nproc-per-node=8 train.py

    Takes torchrun's options (hydroslurm agent -- --help). Without --nnodes, --rdzv-* and --master-*
    the tasks of a job step find each other. The ranks are preemptible, as below srun --preempt,
    unless HYDROSLURM_PREEMPT=off.

    Exit status: 0; 75 saved, run it again; 93 must not be run again; 143 cancelled. A worker that
    exits with one of these is not restarted. Otherwise the status of the first worker that failed
    for good, 128+N for signal N.
    """
    if not any(context.args):
        context.fail("wanted torchrun's arguments: hydroslurm agent -- --nproc-per-node=8 train.py")
    from hydroslurm.jobs.agent.node import run_agent

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("hydroslurm agent: %(message)s"))
    logger = logging.getLogger("hydroslurm.jobs.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    sys.exit(run_agent(context.args, environ=os.environ))
