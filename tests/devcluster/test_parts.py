"""Folders, ports, programs and processes, each without a cluster."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from clusters import require_slurm

from hydroslurm.devcluster import ClusterSpec, DevCluster, config, processes, programs
from hydroslurm.devcluster.layout import Layout, make_link, remove_link
from hydroslurm.errors import ClusterError


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    """A folder with strangers in it is refused, and nothing in it is ever removed."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "thesis.tex").write_text("years of work")
    layout = Layout.at(tmp_path)
    with pytest.raises(ClusterError, match="is not empty and not a dev cluster's folder"):
        layout.create()
    layout.remove_state()
    layout.remove_all()
    assert (tmp_path / "state" / "thesis.tex").exists()


def test_a_deep_folder_gets_a_short_name(tmp_path: Path) -> None:
    """However deep and odd the folder and TMPDIR are, sockets fit; only our own link is removed."""
    deep = tmp_path / ("d e,e#p" * 20)
    deep.mkdir()
    link = make_link(deep, temporary=deep)
    try:
        assert len(str(link)) + 60 <= 107
        assert link.resolve() == deep.resolve()
        assert link.parent.stat().st_mode & 0o777 == 0o700
    finally:
        remove_link(link)
    assert not link.parent.exists()
    stranger = tmp_path / "link"
    stranger.symlink_to(deep)
    remove_link(stranger)
    assert stranger.is_symlink()


def test_reserved_ports_are_ours_until_a_daemon_takes_them() -> None:
    """No two reservations share a port, nobody else gets one, and a daemon with SO_REUSEADDR can
    listen on it meanwhile."""
    first, second = config.Ports.reserve(20), config.Ports.reserve(20)
    try:
        numbers = first.all + second.all
        assert len(set(numbers)) == len(numbers) == 44
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", first.slurmctld))
        with socket.socket() as daemon:
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            daemon.bind(("127.0.0.1", first.slurmctld))
            assert not config.listening(first.slurmctld)
            daemon.listen()
            assert config.listening(first.slurmctld)
    finally:
        first.release()
        second.release()


def test_a_listener_beyond_loopback_is_seen() -> None:
    """A port counts as open to others exactly when it listens on another address than loopback."""
    for address, exposed in (("127.0.0.1", False), ("0.0.0.0", True)):
        with socket.socket() as listener:
            listener.bind((address, 0))
            listener.listen()
            port = listener.getsockname()[1]
            assert config.open_to_others([port]) == ([port] if exposed else [])


def test_missing_programs_are_named_with_package_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the program, its Debian package and the command that installs it, and no
    folder is made."""
    with pytest.raises(ClusterError) as caught:
        programs.find_programs(str(tmp_path))
    words = str(caught.value)
    assert "slurmctld (Debian package slurmctld)" in words
    assert "a C compiler (Debian package g++)" in words
    assert "sudo apt-get install -y --no-install-recommends g++ mariadb-server-core munge" in words
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"sinfo \(Debian package slurm-client\)"):
        DevCluster.up(ClusterSpec(nodes=1, directory=tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_where_programs_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of daemons come after what PATH names, each once; a Slurm beside this Python comes
    first: it is a whole one, and the site's may be of another release."""
    path = programs.search_path("/opt/bin:/usr/sbin").split(":")
    assert path[:2] == ["/opt/bin", "/usr/sbin"]
    assert sorted(path[2:]) == ["/sbin", "/usr/local/sbin"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "slurmctld").touch()
    path = programs.search_path(f"/opt/bin:{tmp_path}").split(":")
    assert path[:2] == [str(tmp_path), "/opt/bin"]
    assert path.count(str(tmp_path)) == 1


def test_a_process_is_not_mistaken_for_a_later_one() -> None:
    """A ProcessId of a process that has ended is not alive, and signalling it does nothing, even if
    its number lives."""
    me = processes.ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive
    former = processes.ProcessId(os.getpid(), me.start_ticks - 1)
    assert not former.alive
    former.send(9)  # would end the tests


def test_without_slurm_tests_are_skipped_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is named, and a machine that must have Slurm does not pass without it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for required, outcome in (("", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv("HYDROSLURM_REQUIRE_SLURM", required)
        with pytest.raises(outcome, match=r"a real Slurm is needed; not found: .*slurm-client"):
            require_slurm()
