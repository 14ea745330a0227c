"""The choice of the backend: what is there, what was asked for, and never a dead process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.errors import SlurmMissing, UsageError
from hydroslurm.slurm import libslurm
from hydroslurm.slurm.client import BACKEND_ENV, open_client
from hydroslurm.slurm.munge import socket_of

# pyslurm as it behaves: importing it without a slurm.conf ends the process, whoever imports it
PYSLURM = """
import os
if not os.path.isfile(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")):
    os._exit(1)
class RPCError(Exception): pass
class Jobs:
    def load(): raise RPCError("Protocol authentication error")
class Partitions: pass
class slurmctld:
    class Config:
        def load(): pass
"""
OLDER_CONTROLLER = PYSLURM.replace("def load(): pass", "load = Jobs.load")


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this source the pyslurm that is installed."""

    def installed(source: str = PYSLURM) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "pyslurm.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        # forgets the module again, whether a test imported it or not
        monkeypatch.setitem(sys.modules, "pyslurm", None)
        monkeypatch.delitem(sys.modules, "pyslurm")
        monkeypatch.setattr(libslurm, "_bound_conf", None)
        monkeypatch.setattr(libslurm, "_failure", "")

    return installed


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=x\n")
    monkeypatch.setenv("SLURM_CONF", str(path))
    return path


def test_without_pyslurm(tmp_path: Path) -> None:
    """Without pyslurm it is the commands, and ``why`` says so."""
    client = open_client(environ={"SLURM_CONF": str(tmp_path / "other.conf"), "PATH": ""})
    assert client.backend == "commands"
    assert client.why.startswith("commands: pyslurm ")


def test_a_request_that_fails_leaves_the_rest_to_the_programs(
    tmp_path: Path, pretend, monkeypatch, conf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pyslurm that answers is used where there is a slurm.conf, up to the first request that
    fails: then neither this client nor a later one asks it, with one line and no retry."""
    pretend()
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '{\"jobs\": []}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    client = open_client()
    assert client.backend == "pyslurm"
    assert client.why == f"pyslurm: it answers, and {conf} exists"
    assert client.jobs() == client.jobs() == ()
    assert (client.backend, open_client().backend) == ("commands", "commands")
    (line,) = caplog.messages
    assert "pyslurm: load jobs: Protocol authentication error; Slurm's programs are used" in line


def test_no_slurm_conf_no_import(tmp_path: Path, pretend, monkeypatch) -> None:
    """Without a slurm.conf pyslurm is not touched: this very process would end."""
    pretend()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "missing.conf"))
    client = open_client()
    assert client.why.startswith("commands: there is no slurm.conf")
    assert "pyslurm" not in sys.modules
    with pytest.raises(SlurmMissing, match=r"asked for by the caller, but there is no slurm\.conf"):
        open_client("pyslurm")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os; os._exit(1)", "no reason given"),
        ("raise ImportError('libslurm.so.44: cannot open')", r"libslurm\.so\.44"),
        ("version = '18.08'", "no attribute 'Jobs'"),
        (OLDER_CONTROLLER, "Protocol authentication error"),
    ],
)
def test_pyslurm_that_does_not_work(
    pretend, monkeypatch, conf: Path, caplog, source: str, words: str
) -> None:
    """One that ends the process, lacks its library, is too old, or newer than the controller is
    found out in a child, once; one line says so."""
    pretend(source)
    assert open_client().backend == "commands"
    (line,) = caplog.messages
    assert "Slurm's programs are used instead" in line
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/not/tried/again")
        assert open_client().why == f"commands: {libslurm._failure}"
    assert caplog.messages == [line]
    with pytest.raises(SlurmMissing, match=words):
        open_client("pyslurm")


def test_one_process_asks_one_cluster(tmp_path: Path, pretend, monkeypatch, conf: Path) -> None:
    """libslurm keeps the first slurm.conf that it reads, so that a client for the next one that
    SLURM_CONF or its own environment names uses the commands; the first one, by any name, keeps
    pyslurm."""
    pretend()
    elsewhere = open_client(environ={**os.environ, "SLURM_CONF": str(tmp_path / "slurm2.conf")})
    cannot = "pyslurm cannot be given another SLURM_CONF than this process has"
    assert elsewhere.why == f"commands: {cannot}"
    assert open_client().backend == "pyslurm"
    other = tmp_path / "other.conf"
    other.write_text("ClusterName=y\n")
    monkeypatch.setenv("SLURM_CONF", str(other))
    assert open_client().why.startswith("commands: pyslurm in this process goes on asking")
    with pytest.raises(SlurmMissing, match=rf"cluster of {conf}, which it read first.*{other}"):
        open_client("pyslurm")
    link = tmp_path / "link.conf"
    link.symlink_to(conf)
    monkeypatch.setenv("SLURM_CONF", str(link))
    assert open_client().backend == "pyslurm"


def test_a_pyslurm_that_somebody_else_imported(pretend, conf: Path) -> None:
    """Nobody knows which slurm.conf it read, so it is not asked."""
    pretend()
    import pyslurm  # noqa: F401 - the stand-in

    assert open_client().why.startswith("commands: something else has imported pyslurm")


def test_the_environment_chooses(pretend, monkeypatch, conf: Path) -> None:
    """HYDROSLURM_SLURM_BACKEND wins over what is there, the caller over it; nonsense is named."""
    pretend()
    monkeypatch.setenv(BACKEND_ENV, "commands")
    assert open_client().why == f"commands: asked for by {BACKEND_ENV}"
    assert open_client("pyslurm").why == "pyslurm: asked for by the caller"
    monkeypatch.setenv(BACKEND_ENV, "rest")
    with pytest.raises(UsageError, match=f"no Slurm backend 'rest'.*{BACKEND_ENV}"):
        open_client()


@pytest.mark.parametrize(
    ("lines", "socket"),
    [
        ('authinfo = "cred_expire=5,socket=/a"  # remark', "/a"),
        ("# AuthInfo=socket=/a", None),
        ("AuthInfo=socket=/a\nAuthInfo=socket=/b", "/b"),
        ("Include auth.conf", "/included"),
        ("include itself.conf\nInclude missing.conf", None),
    ],
)
def test_the_socket_of_munged(conf: Path, lines: str, socket: str | None) -> None:
    """By slurm.conf and what it includes; the doctor and ranks ask this alone."""
    conf.write_text(lines + "\n")
    (conf.parent / "auth.conf").write_text("AuthInfo=socket=/included\n")
    (conf.parent / "itself.conf").write_text("Include itself.conf\n")
    environ = {"SLURM_CONF": str(conf)}
    assert socket_of(environ) == socket
    assert socket_of({**environ, "HYDROSLURM_MUNGE_SOCKET": "/set"}) == "/set"
