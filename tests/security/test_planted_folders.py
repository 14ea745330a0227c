"""A dev cluster, a registry, an nsys nsys, a gate library: another user made them beforehand."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from gate.test_build import FakeCompiler
from security.planting import python
from zygote import forked

from hydroslurm.core import registry
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.cluster import end_cluster
from hydroslurm.devcluster.layout import Layout, make_link, remove_link
from hydroslurm.devcluster.processes import ProcessId, Running, to_json
from hydroslurm.errors import NsysMissing, RunFolderError, TargetError, UntrustedFile
from hydroslurm.gate import build
from hydroslurm.gate import library as gates
from hydroslurm.gate.build import find_compiler
from hydroslurm.gate.library import SITE_DIR_ENV, installed_torch
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.report import nsys
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
model = torch.nn.Linear(1, 1)
while True:
    model(torch.ones(1))
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
    monkeypatch.setattr(nsys, "find_nsys", lambda: None)
    with pytest.raises(NsysMissing), nsys.as_sqlite(report):
        pass
    program = tmp_path / "nsys"
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\nprintf real > "$2"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(nsys, "find_nsys", lambda: str(program))
    with nsys.as_sqlite(report) as made:
        assert made.read_text() == "real"
    monkeypatch.setattr(nsys, "find_nsys", lambda: None)
    with nsys.as_sqlite(report) as made:
        assert (made, made.read_text()) == (beside, "real")


TORCH = installed_torch()
LOAD = """
    from hydroslurm.gate.native_gate import NativeGate
    print("loaded", NativeGate().granularity)
"""
EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {
    FILE *file = fopen("MARKER", "w");
    if (file) fclose(file);
}
"""


@pytest.fixture(scope="module")
def good_library() -> Path:
    """A gate that works, from the user's cache."""
    return NativeGate().path


@pytest.fixture
def environ(tmp_path: Path, good_library: Path) -> dict[str, str]:
    """A compiler that "compiles" by copying: a build takes no ten seconds."""
    return {"CXX": str(FakeCompiler(tmp_path / "bin", good_library).path)}


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What planted code makes when it runs, in a folder that only its victim can write."""
    return tmp_path_factory.mktemp("victim") / "ran-as-the-owner"


@pytest.fixture(scope="module")
def evil(marker: Path, stranger: Stranger) -> Path:
    """The attacker's library, which does run where somebody loads it."""
    source, library = stranger.home / "evil.c", stranger.home / "evil.so"
    source.write_text(EVIL.replace("MARKER", str(marker)))
    command = [*find_compiler(os.environ), "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    load = f"import ctypes; ctypes.CDLL({str(library)!r})"
    subprocess.run([sys.executable, "-c", load], check=True)
    assert marker.exists()
    marker.unlink()
    return library


def _plant(stranger: Stranger, evil: Path, root: Path) -> None:
    """With the right name, manifest and checksum, all of which everybody can compute."""
    folder = root / gates.key_of(TORCH)
    manifest = {"sha256": hashlib.sha256(evil.read_bytes()).hexdigest()}
    stranger.plant(folder / "hs_gate.json", json.dumps(manifest))
    stranger.run("cp", str(evil), str(folder / "hs_gate.so"))
    assert gates.is_whole(folder)


@pytest.mark.parametrize(
    ("place", "mode", "then", "said"),
    [
        ("XDG_CACHE_HOME", None, None, "belongs to uid {uid}"),
        ("XDG_CACHE_HOME", 0o777, None, "others can write {root}"),
        ("XDG_CACHE_HOME", 0o777, 0o700, "belongs to uid {uid}"),
        (SITE_DIR_ENV, None, None, f"{SITE_DIR_ENV} is passed over"),
    ],
    ids=["a cache of theirs", "one that all can write", "one that was closed later", "a site's"],
)
def test_a_planted_library_does_not_run(
    place: str,
    mode: int | None,
    then: int | None,
    said: str,
    scratch: Path,
    tmp_path: Path,
    evil: Path,
    marker: Path,
    environ: dict[str, str],
    stranger: Stranger,
) -> None:
    """Whoever made the folder: one warning says what is wrong with it, and a gate of our own is
    loaded from elsewhere."""
    root = scratch if place == SITE_DIR_ENV else scratch / "hydroslurm" / "gate"
    if mode is not None:
        root.mkdir(parents=True)
        root.chmod(mode)
    _plant(stranger, evil, root)
    if then is not None:
        root.chmod(then)
    done = python(
        LOAD, **environ, **{"XDG_CACHE_HOME": str(tmp_path / "cache"), place: str(scratch)}
    )
    assert "loaded every operator" in done.stdout, done.stdout
    assert not marker.exists()
    if then is None:  # nothing of ours is put where others could replace it
        assert [one.name for one in root.iterdir()] == [gates.key_of(TORCH)]
    assert done.stdout.count(said.format(uid=stranger.uid, root=root)) == 1


def test_a_sites_own_account_is_believed(
    tmp_path: Path, good_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns the installed package decides already what runs: their gate is loaded from
    HYDROSLURM_GATE_DIR, and not from a cache of the user's."""
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        owned = SimpleNamespace(st_uid=4711)
        return owned if str(path) == gates.__file__ else real(path, **options)

    site = tmp_path / "site"
    shutil.copytree(good_library.parent, site / gates.key_of(TORCH))
    for path in (site, *site.rglob("*")):
        os.chown(path, 4711, 4711)
    monkeypatch.setattr(Path, "stat", stat)
    found = gates.find({SITE_DIR_ENV: str(site)}, torch=TORCH)
    assert found is not None
    assert found.origin == "site"
    (tmp_path / "cache" / "hydroslurm").mkdir(parents=True)
    site.rename(tmp_path / "cache" / "hydroslurm" / "gate")
    assert gates.find({"XDG_CACHE_HOME": str(tmp_path / "cache")}, torch=TORCH) is None


def test_a_cache_made_under_an_open_umask_is_used_again(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """What we build is nobody else's to write whatever the umask is, so that it is found again.
    `hydroslurm gate build --out` refuses a folder from which nobody would load it."""
    environ = {**environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = os.umask(0)
    try:
        first, second = (build.ensure(environ, torch=TORCH) for _ in range(2))
    finally:
        os.umask(before)
    assert (first.origin, second.origin) == ("cache", "cache")
    assert second.built_s is None
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    with pytest.raises(UntrustedFile, match="chmod go-w"):
        build.build(tmp_path / "out", environ=environ, torch=TORCH)
    assert not any((tmp_path / "out").iterdir())


def test_a_temporary_folder_that_all_can_write_is_not_built_in(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no cache and a TMPDIR without the sticky bit, where a neighbour could exchange the
    library between its test and its loading, another place is taken."""
    open_tmp = tmp_path / "tmp"
    open_tmp.mkdir()
    open_tmp.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(open_tmp))
    (tmp_path / "file").write_text("")
    environ = {**environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        built = build.ensure(environ, torch=TORCH)
    assert built.origin == "private"
    assert not built.path.is_relative_to(open_tmp)
    shutil.rmtree(built.path.parent.parent)


def test_the_self_test_imports_nothing_from_the_working_directory(
    scratch: Path,
    marker: Path,
    good_library: Path,
    stranger: Stranger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gate is tested in a child of ours; modules that a stranger has put into the folder that a
    job was submitted from are not what it imports."""
    for name in ("torch", "hydroslurm", "json", "runpy"):
        stranger.plant(scratch / f"{name}.py", f"open({str(marker)!r}, 'w')")
    monkeypatch.chdir(scratch)
    build.self_test_in_child(good_library)
    assert not marker.exists()
