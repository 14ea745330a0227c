"""Which elements are submitted, cancelled and counted. Slurm's part is played by lists of rows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.roster import Record
from hydroslurm.jobs.plan import ElasticPlan, RunLimits
from hydroslurm.jobs.supervisor import elastic
from hydroslurm.jobs.supervisor.elements import (
    LINGERS_S,
    UNSEEN_S,
    Action,
    Cancel,
    Elements,
    Submit,
)
from hydroslurm.slurm.values import Element, JobState

RUNNING, PENDING = JobState.RUNNING, JobState.PENDING


class Ledger:
    """Elements whose actions are carried out as the allocator does, and written down."""

    def __init__(self, *, base: int = 0, **limits: Any) -> None:
        self.plan = ElasticPlan(base, exclude_after=2)
        self.limits = RunLimits(**limits)
        self.elements = Elements(self.plan, self.limits, last_words="{} said so".format)
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.arrays = 100

    def note(self, kind: str, /, now_s: float = 0.0, **data: Any) -> None:
        self.lines.append((kind, data))
        self.act(self.elements.note(kind, data, now_s))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self.lines.append((action.kind, action.data))
            elif isinstance(action, Cancel):
                self.cancelled += action.names
            else:
                self.arrays += 1
                names = [f"{self.arrays}_{n}" for n in range(action.count)]
                self.note("submitted", members=names, base=action.is_base)

    def want(self, count: int, *training: str) -> list[str]:
        """The new elements."""
        before = set(self.elements.elements)
        self.act(self.elements.wanted(count, training=training, now_s=0.0))
        return [name for name in self.elements.elements if name not in before]

    def seen(self, *rows: Element, now_s: float = 1.0) -> None:
        self.act(self.elements.seen(rows, now_s))

    def train(self, *names: str) -> None:
        self.note("forming", members=[[name, 1] for name in names])
        self.seen(*(row(name) for name in names))


def row(name: str, state: JobState = RUNNING, node: str = "n1") -> Element:
    return Element(name=name, state=state, node=node)


def test_the_base_array_is_filled_first() -> None:
    """`min` elements are on the safer side, also after one of them was replaced: one that announces
    its leave is so at once, before Slurm knows. What Slurm says later changes nothing."""
    of = Ledger(base=2)
    assert of.elements.wanted(5, training=(), now_s=0.0) == [Submit(2, True), Submit(3, False)]
    names = of.want(5)
    assert of.want(5) == []
    of.train(*names)
    of.note("leaving", member=names[0], node="n1", reason="SIGTERM")
    assert of.elements.wanted(5, training=(), now_s=0.0) == [Submit(1, True)]
    (new,) = of.want(5, *names[1:])
    of.note("left", member=names[0], node="n1", reason="SIGTERM")
    of.seen(row(names[0], JobState.PREEMPTED), *map(row, names[1:]), row(new, PENDING, ""))
    assert (of.elements.preemptions, of.elements.failures) == (1, 0)
    assert of.want(5, *names[1:]) == []


@pytest.mark.parametrize(
    ("state", "how"),
    [
        (JobState.FAILED, "failure"),
        (JobState.COMPLETED, "failure"),
        (JobState.PREEMPTED, "preemption"),
        (JobState.NODE_FAIL, "preemption"),
        (JobState.CANCELLED, "preemption"),
        (JobState.TIMEOUT, "preemption"),
    ],
)
def test_slurm_tells_why_a_newcomer_ended(state: JobState, how: str) -> None:
    """A script that ends well without having joined has not trained."""
    of = Ledger()
    (name,) = of.want(1)
    of.seen(row(name, state))
    kind, data = of.lines[-1]
    assert (kind, data["how"], data["node"]) == ("ended", how, "n1")
    assert of.want(1) != []


def test_a_lost_member_is_replaced_when_it_is_known_why() -> None:
    """Its element is cancelled if it runs on: it hangs, and would come back."""
    of = Ledger()
    first, second = of.want(2)
    of.train(first, second)
    of.note("failure", member=second, node="n2", reason="silent for 5 s", now_s=10.0)
    assert of.want(2, first) == []
    of.seen(row(first), row(second), now_s=11.0)
    assert of.cancelled == []
    of.seen(row(first), row(second), now_s=20.0)
    assert of.cancelled == [second]
    assert of.elements.failures == 1
    assert len(of.want(2, first)) == 1


def test_one_that_has_done_what_follows_the_training_may_end() -> None:
    """It is neither replaced nor counted nor cancelled, however long it takes; another one's end
    without a word is a failure."""
    of = Ledger()
    first, second = of.want(2)
    of.train(first, second)
    of.note("trained", step=7, generation=1)
    of.note("done", member=first, local_rank=0)
    assert not of.want(2)
    of.note("failure", member=second, node="n2", reason="its connection ended")
    assert not of.want(1)
    of.seen(row(first), row(second, JobState.FAILED), now_s=2 * LINGERS_S)
    of.seen(row(first, JobState.COMPLETED), now_s=3 * LINGERS_S)
    ended = [(data["member"], data["how"]) for kind, data in of.lines if kind == "ended"]
    assert ended == [(second, "failure"), (first, "left")]
    assert not of.cancelled
    assert len(of.want(1)) == 1


def test_a_node_that_fails_members_is_excluded_once() -> None:
    """While others train; what waits could start there, and is submitted again without it. What is
    plainly the node's counts at once, and against no limit while the node can be left out."""
    of = Ledger(backoff_limit=9)
    first, second, trains, waits = of.want(4)
    well = row(trains), row(waits, PENDING, "")
    of.seen(row(first, JobState.FAILED, "bad"), row(second), *well)
    assert of.cancelled == []
    of.seen(row(second, JobState.FAILED, "bad"), *well)
    assert of.cancelled == [waits]
    (again, *_) = of.want(2)
    of.seen(row(again, JobState.FAILED, "bad"), row(trains))
    assert list(of.elements.excluded) == ["bad"]
    assert [kind for kind, _ in of.lines].count("excluded") == 1
    assert of.elements.failures == 3
    of.elements._last_words = "{}: CUDA error: uncorrectable ECC error encountered".format
    for node, failures in (("ecc", 3), ("one too many", 4)):
        (again, *_) = of.want(2)
        of.seen(row(again, JobState.FAILED, node), row(trains))
        assert list(of.elements.excluded) == ["bad", "ecc"]
        assert of.elements.failures == failures
    for by, left in (("autoscaler: it waits", ["bad", "ecc"]), ("ada", [])):  # a person undoes it
        of.note("wanted", size=2, by=by)
        assert list(of.elements.excluded) == left


def test_a_bug_of_the_script_excludes_no_node() -> None:
    """It fails members on one node after the other, or all there are."""
    for others in ([], ["n1"]):
        of = Ledger(backoff_limit=9)
        for node in ("bad", *others, "bad", *others):
            names = of.want(1 + len(others))
            of.seen(row(names[0], JobState.FAILED, node), *(row(name) for name in names[1:]))
        assert of.elements.excluded == {}


def test_budgets_are_apart() -> None:
    """Preemptions are not failures; the one that is too many gives the verdict."""
    of = Ledger(backoff_limit=1, preemption_limit=None)
    for state in [JobState.PREEMPTED] * 10 + [JobState.FAILED] * 2:
        assert of.elements.verdict() is None
        (name,) = of.want(1)
        of.seen(row(name, state, "n7"))
    reason, said = of.elements.verdict() or ("", "")
    assert reason == "BackoffLimitExceeded"
    assert f"{name} on n7: it ended FAILED (the last line of its log: {name} said so)" in said
    limited = Ledger(preemption_limit=0)
    (name,) = limited.want(1)
    limited.seen(row(name, JobState.NODE_FAIL))
    assert limited.elements.verdict() is not None


def test_fewer_are_wanted() -> None:
    """Those that wait go first, then those that have not joined; who trains is never cancelled,
    and the base goes last."""
    of = Ledger(base=1)
    base, trains, starts, waits = of.want(4)
    of.train(base, trains)
    of.seen(row(base), row(trains), row(starts), row(waits, PENDING, ""))
    of.want(3, base, trains)
    assert of.cancelled == [waits]
    of.want(1, base, trains)
    assert of.cancelled == [waits, starts]
    assert of.elements.failures == of.elements.preemptions == 0
    of = Ledger(base=1)
    base, other = of.want(2)
    of.seen(row(base, PENDING, ""), row(other))
    of.want(1)
    assert of.cancelled == [other]


def test_one_that_is_still_going_is_not_taken_for_a_new_one() -> None:
    """Slurm lists it for a moment after its leave; much later it is cancelled. A new one may be
    missing for a moment, and not for ever."""
    of = Ledger()
    (unseen,) = of.want(1)
    of.seen(now_s=UNSEEN_S - 1)
    assert of.want(1) == []
    of.seen(now_s=UNSEEN_S + 1)
    (name,) = of.want(1)
    assert name != unseen
    of = Ledger()
    (name,) = of.want(1)
    of.train(name)
    of.note("leaving", member=name, node="n1", reason="SIGTERM")
    of.note("left", member=name, node="n1", reason="SIGTERM")
    of.seen(row(name), now_s=1.0)
    of.seen(row(name, JobState.COMPLETING), now_s=11.0)
    assert (of.cancelled, list(of.elements.elements)) == ([], [])
    of.seen(row(name), now_s=LINGERS_S + 2)
    assert of.cancelled == [name]
    of.seen(row(name, JobState.FAILED), now_s=LINGERS_S + 3)
    assert (of.elements.failures, of.elements.preemptions) == (0, 1)


def test_the_next_coordinator_knows_the_same_from_the_ledger() -> None:
    """And takes over what the last one submitted without being able to write that down."""
    of = Ledger(base=1, backoff_limit=5)
    names = of.want(3)
    of.train(*names)
    of.note("leaving", member=names[1], node="n2", reason="SIGTERM")
    of.note("left", member=names[1], node="n2", reason="SIGTERM")
    of.want(3, names[0], names[2])
    of.seen(row(names[0]), row(names[2], JobState.FAILED), *map(row, of.elements.elements))
    after = Elements(of.plan, of.limits)
    for kind, data in of.lines:
        after.replay(kind, data, 0.0)
    assert after.elements.keys() == of.elements.elements.keys()
    assert (after.failures, after.preemptions) == (of.elements.failures, of.elements.preemptions)
    after.seen([*map(row, after.elements), row("999_0", PENDING)], 1.0)
    assert "999_0" in after.elements


def test_members_that_slurm_has_accepted_are_known_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that cannot be written makes nobody submit twice."""
    done = subprocess.CompletedProcess[str]([], 0, "Submitted batch job 101\n", "")
    monkeypatch.setattr(elastic, "sbatch", lambda *_, **__: done)
    said: list[str] = []
    keeper = elastic.Allocator(
        ElasticFolder(run=tmp_path / "not" / "there"),
        Elements(ElasticPlan(0, 2), RunLimits()),
        client=Mock(),
        environ={},
        log=said.append,
    )
    (tmp_path / "not").touch()
    keeper._wanted(1, ())
    for now_s in (1.0, 2.0):
        keeper._adjust(now_s)
    assert list(keeper.elements.elements) == ["101_0"]
    assert ["submitted 101_0" in one for one in said] == [False, True], said
    assert "Not a directory" in said[0]
