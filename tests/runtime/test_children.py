"""Processes that multiprocessing spawns must survive the rank's pause signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

CHILD = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys, time
    from hydroslurm.runtime.children import SpawnShield

    def work(pipe):
        pipe.send("up")
        pipe.send(pipe.recv() + 1)

    if __name__ == "__main__":
        method, shielded = sys.argv[1], sys.argv[2] == "shielded"
        shield = SpawnShield({signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP})
        if shielded:
            shield.install()
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=work, args=(theirs,))
        child.start()
        theirs.close()
        # signalled from its very first moment on, while it is still importing
        for _ in range(20):
            os.kill(child.pid, signal.SIGUSR1)
            os.kill(child.pid, signal.SIGUSR2)
            time.sleep(0.001)
        try:
            assert ours.recv() == "up"
            ours.send(41)
            print("answer", ours.recv())
        except EOFError:
            print("child died")
        child.join(20)
        print("exit", child.exitcode)
        shield.uninstall()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print("parent blocks", sorted(mask))
    """
)


def _run(tmp_path, method: str, shielded: str) -> str:
    script = tmp_path / "spawner.py"
    script.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, str(script), method, shielded], capture_output=True, text=True, timeout=90
    )
    return done.stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_child_survives_pause_signals(tmp_path, method: str) -> None:
    """A child that is signalled from its first moment works on and exits 0, and the parent's mask
    is as before."""
    out = _run(tmp_path, method, "shielded")
    assert "answer 42" in out
    assert "exit 0" in out
    assert "parent blocks []" in out


def test_the_shield_is_what_saves_it(tmp_path) -> None:
    """Without the shield the same spawned child dies of the signal: the test above tests
    something."""
    out = _run(tmp_path, "spawn", "bare")
    assert f"exit {-signal.SIGUSR1}" in out
