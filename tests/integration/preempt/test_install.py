"""``hydroslurm spank`` and ``hydroslurm run``, as a person types them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from processes import captured

from hydroslurm.slurm.spank.build import PLUGIN
from hydroslurm.slurm.spank.plugstack import MARK

OTHERS = """\
# ours, since 2019, \udce9t\udce9
required\tprivate_tmp.so  base=/x
include plugstack.conf.d/*.conf
"""


def hydroslurm(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-m", "hydroslurm.cli", *argv], env={**os.environ, **environ}, timeout=120
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


SRUN = """#!/bin/sh
# Stands in for srun: tells the release $RELEASE, as srun --version does, and only with a slurm.conf
# that can be read, as 22.05 does.
[ "$1" = --version ] && grep -q ClusterName "$SLURM_CONF" && echo "slurm $RELEASE"
"""


@pytest.fixture
def other_slurm(tmp_path: Path) -> Path:
    """The prefix of a Slurm of its own, with an srun that tells any release."""
    (tmp_path / "slurm" / "bin").mkdir(parents=True)
    srun = tmp_path / "slurm" / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    return tmp_path / "slurm"


def _build(prefix: Path, release: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = f"{prefix}/bin{os.pathsep}{os.environ['PATH']}"
    out = ("--out", str(prefix / "plugin.so"))
    return hydroslurm("spank", "build", *out, *options, PATH=path, RELEASE=release, SLURM_CONF="/x")


def _give_headers(prefix: Path, number: str) -> Path:
    """Headers of another release, made of those of this one."""
    ours = Path("/usr/include/slurm")
    theirs = prefix / "include" / "slurm"
    shutil.copytree(ours, theirs)
    version = theirs / "slurm_version.h"
    text = re.sub(r"(SLURM_VERSION_NUMBER) 0x\w+", rf"\1 {number}", version.read_text())
    version.write_text(text)
    return prefix / "include"


def _is_for(plugin: Path, number: int) -> bool:
    """Whether the plugin holds what Slurm compares with its own number, its plugin_version."""
    return number.to_bytes(4, "little") in plugin.read_bytes()


def test_headers_of_another_release_are_refused(other_slurm: Path) -> None:
    """Slurm would pass over the plugin at every srun: it is not built, and the fix is named."""
    done = _build(other_slurm, "25.11.7")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{other_slurm}/bin/srun is of Slurm 25.11" in done.stderr
    assert "Install the headers of 25.11" in done.stderr
    assert "--include" in done.stderr
    assert not (other_slurm / "plugin.so").exists()
    named = _build(other_slurm, "25.11.7", "--include", "/usr/include")
    assert (named.returncode, "in /usr/include" in named.stderr) == (1, True)
    empty = _build(other_slurm, "25.11.7", "--include", str(other_slurm))
    assert (empty.returncode, "name their folder with --include" in empty.stderr) == (1, True)


def test_headers_beside_srun_are_taken(other_slurm: Path) -> None:
    """Of two include folders the one of srun's release, whichever the compiler finds first."""
    _give_headers(other_slurm, "0x190b07")
    done = _build(other_slurm, "25.11.2")  # another micro release loads it
    assert done.returncode == 0, done.stderr
    assert _is_for(other_slurm / "plugin.so", 0x190B07)


def test_headers_of_the_right_release_may_be_named(other_slurm: Path, tmp_path: Path) -> None:
    """--include names the folder where the headers lie somewhere else."""
    include = _give_headers(tmp_path / "elsewhere", "0x190b07")
    done = _build(other_slurm, "25.11.7", "--include", str(include))
    assert done.returncode == 0, done.stderr
    assert _is_for(other_slurm / "plugin.so", 0x190B07)


def test_an_srun_that_tells_no_release(other_slurm: Path) -> None:
    """What the plugin is for must be known."""
    done = _build(other_slurm, "")
    assert (done.returncode, "names no release" in done.stderr) == (1, True)


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
        (
            ["--mode", "other", "--", "true"],
            "unknown --mode 'other'; wanted one of pause, vacate, requeue",
        ),
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
