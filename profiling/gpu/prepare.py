"""Make a folder for PYTHONPATH from which hydroslurm runs out of a checkout: ``prepare.py FOLDER``.

It gets the wheels that this Python lacks, hydroslurm's entry points, by which Lightning finds it,
and its line at Python's start. Nothing else on the machine changes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "annotated_types", "cloudpickle", "isal", "jinja2", "matplotlib", "msgspec", "numpy", "nvtx",
    "pydantic", "pydantic_core", "rich", "submitit", "torch", "typer", "typing_extensions",
    "typing_inspection", "yaml",
)  # fmt: skip
"""What hydroslurm imports."""
START = """\
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if "HYDROSLURM_PREEMPT" in os.environ:
    from hydroslurm.runtime.autoload import start

    start()
_others = [one for one in sys.path if one != os.path.dirname(__file__)]
_spec = PathFinder.find_spec("sitecustomize", _others)  # the machine's own, which this one hides
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
"""


def lacking(folder: Path) -> list[str]:
    """The modules that neither this Python nor the folder has."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return [name for name in NEEDED if importlib.util.find_spec(name) is None]
    finally:
        sys.path.remove(str(folder))


def entry_points() -> str:
    """Those of pyproject.toml, as the metadata of an installed package has them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return "\n".join(lines)


def main(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    wheels = ROOT / "profiling/gpu_wheels" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if missing := lacking(folder):
        found = sorted(map(str, wheels.glob("*.whl")))
        print(f"this Python lacks {', '.join(missing)}: {len(found)} wheels for this run")
        if found:
            options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet")
            command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder)]
            subprocess.run([*command, *found], check=True, timeout=120)
        if missing := lacking(folder):
            sys.exit(
                f"{sys.executable} lacks {', '.join(missing)}, and so does {wheels}. Run "
                f"profiling/gpu_wheels.sh {wheels.name} on a machine with a network"
            )
    metadata = folder / "hydroslurm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hydroslurm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entry_points())
    (folder / "sitecustomize.py").write_text(START)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
