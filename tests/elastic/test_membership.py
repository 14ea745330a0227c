"""The state machine of an elastic run: who trains together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from elasticworld import World, gathered

from hydroslurm.elastic.liveness import Liveness
from hydroslurm.elastic.membership import Membership
from hydroslurm.elastic.roster import Action, Close, Phase, Record, Refused, Send, Size


def test_scaling_down_sends_the_newest_away() -> None:
    """The members that are named go first, then the newest; a size out of bounds is refused."""
    world = gathered(4, max=4)
    world.act(world.membership.scale(2, ["m1"], world.now_s))
    world.calm()
    assert world.membership.current == ("m2", "m3")
    with pytest.raises(ValueError, match=r"may have 1 to 4"):
        world.membership.scale(5, [], world.now_s)
    with pytest.raises(ValueError, match="no member m9"):
        world.membership.scale(2, ["m9"], world.now_s)


def test_a_rank_that_lives_and_hangs_is_given_up() -> None:
    """Not one that all are slow with, and not one that is paused."""
    world = gathered(3, max=3)
    membership, now_s = world.membership, world.now_s
    for after_s in range(0, 2000, 10):
        for number in (1, 2, 3):
            membership.beat((f"m{number}", 0), 7, now_s + after_s, waits=False)
        assert membership.tick(now_s + after_s) == []
    now_s += 2000
    for number in (1, 2):
        membership.beat((f"m{number}", 0), 7, now_s, waits=True)
    assert membership.tick(now_s + 800) == []
    told = membership.tick(now_s + 901)
    assert Close(("m3", 0)) in told
    assert any(isinstance(one, Record) and one.kind == "failure" for one in told)


def test_agents_are_told_that_others_wait_for_their_processes() -> None:
    """They are not given up for it; and processes that are started again count again."""
    world = gathered(2, max=2)
    membership, now_s = world.membership, world.now_s
    for rank, issued in ((("m1", 0), 41), (("m2", 0), 40)):
        membership.beat(rank, 7, now_s, collectives=issued)
    told = {"type": "awaited", "generation": 1, "collectives": 41, "meeting_s": 0.0, "ended": False}
    assert membership.tick(now_s + 1) == [Send(("m2", 0), told)]
    membership.beat(("m2", 0), 7, now_s, collectives=None)
    assert membership.tick(now_s + 1) == []
    membership.beat(("m1", 0), 7, now_s, meeting_s=60.0)
    told.update(collectives=0, meeting_s=60.0)
    assert membership.tick(now_s + 1) == [Send(("m2", 0), told)]
    membership.beat(("m2", 0), 7, now_s, meeting_s=60.0)
    assert membership.tick(now_s + 1) == []
    membership.beat(("m2", 0), 7, now_s, collectives=40)
    world.start()
    world.act(membership.scale(1, (), now_s))
    world.calm()
    assert membership.generation == 2
    assert not [one for one in membership.tick(world.now_s) if isinstance(one, Send)]


def test_nobody_has_waited_yet_in_a_new_generation() -> None:
    """Who waited long in the one before, and for whom, is forgotten."""
    liveness, ranks = Liveness(), [("m1", 0), ("m2", 0)]
    for rank in ranks:
        liveness.beat(rank, 7, 0.0, waits=rank[0] == "m1")
    assert liveness.stuck(ranks, 901.0, after_s=900.0) == [("m2", 0)]
    liveness.begin_generation()
    assert liveness.stuck(ranks, 901.0, after_s=900.0) == []


def test_one_that_does_not_end_is_told_that_others_have() -> None:
    """Before their agents hold, and behind that, until all have ended."""
    world = gathered(2, max=2)
    membership, now_s = world.membership, world.now_s
    membership.beat(("m2", 0), 7, now_s, collectives=40)
    membership.beat(("m1", 0), 7, now_s, collectives=41, ended=True)
    told = {"type": "awaited", "generation": 1, "collectives": 0, "meeting_s": 0.0, "ended": True}
    assert membership.tick(now_s + 1) == [Send(("m2", 0), told)]
    membership.arrived(("m1", 0), 0, 7, now_s, final=True)
    assert membership.tick(now_s + 2) == [Send(("m2", 0), told)]
    membership.beat(("m2", 0), 7, now_s, collectives=41, ended=True)
    assert membership.tick(now_s + 2) == []


def test_the_first_failure_is_the_one_that_counts() -> None:
    """Agents say that a process of theirs has ended; those of the others end by that, so only the
    first is named to all, and its reason is in the ledger if it goes."""
    world = gathered(2, max=2)
    membership = world.membership
    membership.are_agents = True
    told = membership.failed(("m2", 0), 1, 5.0, reason="rank 1 was killed by SIGKILL")
    told += membership.failed(("m1", 0), 1, 5.1, reason="rank 0 exited with status 1")
    aborts = [one.message for one in told if isinstance(one, Send)]
    assert [(one["type"], one["culprit"]) for one in aborts] == [("abort", "m2")] * 2
    (record,) = [one for one in membership.lost(("m2", 0), 5.2) if isinstance(one, Record)]
    assert record.data["reason"] == "rank 1 was killed by SIGKILL"
    membership.beat(("m1", 0), 30, 5.3)
    formed = membership.arrived(
        ("m1", 0), membership.change.number, 30, 5.4, has_state=False, failed=True
    )
    change = next(one for one in formed if isinstance(one, Send)).message
    assert (change["type"], change["fresh"], change["world_size"]) == ("form", True, 1)
    made = membership.formed(("m1", 0), change["change"], True, 0.1, 5.5)
    assert [one.data["steps_lost"] for one in made if isinstance(one, Record)] == [0]
    (cost,) = membership.resumed(("m1", 0), 2, 20, 9.0)
    assert cost.data == {"generation": 2, "step": 20, "steps_lost": 10, "pause_s": 4.0}
    assert membership.resumed(("m1", 0), 2, 20, 9.1) == []
    (over, *_) = membership.arrived(("m1", 0), 0, 44, 12.0, has_state=False, final=True)
    assert (over.kind, over.data["step"]) == ("finished", 44)


def test_what_the_loss_of_all_members_costs_is_counted() -> None:
    """A newcomer loads a checkpoint: the steps behind it are lost, as far as beats have told of
    them; if that newcomer dies at once, the next one has lost none."""
    world = gathered(1, max=1)
    membership = world.membership
    membership.beat(("m1", 0), 57, 5.0)
    membership.lost(("m1", 0), 5.1)
    for name in ("m2", "m3"):
        rank = (name, 0)
        membership.join(rank, local_size=1, node="", generation=0, holding=False, now_s=6.0)
        formed = [*membership.ready(rank, 6.1), *membership.tick(9.0)]
        change = next(one for one in formed if isinstance(one, Send)).message
        assert (change["type"], change["fresh"]) == ("form", True)
        made = membership.formed(rank, change["change"], True, 0.1, 9.1, step=40)
        (record,) = [one for one in made if isinstance(one, Record)]
        assert record.data["step"] == 40
        assert record.data["steps_lost"] == (17 if name == "m2" else 0)
        membership.lost(rank, 9.2)


def test_a_newcomer_that_cannot_be_met_is_left_out_and_has_failed() -> None:
    """The third time; the others go on behind the same step, and what it was is in the ledger."""
    world = gathered(2, max=3)
    world.cannot_meet = {"m3"}
    world.start()
    world.calm()
    assert world.membership.current == ("m1", "m2")
    assert len({world.ranks[name, 0].step for name in ("m1", "m2")}) == 1
    (failure,) = [one.data for one in world.ledger if one.kind == "failure"]
    assert failure["member"] == "m3"
    assert "3 generations in a row could not meet, the last: m3: no route to host" in str(failure)
    assert world.membership.generation == 5
    world.start()
    world.calm()
    assert world.membership.current == ("m1", "m2", "m4")


def test_one_that_tells_of_every_failure_is_left_out() -> None:
    """Where all are new; the others wait for more, as many as ``min``."""
    world = World(1, Size(min=2, max=2, wanted=2))
    world.cannot_meet = {"m2"}
    world.start()
    world.calm()
    assert world.membership.generation == 0
    world.start()
    world.calm()
    assert "m2" not in world.membership.members
    world.start()
    world.calm()
    assert world.membership.current == ("m1", "m3")


def sent(actions: list[Action], kind: str) -> dict[str, dict[str, object]]:
    """The messages of one type, by the member that gets them."""
    found = [one for one in actions if isinstance(one, Send)]
    return {one.to[0]: one.message for one in found if one.message["type"] == kind}


def hold(world: World, steps: dict[str, int], **how: bool) -> list[Action]:
    """These members hold behind these steps."""
    change = world.membership.change
    number, told = change.number if change is not None else 0, []
    for name, step in steps.items():
        told += world.membership.arrived((name, 0), number, step, world.now_s, **how)
    return told


def test_a_leaving_member_that_alone_has_the_newest_state_sends_it_first() -> None:
    """Where too few would be left it is saved before, by another one if the first is gone; once it
    has gone, the run goes on from what the others have."""
    world = gathered(3, max=3)
    machine, now_s = world.membership, world.now_s
    machine.lost(("m3", 0), now_s)
    machine.leave(("m1", 0), "SIGTERM", now_s)
    formed = sent(hold(world, {"m1": 5, "m2": 4}), "form")
    assert [(one["source"], one["needs"]) for one in formed.values()] == [(0, [1])] * 2
    world = gathered(3, min=3, max=3)
    machine, now_s = world.membership, world.now_s
    machine.lost(("m3", 0), now_s)
    for name in ("m1", "m2"):
        machine.leave((name, 0), "SIGTERM", now_s)
    assert list(sent(hold(world, {"m1": 5, "m2": 4}), "save")) == ["m1"]
    assert list(sent(machine.lost(("m1", 0), now_s), "save")) == ["m2"]
    assert machine.change is not None
    assert list(sent(machine.saved(("m2", 0), machine.change.number, now_s), "depart")) == ["m2"]
    world = gathered(3, min=3, max=3)
    machine, now_s = world.membership, world.now_s
    machine.lost(("m3", 0), now_s)
    machine.leave(("m1", 0), "SIGTERM", now_s)
    hold(world, {"m1": 5, "m2": 4})
    assert machine.change is not None
    told = machine.saved(("m1", 0), machine.change.number, now_s)
    assert (list(sent(told, "depart")), machine.state) == (["m1"], "Suspended")
    for name in ("m4", "m5"):
        machine.join((name, 0), local_size=1, node="", generation=0, holding=False, now_s=now_s)
        told = machine.ready((name, 0), now_s)
    assert (sent(told, "form")["m2"]["source"], sent(told, "form")["m2"]["needs"]) == (1, [0, 2])


def test_all_hold_behind_the_newest_step_that_any_of_them_offers() -> None:
    """One that offers an older step trains up to it."""
    world = gathered(3, max=3)
    machine, now_s = world.membership, world.now_s
    machine.leave(("m3", 0), "SIGTERM", now_s)
    assert machine.change is not None
    for name, step in (("m1", 5), ("m2", 9), ("m3", 7)):
        told = machine.proposed((name, 0), machine.change.number, step, now_s)
    assert [one["step"] for one in sent(told, "hold_at").values()] == [9, 9, 9]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.TRAINING, Phase.SUSPENDED])
def test_an_idle_member_that_leaves_is_let_go_at_once(phase: Phase) -> None:
    """Whatever the others do: wait for more, train, or hold."""
    world = gathered(1 if phase is Phase.WAITING else 2, min=2, max=2)
    machine, now_s = world.membership, world.now_s
    if phase is Phase.SUSPENDED:
        machine.lost(("m2", 0), now_s)
        hold(world, {"m1": 5})
    assert machine.phase is phase
    machine.join(("m9", 0), local_size=1, node="", generation=0, holding=False, now_s=now_s)
    assert list(sent(machine.leave(("m9", 0), "SIGTERM", now_s), "depart")) == ["m9"]
    assert machine.phase is phase


def test_a_new_coordinator_changes_nothing_before_all_are_back() -> None:
    """Who leaves or joins meanwhile is not called for: a rank that returns in the middle of a
    change would drop its step."""
    machine = Membership(Size(min=1, max=3, wanted=3), generation=4, current=[("m1", 1), ("m2", 1)])

    def join(name: str, generation: int) -> list[Action]:
        return machine.join(
            (name, 0), local_size=1, node="", generation=generation, holding=False, now_s=1.0
        )

    told = [*join("m1", 4), *join("m3", 0), *machine.ready(("m3", 0), 1.0)]
    told += [*machine.tick(2.0), *machine.leave(("m1", 0), "SIGTERM", 2.0)]
    assert not sent(told, "hold")
    told = join("m2", 4)
    assert (list(sent(told, "hold")), sent(told, "abort")) == (["m1", "m2"], {})


def test_one_lost_while_the_others_save_makes_the_group_incomplete() -> None:
    """No tail follows, though all who are left have trained to the end."""
    world = gathered(2, min=2, max=2)
    machine, now_s = world.membership, world.now_s
    machine.leave(("m2", 0), "SIGTERM", now_s)
    assert list(sent(hold(world, {"m1": 7, "m2": 7}, final=True), "save")) == ["m1"]
    machine.lost(("m2", 0), now_s)
    assert machine.change is not None
    machine.saved(("m1", 0), machine.change.number, now_s)
    assert machine.phase is Phase.SUSPENDED


@pytest.mark.parametrize("why", ["leaves", "failed", "lost"])
def test_no_tail_follows_where_the_group_is_not_whole(why: str) -> None:
    """All have trained to the end; they meet again first."""
    world = gathered(3, max=3)
    machine, now_s = world.membership, world.now_s
    if why == "lost":
        machine.lost(("m3", 0), now_s)
    elif why == "leaves":
        machine.leave(("m3", 0), "SIGTERM", now_s)
    names = [name for name in ("m1", "m2", "m3") if name in machine.members]
    told = hold(world, dict.fromkeys(names, 7), final=True, failed=why == "failed")
    assert list(sent(told, "form")) == names[: 3 if why == "failed" else 2]
    assert not machine.is_in_tail
    change = next(iter(sent(told, "form").values()))["change"]
    for name in sent(told, "form"):
        told = machine.formed((name, 0), change, True, 0.1, now_s)
    (made,) = [one.data for one in told if isinstance(one, Record)]
    assert made["steps_lost"] == int(why == "failed")


def agents_fail(
    world: World, names: Iterable[str], *, of: str, met: bool = False, later: str = ""
) -> list[Record]:
    """Processes of agents end at the begin of a generation, those of one first, and, where others
    come ``later`` with the cause, by that; what is recorded until all hold and the next one is
    formed, or not."""
    membership, found = world.membership, []
    reason = "rank 1 exited with status 1 (no route to host)"
    told = membership.failed(
        (of, 0), membership.generation, world.now_s, reason=reason, met=met, lost_peer=bool(later)
    )
    for name in filter(None, (later, of)):
        told += membership.failed(
            (name, 0),
            membership.generation,
            world.now_s,
            reason="no such interface" if name == later else reason,
            met=met,
            lost_peer=name != later,
        )
    number = membership.change.number
    for name in names:
        told += membership.arrived((name, 0), number, 0, world.now_s, has_state=False, failed=True)
    world.now_s += 10.0
    told += membership.tick(world.now_s)
    for one in [one for one in told if isinstance(one, Send) and one.message["type"] == "form"]:
        found += membership.formed(one.to, one.message["change"], True, 0.1, world.now_s)
    return [one for one in (*told, *found) if isinstance(one, Record)]


def test_agents_whose_processes_cannot_meet() -> None:
    """An agent has formed a generation before its processes have met. Nobody is charged until the
    third time; then it is the one that is new, and the others meet without it."""
    world = gathered(2, max=3, are_agents=True)
    membership = world.membership
    membership.beat(("m1", 0), 0, world.now_s, collectives=2)
    world.start()
    world.calm()
    names = ("m1", "m2", "m3")
    assert membership.current == names
    for teller in ("m1", "m2"):
        told = agents_fail(world, names, of=teller)
        assert [one.kind for one in told] == ["forming", "generation"]
        assert f"could not meet ({teller}: rank 1 exited" in told[1].data["cause"]
    told = agents_fail(world, names, of="m1")
    (failure,) = [one.data for one in told if one.kind == "failure"]
    assert failure["member"] == "m3"
    assert membership.current == ("m1", "m2")


def test_who_has_lost_another_is_not_the_cause() -> None:
    """Where all agents are new, the one is left out that knows more than that another has gone,
    though it tells of it later."""
    world = gathered(2, max=2, are_agents=True)
    for _ in range(2):
        told = agents_fail(world, ("m1", "m2"), of="m1", later="m2")
        assert told[1].data["cause"] == "the generation could not meet (m2: no such interface)"
    told = agents_fail(world, ("m1", "m2"), of="m1", later="m2")
    (failure,) = [one.data for one in told if one.kind == "failure"]
    assert failure["member"] == "m2"
    assert "the last: m2: no such interface" in failure["reason"]
    assert world.membership.current == ("m1",)


@pytest.mark.parametrize("met", ["resumed", "beat"])
def test_agents_that_have_met_begin_the_count_again(met: str) -> None:
    """Their processes train, or are behind their first collective."""
    world = gathered(2, max=2, are_agents=True)
    membership, names = world.membership, ("m1", "m2")
    for number in range(8):
        told = agents_fail(world, names, of="m1")
        assert [one.kind for one in told] == ["forming", "generation"], number
        if number % 2 and met == "beat":
            membership.beat(("m1", 0), 0, world.now_s, collectives=2)
        elif number % 2:
            membership.resumed(("m1", 0), membership.generation, 3, world.now_s)


def test_a_run_whose_members_cannot_meet_ends() -> None:
    """After six times, ever further apart; the state is saved before, and all are told why."""
    world = gathered(2, max=2)
    world.cannot_meet = {"m1", "m2", "m3"}
    world.start()
    membership, begin = world.membership, len(world.told)
    world.act(membership.leave(("m1", 0), "preempted", world.now_s))
    world.start()
    world.calm()
    told = world.told[begin:]
    assert membership.state == "Failed"
    assert "6 generations in a row could not meet" in membership.gave_up
    assert [one.data for one in world.ledger if one.kind == "gave_up"] == [
        {"reason": membership.gave_up}
    ]
    tried = sorted({at_s for at_s, kind in told if kind == "form"})
    apart = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert len(tried) == 6
    assert apart == sorted(apart)
    assert apart[-1] >= 4.0
    kinds = [kind for _, kind in told]
    assert kinds.index("depart", kinds.index("save")) > kinds.index("save")
    with pytest.raises(Refused, match="could not meet"):
        membership.join(("m9", 0), local_size=1, node="", generation=0, holding=False, now_s=0.0)


def test_a_generation_may_have_nothing_to_train() -> None:
    """One of its ranks may be at its end before another has met it; members with another number of
    ranks are refused."""
    membership = Membership(Size(min=2, max=2, wanted=2))
    told: list[object] = []
    for name in ("m1", "m2"):
        membership.join((name, 0), local_size=1, node="", generation=0, holding=False, now_s=0.0)
        told += membership.ready((name, 0), 0.0)
    assert membership.change is not None
    number = membership.change.number
    membership.formed(("m1", 0), number, True, 0.1, 1.0)
    membership.arrived(("m1", 0), 0, 20, 1.1, final=True)
    membership.formed(("m2", 0), number, True, 0.1, 1.2)
    ended = membership.arrived(("m2", 0), 0, 20, 1.3, final=True)
    assert [one.kind for one in ended if isinstance(one, Record)] == ["trained"]
    with pytest.raises(Refused, match="m3 has 2 ranks, and each member of this run has 1"):
        membership.join(("m3", 0), local_size=2, node="", generation=0, holding=False, now_s=2.0)
