"""What is released: the sdist and the wheel, and a training paused by what the wheel brings.

The clean environment holds the wheel and nothing else of ours. torch and the other dependencies are
those of the tests, put behind it on the path, so that no gigabytes are downloaded.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _done(command: Sequence[str | Path], **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes."""
    folder = tmp_path_factory.mktemp("dist")
    _done([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT])
    return folder


@pytest.fixture(scope="module")
def clean(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / "bin/python"
    (wheel,) = dist.glob("*.whl")
    _done([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel])
    (site,) = home.glob("lib/python*/site-packages")
    # read as a path only: the start-up lines of the tests' environment, ours among them, are not
    (site / "tests_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


TRAINING = """
import torch
model = torch.nn.Linear(64, 64)
for step in range(10**9):
    model(torch.ones(8, 64)).sum().backward()
    if step == 100:
        print("trains", flush=True)
"""


@contextlib.contextmanager
def _training(clean: Path, folder: Path, environ: dict[str, str]) -> Iterator[int]:
    """The process id of a training without a word of ours, below `hydroslurm run`."""
    (folder / "train.py").write_text(TRAINING)
    process = subprocess.Popen(
        [clean / "hydroslurm", "run", "--", clean / "python", "train.py"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_both_are_complete(dist: Path) -> None:
    """The wheel has the native sources and the start-up line; the sdist has the rest, too."""
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in ("hydroslurm_autoload.pth", "hydroslurm/py.typed", "hydroslurm/__init__.py"):
        assert wanted in names
    sources = (ROOT / "hydroslurm").rglob("*")
    tracked = {p.relative_to(ROOT).as_posix() for p in sources if p.suffix in (".h", ".cpp", ".c")}
    assert tracked <= names
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("README.md", "docs/index.md", "mkdocs.yml", "Makefile", "setup.sh"):
        assert wanted in inner


def test_the_wheel_pauses_a_training(clean: Path, tmp_path: Path) -> None:
    """An unmodified script is parked and resumed by the command line of the clean environment."""
    environ = {**os.environ, "PATH": f"{clean}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    options: dict[str, object] = {"cwd": tmp_path, "env": environ}
    where = _done(
        [clean / "python", "-c", "import hydroslurm; print(hydroslurm.__file__)"], **options
    )
    assert where.startswith(str(clean.parent))
    with _training(clean, tmp_path, environ) as pid:
        paused = _done([clean / "hydroslurm", "pause", "--pid", str(pid)], **options)
        assert "parked" in paused
        resumed = _done([clean / "hydroslurm", "resume", "--pid", str(pid)], **options)
        assert "running" in resumed
