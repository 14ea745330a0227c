"""Members come and go while the others train on, in the same processes."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from elasticstory import (
    BATCH,
    SAMPLES,
    TRAIN,
    ElasticStory,
    goes_on,
    mean_losses,
    times_seen,
    write_options,
)
from processes import LIMIT_S, wait_until

from hydroslurm.core.exitcodes import CANCELLED, FAILED, RUN_AGAIN
from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.elastic import coordinator
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.member import LOOK_AFTER_S, Member
from hydroslurm.elastic.roster import Depart
from hydroslurm.errors import UsageError
from hydroslurm.integrations.framework import FrameworkSession

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
        pytest.param(IN_GROUPS, id="each batch"),
        pytest.param(ACCUMULATES, id="accumulated", marks=pytest.mark.long),
    ],
)
def test_members_come_and_go(tmp_path: Path, program: str) -> None:
    """Members that get SIGTERM, or that Slurm suspends (SIGTSTP, two seconds later SIGSTOP), go
    together, in one change. The coordinator is killed: the others train on, and another one takes
    in a newcomer, which has its state from a peer and reads no checkpoint. No step is lost but the
    one in which a member is killed. Every sample comes once; with keep_global the mean loss of each
    step, and the weights, differ from those of one member alone by the order of sums only."""
    told = {"plain": True, "epochs": 4, "hurry": str(tmp_path / "hurry")}
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    with (
        ElasticStory(tmp_path / "together", program=program) as story,
        ElasticStory(tmp_path / "alone", program=program, wanted=1) as alone,
    ):
        alone.start("x", **told, step_s=0.0)
        story.start_all("abcd", **told, step_s=0.3)
        story.wait_for_step("a", size=4)
        story.signal("b", signal.SIGTSTP)
        story.signal("c", signal.SIGTERM)
        story.wait_for_step("a", size=2)
        for name in "bc":
            assert story.members[name].wait() in (RUN_AGAIN, CANCELLED), story
        story.kill_coordinator()
        goes_on(story, "a", steps=5)
        story.start_coordinator()
        story.start("e", **told, step_s=0.3, seed=11)
        story.wait_for_step("e", size=3)
        story.signal("d", signal.SIGKILL)
        (tmp_path / "hurry").touch()
        ends = [story.done(name) for name in "ae"]
        fixed = alone.done("x")
    _, left, joined, killed = generations = story.entries("generation")
    assert [one["ranks"] for one in generations] == [4, 2, 3, 2], story
    assert (set(left["left"]), set(left["members"])) == ({"b", "c"}, {"a", "d"}), story
    # whoever is heard first
    assert any(words in left["cause"] for words in ("b: SIGTSTP", "c: SIGTERM")), left
    assert [one["lost"] or one["steps_lost"] for one in (left, joined)] == [0, 0], story
    assert joined["joined"] == ["e"]
    assert (killed["lost"], killed["steps_lost"] <= 1) == (["d"], True), story
    assert [one["member"] for one in story.entries("failure")] == ["d"]
    assert [one["epoch"] for one in story.entries("coordinator")] == [1, 2]
    status = story.folder.read(story.folder.status_json)
    assert status is not None
    assert status["engine"] == "in_place"

    assert ends[0] == ends[1], story
    assert ends[0]["step"] == fixed["step"] == 4 * SAMPLES // (4 * BATCH)
    assert ends[0]["weights"] == pytest.approx(fixed["weights"], rel=1e-5)
    saved = [one.name for one in (story.folder.run / "checkpoints").glob("step-*")]
    assert saved == [f"step-{fixed['step']:09d}"]
    losses, wanted = mean_losses(story), mean_losses(alone)
    assert len(losses) >= len(wanted) - 1  # the one in which d was killed
    assert losses == pytest.approx({step: wanted[step] for step in losses}, rel=1e-4)
    check_samples(story)


def check_samples(story: ElasticStory) -> None:
    """Each came once in each epoch."""
    for epoch, seen in times_seen(*story.all_steps("BEGUN")).items():
        assert seen == dict.fromkeys(range(SAMPLES), 1), epoch


def test_a_member_that_hangs_is_given_up(tmp_path: Path) -> None:
    """One that is stopped says nothing; the others do not wait for their collectives' time-out.
    When it wakes up it is refused, and leaves; after their end it finds that they have finished."""
    with ElasticStory(tmp_path, max=3, silent_s=2.5) as story:
        story.start_all("abc")
        story.wait_for_step("a", size=3)
        story.signal("b", signal.SIGSTOP)
        story.signal("c", signal.SIGSTOP)
        story.wait_for_step("a", size=1)
        story.signal("b", signal.SIGCONT)
        assert story.ended("b") == RUN_AGAIN, story
        story.done("a")
        assert story.coordinator is not None
        assert story.coordinator.wait(LIMIT_S) == 0
        story.signal("c", signal.SIGCONT)
        assert story.ended("c") == 0, story
        assert any("finished without it" in line for line in story.members["c"].lines), story
        assert all("silent for" in one["reason"] for one in story.entries("failure"))


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


def test_a_coordinator_that_ends_in_order_takes_nobody_for_lost(tmp_path: Path) -> None:
    """At its time limit it goes, and the members wait for the next one; where the run has failed
    meanwhile they leave."""
    folder = ElasticFolder(run=tmp_path)
    folder.root.mkdir(mode=0o700)
    write_options(folder, max=1)
    served = coordinator.start(folder)
    member = Member(folder, name="a")
    member.start()
    begun: list[object] = []
    thread = threading.Thread(target=lambda: begun.append(member.begin()))
    thread.start()
    while not begun:
        served.serve_once()
    served.end_within(0.0)
    served.run()
    thread.join()
    folder.write(folder.status_json, {"state": "Failed"})
    left = member.again()
    member.close()
    assert left == Depart("the run has failed without it", failed=True)
    assert [one["kind"] for one in folder.ledger()] == ["coordinator", "forming"]


@pytest.mark.parametrize(
    ("depart", "status"),
    [
        (Depart("it cannot go on", failed=True), (FAILED, FAILED)),
        (Depart("the others went on", again=True), (RUN_AGAIN, RUN_AGAIN)),
        (Depart("fewer are wanted"), (0, RUN_AGAIN)),
    ],
)
def test_the_status_of_a_member_that_departs(depart: Depart, status: tuple[int, int]) -> None:
    """One that has failed says so, even if it was asked to stop as well; one that may join again,
    or was asked to stop, is run again."""
    assert (depart.exit_status(), depart.exit_status(stops=True)) == status


@pytest.mark.parametrize(
    "saves", [True, pytest.param(False, id="on a disk that takes nothing", marks=pytest.mark.long)]
)
def test_a_run_whose_members_all_go(tmp_path: Path, saves: bool) -> None:
    """Below ``min`` the step is saved before anybody leaves; new members go on from there. If it
    cannot be saved that is told, both leave all the same, and the newest checkpoint counts."""
    program = TRAIN.replace("every_s=0,", "every_s=0, every_steps=5,")
    with ElasticStory(tmp_path, program=program, min=2, max=2) as story:
        checkpoints = story.folder.run / "checkpoints"
        story.start_all("ab")
        saved = checkpoints / "step-000000005" / "manifest.json"
        wait_until(saved.exists, lambda: f"a checkpoint\n{story}")
        if not saves:
            checkpoints.rename(tmp_path / "kept")
            checkpoints.write_text("no folder any more")
        for name in "ab":
            story.signal(name, signal.SIGTERM)
        for name in "ab":
            assert story.members[name].wait() in (RUN_AGAIN, CANCELLED), story
        trained = max(one["step"] for name in "ab" for one in story.steps(name)) + 1
        if saves:
            assert (checkpoints / f"step-{trained:09d}").is_dir(), story
        else:
            assert "could not be saved" in str(story)
            checkpoints.unlink()
            (tmp_path / "kept").rename(checkpoints)
        story.start_all("ab")
        ends = [story.done(name) for name in "ab"]
        assert ends[0] == ends[1], story
        begun = story.steps("a")[0]["step"]
        assert begun == trained if saves else begun % 5 == 0
        check_samples(story)


def test_a_framework_is_refused_in_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members would each train alone, without a word."""
    monkeypatch.setenv(ELASTIC_ENV, str(tmp_path))
    with pytest.raises(UsageError, match=r"lightning trains with a fixed .*engine: restart"):
        FrameworkSession("lightning", dict, dict)
