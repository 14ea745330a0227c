"""The state machine of an elastic run in storms: connections break, coordinators are replaced."""

from __future__ import annotations

import gc
import statistics

import pytest
from elasticworld import World

from hydroslurm.elastic.membership import Membership
from hydroslurm.elastic.roster import Send, Size, Timing


@pytest.mark.parametrize(
    ("members", "local_size", "slowest_s", "misses", "seed"),
    [
        pytest.param(*world, seed, marks=[pytest.mark.long] if seed >= 4 else [])
        for seed in range(50)
        for world in (
            (2, 1, 0.05, 0.0),
            (3, 1, 0.05, 0.0),
            (5, 1, 0.05, 0.0),
            (10, 1, 0.05, 0.0),
            (3, 2, 2.0, 0.0),
            (6, 1, 2.0, 0.02),
            (6, 2, 2.0, 0.01),
        )
    ],
)
def test_no_member_is_lost_and_no_two_generations_train(
    members: int, local_size: int, slowest_s: float, misses: float, seed: int
) -> None:
    """However messages are delayed, and also where generations do not meet now and then, after any
    storm all that live train, together, in the newest generation."""
    size = Size(min=max(1, members // 4), max=members, wanted=members)
    world = World(seed, size, local_size=local_size, slowest_s=slowest_s, misses=misses)
    chance = world.random

    def refill(within_s: float) -> None:
        for _ in range(members - len({name for name, _ in world.alive()})):
            world.start(chance.uniform(0.0, within_s))

    refill(1.0)
    for _ in range(30):
        world.run(chance.expovariate(1.0))
        what, alive = chance.random(), world.alive()
        burst = chance.choice([1, 1, 1, max(1, members // 10)])
        for rank in chance.sample(alive, min(len(alive), burst)):
            if what < 0.3:
                world.kill(rank)
            elif what < 0.6:
                world.preempt(rank)
            elif what < 0.7:
                world.break_connection(rank)
        if 0.7 <= what < 0.8:
            world.replace_coordinator()
        refill(20.0)
    for _ in range(2):
        refill(0.0)
        world.calm()
    assert (world.lost_members(), world.split_brains) == (0, 0), world.membership.change
    assert world.steps > 0
    assert len(world.membership.current) == members


def test_the_simulation_sees_two_generations_that_train() -> None:
    """A membership that forgets to stop the old generation is found out."""
    world = World(1, Size(min=1, max=4, wanted=4))
    for _ in range(4):
        world.start()
    world.run(20.0)
    assert (world.split_brains, world.lost_members()) == (0, 0)
    world.generations[99] = [("m1", 0), ("m2", 0)]
    for rank in world.generations[99]:
        world.ranks[rank].generation = 99
    world.generations[1] = [("m3", 0), ("m4", 0)]
    world.run(2.0)
    assert world.split_brains > 0


def test_a_change_costs_the_coordinator_no_more_than_its_messages() -> None:
    """Ten times the members cost far less than a hundred times the work; their messages grow at
    most as n log n, which is 10 ** 1.25 from 20 to 200."""
    costs = ([_cost_of_changes(n) for _ in range(2)] for n in (20, 200))
    smaller, larger = (map(min, zip(*of_size, strict=True)) for of_size in costs)
    (seconds, messages), (more_seconds, more_messages) = smaller, larger
    assert more_seconds / seconds < 50
    assert more_messages / messages <= 10**1.25


def _cost_of_changes(members: int) -> tuple[float, float]:
    """Processor seconds and messages per change, of leaves, deaths and joins one by one."""
    world = World(1, Size(min=1, max=2 * members, wanted=members))
    for _ in range(members):
        world.start(world.random.random())
    world.run(10.0)
    seconds, messages = [], []
    gc.collect()
    gc.disable()  # a collection would walk through all that the simulator keeps
    try:
        for number in range(6):
            before_s, before, generation = (
                world.processor_s,
                world.messages,
                world.membership.generation,
            )
            rank = (world.membership.current[number], 0)
            if number % 3 == 2:
                world.start()
            else:
                (world.preempt, world.kill)[number % 3](rank)
            world.run(5.0)
            assert world.membership.generation == generation + 1, world.membership.change
            seconds.append(world.processor_s - before_s)
            messages.append(world.messages - before)
    finally:
        gc.enable()
    assert world.lost_members() == world.split_brains == 0
    return statistics.median(seconds), statistics.median(messages)


def test_a_spare_is_taken_in_when_more_are_wanted_and_may_leave() -> None:
    """One that has been ready for long joins once there is room, without a word of its own; one
    that leaves is let go at once, and the others train on."""
    membership = Membership(Size(min=1, max=2, wanted=1), Timing(gather_s=0.0, join_s=0.1))
    for name in ("a", "b", "c"):
        rank = (name, 0)
        membership.join(rank, local_size=1, node="", generation=0, holding=False, now_s=0.0)
        membership.ready(rank, 0.0)
    assert membership.change is not None
    membership.formed(("a", 0), membership.change.number, True, 0.0, 1.0)
    assert (membership.current, membership.state) == (("a",), "Running")
    sent = [one for one in membership.leave(("b", 0), "SIGTERM", 1.5) if isinstance(one, Send)]
    assert [(one.to, one.message["type"]) for one in sent] == [(("b", 0), "depart")]
    membership.scale(2, [], 2.0)
    assert membership.due_s() <= 2.2
    sent = [one for one in membership.tick(2.2) if isinstance(one, Send)]
    assert [(one.to, one.message["type"]) for one in sent] == [(("a", 0), "hold")]
