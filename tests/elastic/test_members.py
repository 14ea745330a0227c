"""Members come and go while the others train on, in the same processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticstory import BATCH, SAMPLES, TRAIN, ElasticStory, mean_losses, times_seen, write_options
from processes import LIMIT_S, wait_until

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.elastic import coordinator
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.member import LOOK_AFTER_S, Member

IN_GROUPS = TRAIN.replace(
    "step = run.step\n",
    """step = run.step
            if run.generation != options.setdefault("made", 0):
                options["made"] = run.generation
                ranks = list(range(dist.get_world_size()))
                beside = dist.new_group(ranks[-2:])
                assert dist.get_process_group_ranks(dist.group.WORLD) == ranks
                if dist.get_rank() in ranks[-2:]:
                    sum_of = torch.tensor(dist.get_rank())
                    dist.all_reduce(sum_of, group=beside)
                    assert sum_of == sum(ranks[-2:]), sum_of
""",
)
"""Makes a group of its own in each generation, and uses it."""


@pytest.fixture
def story(tmp_path: Path) -> Iterator[ElasticStory]:
    with ElasticStory(tmp_path) as one:
        yield one


def test_an_announced_leave_loses_nothing(story: ElasticStory) -> None:
    """Members that get SIGTERM, or that Slurm suspends (SIGTSTP, two seconds later SIGSTOP), go
    together, at a step that all agree on: one change, no step is repeated, every sample comes once,
    and the others end with the same weights."""
    story.start_all("abcd")
    story.wait_for_step("a", size=4)
    story.signal("b", signal.SIGTSTP)
    story.signal("c", signal.SIGTERM)
    ends = {story.done(name)["weights"] for name in "ad"}
    for name in "bc":
        assert story.members[name].wait() in (RUN_AGAIN, CANCELLED)
    assert len(ends) == 1, story
    (first, second) = story.entries("generation")
    assert (first["ranks"], second["ranks"], set(second["left"])) == (4, 2, {"b", "c"}), story
    assert (second["lost"], second["steps_lost"], set(second["members"])) == ([], 0, {"a", "d"})
    # whoever is heard first
    assert any(words in second["cause"] for words in ("b: SIGTSTP", "c: SIGTERM")), second
    for epoch, seen in times_seen(*story.all_steps()).items():
        assert seen == dict.fromkeys(range(SAMPLES), 1), epoch


def test_a_member_that_hangs_is_given_up(story: ElasticStory) -> None:
    """One that is stopped says nothing; the others do not wait for their collectives' time-out.
    When it wakes up it is refused, and leaves."""
    story.start_all("abc", epochs=4)
    story.wait_for_step("a", size=3)
    story.signal("b", signal.SIGSTOP)
    story.wait_for_step("a", size=2)
    story.signal("b", signal.SIGCONT)
    assert story.members["b"].wait() == RUN_AGAIN, story
    ends = [story.done(name) for name in "ac"]
    assert ends[0] == ends[1]
    assert "silent for" in story.entries("failure")[0]["reason"]


def test_the_coordinator_may_be_killed(story: ElasticStory) -> None:
    """Members train on without it; another one takes over, and takes a newcomer in, which has its
    state from a peer and reads no checkpoint. One that comes after the end does nothing."""
    story.start_all("ab", seed=3, epochs=6)
    story.wait_for_step("a", size=2)
    story.kill_coordinator()
    before = len(story.steps("a"))
    wait_until(lambda: len(story.steps("a")) > before + 5, "steps without a coordinator")
    story.start_coordinator()
    story.start("c", seed=11, epochs=6)
    story.wait_for_step("c", size=3)
    ends = [story.done(name) for name in "abc"]
    story.start("late")
    assert story.members["late"].wait() == 0  # nobody answers any more
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"], story
    assert {one["lr"] for one in ends} == {ends[0]["lr"]}
    assert story.entries("generation")[1]["joined"] == ["c"]
    assert not list((story.folder.run / "checkpoints").glob("step-0000000[1-9]*"))
    assert not story.entries("failure")
    assert [one["epoch"] for one in story.entries("coordinator")] == [1, 2]


@pytest.mark.long
def test_a_frozen_coordinator_dismisses_nobody(tmp_path: Path) -> None:
    """It was stopped for longer than a member may be silent, time and again: all whom it finds in
    its sockets stay, and who has died meanwhile is the only one it takes for dead. Where another
    has taken over the members go there, and it ends when it wakes up."""
    story = ElasticStory(tmp_path, max=3, silent_s=1.2)
    try:
        frozen = story.coordinator
        assert frozen is not None
        for name in "abc":
            story.start(name, epochs=14, step_s=0.05)
        story.wait_for_step("a", size=3)
        for _ in range(2):
            frozen.send_signal(signal.SIGSTOP)
            trains_for(story, "a", 3.0)
            frozen.send_signal(signal.SIGCONT)
            story.wait_for_step("a", size=3)
        frozen.send_signal(signal.SIGSTOP)
        story.signal("c", signal.SIGKILL)
        story.members["c"].wait()
        frozen.send_signal(signal.SIGCONT)
        story.wait_for_step("a", size=2)
        frozen.send_signal(signal.SIGSTOP)
        story.start_coordinator()
        trains_for(story, "a", LOOK_AFTER_S + 2.0)
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait(LIMIT_S) == 0
        story.start("d", epochs=14, step_s=0.05)
        story.wait_for_step("d", size=3)
        ends = [story.done(name)["weights"] for name in "abd"]
    finally:
        story.close()
    assert ends[0] == ends[1] == ends[2], story
    assert [one["member"] for one in story.entries("failure")] == ["c"], story
    assert [len(one["members"]) for one in story.entries("generation")] == [3, 2, 3], story


def trains_for(story: ElasticStory, name: str, seconds: float) -> None:
    """Until the member has trained for so long from now on."""
    until_s = time.monotonic() + seconds
    wait_until(
        lambda: story.steps(name)[-1]["at_s"] > until_s,
        lambda: f"{name} to train for {seconds} s\n{story}",
    )


ACCUMULATES = TRAIN.replace(
    """            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
""",
    """            loss.backward()
            if step % 4 == 3:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
""",
)
"""Over four batches, and the end of an epoch, without a word to the run."""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TRAIN, id="each batch"),
        pytest.param(ACCUMULATES, id="accumulated", marks=pytest.mark.long),
    ],
)
def test_the_training_is_that_of_a_fixed_size(tmp_path: Path, program: str) -> None:
    """With keep_global a step has the same samples with one member and with three that come and go:
    the mean loss of each step, and the weights at the end, differ by the order of sums only."""
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    with (
        ElasticStory(tmp_path / "together", program=program) as story,
        ElasticStory(tmp_path / "alone", program=program, max=4, wanted=1) as alone,
    ):
        alone.start("x", plain=True, step_s=0.0)
        story.start_all("abc", plain=True)
        story.wait_for_step("a", size=3)
        story.signal("b", signal.SIGKILL)
        story.wait_for_step("a", size=2)
        story.start("d", plain=True, seed=5)
        story.wait_for_step("d", size=3)
        ends = [story.done(name) for name in "acd"]
        fixed = alone.done("x")
    assert ends[0] == ends[1] == ends[2], story
    assert ends[0]["step"] == fixed["step"] == 2 * SAMPLES // (4 * BATCH)
    assert ends[0]["weights"] == pytest.approx(fixed["weights"], rel=1e-5)
    losses, wanted = mean_losses(story), mean_losses(alone)
    assert len(losses) >= len(wanted) - 1  # the one in which b was killed
    assert losses == pytest.approx({step: wanted[step] for step in losses}, rel=1e-4)


def test_a_coordinator_that_ends_in_order_takes_nobody_for_lost(tmp_path: Path) -> None:
    """At its time limit it goes, and the members wait for the next one."""
    folder = ElasticFolder(run=tmp_path)
    folder.root.mkdir(mode=0o700)
    write_options(folder, max=1)
    served = coordinator.start(folder)
    member = Member(folder, name="a")
    member.start()
    begun: list[object] = []
    thread = threading.Thread(target=lambda: begun.append(member.begin(stop=lambda: False)))
    thread.start()
    while not begun:
        served.serve_once()
    served.end_within(0.0)
    served.run()
    member.close()
    thread.join()
    assert [one["kind"] for one in folder.ledger()] == ["coordinator", "forming"]


def test_a_run_whose_members_all_go_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Below ``min`` the step is saved before anybody leaves; new members go on from there."""
    with ElasticStory(tmp_path, min=2, max=2) as story:
        story.start_all("ab")
        story.wait_for_step("a", size=2, times=5)
        for name in "ab":
            story.signal(name, signal.SIGTERM)
        for name in "ab":
            assert story.members[name].wait() in (RUN_AGAIN, CANCELLED), story
        trained = max(one["step"] for name in "ab" for one in story.steps(name)) + 1
        assert (story.folder.run / "checkpoints" / f"step-{trained:09d}").is_dir(), story
        logs = [story.steps("a"), story.steps("b")]
        story.start_all("ab")
        ends = [story.done(name) for name in "ab"]
        assert ends[0] == ends[1], story
        assert story.steps("a")[0]["step"] == trained
        for epoch, seen in times_seen(*logs, story.steps("a"), story.steps("b")).items():
            assert seen == dict.fromkeys(range(SAMPLES), 1), epoch


@pytest.mark.long
def test_members_leave_in_order_if_their_save_fails(tmp_path: Path) -> None:
    """Below ``min`` with a disk that takes nothing: the reason is told, both leave, and new members
    go on from the newest checkpoint; no sample is left out."""
    program = TRAIN.replace("every_s=0,", "every_s=0, every_steps=5,")
    with ElasticStory(tmp_path, program=program, min=2, max=2) as story:
        checkpoints = story.folder.run / "checkpoints"
        story.start_all("ab", epochs=1)
        saved = checkpoints / "step-000000005" / "manifest.json"
        wait_until(saved.exists, lambda: f"a checkpoint\n{story}")
        checkpoints.rename(tmp_path / "kept")
        checkpoints.write_text("no folder any more")
        for name in "ab":
            story.signal(name, signal.SIGTERM)
        for name in "ab":
            assert story.members[name].wait() in (RUN_AGAIN, CANCELLED), story
        assert "could not be saved" in str(story)
        checkpoints.unlink()
        (tmp_path / "kept").rename(checkpoints)
        story.start_all("ab", epochs=1)
        ends = [story.done(name) for name in "ab"]
        assert ends[0] == ends[1], story
        assert story.steps("a")[0]["step"] % 5 == 0
        for epoch, seen in times_seen(*story.all_steps("BEGUN")).items():
            assert seen == dict.fromkeys(range(SAMPLES), 1), epoch


def test_the_group_follows_its_members(tmp_path: Path) -> None:
    """One leaves, one is killed, one joins, and groups of the script's own are made in between:
    every sample comes once, the weights are equal, and the status names the engine."""
    with ElasticStory(tmp_path, program=IN_GROUPS) as story:
        story.start_all("abc", epochs=8)
        story.wait_for_step("a", size=3)
        story.signal("b", signal.SIGTERM)
        story.wait_for_step("a", size=2)
        story.start("d", epochs=8, seed=5)
        story.wait_for_step("d", size=3)
        story.signal("c", signal.SIGKILL)
        ends = [story.done(name) for name in "ad"]
        assert ends[0] == ends[1], story
        assert ends[0]["trained"] == ends[0]["step"]  # BatchNorm has counted no dropped step
        last = story.entries("generation")[-1]
        assert (last["lost"], last["steps_lost"] <= 1) == (["c"], True), story
        for epoch, seen in times_seen(*story.all_steps("BEGUN")).items():
            assert seen == dict.fromkeys(range(SAMPLES), 1), epoch
        status = story.folder.read(story.folder.status_json)
        assert status is not None
        assert status["engine"] == "in_place"
