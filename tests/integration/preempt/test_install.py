"""``hydroslurm spank`` and ``hydroslurm run``, as a person types them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import captured

from hydroslurm import cli
from hydroslurm.slurm.spank.build import PLUGIN
from hydroslurm.slurm.spank.plugstack import MARK

OTHERS = """\
# ours, since 2019, \udce9t\udce9
required\tprivate_tmp.so  base=/x
include plugstack.conf.d/*.conf
"""


Said = subprocess.CompletedProcess[str]
Spank = Callable[..., Said]


@pytest.fixture
def spank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spank:
    """``hydroslurm spank WORDS`` in this process, with these environment variables."""

    def run(*words: str, **environ: str) -> Said:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["hydroslurm", "spank", *words])
            with pytest.raises(SystemExit) as end:
                cli.main()
        return Said(words, int(end.value.code or 0), *capsys.readouterr())

    return run


def _text(path: Path) -> str:
    return path.read_text(errors="surrogateescape")


def test_install_and_uninstall(spank: Spank, tmp_path: Path) -> None:
    """Both say what they change, and the second time that there is nothing to. Other lines, the
    mode of the file, and the link that leads to it stay."""
    real, conf = tmp_path / "real.conf", tmp_path / "plugstack.conf"
    real.write_text(OTHERS, errors="surrogateescape")  # somebody's Latin-1
    real.chmod(0o640)
    conf.symlink_to(real)
    plugin = tmp_path / PLUGIN
    option = ("--plugstack", str(conf))
    plan = spank("install", *option, "--dry-run")
    assert f"would build {plugin}\n" in plan.stdout
    assert not plugin.exists()
    assert _text(real) == OTHERS

    first = spank("install", *option)
    assert first.returncode == 0, first.stderr
    assert f"  + {MARK}\n  + optional {plugin}\n" in first.stdout
    assert plugin.stat().st_mode & 0o777 == 0o755
    installed = _text(real)
    assert installed == f"{OTHERS}{MARK}\noptional {plugin}\n"
    again = spank("install", *option)
    assert f"{conf}: nothing to change" in again.stdout
    assert _text(real) == installed

    assert "nothing to change" not in spank("uninstall", *option).stdout
    assert _text(real) == OTHERS
    assert f"{conf}: nothing to change" in spank("uninstall", *option).stdout
    assert real.stat().st_mode & 0o777 == 0o640
    assert conf.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == [PLUGIN, "plugstack.conf", "real.conf"]


def test_a_plugin_that_moves_keeps_its_place(spank: Spank, tmp_path: Path) -> None:
    """There is never more than one, whoever named the other ones; lines below it stay below. A
    build prints the path of the plugin, whether a folder or a file was named."""
    conf = tmp_path / "plugstack.conf"
    before = f"required /old/{PLUGIN} x\n{OTHERS}optional /older/{PLUGIN}\n"
    conf.write_text(before, errors="surrogateescape")
    done = spank("install", "--plugstack", str(conf), "--lib", str(tmp_path / "lib"))
    assert done.returncode == 0, done.stderr
    assert f"  - required /old/{PLUGIN} x\n" in done.stdout
    assert _text(conf) == f"{MARK}\noptional {tmp_path}/lib/{PLUGIN}\n{OTHERS}"
    assert spank("build", "--out", str(tmp_path)).stdout == f"{tmp_path}/{PLUGIN}\n"
    file = tmp_path / "new" / "x.so"
    assert spank("build", "--out", str(file)).stdout == f"{file}\n"
    assert file.read_bytes()[:4] == b"\x7fELF"


SRUN = """#!/bin/sh
# Stands in for srun: tells the release $RELEASE, as srun --version does, and only with a slurm.conf
# that can be read, as 22.05 does.
[ "$1" = --version ] && grep -q ClusterName "$SLURM_CONF" && echo "slurm $RELEASE"
"""


class Other:
    """A Slurm of its own below a prefix, with an srun that tells any release."""

    def __init__(self, prefix: Path, spank: Spank) -> None:
        self.prefix, self._spank = prefix, spank
        self.plugin = prefix / "plugin.so"
        self.srun = prefix / "bin" / "srun"
        self.srun.parent.mkdir(parents=True)
        self.srun.write_text(SRUN)
        self.srun.chmod(0o755)

    def build(self, release: str, *options: str) -> Said:
        path = f"{self.srun.parent}{os.pathsep}{os.environ['PATH']}"
        more = {"PATH": path, "RELEASE": release, "SLURM_CONF": "/x"}
        return self._spank("build", "--out", str(self.plugin), *options, **more)

    def check_built(self, release: str, *options: str) -> None:
        """It holds what Slurm compares with its own number, its plugin_version."""
        done = self.build(release, *options)
        assert done.returncode == 0, done.stderr
        assert THEIRS.to_bytes(4, "little") in self.plugin.read_bytes()


@pytest.fixture
def other_slurm(tmp_path: Path, spank: Spank) -> Other:
    return Other(tmp_path / "slurm", spank)


THEIRS = 0x190B07  # 25.11.7


def _give_headers(prefix: Path) -> str:
    """Headers of another release, made of those of this one."""
    theirs = prefix / "include" / "slurm"
    shutil.copytree(Path("/usr/include/slurm"), theirs)
    version = theirs / "slurm_version.h"
    text = re.sub(r"(SLURM_VERSION_NUMBER) 0x\w+", rf"\1 {THEIRS:#x}", version.read_text())
    version.write_text(text)
    return str(prefix / "include")


def test_headers_of_another_release_are_refused(other_slurm: Other) -> None:
    """Slurm would pass over the plugin at every srun: it is not built, and the fix is named. What
    it is for must be known."""
    done = other_slurm.build("25.11.7")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{other_slurm.srun} is of Slurm 25.11" in done.stderr
    assert "Install the headers of 25.11" in done.stderr
    assert "--include" in done.stderr
    named = other_slurm.build("25.11.7", "--include", "/usr/include")
    assert (named.returncode, "in /usr/include" in named.stderr) == (1, True)
    empty = other_slurm.build("25.11.7", "--include", str(other_slurm.prefix))
    assert (empty.returncode, "name their folder with --include" in empty.stderr) == (1, True)
    none = other_slurm.build("")
    assert (none.returncode, "names no release" in none.stderr) == (1, True)
    assert not other_slurm.plugin.exists()


def test_headers_of_the_right_release_are_taken(other_slurm: Other, tmp_path: Path) -> None:
    """Those that --include names, or of two include folders the one of srun's release, whichever
    the compiler finds first; another micro release loads the plugin."""
    other_slurm.check_built("25.11.7", "--include", _give_headers(tmp_path / "elsewhere"))
    other_slurm.plugin.unlink()
    _give_headers(other_slurm.prefix)
    other_slurm.check_built("25.11.2")


def test_what_is_missing_is_named_with_the_remedy(spank: Spank, tmp_path: Path) -> None:
    """No compiler, no header, no slurm.conf, no right to write: nothing is changed."""
    conf = tmp_path / "plugstack.conf"
    here = ("--plugstack", str(conf))
    # an empty folder that the compiler looks at first, so that it finds no header behind it
    (tmp_path / "empty" / "slurm" / "spank.h").mkdir(parents=True)
    no_header = {"CC": "cc -nostdinc", "CPATH": str(tmp_path / "empty")}
    for options, environ, words in (
        (here, {"CC": "no-such-cc"}, "apt-get install gcc"),
        (here, no_header, "libslurm-dev"),
        ((), {"SLURM_CONF": str(tmp_path / "nowhere")}, "--plugstack"),
        (("--plugstack", "/proc/plugstack.conf"), {}, "cannot write /proc/"),
        (
            ("--plugstack", "/proc/x", "--lib", str(tmp_path)),
            {},
            "belongs to the administrators",
        ),
    ):
        done = spank("install", *options, **environ)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    assert not conf.exists()


def run(*words: str, **environ: str) -> Said:
    """``hydroslurm run WORDS``, which becomes another program."""
    command = [sys.executable, "-m", "hydroslurm.cli", "run", *words]
    return captured(command, env={**os.environ, **environ}, timeout=120)


def test_run_becomes_the_command() -> None:
    """Its arguments, its own exit status, and the mode; nothing of them is ours. A command that is
    killed is seen as killed."""
    show = "import os, sys; print(os.environ['HYDROSLURM_PREEMPT'], sys.argv[1:]); sys.exit(7)"
    python = [sys.executable, "-c", show, "--mode", "x", "--", "--help"]
    for before in ([], ["--mode", "requeue", "--"]):
        done = run(*before, *python, HYDROSLURM_RANK_TAKEN="1:")
        mode = "requeue" if "--mode" in before else "pause"
        assert done.stdout == f"{mode} ['--mode', 'x', '--', '--help']\n", done.stderr
        assert done.returncode == 7
    assert run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_run_refuses(tmp_path: Path) -> None:
    """What it cannot do is said before anything is run. A Python without the package would run the
    program as ever; the one that has it is named."""
    venv.create(tmp_path, with_pip=False)
    python = str(tmp_path / "bin" / "python")
    for argv, words in (
        (
            ["--mode", "other", "--", "true"],
            ["unknown --mode 'other'; wanted one of pause, vacate, requeue"],
        ),
        (["--", "no-such-program-7"], ["there is no program 'no-such-program-7' on the PATH"]),
        (
            ["--", python, "-c", "print('ran')"],
            [f"{python} -m pip install hydroslurm", sys.executable],
        ),
    ):
        done = run(*argv)
        assert (done.returncode, done.stdout) == (1, "")
        assert all(word in done.stderr for word in words), done.stderr
