"""What is released: the sdist and the wheel, and the tutorial with nothing else.

The clean environment holds the wheel and nothing else of ours. torch and the other dependencies are
those of the tests, put behind it on the path, so that no gigabytes are downloaded.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import captured, text_of, wait_until

from hydroslurm.devcluster import DevCluster

ROOT = Path(__file__).resolve().parents[2]


def _done(command: Sequence[str | Path], **options: Any) -> str:
    done = captured(list(command), timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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


@pytest.fixture
def newcomer(clean: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a command in an empty folder of somebody who has installed the wheel; its output."""

    def run(*command: str, environ: Mapping[str, str] = os.environ) -> str:
        path = f"{clean}:{environ['PATH']}"
        return _done(command, cwd=tmp_path, env={**environ, "PATH": path, "OMP_NUM_THREADS": "1"})

    assert run("python", "-c", PLACE).startswith(str(clean.parent))
    return run


PLACE = "import hydroslurm; print(hydroslurm.__file__)"


def test_both_are_complete(dist: Path) -> None:
    """Native sources, start-up line, examples and batch scripts are in the wheel."""
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in ("hydroslurm_autoload.pth", "hydroslurm/py.typed", "hydroslurm/__init__.py"):
        assert wanted in names
    sources = (ROOT / "hydroslurm").rglob("*")
    tracked = {p.relative_to(ROOT).as_posix() for p in sources if p.suffix in (".h", ".cpp", ".c")}
    assert tracked <= names
    for folder in ("examples", "templates"):
        files = (ROOT / "hydroslurm" / folder).glob("*.*")
        assert {f"hydroslurm/{folder}/{path.name}" for path in files} <= names
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("README.md", "docs/index.md", "mkdocs.yml", "Makefile", "setup.sh"):
        assert wanted in inner


@pytest.mark.slurm
def test_the_wheel_walks_the_tutorial(
    newcomer: Callable[..., str], tmp_path: Path, requeue_cluster: DevCluster
) -> None:
    """An example that the wheel brings is submitted, paused, requeued, resumed and reported."""
    environ = requeue_cluster.child_environ()
    assert "train_run.py" in newcomer("hydroslurm", "template")
    (tmp_path / "train.py").write_text(newcomer("hydroslurm", "template", "train_run.py"))
    submit = ("hydroslurm", "submit", "--partition", "low", "train.py")
    told = newcomer(*submit, "--epochs", "40", "--think-s", "0.02", environ=environ)
    job, run = re.search(r"job (\d+) .*?(/\S+)", told).groups()  # type: ignore[union-attr]

    log = Path(run, "logs", f"{job}_0_log.out")
    try:
        wait_until(lambda: " step 100 " in text_of(log), "a step", limit_s=300)
        assert "parked" in newcomer("hydroslurm", "pause", "--job", job, environ=environ)
        assert "running" in newcomer("hydroslurm", "resume", "--job", job, environ=environ)
        newcomer("hydroslurm", "requeue", job, environ=environ)
        said = newcomer("hydroslurm", "logs", "-f", job, environ=environ)
        assert "weights sha256" in said
    finally:
        newcomer("scancel", job, environ=environ)
    report = newcomer("hydroslurm", "report", run, environ=environ)
    assert "Steps lost: 0." in report
