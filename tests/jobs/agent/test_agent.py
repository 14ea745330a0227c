"""One node: an agent, its workers, and the signals that Slurm sends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs.agent.agentworkers import Scene, one_node
from processes import free_port, wait_until

from hydroslurm.jobs.agent import workers


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_pause_and_resume_reach_the_workers_only(scene: Scene) -> None:
    """Only the agent is signalled: every worker is paused and resumed, in both ways, and the node
    reports one state; where it was started with pauses held, as `srun --preempt` does."""
    scene.environ["HYDROSLURM_PREEMPT"] = "pause"
    with scene.agent(*one_node(2)) as agent:
        scene.wait_announced()
        for pause, resume in ((signal.SIGUSR1, signal.SIGUSR2), (signal.SIGTSTP, signal.SIGCONT)):
            agent.signal(pause)
            scene.wait_state("parked")
            agent.signal(resume)
            scene.wait_state("running")
        told = [scene.told(rank)[2:] for rank in range(2)]
        assert told == [["SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT"]] * 2
        for rank in range(2):
            scene.leave(rank, 0)
        assert agent.wait() == 0
    assert [event.data["status"] for event in scene.events("agent_left")] == [0]


def test_a_worker_that_imports_gets_the_latest(scene: Scene) -> None:
    """What would kill a worker that does not listen yet is kept for it: the latest of each kind."""
    (scene.folder / "late").touch()
    with scene.agent(*one_node(1)) as agent:
        wait_until(lambda: scene.attempts(0), "the worker began")
        for signo in (signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR1):
            agent.signal(signo)
            wait_until(
                lambda signo=signo: (
                    signo.name
                    in [one.data["signal"] for one in scene.events("signal_passed_on")[-1:]]
                ),
                f"{signo.name} was taken",
            )
        assert len(scene.told(0)) == 1
        (scene.folder / "announce").touch()
        scene.wait_state("parked")
        assert scene.told(0)[2:] == ["SIGUSR1"]
        scene.leave(0, 0)
        assert agent.wait() == 0


def test_workers_that_save_are_left_alone(scene: Scene) -> None:
    """After SIGTERM the first worker to leave with 75 ends no other; none is started again, and the
    node leaves with 75 when the last has."""
    with scene.agent(*one_node(2)) as agent:
        scene.wait_announced()
        agent.signal(signal.SIGCONT)
        agent.signal(signal.SIGTERM)
        for rank in range(2):
            scene.wait_told(rank, "SIGTERM")
        scene.wait_state("stopping")
        scene.leave(0, 75)
        scene.wait_told(0, "leaves 75")
        # torchrun would have sent the other one a SIGTERM by now
        agent.signal(signal.SIGTERM)
        scene.wait_told(1, "SIGTERM", times=2)
        scene.leave(1, 75)
        assert agent.wait() == 75
    assert scene.told(1).count("SIGTERM") == 2
    assert [len(scene.attempts(rank)) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize(("first", "second", "status"), [(93, 75, 93), (75, 1, 75)])
def test_leaving_on_purpose_without_a_signal(
    scene: Scene, first: int, second: int, status: int
) -> None:
    """Workers that another node's ranks have told to leave are not started again either; the most
    binding status is the node's."""
    with scene.agent(*one_node(2, restarts=0 if second == 1 else 3)) as agent:
        scene.wait_announced()
        for rank, code in enumerate((first, second)):  # the second would end the first
            scene.leave(rank, code)
            scene.wait_told(rank, f"leaves {code}")
        assert agent.wait() == status


def test_a_failure_is_restarted_and_nobody_takes_it_for_a_stop(scene: Scene) -> None:
    """A crashed worker is started again with all its siblings, of which none gets a SIGTERM; the
    new ones are of another attempt, and are paused like the old ones."""
    with scene.agent(*one_node(2, restarts=1)) as agent:
        scene.wait_announced()
        agent.signal(signal.SIGUSR1)
        scene.wait_state("parked")
        scene.leave(0, 3)
        for rank in range(2):
            scene.wait_told(rank, "announced", times=2)
            scene.wait_told(rank, "SIGUSR1", times=2)
            assert "SIGTERM" not in scene.told(rank)
            assert len(set(scene.attempts(rank))) == 2
        assert scene.attempts(0) == scene.attempts(1)
        scene.leave(0, 3)
        assert agent.wait() == 3
    assert "ChildFailedError" in str(agent)
    assert "exitcode" in str(agent)
    assert "Traceback" not in str(agent)


def test_the_first_failure_is_the_nodes_status(scene: Scene) -> None:
    """A restart policy can tell a killed worker from a crash: the node leaves with the status of
    the first, 128 + N for a signal, and not with that of the siblings that are killed for it."""
    with scene.agent(*one_node(2, restarts=0)) as agent:
        scene.wait_announced()
        os.kill(scene.pid(1), signal.SIGKILL)
        assert agent.wait() == 137
    assert [event.data["status"] for event in scene.events("agent_left")] == [137]


ASKED = """
import os
from pathlib import Path
blocked = Path("/proc/self/status").read_text().partition("SigBlk:")[2].split()[0]
print("asked", os.environ.get("HYDROSLURM_PREEMPT"), "held", int(blocked, 16) >> 9 & 1, flush=True)
"""


@pytest.mark.parametrize(
    ("said", "mode", "held"),
    [(None, "pause", 1), ("requeue", "requeue", 1), ("off", "off", 0)],
)
def test_workers_are_preemptible(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, said: str | None, mode: str, held: int
) -> None:
    """Without a further option; who said what they are to be is heard, and one who does not want
    them preemptible gets workers to which SIGUSR1 is a signal like any other."""
    monkeypatch.delenv("HYDROSLURM_PREEMPT", raising=False)
    if said is not None:
        scene.environ["HYDROSLURM_PREEMPT"] = said
    script = scene.folder / "asked.py"
    script.write_text(ASKED)
    with scene.agent(*one_node(1), script=script) as agent:
        agent.expect(f"asked {mode} held {held}")
        assert agent.wait() == 0


@pytest.mark.parametrize(
    ("options", "wanted", "status"),
    [([], "there is no script", 2), (["--no-python"], "there is no program", 127)],
)
def test_a_script_that_is_not_there(
    scene: Scene, options: list[str], wanted: str, status: int
) -> None:
    """One line says what was looked for and where; nothing is started for it, and the status is
    that of the same command below srun."""
    missing = scene.folder / "trian.py"
    with scene.agent(*one_node(2), *options, script=missing) as agent:
        assert agent.wait() == status
    (line,) = [each for each in str(agent).splitlines() if "trian.py" in each]
    assert wanted in line
    assert str(missing) in line
    assert "Traceback" not in str(agent)
    assert not scene.events("workers_started")


def test_a_stop_before_there_are_workers(scene: Scene) -> None:
    """An agent that waits for other nodes, or still imports torch, leaves with 143 on SIGTERM."""
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    with scene.agent(*options, "--rdzv-id=x", fresh=True) as agent:
        status = Path(f"/proc/{agent.pid}/status")
        bit = 1 << (signal.SIGTERM - 1)
        wait_until(
            lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & bit,
            "the agent listens",
        )
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143
    assert "Traceback" not in str(agent)


def test_a_program_that_does_not_listen(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that knows nothing of hydroslurm is not killed by a pause; a stop ends it, late."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import hydroslurm.jobs.agent.workers as w\nw.PATIENCE_S = 0.5\n"
    )
    assert workers.PATIENCE_S > 5
    plain = tmp_path / "plain.py"
    plain.write_text("import time\nprint('plain began', flush=True)\ntime.sleep(600)\n")
    with scene.agent(*one_node(1), script=plain, fresh=True) as agent:
        agent.expect("plain began")
        agent.signal(signal.SIGUSR1)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143
