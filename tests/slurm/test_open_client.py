"""The choice of the backend: what is there, what was asked for, and never a dead process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hydroslurm.errors import SlurmMissing, UsageError
from hydroslurm.slurm import client as client_module
from hydroslurm.slurm import pyslurm_backend
from hydroslurm.slurm.client import BACKEND_ENV, open_client
from hydroslurm.slurm.config import find_slurm_conf
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


def _pretend_pyslurm(tmp_path: Path, patch: pytest.MonkeyPatch, source: str = PYSLURM) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "pyslurm.py").write_text(source)
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", str(folder))
    # forgets the module again, whether a test imported it or not
    patch.setitem(sys.modules, "pyslurm", None)
    patch.delitem(sys.modules, "pyslurm")
    patch.setattr(client_module, "_bound_conf", None)
    patch.setattr(pyslurm_backend, "failure", "")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=x\n")
    monkeypatch.setenv("SLURM_CONF", str(path))
    return path


def test_without_pyslurm(tmp_path: Path) -> None:
    """Without pyslurm it is the commands, and ``why`` says so; asking for pyslurm is an error."""
    client = open_client(environ={"SLURM_CONF": str(tmp_path / "other.conf"), "PATH": ""})
    assert client.backend == "commands"
    assert client.why.startswith("commands: pyslurm ")


def test_pyslurm_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: Path
) -> None:
    """A pyslurm that answers, and a slurm.conf: pyslurm, with the reason."""
    _pretend_pyslurm(tmp_path, monkeypatch)
    client = open_client()
    assert client.backend == "pyslurm"
    assert client.why == f"pyslurm: it answers, and {conf} exists"


def test_a_request_that_fails_leaves_the_rest_to_the_programs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conf: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the first one, for this client and later ones, with one line and no retry."""
    _pretend_pyslurm(tmp_path, monkeypatch)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '{\"jobs\": []}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    client = open_client()
    assert client.backend == "pyslurm"
    assert client.jobs() == client.jobs() == ()
    assert (client.backend, open_client().backend) == ("commands", "commands")
    (line,) = caplog.messages
    assert "pyslurm: load jobs: Protocol authentication error; Slurm's programs are used" in line


def test_no_slurm_conf_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a slurm.conf pyslurm is not touched: this very process would end."""
    _pretend_pyslurm(tmp_path, monkeypatch)
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conf: Path,
    caplog: pytest.LogCaptureFixture,
    source: str,
    words: str,
) -> None:
    """One that ends the process, lacks its library, is too old, or newer than the controller is
    found out in a child, once; one line says so."""
    _pretend_pyslurm(tmp_path, monkeypatch, source)
    assert open_client().backend == "commands"
    (line,) = caplog.messages
    assert "Slurm's programs are used instead" in line
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/not/tried/again")
        assert open_client().why == f"commands: {pyslurm_backend.failure}"
    assert caplog.messages == [line]
    with pytest.raises(SlurmMissing, match=words):
        open_client("pyslurm")


def test_another_cluster_rules_pyslurm_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: Path
) -> None:
    """pyslurm reads this process's SLURM_CONF; a client for another cluster uses the commands."""
    _pretend_pyslurm(tmp_path, monkeypatch)
    client = open_client(environ={**os.environ, "SLURM_CONF": str(tmp_path / "slurm2.conf")})
    assert (
        client.why == "commands: pyslurm cannot be given another SLURM_CONF than this process has"
    )


def test_one_process_asks_one_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: Path
) -> None:
    """libslurm keeps the first slurm.conf that it reads, so that a client for the next one that
    SLURM_CONF names uses the commands; the first one, by any name, keeps pyslurm."""
    _pretend_pyslurm(tmp_path, monkeypatch)
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


def test_a_pyslurm_that_somebody_else_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: Path
) -> None:
    """Nobody knows which slurm.conf it read, so it is not asked."""
    _pretend_pyslurm(tmp_path, monkeypatch)
    import pyslurm  # noqa: F401 - the stand-in

    assert open_client().why.startswith("commands: something else has imported pyslurm")


def test_the_environment_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: Path
) -> None:
    """HYDROSLURM_SLURM_BACKEND wins over what is there, the caller over it; nonsense is named."""
    _pretend_pyslurm(tmp_path, monkeypatch)
    monkeypatch.setenv(BACKEND_ENV, "commands")
    assert open_client().why == f"commands: asked for by {BACKEND_ENV}"
    assert open_client("pyslurm").why == "pyslurm: asked for by the caller"
    monkeypatch.setenv(BACKEND_ENV, "rest")
    with pytest.raises(UsageError, match=f"no Slurm backend 'rest'.*{BACKEND_ENV}"):
        open_client()


@pytest.mark.parametrize(
    ("lines", "socket"),
    [
        ("AuthInfo=socket=/a,cred_expire=5", "/a"),
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


def test_find_slurm_conf(conf: Path) -> None:
    """SLURM_CONF is the only place when it is set, wrong as it may be."""
    assert find_slurm_conf({"SLURM_CONF": str(conf)}) == conf
    assert find_slurm_conf({"SLURM_CONF": str(conf) + ".not"}) is None
