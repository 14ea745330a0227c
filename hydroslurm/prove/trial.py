"""Run a script undisturbed, undisturbed again, and stopped; compare the runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.errors import ProofError, UsageError
from hydroslurm.prove.attempts import Script, ScriptRun, new_run
from hydroslurm.prove.compare import Comparison, compare, place_of, plural, seeded_generators
from hydroslurm.prove.updates import Update

Notice = Callable[[str], None]
_AHEAD = 1
"""Steps allowed while the signal is on its way: a quick script would make dozens."""


@dataclass(frozen=True)
class Stop:
    """One stop: the completed step, and the command's exit status (None: only Slurm knows it).

    Attributes:
        was_killed: it ended by SIGKILL, for example because it did not leave within the grace.
    """

    step: int
    status: int | None
    was_killed: bool = False


@dataclass
class Proof:
    """Result of the comparison.

    Attributes:
        control: one undisturbed run against the other.
        steps: compared steps; fewer than wanted if the script ends before.
        result: the stopped run against the undisturbed one; None if the control differs.
        stops: the stops made.
    """

    control: Comparison
    steps: int
    result: Comparison | None = None
    stops: list[Stop] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether it trained the same bits, each step once, after at least one stop."""
        is_equal = self.control.is_equal and self.result is not None and self.result.is_equal
        return is_equal and bool(self.stops_within)

    @property
    def stops_within(self) -> list[Stop]:
        """Stops that prove something: the command left in time, and a later step was compared. A
        quick script is stopped later than intended."""
        return [stop for stop in self.stops if stop.step < self.steps and not stop.was_killed]

    def __str__(self) -> str:
        """Return the verdict: the first difference and its cause, then a summary in one line."""
        if not self.control.is_equal or self.result is None:
            return (
                "not deterministic: two undisturbed runs differ, so that nothing can be said about "
                f"stops.\nThey differ first at {self.control.differences[0]}\n"
                "Seed everything (torch.manual_seed, random, numpy, the sampler's generator), and "
                "use torch.use_deterministic_algorithms(True)"
            )
        lines = [f"differs first at {difference}" for difference in self.result.differences[:1]]
        for number, what in (
            (self.result.repeated, "trained again"),
            (self.result.left_out, "never trained"),
        ):
            if number:
                lines.append(f"{plural(number, 'step')} {'was' if number == 1 else 'were'} {what}")
        lines += [
            f"after step {stop.step} the command ended with status 0: unless Slurm itself "
            "requeues the job, that is its end"
            for stop in self.stops
            if stop.status == 0
        ]
        lines += [
            f"nothing is known of the stop after step {stop.step}: the command ended by SIGKILL. "
            "Give it longer (--grace), or see what holds it up"
            for stop in self.stops
            if stop.was_killed
        ]
        late = [str(stop.step) for stop in self.stops if stop.step >= self.steps]
        if late:
            lines.append(
                f"nothing is known of the stop after step {', '.join(late)}: {self.steps} steps "
                "are compared. Compare more (--steps), or have each take longer"
            )
        verdict = "the same bits" if self.result.is_equal else "not the same"
        within = plural(len(self.stops_within), "stop")
        return "\n".join([*lines, f"{verdict}: {plural(self.steps, 'step')}, {within}"])


def prove(
    script: Script,
    folder: Path,
    *,
    steps: int = 40,
    stops: int = 3,
    seed: int = 0,
    notice: Notice = lambda _: None,
) -> Proof:
    """Test whether a stopped run of the script equals an undisturbed one.

    Args:
        folder: where all runs work and write.
        steps: optimizer steps to compare.
        stops: number of stops within them.
        seed: chooses the places.
        notice: called with one line per event.

    Raises:
        UsageError: the arguments leave nothing to compare.
        ProofError: the script failed, hung, or trained nothing.
    """
    if steps < 2 or not 0 < stops < steps:
        raise UsageError(
            f"--steps {steps} --stops {stops}: wanted at least 2 steps, and between 1 stop and one "
            "less than there are steps"
        )
    first, step_s = _whole(script, folder / "whole", steps)
    rank0 = first[min(first)]
    steps = min(len(rank0), steps)
    if steps < 2:
        raise ProofError("the script made one optimizer step: there is no place to stop it at")
    notice(f"undisturbed: {steps} steps of {plural(len(first), 'rank')}")
    again, _ = _whole(script, folder / "again", steps)
    seeded = seeded_generators(first, again)
    once = {rank: [run] for rank, run in again.items()}
    control = compare(first, once, steps=steps, generators=seeded)
    if not control.is_equal:
        return Proof(control, steps)
    notice("undisturbed again: the same bits")
    chosen = places(stops, latest=max(1, steps - _AHEAD - 2), seed=seed)
    with new_run(script, folder / "stopped", attempts=len(chosen) + 1, limit=1) as run:
        stopped = _Stopped(run, rank0[:steps], list(chosen), step_s, notice)
        attempts = stopped.attempts(random.Random(seed))
    result = compare(first, attempts, steps=steps, generators=seeded)
    return Proof(control, steps, result, stopped.stops)


def places(stops: int, *, latest: int, seed: int) -> list[int]:
    """Choose steps to stop after, in order: random, and if possible far enough apart that none is
    passed while the previous signal is on its way.

    Args:
        latest: at least one step is compared after it.
    """
    stops = min(stops, latest)
    gap = min(_AHEAD + 2, (latest - 1) // max(1, stops - 1)) or 1
    spread = range(1, latest - (stops - 1) * (gap - 1) + 1)
    drawn = sorted(random.Random(seed).sample(spread, stops))
    return [step + number * (gap - 1) for number, step in enumerate(drawn)]


def _whole(script: Script, root: Path, steps: int) -> tuple[dict[int, list[Update]], float]:
    """Run undisturbed; return rank -> its updates, and seconds per step."""
    with new_run(script, root, attempts=1, limit=None) as run:
        run.begin()
        count = run.wait_for(steps)
        lasted_s = time.monotonic() - (run.first_step_s or time.monotonic())
        if count < steps and run.status != 0:
            raise ProofError(
                f"the script ended with status {run.status} after {count} steps, undisturbed. "
                f"{run.last_words()}"
            )
        if not count:
            raise ProofError(
                "the script ended without an optimizer step that could be seen. Is hydroslurm "
                "installed in the Python that it runs, and does it train with torch.optim? "
                f"{run.last_words()}"
            )
    return run.read(), lasted_s / count


@dataclass
class _Stopped:
    """The run that is stopped and restarted until it has made all steps.

    Attributes:
        whole: updates of the undisturbed run. left: steps to stop after. step_s: of one step.
        reached: steps made. stops: stops made.
    """

    run: ScriptRun
    whole: Sequence[Update]
    left: list[int]
    step_s: float
    notice: Notice
    reached: int = 0
    stops: list[Stop] = field(default_factory=list)

    def attempts(self, chance: random.Random) -> dict[int, list[list[Update]]]:
        """Return rank -> the updates of each attempt."""
        updates_of: dict[int, list[list[Update]]] = {}
        goes_on = True
        while goes_on:
            self.run.begin()
            goes_on = self._attempt(chance)
            for rank, updates in self.run.read().items():
                updates_of.setdefault(rank, []).append(updates)
        return updates_of

    def _attempt(self, chance: random.Random) -> bool:
        """Run one attempt up to its stop or the end; return whether another follows."""
        run, steps = self.run, len(self.whole)
        if not run.wait_for(1):
            if run.status == 0 and self.reached >= steps - 1:
                return False  # it was stopped after its last step
            raise ProofError(
                f"attempt {run.number} ended with status {run.status} before its first step. "
                f"{run.last_words()}"
            )
        updates = run.read()
        place = place_of(updates[min(updates)][0], self.whole, self.reached)
        begins = self.reached if place is None else place
        if begins != self.reached:
            self.notice(
                f"attempt {run.number}: begins with step {begins + 1}, not {self.reached + 1}"
            )
        self.left = [step for step in self.left if step > begins]
        target = self.left.pop(0) if self.left else steps
        run.allow(target - begins)
        n = run.wait_for(target - begins)
        if target == steps or not run.is_running():
            if run.status not in (None, 0):
                raise ProofError(
                    f"attempt {run.number} ended with status {run.status} at step {begins + n}, "
                    f"without having been stopped. {run.last_words()}"
                )
            return False
        run.allow(target - begins + _AHEAD)
        time.sleep(chance.uniform(0.0, min(1.0, self.step_s)))
        status = run.stop()
        self.reached = begins + run.count()
        self.stops.append(Stop(self.reached, status, run.was_killed))
        ending = "" if status is None else f", exit status {status}"
        ending += ", killed" * run.was_killed
        self.notice(f"attempt {run.number}: stopped after step {self.reached}{ending}")
        return self.reached < steps
