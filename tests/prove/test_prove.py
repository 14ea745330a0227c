"""``hydroslurm prove`` on real processes that are really stopped, and its pytest fixture."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured

from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import ProofError, UsageError
from hydroslurm.prove.attempts import Script, new_run, runnable
from hydroslurm.prove.compare import Comparison
from hydroslurm.prove.trial import Proof, Stop, places, prove

LOOP = Path(__file__).with_name("loop.py")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def command(*words: str) -> list[str]:
    """What a person types, without what the tests' own children read at their start."""
    return [sys.executable, "-m", "hydroslurm.cli", "prove", *words]


@pytest.mark.parametrize(("stops", "latest"), [(3, 37), (1, 1), (6, 57), (9, 4)])
def test_as_many_stops_as_were_asked_for(stops: int, latest: int) -> None:
    """None is passed on the way out of the one before, as two steps that follow each other were."""
    drawn = [tuple(places(stops, latest=latest, seed=seed)) for seed in range(50)]
    for chosen in drawn:
        assert len(chosen) == min(stops, latest)
        assert 1 <= chosen[0] <= chosen[-1] <= latest
        gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
        assert all(gap >= (3 if latest > 3 * stops else 1) for gap in gaps)
    assert (len(set(drawn)) > 1) == (latest > stops)


def test_stops_that_show_nothing_are_told() -> None:
    """Behind the last step that is compared, or ended by SIGKILL; a proof of such stops alone is
    none."""
    control = Comparison()
    proof = Proof(control, 30, Comparison(), [Stop(12, 75), Stop(14, -9, True), Stop(30, 75)])
    assert proof.holds
    assert str(proof).endswith("\nthe same bits: 30 steps, 1 stop")
    assert "nothing is known of the stop after step 30: 30 steps are compared" in str(proof)
    assert "of the stop after step 14: the command ended by SIGKILL" in str(proof)
    assert not Proof(control, 30, Comparison(), [Stop(31, 75)]).holds
    assert not Proof(control, 30, Comparison(), [Stop(14, -9, True)]).holds


def test_a_script_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    """At the end of the grace, which its stop has on record."""
    deaf = f"trap '' TERM; touch {tmp_path}/deaf; sleep 60"
    script = Script(command=("sh", "-c", deaf), environ={}, grace_s=0.1)
    with new_run(script, tmp_path / "run", attempts=1, limit=None) as run:
        run.begin()
        while not (tmp_path / "deaf").exists():
            assert run.is_running()
        assert run.stop() == -signal.SIGKILL
        assert run.was_killed


def test_an_order_that_is_drawn_again_is_named() -> None:
    """By the command, which exits with 1; one line of JSON tells all."""
    words = ["--preempt", "off", "--steps", "30", "--stops", "1", "--seed", "9", "--json"]
    done = subprocess.run(
        command(*words, str(LOOP), "order"), capture_output=True, text=True, timeout=120
    )
    told = json.loads(done.stdout or "{}")
    assert (done.returncode, told["holds"], told["deterministic"]) == (1, False, True), done.stderr
    first = told["differences"][0]
    assert (first["attempt"], first["step"]) == (2, told["stops"][0]["step"] + 1)
    assert first["what"].startswith("samples ")
    assert "the generator of the sampler" in first["cause"]


def test_a_script_that_cannot_be_compared(tmp_path: Path) -> None:
    """The message has what it printed."""
    script = tmp_path / "empty.py"
    script.write_text("print('hello')\n")
    said = "ended with status 1 after 0 steps, undisturbed. Its last words:\n  no data here"
    for words, told in (
        ((str(LOOP), "fails"), said),
        ((str(script),), "without an optimizer step that could be seen"),
    ):
        own = Script(command=runnable(words), environ={})
        with pytest.raises(ProofError, match=told):
            prove(own, tmp_path / words[-1][-5:], steps=5, stops=1)


def test_a_script_that_is_not_deterministic(tmp_path: Path) -> None:
    """Nothing can be said about its stops."""
    script = Script(command=runnable([str(LOOP), "unseeded"]), environ={})
    proof = prove(script, tmp_path / "runs", steps=3, stops=1)
    assert (proof.holds, proof.result) == (False, None)
    assert str(proof).startswith("not deterministic: two undisturbed runs differ")


def test_arguments_that_leave_nothing_to_compare(tmp_path: Path) -> None:
    """Before anything is run."""
    script = Script(command=("no-such-program",), environ={})
    with pytest.raises(UsageError, match=r"--steps 3 --stops 3: wanted at least 2 steps"):
        prove(script, tmp_path / "a", steps=3, stops=3)
    with pytest.raises(UsageError, match="no-such-program cannot be run: No such file"):
        prove(script, tmp_path / "b", steps=3, stops=1)
    outside = Script(command=("true",), environ={}, links=("../secret",))
    with pytest.raises(UsageError, match=r"--link \.\./secret: wanted the name"):
        prove(outside, tmp_path / "c", steps=3, stops=1)


@pytest.mark.slurm
def test_two_ranks_of_a_real_job(requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """Requeued by Slurm; nothing of the job is left behind."""
    words = ["--preempt", "off", "--slurm", "-p low -N 2 -n 2", "--steps", "6", "--stops", "1"]
    done = captured(
        command(*words, "--json", str(LOOP), "nothing"),
        env=requeue_cluster.child_environ(),
        timeout=300,
    )
    told = json.loads(done.stdout or "{}")
    assert (done.returncode, told.get("holds"), told.get("steps")) == (0, True, 6), done.stderr
    assert len(told["stops"]) == 1
    assert list(Path.cwd().iterdir()) == []
