"""KillWait = 5 s and a state of 500 MB: is it committed before SIGKILL, every time?

One training on a dev cluster is stopped by gang scheduling for an urgent job, and by `scontrol
requeue`, by turns: both come without a grace, so that KillWait is all there is. Counted as
committed is a stop whose very step is on the disk, and from which the next attempt went on.
"""

from __future__ import annotations

from harness import finish, options, scratch
from stop import Way, figures, stops_of

KILL_WAIT_S = 5
TURNS: tuple[Way, ...] = ("urgent", "requeue")


def main() -> None:
    chosen = options("A large state, and nothing but KillWait.")
    turns, state_bytes = (1, 20_000_000) if chosen.quick else (10, 500_000_000)
    with scratch("killwait") as folder:
        sizes = {"state_bytes": state_bytes, "kill_wait_s": KILL_WAIT_S}
        stops = stops_of("gang-requeue", folder, TURNS * turns, **sizes)
    finish(chosen, "killwait: a large state, and nothing but KillWait", figures(stops))


if __name__ == "__main__":
    main()
