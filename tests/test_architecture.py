"""The rules that hold everywhere: which room may import which, and what an import may cost."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import captured

import hydroslurm
from hydroslurm import errors

PACKAGE = Path(hydroslurm.__file__).parent

# a room -> the rooms it may import. Nothing but the command line and tests imports `devcluster`.
BASE = {"errors", "core"}
COORDINATION = BASE | {"slurm", "gate", "coordination"}
ELASTIC = COORDINATION | {"elastic"}
TRAINING = ELASTIC | {"runtime", "checkpoint", "data"}
MAY_IMPORT = {
    "errors": set(),
    "core": BASE,
    "slurm": BASE,
    "gate": BASE,
    "coordination": COORDINATION,
    "numa": BASE | {"coordination.world"},
    "prove": BASE | {"slurm"},
    "vacate": BASE | {"gate"},
    "runtime": COORDINATION
    | {"numa", "vacate", "prove.recorder"},  # the last as torch is, when asked for
    "checkpoint": BASE,
    "data": BASE | {"checkpoint.census", "checkpoint.rng", "checkpoint.tree"},
    "parallel": COORDINATION,
    "elastic": ELASTIC | {"checkpoint.tree", "data.position", "data.sampler", "runtime.children"},
    "training": TRAINING,
    "compat": TRAINING | {"training", "integrations"},
    "integrations": TRAINING | {"training", "numa", "parallel"},
    "jobs": ELASTIC | {"runtime", "vacate"},
    "report": BASE | {"slurm"},
    "observe": BASE
    | {"elastic.folder", "slurm", "checkpoint", "training.cadence", "jobs", "vacate"}
    | {"gate.signals"},
    "devcluster": {
        "errors",
        "core.files",
        "core.proc",
        "core.rundir",
        "core.trust",
        "slurm.spank.build",
    },
    "cli": {""},  # everything
    "__init__": {""},
}


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """The package's, parsed by the first test that looks: each worker collects this file."""
    return {
        ".".join(("hydroslurm", *path.relative_to(PACKAGE).with_suffix("").parts)): ast.parse(
            path.read_text()
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Every hydroslurm module that these statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "hydroslurm"}


def test_imports_point_one_way() -> None:
    """A module imports, at its top or inside a function, only from its own room and from the rooms
    below it."""
    wrong = []
    for module, tree in _modules().items():
        room = module.split(".")[1]
        allowed = MAY_IMPORT[room] | {room}
        wrong += [
            f"{module} imports {name}; {room} may import {sorted(allowed)}"
            for name in _imported(ast.walk(tree))
            if not any(f"{name}.".startswith(f"hydroslurm.{one}.") for one in allowed - {""})
            and "" not in allowed
        ]
    assert not wrong, "\n".join(wrong)


JOBS_ORDER = (
    *("images", "spec", "plan", "layout", "task", "supervisor"),
    *("launch", "requests", "attached"),
)
"""Each part of jobs/ imports from itself and those before it only; agent/ stands alone."""


def test_jobs_import_one_way() -> None:
    """spec, plan, task, supervisor, launch, requests: no part of jobs/ imports a later one. No two
    modules of it need each other, not even for their types."""
    before = {part: JOBS_ORDER[: place + 1] for place, part in enumerate(JOBS_ORDER)}
    before |= {"agent": ("agent",), "__init__": ()}
    graph: dict[str, set[str]] = {}
    wrong = []
    for module, tree in _modules().items():
        if not module.startswith("hydroslurm.jobs."):
            continue
        wrong += [
            f"{module} imports {name}"
            for name in _imported(ast.walk(tree))
            if name.startswith("hydroslurm.jobs.")
            and name.split(".")[2] not in before[module.split(".")[2]]
        ]
        tops: list[ast.stmt] = []
        for node in tree.body:
            tops += node.body if isinstance(node, ast.If) else [node]  # if TYPE_CHECKING:
        names = _imported(node for node in tops if isinstance(node, ast.ImportFrom))
        graph[module] = {one for name in names for one in (name, name.rpartition(".")[0])}
    assert not wrong, "\n".join(wrong)
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


HEAVY = ("torch", "submitit", "numpy", "matplotlib", "pyslurm", "rich")
SPEC = ("pydantic", "yaml")
"""What reads a job spec. Only the one who submits it has to."""


LIGHT = {
    "hydroslurm": HEAVY + SPEC,
    "hydroslurm.cli": HEAVY + SPEC,
    "hydroslurm.runtime.client": HEAVY + SPEC,
    "hydroslurm.runtime.autoload": (*HEAVY, *SPEC, "dataclasses", "pathlib", "subprocess"),
    "hydroslurm.coordination.coordinator": HEAVY + SPEC,
    "hydroslurm.jobs.launch.training_job": HEAVY,
    "hydroslurm.jobs.supervisor.main": HEAVY + SPEC,
    "hydroslurm.jobs.task": (*HEAVY, *SPEC, "subprocess", "ctypes", "logging"),
}
"""What must not be loaded by the import of a module: a job's first operator waits for the command
line, the supervisor and the task."""


def test_imports_are_light() -> None:
    """What is imported beside a training, or before it, loads nothing of weight that it does not
    need."""
    for module, unwanted in LIGHT.items():
        code = f"import sys, {module}; print([m for m in {unwanted} if m in sys.modules])"
        done = captured([sys.executable, "-c", code], timeout=60)
        assert done.stdout.strip() == "[]", f"{module}: {done.stdout}{done.stderr}"


def test_every_public_name_exists() -> None:
    """Each name in __all__ can be imported, and an unknown one says what there is."""
    for name in hydroslurm.__all__:
        assert getattr(hydroslurm, name) is not None
    with pytest.raises(AttributeError, match="od_execution_wrapper"):
        _ = hydroslurm.no_such_name


def test_only_the_command_line_prints() -> None:
    """No module outside cli/ calls print, except those that are programs themselves."""
    programs = {"jobs.attached", "jobs.task"}
    programs |= {"jobs.supervisor.main", "jobs.supervisor.bad_nodes"}
    for module, tree in _modules().items():
        inner = module.removeprefix("hydroslurm.")
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        prints = [one.lineno for one in calls if isinstance(one, ast.Name) and one.id == "print"]
        assert not prints or inner.startswith("cli.") or inner in programs, f"{inner}: {prints}"


def test_errors_drawn_in_the_docstring_are_the_ones_there_are() -> None:
    """The tree in errors.py names every class of the module."""
    classes = {name for name, one in vars(errors).items() if isinstance(one, type)}
    assert classes <= set((errors.__doc__ or "").replace("(", " ").split())
