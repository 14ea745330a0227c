"""``hydroslurm spank`` and ``hydroslurm run``, as a person types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hydroslurm.slurm.spank.build import PLUGIN
from hydroslurm.slurm.spank.plugstack import MARK

OTHERS = """\
# ours, since 2019, \udce9t\udce9
required\tprivate_tmp.so  base=/x
include plugstack.conf.d/*.conf
"""


def hydroslurm(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hydroslurm.cli", *argv],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="surrogateescape")


def test_install_and_uninstall(tmp_path: Path) -> None:
    """Both say what they change, and the second time that there is nothing to. Other lines, the
    mode of the file, and the link that leads to it stay."""
    real, conf = tmp_path / "real.conf", tmp_path / "plugstack.conf"
    real.write_text(OTHERS, errors="surrogateescape")  # somebody's Latin-1
    real.chmod(0o640)
    conf.symlink_to(real)
    plugin = tmp_path / PLUGIN
    option = ("--plugstack", str(conf))
    plan = hydroslurm("spank", "install", *option, "--dry-run")
    assert f"would build {plugin}\n" in plan.stdout
    assert not plugin.exists()
    assert _text(real) == OTHERS

    first = hydroslurm("spank", "install", *option)
    assert first.returncode == 0, first.stderr
    assert f"  + {MARK}\n  + optional {plugin}\n" in first.stdout
    assert plugin.stat().st_mode & 0o777 == 0o755
    installed = _text(real)
    assert installed == f"{OTHERS}{MARK}\noptional {plugin}\n"
    again = hydroslurm("spank", "install", *option)
    assert f"{conf}: nothing to change" in again.stdout
    assert _text(real) == installed

    assert "nothing to change" not in hydroslurm("spank", "uninstall", *option).stdout
    assert _text(real) == OTHERS
    assert f"{conf}: nothing to change" in hydroslurm("spank", "uninstall", *option).stdout
    assert real.stat().st_mode & 0o777 == 0o640
    assert conf.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == [PLUGIN, "plugstack.conf", "real.conf"]


def test_a_plugin_that_moves_keeps_its_place(tmp_path: Path) -> None:
    """There is never more than one, whoever named the other ones; lines below it stay below."""
    conf = tmp_path / "plugstack.conf"
    before = f"required /old/{PLUGIN} x\n{OTHERS}optional /older/{PLUGIN}\n"
    conf.write_text(before, errors="surrogateescape")
    done = hydroslurm("spank", "install", "--plugstack", str(conf), "--lib", str(tmp_path / "lib"))
    assert done.returncode == 0, done.stderr
    assert f"  - required /old/{PLUGIN} x\n" in done.stdout
    assert _text(conf) == f"{MARK}\noptional {tmp_path}/lib/{PLUGIN}\n{OTHERS}"


def test_build(tmp_path: Path) -> None:
    """The path of the plugin is printed, whether a folder or a file was named."""
    assert hydroslurm("spank", "build", "--out", str(tmp_path)).stdout == f"{tmp_path}/{PLUGIN}\n"
    file = tmp_path / "new" / "x.so"
    assert hydroslurm("spank", "build", "--out", str(file)).stdout == f"{file}\n"
    assert file.read_bytes()[:4] == b"\x7fELF"


def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path) -> None:
    """No compiler, no header, no slurm.conf, no right to write: nothing is changed."""
    conf = tmp_path / "plugstack.conf"
    install = ("spank", "install", "--plugstack", str(conf))
    done = hydroslurm(*install, CC="no-such-cc")
    assert (done.returncode, "apt-get install gcc" in done.stderr) == (1, True)
    # an empty folder that the compiler looks at first, so that it finds no header behind it
    (tmp_path / "empty" / "slurm" / "spank.h").mkdir(parents=True)
    done = hydroslurm(*install, CC="cc -nostdinc", CPATH=str(tmp_path / "empty"))
    assert (done.returncode, "libslurm-dev" in done.stderr) == (1, True)
    done = hydroslurm("spank", "install", SLURM_CONF=str(tmp_path / "nowhere"))
    assert (done.returncode, "--plugstack" in done.stderr) == (1, True)
    done = hydroslurm("spank", "install", "--plugstack", "/proc/plugstack.conf")
    assert (done.returncode, "cannot write /proc/" in done.stderr) == (1, True)
    done = hydroslurm("spank", "install", "--plugstack", "/proc/x", "--lib", str(tmp_path))
    assert (done.returncode, "belongs to the administrators" in done.stderr) == (1, True)
    assert not conf.exists()


def test_run_becomes_the_command() -> None:
    """Its arguments, its own exit status, and the mode; nothing of them is ours."""
    show = "import os, sys; print(os.environ['HYDROSLURM_PREEMPT'], sys.argv[1:]); sys.exit(7)"
    python = [sys.executable, "-c", show, "--mode", "x", "--", "--help"]
    for before in (["--"], [], ["--mode", "requeue", "--"]):
        done = hydroslurm("run", *before, *python, HYDROSLURM_RANK_TAKEN="1:")
        mode = "requeue" if "--mode" in before else "pause"
        assert done.stdout == f"{mode} ['--mode', 'x', '--', '--help']\n", done.stderr
        assert done.returncode == 7


def test_run_gets_the_signals_of_its_command() -> None:
    """A command that is killed is seen as killed."""
    done = hydroslurm("run", "--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mode", "other", "--", "true"], "--mode 'other' is not known; wanted pause or requeue"),
        (["--", "no-such-program-7"], "there is no program 'no-such-program-7' on the PATH"),
    ],
)
def test_run_refuses(argv: list[str], words: str) -> None:
    """What it cannot do is said before anything is run."""
    done = hydroslurm("run", *argv)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


def test_run_refuses_a_python_that_would_not_listen(tmp_path: Path) -> None:
    """A Python without the package would run the program as ever; the one that has it is named."""
    venv.create(tmp_path, with_pip=False)
    python = str(tmp_path / "bin" / "python")
    done = hydroslurm("run", "--", python, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{python} -m pip install hydroslurm" in done.stderr
    assert sys.executable in done.stderr
