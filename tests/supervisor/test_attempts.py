"""How attempts are counted, whatever kills whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from hydroslurm.jobs.supervisor.attempts import Attempts, Ending


def test_attempts_are_numbered_over_lives(tmp_path: Path) -> None:
    """A new life goes on where the last one stopped counting."""
    ledger = Attempts(tmp_path / "attempts")
    one = ledger.begin(0)
    ledger.end(one, Ending.FAILED, replica="worker-1", status=3)
    two = Attempts(tmp_path / "attempts").begin(1)
    assert (one.number, two.number, two.restart_count) == (1, 2, 1)
    kept = Attempts(tmp_path / "attempts").all()
    assert [one.ending for one in kept] == [Ending.FAILED, None]
    assert (kept[0].replica, kept[0].status) == ("worker-1", 3)


def test_failures_and_preemptions_are_two_budgets(tmp_path: Path) -> None:
    """Preemptions do not count against backoffLimit; a life is preempted once."""
    ledger = Attempts(tmp_path / "attempts")
    for life, ending in enumerate([Ending.PREEMPTED] * 10 + [Ending.FAILED] * 2):
        ledger.end(ledger.begin(life), ending)
    ledger.end(ledger.begin(9), Ending.PREEMPTED)
    ledger.end(ledger.begin(10), Ending.RESTARTED)
    assert (ledger.restarts(), ledger.preemptions()) == (3, 10)


def test_the_first_end_counts(tmp_path: Path) -> None:
    """A janitor that comes late does not turn a success into a failure."""
    ledger = Attempts(tmp_path / "attempts")
    attempt = ledger.begin(0)
    ledger.end(attempt, Ending.SUCCEEDED)
    assert ledger.end(attempt, Ending.FAILED).ending is Ending.SUCCEEDED


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Killed while it writes, again and again: every attempt is there whole, numbers are never used
    twice, nothing that was ended is open again."""
    folder = tmp_path / "attempts"
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
        ledger = Attempts(Path(sys.argv[1]))
        print("ready", flush=True)
        while True:
            attempt = ledger.begin(0)
            ledger.started(attempt, srun_pid=1, srun_started=2)
            ledger.end(attempt, Ending.FAILED)
        """
    )
    seen = 0
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        more = seen + 3
        while len(Attempts(folder).all()) < more:
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        kept = Attempts(folder).all()
        assert [one.number for one in kept] == list(range(1, len(kept) + 1))
        assert len(kept) >= more
        assert sum(one.ending is None for one in kept[seen:]) <= 1
        seen = len(kept)
