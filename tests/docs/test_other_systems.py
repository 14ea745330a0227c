"""What other systems publish, as docs/other-systems.md changes it, runs as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import Part, preempt
from processes import captured, child, wait_until
from zygote import forked

from hydroslurm.devcluster import DevCluster
from hydroslurm.training.attempts import AttemptLog

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = """
while "training" not in (job.stdout() or "").splitlines():
    time.sleep(0.2)
job._interrupt()
print(job.result())
"""
STEPS = re.compile(r"^step (\d+)$", re.M)


def published(name: str, *, ours: bool = True) -> str:
    """The example of this name: as changed, or as its system publishes it."""
    marked = rf"<!-- run: {name} -->\n```(\w+)\n(.*?)^```"
    page = (ROOT / "docs/other-systems.md").read_text()
    ((language, text),) = re.findall(marked, page, flags=re.S | re.M)
    if language != "diff":
        return str(text)
    dropped = "-" if ours else "+"
    return "".join(line[1:] or "\n" for line in text.splitlines(True) if line[:1] != dropped)


@pytest.fixture(autouse=True)
def _outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in os.environ if one.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "name", ["hfai-calls", pytest.param("hfai-lightning", marks=pytest.mark.long)]
)
def test_hfai(name: str, tmp_path: Path) -> None:
    """Stopped in the middle and started again: each step once, and the second start ends."""
    with child(published(name), tmp_path) as first:
        first.expect("step 20")
        first.signal(signal.SIGTERM)
        assert first.end() == 75, str(first)
    with child(published(name), tmp_path) as again:
        assert again.end() == 0, str(again)
    steps = STEPS.findall(f"{first}\n{again}")
    assert [int(step) for step in steps] == list(range(400))
    assert list((tmp_path / "hfai_out").glob("suspended*")) == [], name


def test_hydrojobsche(tmp_path: Path) -> None:
    """SIGUSR1 holds it, SIGUSR2 lets it go on."""
    with forked(published("hydrojobsche"), tmp_path) as training:
        training.expect("step 3")
        training.signal(signal.SIGUSR1)
        held = -1
        while held != (held := len(training.lines)):  # the first poll without a new step
            time.sleep(0.5)
        training.signal(signal.SIGUSR2)
        wait_until(lambda: len(training.lines) > held, "steps after the pause")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hydrojobsche-hooks", "FWD PRE Linear\nFWD PRE Linear\nBWD POST Linear\n"),
        ("caffe2", ""),
        ("ffrecord", "Number of samples: 100\n[3, 6, 0, 10]\n"),
    ],
)
def test_others(name: str, said: str, tmp_path: Path) -> None:
    """The script's own assertions hold, and it prints what its system's would."""
    with forked(published(name), tmp_path) as script:
        assert script.end() == 0, str(script)
    out = f"{script}\n"
    assert said in out
    if name == "ffrecord":
        assert [out.count(f"epoch {epoch} batch") for epoch in (5, 6)] == [4, 7]


@pytest.mark.slurm
def test_submitit_and_t9k(
    requeue_cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of the callable is interrupted and resumes; the manifest trains to its end."""
    monkeypatch.chdir(tmp_path)
    for name, value in requeue_cluster.environ().items():
        monkeypatch.setenv(name, value)
    shutil.copy(ROOT / "examples/dist_digits.py", tmp_path)
    (tmp_path / "manifest.yaml").write_text(published("t9k"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/hydroslurm").mkdir(parents=True)
    (tmp_path / "config/hydroslurm/config.yaml").write_text(published("t9k-queues"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert "kubectl create" in published("t9k-command", ours=False)
    with subprocess.Popen(["bash", "-ec", published("t9k-command")]) as t9k:
        (tmp_path / "train.py").write_text(published("submitit") + INTERRUPTED)
        done = captured([sys.executable, "train.py"], timeout=200)
        assert done.stdout.splitlines()[-1:] == ["resumed"], done.stdout + done.stderr
        assert t9k.wait(200) == 0


@pytest.mark.slurm
@pytest.mark.long
def test_hydra(requeue_cluster: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tasks of a multirun one is preempted: it alone stops, and resumes without a step lost;
    both end with the weights of the script that its authors publish."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    Path("alone").mkdir()
    Path("alone/train.py").write_text(published("hydra", ours=False))
    options = ["--multirun", "+lr=0.1,0.2", "+steps=20000"]
    subprocess.run(["python", "train.py", *options], cwd="alone", check=True, timeout=300)
    Path("train.py").write_text(published("hydra"))
    environ = requeue_cluster.child_environ()
    command = published("hydra-command").rstrip() + " hydra.launcher.cpus_per_task=8"  # a node each
    with subprocess.Popen(["bash", "-ec", command], env=environ) as multirun:
        logs = lambda: Path("hydroslurm-runs").glob("*/events/rank-00000.jsonl")  # noqa: E731
        begun = lambda: ["first_step" in one.read_text() for one in logs()]  # noqa: E731
        wait_until(lambda: begun() == [True, True], "the first step of both tasks")
        preempt(requeue_cluster, requeue_cluster.nodes[:1])
        assert multirun.wait(300) == 0
    folders = Path("hydroslurm-runs").glob("*/attempts.jsonl")
    untouched, preempted = sorted((AttemptLog(one).attempts() for one in folders), key=len)
    assert [one.ending for one in untouched] == ["finished"]
    assert [one.ending for one in preempted] == ["preempted", "finished"]
    assert preempted[1].step == preempted[0].end_step > 0
    for name in ("lr-0.1.pt", "lr-0.2.pt"):
        assert Path(name).read_bytes() == Path("alone", name).read_bytes()
