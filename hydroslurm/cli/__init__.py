"""``hydroslurm VERB``: related verbs share a file; only this package prints and exits.

A verb's module imports nothing heavier than typer at its top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hydroslurm.cli import (
    batch,
    checkpoint,
    cluster,
    describe,
    doctor,
    elastic,
    gate,
    job,
    metrics,
    prove,
    report,
    spank,
    spec,
    status,
    submit,
    top,
)
from hydroslurm.core.files import clean
from hydroslurm.errors import HydroslurmError, UsageError

_BY_TASK: dict[str, dict[str, Any]] = {
    "Submit and run": {
        "submit": submit.submit, "run": submit.run, "batch": batch.batch,
        "template": batch.template,
    },
    "Control": {
        "pause": job.pause, "resume": job.resume, "requeue": job.requeue, "cancel": job.cancel,
    },
    "Look": {
        "top": top.top, "status": status.status, "describe": describe.describe,
        "logs": job.logs, "attach": job.attach, "report": report.report,
    },
    "Check": {
        "validate": spec.validate, "prove": prove.prove, "doctor": doctor.doctor,
        "checkpoint": checkpoint.checkpoint_app,
    },
    "Admin": {"cluster": cluster.app, "spank": spank.spank_app},
    "More": {
        "agent": submit.agent, "gate": gate.app, "list": describe.list_jobs,
        "metrics": metrics.metrics, "render": spec.render, "scale": elastic.scale,
        "schema": spec.schema,
    },
}  # fmt: skip
"""The verbs in the order of help; --help omits the last group, and names at most 20."""

_MEANT = {
    "abort": "cancel", "continue": "resume", "delete": "cancel", "end": "cancel",
    "exec": "attach", "info": "describe", "jobs": "list", "kill": "cancel", "launch": "submit",
    "log": "logs", "ls": "list", "monitor": "top", "ps": "list, status or top", "queue": "list",
    "resize": "scale", "restart": "requeue", "rm": "cancel", "sbatch": "submit",
    "scancel": "cancel", "shell": "attach", "show": "describe", "squeue": "list", "srun": "run",
    "ssh": "attach", "start": "submit",
    "stop": "cancel (for good), requeue (save and start again) or pause (in place)",
    "suspend": "pause", "tail": "logs", "unpause": "resume", "version": "--version",
    "watch": "top, or logs -f",
}  # fmt: skip
"""Other tools' verbs -> ours."""


class _Verb(TyperCommand):
    """Shows its arguments as other programs do: ``SCRIPT [ARGS]...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [
            piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)
        ]


class _Verbs(TyperGroup):
    """Lists the verbs by task, and knows ours for another tool's verb."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as click calls it
        self.format_groups(formatter, [title for title in _BY_TASK if title != "More"])

    def format_groups(self, formatter: Any, titles: Iterable[str]) -> None:
        """Write these groups, a line for each verb."""
        for title in titles:
            with formatter.section(title):
                limit = formatter.width - 10
                formatter.write_dl(
                    [
                        (name, self.commands[name].get_short_help_str(limit))
                        for name in _BY_TASK[title]
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], (*_MEANT, *self.commands), n=2)
            meant = " or ".join(dict.fromkeys(_MEANT.get(name, name) for name in near))
            hint = f"did you mean {meant}?" if meant else "hydroslurm help lists all verbs"
            ctx.fail(f"there is no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="hydroslurm",
    cls=_Verbs,
    help="Make PyTorch training on Slurm preemptible: park it between two operators and continue "
    "it in place, or save, requeue and resume.",
    epilog="hydroslurm help lists all verbs, hydroslurm VERB -h explains one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes and colours would double the time of --help
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from hydroslurm import __version__

        typer.echo(f"hydroslurm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Not shown: the app has its own help."""


for _verbs in _BY_TASK.values():
    for _name, _verb in _verbs.items():
        if isinstance(_verb, typer.Typer):
            app.add_typer(_verb, name=_name)
        else:
            app.command(_name, cls=_Verb, context_settings=submit.CONTEXTS.get(_name))(_verb)


@app.command("help", hidden=True)
def show_help(
    context: typer.Context, verb: Annotated[list[str] | None, typer.Argument()] = None
) -> None:
    """List all verbs, or explain one."""
    assert context.parent is not None
    group = context.parent.command
    assert isinstance(group, _Verbs)
    if verb:
        group.main([*verb, "--help"], prog_name=context.parent.info_name, standalone_mode=False)
        return
    formatter = context.make_formatter()
    group.format_groups(formatter, _BY_TASK)
    typer.echo(formatter.getvalue().strip("\n"))


def main() -> None:
    """Run the command line; our own errors become one line on stderr and exit status 1, wrong
    options one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may contain any bytes
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(typer.main.get_command(app).main(standalone_mode=False) or 0)
    except typer.TyperException as error:
        print(_misuse(error), file=sys.stderr)
        sys.exit(2)
    except (HydroslurmError, UsageError) as error:
        message = "\n".join(clean(line, most=2000) for line in str(error).split("\n"))
        print(f"hydroslurm: {message}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(141)
    except UnicodeEncodeError as error:  # a name with undecodable bytes where text is needed
        odd = error.object[: error.end].split()[-1]
        print(f"hydroslurm: {clean(odd)} is not UTF-8, and has to be", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a file without permission, a full disk
        where = f"{error.filename}: " if error.filename else ""
        why = f"{where}{error.strerror or error}"
        if isinstance(error, FileNotFoundError) and not where:
            why = "the current folder does not exist any more; change to another one"
        print(f"hydroslurm: {clean(why)}", file=sys.stderr)
        sys.exit(1)


def _misuse(error: Any) -> str:
    """Say what is wrong with a command line, and where to read on; return the help if empty."""
    message, context = str(error.format_message()), getattr(error, "ctx", None)
    if message.startswith("Usage:"):
        return message
    if near := getattr(error, "possibilities", None):
        message = f"{error.message}; did you mean {' or '.join(near)}?"
    message = f"hydroslurm: {clean(message, most=2000).rstrip('.')}"
    if context is None or context.parent is None:
        return message
    return f"{message} ({context.command_path} -h explains it)"
