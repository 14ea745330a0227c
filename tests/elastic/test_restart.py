"""Agents whose workers are started again in each generation, for any script."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticstory import BATCH, SAMPLES, times_seen
from processes import wait_until
from restartstory import SCRIPTS, STOCK, TRAIN, RestartStory, check_stock_training

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir


@pytest.fixture
def story(tmp_path: Path) -> Iterator[RestartStory]:
    with RestartStory(tmp_path, min=1, max=3, gather_s=20.0) as one:
        yield one


def test_members_leave_join_and_fail(story: RestartStory) -> None:
    """The workers of all are started again at each change, with the exact members; a leave and a
    join let them stop by themselves, a death does not; only the member whose worker died leaves,
    with its status. All workers of a generation share what no other generation has."""
    story.start_all("abc")
    first = story.wait_for_workers(1, *"abc")
    assert {one["rank"] for one in first} == {"0", "1", "2"}
    assert {one["run_dir"] for one in first} == {str(story.folder.run)}
    assert {one["elastic"] for one in first} == {None}
    story.signal("b", signal.SIGTERM)
    assert story.members["b"].wait() == RUN_AGAIN, story
    second = story.wait_for_workers(2, *"ac")
    story.start("d")
    third = story.wait_for_workers(3, *"acd")
    assert len(story.said("stopped")) == 5, story
    story.kill_worker("c")
    assert story.members["c"].wait() == 128 + signal.SIGKILL, story
    fourth = story.wait_for_workers(4, *"ad")
    assert len(story.said("stopped")) == 5, story
    (story.root / "finish").touch()
    assert [story.members[name].wait() for name in "ad"] == [0, 0], story
    told = [
        {
            (one["incarnation"], one["step_key"], one["master_port"], one["master_addr"])
            for one in of
        }
        for of in (first, second, third, fourth)
    ]
    assert [len(one) for one in told] == [1, 1, 1, 1]
    assert len(set.union(*told)) == 4
    causes = [one["cause"] for one in story.entries("generation")]
    assert causes[:3] == ["start", "leave (b: SIGTERM)", "join (d)"]
    assert "c: rank" in causes[3]
    assert "was killed by SIGKILL" in causes[3]
    (failure,) = story.entries("failure")
    assert failure["member"] == "c"
    assert "was killed by SIGKILL" in failure["reason"]
    assert [one["generation"] for one in story.entries("finished")] == [4]


def test_a_member_restarts_its_worker_as_often_as_it_may(story: RestartStory) -> None:
    """--max-restarts is each member's own: the deaths of others' workers, and changes of size, use
    nothing of it. A member that is suspended leaves as one that is terminated."""
    story.start_all("abc", "--max-restarts=1")
    story.wait_for_workers(1, *"abc")
    story.kill_worker("a")
    story.wait_for_workers(2, *"abc")
    story.kill_worker("b")
    story.wait_for_workers(3, *"abc")
    assert not story.entries("failure"), story
    story.kill_worker("a")
    assert story.members["a"].wait() == 128 + signal.SIGKILL, story
    story.wait_for_workers(4, *"bc")
    assert [one["member"] for one in story.entries("failure")] == ["a"]
    story.signal("b", signal.SIGTSTP)
    assert story.members["b"].wait() == RUN_AGAIN, story
    story.wait_for_workers(5, "c")
    assert story.entries("generation")[-1]["cause"] == "leave (b: SIGTSTP)"


def test_an_agent_that_dies_or_hangs_is_given_up(tmp_path: Path) -> None:
    """Its worker is none of the run any more; one that wakes up is refused, ends its worker and
    leaves. Too few wait, without workers, for a newcomer, over the death of the coordinator. A
    worker that alone is stopped is named, killed and started again."""
    with RestartStory(tmp_path, min=2, max=3, silent_s=1.5, gather_s=20.0) as story:
        story.start_all("abc", "--max-restarts=1")
        workers = story.wait_for_workers(1, *"abc")
        (stopped,) = [one["pid"] for one in workers if one["member"] == "a"]
        os.kill(stopped, signal.SIGSTOP)
        story.wait_for_workers(2, *"abc")
        cause = story.entries("generation")[1]["cause"]
        assert re.match(rf"a: local rank 0 \(pid {stopped}\) has been stopped for \d s", cause), (
            cause
        )
        assert not Path(f"/proc/{stopped}").exists()
        assert not story.entries("failure"), story
        story.signal("b", signal.SIGSTOP)
        story.wait_for_workers(3, *"ac")
        assert "silent for" in story.entries("failure")[0]["reason"]
        story.signal("b", signal.SIGCONT)
        assert story.members["b"].wait() == RUN_AGAIN, story
        assert not any(
            Path(f"/proc/{one['pid']}").exists() for one in story.said("began", member="b")
        )
        story.signal("c", signal.SIGKILL)
        story.wait_for("suspended")
        assert story.entries("failure")[1]["member"] == "c"
        story.kill_coordinator()
        story.start_coordinator()
        story.start("d")
        wait_until(lambda: story.said("began", member="d"), lambda: f"d to begin\n{story}")
        (story.root / "finish").touch()
        assert [story.members[name].wait() for name in "ad"] == [0, 0], story


def test_arguments_about_the_rendezvous_are_refused(story: RestartStory) -> None:
    """The coordinator says who meets."""
    child = story.start("a", "--nnodes=2", "--rdzv-endpoint=somewhere:1")
    assert child.wait() == 1, story
    assert any("--nnodes, --rdzv-endpoint: the coordinator" in line for line in child.lines), story


@pytest.mark.long
@pytest.mark.parametrize(
    ("hang", "timeout_s", "why"),
    [
        ("stop", 1800, r"has been stopped for \d s \(SIGSTOP\)"),
        ("sleep", 20, r"train.py:\d+ in <module>, and does nothing"),
        ("spin", 20, r"train.py:\d+ in <module>, though it is busy"),
        ("before", 20, r"train.py:\d+ in <module>, and .* init_process"),
        ("end", 20, r"threading.py:\d+ in _shutdown, .* have ended"),
    ],
)
def test_a_worker_that_hangs_is_found(
    tmp_path: Path, hang: str, timeout_s: float, why: str
) -> None:
    """It is named, with where it stands and what it does, before the collective or the
    init_process_group fails in which the others wait for it, or when they have ended; it is killed
    and charged to its member, and all train on. One that leaves then costs no step."""
    told = {
        "epochs": 2 if hang == "stop" else 1,
        "step_s": 0.05,
        "every": 2,
        "timeout_s": timeout_s,
    }
    waits = {"gather_s": 30.0, "silent_s": 2.0, "stuck_s": timeout_s / 2}
    with RestartStory(tmp_path, script=TRAIN, min=1, max=2, **waits) as story:
        for name in "ab":
            options = {"hang": hang} if name == "b" and hang != "stop" else {}
            story.start(name, "--max-restarts=1", **told, **options, heartbeat_s=0.5)
        if hang == "stop":
            story.wait_for_step("b", size=2)

            def samples_per_step() -> float:
                pace = story.status()
                return float(pace["samples_per_s"] * pace["step_s"])

            two = pytest.approx(2 * BATCH, rel=0.5)
            wait_until(lambda: samples_per_step() == two, lambda: f"the pace of two\n{story}")
            os.kill(story.steps("b")[-1]["pid"], signal.SIGSTOP)
        story.wait_for("generation", 2)
        if hang != "stop":
            (hung,) = story.said("hangs")
            found_s = story.entries("generation")[1]["epoch_ns"] / 1e9 - hung["epoch_s"]
            assert 0.5 * timeout_s <= found_s < timeout_s, story
        else:
            wait_until(
                lambda: any(one["generation"] == 2 for one in story.steps("b")),
                lambda: f"b to train on\n{story}",
            )
            story.signal("b", signal.SIGTERM)
        ends = [story.members[name].wait(limit_s=120) for name in "ab"]
        assert ends == [0, RUN_AGAIN if hang == "stop" else 0], str(story)
        causes = [one["cause"] for one in story.entries("generation")]
        assert causes[2:] == ["leave (b: SIGTERM)"] * (hang == "stop"), story
        assert re.match(r"b: local rank 0 \(pid \d+\) ", causes[1]), causes
        assert re.search(why, causes[1]), causes
        assert not story.entries("failure"), story
        check(story, members="ab", lost=60, first=2 if hang == "before" else 1)
        assert hang != "stop" or story.entries("resumed")[2]["steps_lost"] == 0, str(story)


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_a_training_over_many_sizes(tmp_path: Path, sharded: bool) -> None:
    """SIGTERM, a join, SIGKILL of a worker and of an agent, DDP and FSDP2: every sample of what
    counts came once, all members end with the same weights, and no more steps are trained twice
    than since the last checkpoint."""
    with RestartStory(tmp_path, script=TRAIN, min=1, max=3, gather_s=30.0) as story:
        told = {"epochs": 3, "step_s": 0.05, "every": 5, "sharded": sharded}
        story.start_all("abc", **told)
        story.wait_for_step("a", size=3)
        story.signal("b", signal.SIGTERM)
        story.wait_for_step("a", size=2)
        story.start("d", **told)
        story.wait_for_step("d", size=3, times=8)
        story.kill_worker("c")
        wait_until(lambda: story.steps("a")[-1]["size"] == 2, lambda: f"two\n{story}")
        story.start("e", **told)
        story.wait_for_step("e", size=3, times=8)
        story.signal("d", signal.SIGKILL)
        assert [story.members[name].wait(limit_s=180) for name in "ae"] == [0, 0], story
        check(story, members="abcde", lost=6)


@pytest.mark.long
@pytest.mark.parametrize("script", STOCK.values(), ids=STOCK)
def test_a_script_that_knows_nothing_of_it(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's and Hugging Face's Trainer with the samplers that they make themselves: a member
    leaves inside an epoch, and another comes."""
    monkeypatch.setenv("HYDROSLURM_PREEMPT", "requeue")
    told = {"epochs": 2, "samples": 480, "batch": 4, "step_s": 0.05, "lr": 0.02}
    with RestartStory(
        tmp_path, script=(SCRIPTS / script).read_text(), min=1, max=2, gather_s=30
    ) as story:
        story.start_all("ab", **told)
        story.wait_for_step("a", size=2, times=8)
        story.signal("b", signal.SIGTERM)
        assert story.members["b"].wait() == RUN_AGAIN, story
        story.wait_for_step("a", size=1, times=8)
        story.start("c", **told)
        story.wait_for_step("c", size=2, times=2)
        assert [story.members[name].wait(limit_s=180) for name in "ac"] == [0, 0], story
        assert {one["size"] for one in story.said("step") if one["epoch"] == 0} == {1, 2}
        check_stock_training(tmp_path, lr=0.02, epochs=2)
        assert [one["steps_lost"] for one in story.entries("resumed")] == [0, 0, 0], story
        log = read_events(RunDir(story.folder.run).rank_events(0))
        begun = [one.data for one in log if one.kind is EventKind.FIRST_STEP]
        assert [one["samples_per_step"] for one in begun] == [8, 4, 8]


def check(story: RestartStory, *, members: str, lost: int, first: int = 1) -> None:
    """Every sample once, the same weights, and what the ledger says of it, from the generation on
    that is the ``first`` to train. At the end of an epoch the sampler fills up what the ranks
    cannot share evenly."""
    for epoch, seen in times_seen(*map(story.steps, members)).items():
        assert not set(range(SAMPLES)) - set(seen), f"epoch {epoch}\n{story}"
        assert seen.total() - SAMPLES < len(members[:3]), f"epoch {epoch}\n{story}"
    assert len({one["weights"] for one in story.said("done")}) == 1, story
    costs = story.entries("resumed")
    assert [one["generation"] for one in costs] == list(range(first, first + len(costs)))
    assert max(one["steps_lost"] for one in costs) <= lost, story
    assert story.entries("finished")[0]["step"] == story.said("done")[0]["step"]
