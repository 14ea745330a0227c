"""As another user, on another host name, and from the command line."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import require_slurm
from devcluster.traces import links_to, processes_of
from processes import captured

import hydroslurm

pytestmark = pytest.mark.slurm

PACKAGE_PARENT = Path(hydroslurm.__file__).parent.parent

TRY = """\
import os
from pathlib import Path
from hydroslurm.devcluster import ClusterSpec, DevCluster
with DevCluster.up(ClusterSpec(nodes=2, directory=Path("c").absolute())) as cluster:
    both = ["srun", "--preempt", "-N2", "-n2", "printenv", "SLURMD_NODENAME"]
    print(*sorted(cluster.run(both).stdout.split()))
    job = cluster.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "srun sleep 600"])
    cluster.run(["scontrol", "show", "job", job.stdout.strip()])
    print(os.uname().nodename, os.geteuid())
"""


@pytest.fixture(autouse=True)
def _slurm() -> None:
    require_slurm()


def _run(argv: list[str], folder: Path, **environ: str) -> str:
    """Run a program to its end; its output, with that of a failure in the test's own message."""
    more = {**os.environ, "PYTHONPATH": str(PACKAGE_PARENT), **environ}
    done = captured(argv, cwd=folder, env=more, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder that everybody can reach, with a copy of the package, since the checkout may lie in
    a private home, and one in it that belongs to nobody."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    nobody = pwd.getpwnam("nobody")
    folder = Path(tempfile.mkdtemp(prefix="nobody-", dir="/tmp"))
    folder.chmod(0o755)
    shutil.copytree(PACKAGE_PARENT / "hydroslurm", folder / "hydroslurm")
    (folder / "own").mkdir()
    os.chown(folder / "own", nobody.pw_uid, nobody.pw_gid)
    yield folder
    shutil.rmtree(folder)


ELSEWHERE = """\
import os, socket, sys
socket.sethostname("no-such-host-7")
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_an_ordinary_user_can_do_it(for_all: Path) -> None:
    """With no privileges at all, and no home, on a host whose own name no resolver knows: all
    daemons are the user's, srun has --preempt, and all are gone."""
    uid, own = pwd.getpwnam("nobody").pw_uid, for_all / "own"
    as_nobody = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    # the interpreter of these tests may lie in a folder that only its owner can reach
    python = next(
        p
        for p in (sys.executable, "/usr/bin/python3")
        if subprocess.run([*as_nobody, "env", p, "-c", ""], check=False).returncode == 0
    )
    elsewhere = ["unshare", "--uts", sys.executable, "-c", ELSEWHERE]
    environ = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(for_all)}
    out = _run([*elsewhere, *as_nobody, python, "-c", TRY], own, **environ)
    assert out == f"n1 n2\nno-such-host-7 {uid}\n"
    assert {path.stat().st_uid for path in own.rglob("*")} == {uid}
    assert processes_of(str(own)) == []
    assert links_to(own / "c") == []


def test_the_command_line(tmp_path: Path) -> None:
    """`up` returns and the cluster lives on, `env` leads a shell to it, `status` shows it, `down`
    ends it; with none up, `status` fails with a line that says so."""
    hydroslurm_program = [sys.executable, "-c", "import hydroslurm.cli.cluster as c; c.app()"]

    def cluster(*arguments: str) -> str:
        return _run([*hydroslurm_program, *arguments], tmp_path)

    said = cluster("up", "--nodes", "1", "--cpus", "2", "--profile", "requeue")
    try:
        assert "FOR TRYING AND TESTING ONLY, NOT FOR PRODUCTION" in said
        assert "hydroslurm cluster down\n" in said
        status = json.loads(cluster("status", "--json"))
        assert status["profile"] == "requeue"
        assert status["directory"] == str(tmp_path / ".hydroslurm" / "cluster")
        assert [node["state"] for node in status["nodes"]] == ["idle"]
        assert "slurmctld    runs" in cluster("status")
        script = f"{cluster('env')}\nsinfo -h -p low -o '%N %c'"
        assert _run(["sh", "-c", script], tmp_path) == "n1 2\n"
    finally:
        ended = cluster("down")
    assert ended == f"down: {tmp_path}/.hydroslurm/cluster\n"
    assert cluster("down").startswith("nothing is up: ")
    assert processes_of(str(tmp_path)) == []
    failed = captured([*hydroslurm_program, "status"], cwd=tmp_path, timeout=120)
    assert failed.returncode == 1
    assert "no cluster is up in" in failed.stderr
