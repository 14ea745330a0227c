"""A day of a preemptible partition in ten minutes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from elasticstory import BATCH, SAMPLES, TRAIN, ElasticStory, times_seen
from processes import wait_until

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN

EVENTS = int(os.environ.get("HYDROSLURM_TEST_EVENTS", "200"))


def goodput(story: ElasticStory) -> dict[str, float]:
    """What of the training was of use: steps that counted of those that were begun, and of the time
    from the first step to the last the part in which no change had the members stand still."""
    told = [one for log in story.all_steps("BEGUN") for one in log]
    begun = {(one["step"], one["generation"]) for one in told}
    took_s = max(one["at_s"] for one in told) - min(one["at_s"] for one in told)
    changes = story.entries("generation")
    paused_s = sum(one["pause_s"] for one in changes[1:])
    return {
        "generations": len(changes),
        "steps_useful_ratio": round(len({step for step, _ in begun}) / len(begun), 4),
        "time_useful_ratio": round(1 - paused_s / took_s, 4),
        "took_s": round(took_s, 1),
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_day_of_random_changes(tmp_path: Path) -> None:
    """Members join, leave, die and hang, and the coordinator dies, in any order: every sample of
    every epoch comes once, those who finish have the same weights, and whoever was started ends by
    itself, the coordinator last. Prints the goodput."""
    events = EVENTS
    chance = random.Random(int(os.environ.get("HYDROSLURM_TEST_SEED", "1")))
    # the last member may be killed before another has joined: a checkpoint is all that is left
    # then, and each time counts as a failure of the run
    limits = f"limits=hydroslurm.Limits(failures={events}, attempts_without_progress={events})"
    program = TRAIN.replace("every_s=0,", f"every_s=2, {limits},")
    story = ElasticStory(tmp_path, program=program, min=1, max=4, gather_s=0.5)
    epochs = 2 + events * 3 // 2  # it lasts longer than the events, on a quiet machine too
    number = 0

    def start() -> None:
        nonlocal number
        number += 1
        story.start(f"m{number}", epochs=epochs, step_s=0.015)

    told: dict[int, set[str]] = {}

    def tell(signo: int, name: str) -> None:
        told.setdefault(signo, set()).add(name)
        # one that ends by itself may be gone, and the process that forked it has not said so yet;
        # how each has ended is looked at in the end
        with contextlib.suppress(ProcessLookupError):
            story.signal(name, signo)

    def explained(name: str, status: int) -> bool:
        """Whether a member may have ended so: as a rank does that has left or is not wanted any
        more, or of what it was told by us; SIGTERM kills those that are not in their Run yet."""
        if status == -signal.SIGTERM:
            return name in told.get(signal.SIGTERM, ()) and not story.steps(name)
        return status in (0, RUN_AGAIN, CANCELLED) or (
            status == -signal.SIGKILL and name in told.get(signal.SIGKILL, ())
        )

    def alive() -> list[str]:
        return [name for name, one in story.members.items() if one.process.poll() is None]

    def trains() -> bool:
        status = story.folder.read(story.folder.status_json) or {}
        return status.get("state") == "Running" and status.get("size", 0) >= 1

    try:
        for _ in range(3):
            start()
        wait_until(trains, lambda: str(story))
        for _ in range(events):
            if story.entries("trained"):
                break
            time.sleep(chance.uniform(0.1, 1.0))
            here, act = alive(), chance.random()
            if len(here) < 2 or (act < 0.35 and len(here) < 5):
                start()
            elif act < 0.6:
                tell(signal.SIGTERM, chance.choice(here))
            elif act < 0.85:
                tell(signal.SIGKILL, chance.choice(here))
            elif act < 0.92:
                name = chance.choice(here)
                tell(signal.SIGSTOP, name)
                time.sleep(chance.choice((0.3, 7.0)))
                tell(signal.SIGCONT, name)
            else:
                story.kill_coordinator()
                time.sleep(chance.uniform(0.0, 1.0))
                story.start_coordinator()
        for _ in range(2):  # those that are there may have been told to leave
            start()
        statuses = {name: story.ended(name, limit_s=600.0) for name in story.members}
        wrong = {name: one for name, one in statuses.items() if not explained(name, one)}
        assert not wrong, f"{wrong}\n{story}"
        ends = [
            story.done(name)
            for name, one in story.members.items()
            if any(line.startswith("DONE ") for line in one.lines)
        ]
        assert ends, story
        assert len({one["weights"] for one in ends}) == 1, story
        assert {one["step"] for one in ends} == {epochs * SAMPLES // (4 * BATCH)}, story
        seen = times_seen(*story.all_steps("BEGUN"))
        assert set(seen) == set(range(epochs)), story
        for epoch, samples in seen.items():
            assert samples == dict.fromkeys(range(SAMPLES), 1), (epoch, str(story))
        assert story.coordinator is not None
        assert story.coordinator.wait(60) == 0, story
        print(json.dumps({"events": events, **goodput(story)}))
    finally:
        story.close()
