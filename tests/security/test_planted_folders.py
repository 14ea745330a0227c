"""Dev cluster, registry and nsys exports that another user has made beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from zygote import forked

from hydroslurm.core import registry
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.cluster import end_cluster
from hydroslurm.devcluster.layout import Layout, make_link, remove_link
from hydroslurm.devcluster.processes import ProcessId, Running, to_json
from hydroslurm.errors import NsysMissing, RunFolderError, TargetError, UntrustedFile
from hydroslurm.report.nsys import export
from hydroslurm.runtime import client

if TYPE_CHECKING:
    from security.conftest import Stranger


Bystander = subprocess.Popen[bytes]


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    """A process of ours that must live on. It listens to every signal that a plan can name."""
    code = "import signal\nfor n in (10, 12): signal.signal(n, lambda *_: exit(7))\n"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}print('ready', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.communicate()


def _plant_cluster(stranger: Stranger, folder: Path, victim: int, link: str = "/nowhere") -> None:
    """What a dev cluster's folder looks like, with a process of the victim's as its supervisor."""
    process = ProcessId.of(victim)
    assert process is not None
    running = Running(
        spec=ClusterSpec(directory=folder),
        up=True,
        temporary=True,
        link=Path(link),
        supervisor=process,
    )
    stranger.plant(folder / "THIS-IS-FOR-TESTING-ONLY")
    stranger.plant(folder / "cluster.json", to_json(running))
    stranger.plant(folder / "conf/slurm.conf", "ClusterName=theirs")


def test_a_planted_cluster_is_not_started_used_or_ended(
    scratch: Path, stranger: Stranger, bystander: Bystander
) -> None:
    """A dev cluster's folder of somebody else's: `up` runs none of its configuration, `env` leads
    nobody there, and `down` neither signals the process that it names nor removes anything."""
    planted = scratch / "cluster"
    _plant_cluster(stranger, planted, bystander.pid)
    belongs = f"{planted} belongs to uid {stranger.uid}"
    with pytest.raises(UntrustedFile, match=belongs):
        Layout.at(planted).create()
    with pytest.raises(UntrustedFile, match=belongs):
        DevCluster.attach(planted)
    with pytest.raises(UntrustedFile, match=belongs):
        end_cluster(planted)
    assert bystander.poll() is None
    assert (planted / "conf" / "slurm.conf").exists()


def test_where_a_cluster_may_be(tmp_path: Path, scratch: Path) -> None:
    """Below a folder that everybody can write, who could exchange it later, root's daemons would
    run what they find, and no short name of a cluster is made there. /tmp is fine, and so is umask
    0."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedFile, match=f"others can write {tmp_path / 'open'}"):
        Layout.at(tmp_path / "open" / "cluster").create()
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as open_tmp:
        Path(open_tmp).chmod(0o777)
        link = make_link(tmp_path, temporary=Path(open_tmp))
        assert not link.is_relative_to(open_tmp)
        remove_link(link)
    before = os.umask(0)
    try:
        layout = Layout.at(scratch / "cluster")
        layout.create()
        layout.create()
    finally:
        os.umask(before)
    assert Running.read(layout) is None


def _entry(victim: int, *, signo: int) -> str:
    row = {
        "pid": victim,
        "started": registry.start_ticks(victim),
        "rank": 0,
        "events": "/dev/zero",
        "signals": {"user_pause": signo, "user_resume": signo},
    }
    return json.dumps(row)


def test_a_planted_registry_is_refused(
    scratch: Path, stranger: Stranger, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp/hydroslurm-UID made by a neighbour: a client neither signals nor reads by it."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    folder = scratch / f"hydroslurm-{os.getuid()}"
    entry = registry.entry_file(folder, bystander.pid)
    stranger.plant(entry, _entry(bystander.pid, signo=12))
    with pytest.raises(RunFolderError, match=f"belongs to uid {stranger.uid}"):
        client.pause(bystander.pid, timeout_s=1, environ={})
    assert bystander.poll() is None


RANK = """
import hydroslurm
hydroslurm.install()
print("ready", flush=True)
import torch
while True:
    torch.ones(1) + 1
"""


def test_a_registry_whose_name_is_taken_is_elsewhere(
    scratch: Path, stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour has made /tmp/hydroslurm-UID: ranks and clients meet in the user's home, also
    when the name is given back in between."""
    folder = scratch / f"hydroslurm-{os.getuid()}"
    stranger.run("mkdir", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    environ = {"HOME": str(tmp_path), "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": ""}
    with forked(RANK, tmp_path, environ={**environ, "HYDROSLURM_GATE": "hooks"}) as rank:
        rank.expect("ready")
        assert client.pause(rank.pid, environ=environ).done
        stranger.run("rmdir", str(folder))
        assert client.resume(rank.pid, environ=environ).done
    assert not folder.exists()


def test_a_registry_that_others_can_write_is_refused(
    stranger: Stranger, bystander: Bystander
) -> None:
    """Also one of our own with an open mode, into which a neighbour has put an entry; and the entry
    is not believed once the folder is closed again."""
    with tempfile.TemporaryDirectory(prefix="hs-run-") as name:
        Path(name).chmod(0o755)
        environ = {"XDG_RUNTIME_DIR": name}
        folder = registry.folder(environ)
        folder.chmod(0o777)
        entry = registry.entry_file(folder, bystander.pid)
        stranger.plant(entry, _entry(bystander.pid, signo=12))
        with pytest.raises(RunFolderError, match=f"chmod go-w {folder}"):
            client.pause(bystander.pid, timeout_s=1, environ=environ)
        folder.chmod(0o700)
        with pytest.raises(TargetError, match="has not announced itself"):
            client.pause(bystander.pid, timeout_s=1, environ=environ)
    assert bystander.poll() is None


def test_a_planted_export_is_not_read(
    tmp_path: Path, lab: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a report of ours, in a folder of our group: a newer .sqlite of somebody else's is not
    taken for what nsys made of it; our own is."""
    report = lab / "rank-0.nsys-rep"
    report.write_text("report")
    os.utime(report, (1, 1))
    beside = lab / "rank-0.sqlite"
    stranger.plant(beside, "forged")
    monkeypatch.setattr(export, "find_nsys", lambda: None)
    with pytest.raises(NsysMissing), export.as_sqlite(report):
        pass
    nsys = tmp_path / "nsys"
    nsys.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\nprintf real > "$2"\n')
    nsys.chmod(0o755)
    monkeypatch.setattr(export, "find_nsys", lambda: str(nsys))
    with export.as_sqlite(report) as made:
        assert made.read_text() == "real"
    monkeypatch.setattr(export, "find_nsys", lambda: None)
    with export.as_sqlite(report) as made:
        assert (made, made.read_text()) == (beside, "real")
