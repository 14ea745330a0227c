"""The rules that hold everywhere: which room may import which, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hydroslurm

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
    "elastic": ELASTIC
    | {"checkpoint.tree", "data.position", "data.sampler", "runtime.child_signals"},
    "training": TRAINING,
    "compat": TRAINING | {"training", "integrations"},
    "integrations": TRAINING | {"training", "numa", "parallel"},
    "jobs": ELASTIC | {"runtime", "vacate"},
    "report": BASE | {"slurm"},
    "observe": BASE
    | {"elastic.folder", "slurm", "checkpoint", "training.attempts", "jobs", "vacate"}
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


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _imports(path: Path) -> set[str]:
    """Every hydroslurm module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "hydroslurm"}


def test_imports_point_one_way() -> None:
    """A module imports only from its own room and from the rooms below it."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).with_suffix("")
        room = place.parts[0]
        allowed = MAY_IMPORT[room] | {room}
        wrong += [
            f"{place} imports {name}; {room} may import {sorted(allowed)}"
            for name in _imports(path)
            if "" not in allowed
            and not any(
                f"{name.removeprefix('hydroslurm.')}.".startswith(f"{one}.") for one in allowed
            )
        ]
    assert not wrong, "\n".join(wrong)


JOBS_ORDER = (
    *("images", "spec", "plan", "layout", "submission", "task", "supervisor", "elastic"),
    *("launch", "control"),
)
"""Each part of jobs/ imports from itself and those before it only; agent/ stands alone."""


def test_jobs_import_one_way() -> None:
    """spec, plan, task, supervisor, launch, control: no part of jobs/ imports a later one."""
    before = {part: JOBS_ORDER[: place + 1] for place, part in enumerate(JOBS_ORDER)}
    before |= {"agent": ("agent",), "__init__": ()}
    wrong = []
    for path in sorted((PACKAGE / "jobs").rglob("*.py")):
        part = path.relative_to(PACKAGE / "jobs").with_suffix("").parts[0]
        wrong += [
            f"{path} imports {name}"
            for name in _imports(path)
            if name.startswith("hydroslurm.jobs.") and name.split(".")[2] not in before[part]
        ]
    assert not wrong, "\n".join(wrong)


def _graph() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports at its top, type-only ones included."""
    files = {
        ".".join(("hydroslurm", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        tops: list[ast.stmt] = []
        for node in ast.parse(path.read_text()).body:
            tops += node.body if isinstance(node, ast.If) else [node]  # if TYPE_CHECKING:
        for node in tops:
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {one for one in (*inner, node.module) if one in files}
    return graph


def test_modules_of_jobs_have_no_import_cycle() -> None:
    """No two modules of jobs/ need each other, not even for their types."""
    graph = {name: all_ for name, all_ in _graph().items() if name.startswith("hydroslurm.jobs.")}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


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
        found = _run(f"import sys, {module}; print([m for m in {unwanted} if m in sys.modules])")
        assert found == "[]", module


def test_every_public_name_exists() -> None:
    """Each name in __all__ can be imported, and an unknown one says what there is."""
    for name in hydroslurm.__all__:
        assert getattr(hydroslurm, name) is not None
    with pytest.raises(AttributeError, match="od_execution_wrapper"):
        _ = hydroslurm.no_such_name


def test_only_the_command_line_prints() -> None:
    """No module outside cli/ calls print, except those that are programs themselves."""
    programs = {
        "jobs/control/attached.py",
        "jobs/task.py",
        "jobs/supervisor/main.py",
    }
    for path in PACKAGE.rglob("*.py"):
        inner = path.relative_to(PACKAGE)
        if inner.parts[0] == "cli" or inner.as_posix() in programs:
            continue
        calls = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
        assert not calls, f"{inner} prints in line {calls}"


def test_errors_drawn_in_the_docstring_are_the_ones_there_are() -> None:
    """The tree in errors.py names every class of the module, and no other."""
    from hydroslurm import errors

    classes = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)
    }
    drawn = {
        word
        for word in (errors.__doc__ or "").replace("(", " ").split()
        if word in classes or word.endswith("Error")
    }
    assert classes <= drawn
