"""The pages of the site that are made from the code, each time mkdocs builds it (see mkdocs.yml).

``cli.md`` comes from the command line itself and ``api.md`` from ``hydroslurm.__all__``, so neither
can describe something that no longer exists. CONTRIBUTING.md, CHANGELOG.md and the picture of the
comparison stay where people look for them in the repository, and are copied in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

API = {
    "Pause": [
        "install",
        "uninstall",
        "installed",
        "is_installed",
        "controller",
        "Controller",
        "od_execution_wrapper",
        "Engine",
        "set_step",
        "send_signal",
        "SignalPlan",
    ],
    "Stop and resume": ["Run", "Limits"],
    "Data": [
        "data.ResumableSampler",
        "data.SeededDataset",
        "data.RecordDataset",
        "data.RecordLoader",
        "data.RecordFile",
        "data.RecordWriter",
    ],
    "Several ranks": ["set_torch_environment", "numa.bind"],
    "Gradients reduced on the host": [
        "parallel.DistributedDataParallel",
        "parallel.host_reduce_hook",
    ],
    "Fused modules and optimizers": [
        "optimize_modules",
        "optimize_optimizer",
        "register_rewriter",
    ],
    "Launching": ["Executor", "preemptible"],
    "HFAI's two calls": ["receive_suspend_command", "go_suspend"],
    "Caffe2's Job": [
        "Job",
        "JobRunner",
        "CheckpointManager",
        "MultiNodeCheckpointManager",
        "TaskGroup",
        "Task",
        "LocalSession",
        "epoch_limiter",
    ],
    "HydroJobSche's hooks": [
        "BaseOpHook",
        "ExecutionOpHook",
        "register_ophooks_recursively",
        "nvtx_mark",
    ],
    "Errors": ["HydroslurmError", "UsageError"],
}


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once it has listed docs/: adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {
        "cli.md": cli_page(),
        "api.md": api_page(),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changelog.md": from_root("CHANGELOG.md"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: points links that leave docs/ at the copies."""
    return markdown.replace("../CONTRIBUTING.md", "contributing.md")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for each page: docstrings' cross-references (``:meth:`~a.b.C.d```) become
    code with the short name."""
    html = re.sub(r":(?:meth|class|func|mod|attr|data|exc):(?=<code)", "", html)
    return re.sub(r"(<code[^>]*>)~(?:\w+\.)*(\w+\.\w+|\w+)(?=</code>)", r"\1\2", html)


def from_root(name: str) -> str:
    """A Markdown file of the repository's top as a page of the site."""
    text = (ROOT / name).read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return text.replace("](CHANGELOG.md", "](changelog.md")


def api_page() -> str:
    """Every public name under the heading it belongs to.

    Raises:
        ValueError: a public name has no place in ``API``, or one in ``API`` is not public.
    """
    import hydroslurm

    listed = [name for names in API.values() for name in names if "." not in name]
    if unlisted := set(hydroslurm.__all__) - {"data"} ^ set(listed):
        raise ValueError(f"docs/site.py and hydroslurm.__all__ disagree about {sorted(unlisted)}")
    lines = [
        "# Python API",
        "",
        "Everything here is imported from `hydroslurm` itself (`hydroslurm.Run`, "
        "`hydroslurm.data.ResumableSampler`).",
    ]
    for heading, names in API.items():
        lines += ["", f"## {heading}", ""]
        for name in names:
            lines += [
                f"::: {_path(hydroslurm, name)}",
                "    options:",
                "      heading_level: 3",
                f"      inherited_members: {str(name == 'Run').lower()}",  # made in several parts
                "",
            ]
    return "\n".join(lines)


def _path(package: Any, name: str) -> str:
    """Where a public name is defined, also one that is another name of a class."""
    thing = package
    for part in name.split("."):
        thing = getattr(thing, part)
    return f"{thing.__module__}.{name.rpartition('.')[2]}"


def cli_page() -> str:
    """Every verb with its arguments and options, as ``--help`` has them."""
    import typer.main

    from hydroslurm.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("hydroslurm", [], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        "Made from the commands themselves: `hydroslurm VERB --help` says the same. Errors are one "
        "line on stderr and exit status 1; see [exit statuses](environment.md#exit-statuses).",
        "",
        "| verb | |",
        "| --- | --- |",
    ]
    names = group.list_commands(context)
    for name in names:
        command = group.get_command(context, name)
        lines.append(
            f"| [`{name}`](#hydroslurm-{name}) | {_cell(command.get_short_help_str(200))} |"
        )
    for name in names:
        lines += _verb(group.get_command(context, name), f"hydroslurm {name}", context, level=2)
    return "\n".join(lines) + "\n"


def _verb(command: Any, path: str, parent: Any, *, level: int) -> Iterator[str]:
    context = command.context_class(command, info_name=path.split()[-1], parent=parent)
    yield from ("", f"{'#' * level} hydroslurm {path.removeprefix('hydroslurm ')}", "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```", f"{path} {usage}", "```", "")
    yield from _paragraphs(command.help or "")
    rows = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [row for row in rows if row is not None and "--help" not in row[0]]
    if rows:
        yield from ("", "| argument or option | |", "| --- | --- |")
        for names, text in rows:
            yield f"| `{_cell(names)}` | {_cell(text)} |"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _verb(inner, f"{path} {name}", context, level=level + 1)


def _paragraphs(text: str) -> Iterator[str]:
    """Help as Markdown: a paragraph after ``\\b`` keeps its lines, as in a terminal."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```", paragraph.removeprefix("\b").strip("\n"), "```", "")
        else:
            yield from (_escaped(paragraph), "")


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;") if "`" not in text else text
