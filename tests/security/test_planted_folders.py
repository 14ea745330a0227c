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
from clusters import require_slurm
from processes import child

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


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
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
    code = """
        import os, sys
        os.umask(0)
        os.makedirs(os.path.join(sys.argv[1], "conf"))
        for name, text in (
            ("THIS-IS-FOR-TESTING-ONLY", ""),
            ("cluster.json", sys.argv[2]),
            ("conf/slurm.conf", "ClusterName=theirs"),
        ):
            open(os.path.join(sys.argv[1], name), "w").write(text)
        """
    stranger.python(code, str(folder), to_json(running))


def test_a_planted_cluster_is_not_started_used_or_ended(
    scratch: Path, stranger: Stranger, bystander: subprocess.Popen[bytes]
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


@pytest.mark.slurm
def test_cluster_up_refuses_a_planted_folder(
    scratch: Path, stranger: Stranger, bystander: subprocess.Popen[bytes]
) -> None:
    """`hydroslurm cluster up`, with a real Slurm: it ends with a message, and no daemon has run."""
    require_slurm()
    planted = scratch / "cluster"
    _plant_cluster(stranger, planted, bystander.pid)
    command = [sys.executable, "-m", "hydroslurm.cli", "cluster", "up", "--nodes", "1"]
    done = subprocess.run(
        [*command, "--dir", str(planted)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert f"belongs to uid {stranger.uid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (planted / "log").exists()


def test_a_cluster_below_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    """Where everybody could exchange the folder later, root's daemons would run what they find."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedFile, match=f"others can write {tmp_path / 'open'}"):
        Layout.at(tmp_path / "open" / "cluster").create()


def test_a_cluster_in_a_sticky_folder_and_under_an_open_umask_is_taken(scratch: Path) -> None:
    """/tmp is fine, and so is umask 0."""
    before = os.umask(0)
    try:
        layout = Layout.at(scratch / "cluster")
        layout.create()
        layout.create()
    finally:
        os.umask(before)
    assert Running.read(layout) is None


def test_the_short_name_of_a_cluster_is_made_where_nobody_can_exchange_it(tmp_path: Path) -> None:
    """A temporary folder that everybody may write, without the sticky bit, is passed over."""
    open_tmp = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))
    open_tmp.chmod(0o777)
    link = make_link(tmp_path, temporary=open_tmp)
    try:
        assert not link.is_relative_to(open_tmp)
    finally:
        remove_link(link)
        open_tmp.rmdir()


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
    scratch: Path,
    stranger: Stranger,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/tmp/hydroslurm-UID made by a neighbour: a client neither signals nor reads by it."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    folder = scratch / f"hydroslurm-{os.getuid()}"
    code = """
        import os, sys
        os.umask(0)
        os.mkdir(sys.argv[1])
        open(os.path.join(sys.argv[1], sys.argv[2]), "w").write(sys.argv[3])
        """
    name = registry.entry_file(folder, bystander.pid).name
    stranger.python(code, str(folder), name, _entry(bystander.pid, signo=12))
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
    stranger.python("import os, sys; os.mkdir(sys.argv[1])", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    environ = {"HOME": str(tmp_path), "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": ""}
    # the gate that is built already
    environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with child(RANK, tmp_path, environ=environ) as rank:
        rank.expect("ready")
        assert client.pause(rank.pid, environ=environ).done
        stranger.python("import os, sys; os.rmdir(sys.argv[1])", str(folder))
        assert client.resume(rank.pid, environ=environ).done
    assert not folder.exists()


def test_a_registry_that_others_can_write_is_refused(
    stranger: Stranger, bystander: subprocess.Popen[bytes]
) -> None:
    """Also one of our own with an open mode, into which a neighbour has put an entry; and the entry
    is not believed once the folder is closed again."""
    with tempfile.TemporaryDirectory(prefix="hs-run-") as name:
        Path(name).chmod(0o755)
        environ = {"XDG_RUNTIME_DIR": name}
        folder = registry.folder(environ)
        folder.chmod(0o777)
        stranger.python(
            "import sys; open(sys.argv[1], 'w').write(sys.argv[2])",
            str(registry.entry_file(folder, bystander.pid)),
            _entry(bystander.pid, signo=12),
        )
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
    stranger.python("import sys; open(sys.argv[1], 'w').write('forged')", str(beside))
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
