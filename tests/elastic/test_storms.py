"""The state machine of an elastic run in storms: connections break, coordinators are replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hydroslurm.elastic.membership import Membership
from hydroslurm.elastic.roster import Send, Size, Timing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "profiling"))
import elastic_sim


@pytest.mark.parametrize("members", [2, 3, 5, 10])
@pytest.mark.parametrize("seed", range(10))
def test_no_member_is_lost_and_no_two_generations_train(members: int, seed: int) -> None:
    """After any storm all that live train, together, in the newest generation."""
    found = elastic_sim.storm(members, seed=seed, disturbances=30, between_s=1.0)
    assert (found.lost_members(), found.split_brains) == (0, 0), found.membership.change
    assert found.steps > 0
    assert len(found.membership.current) == members


def test_the_simulation_sees_two_generations_that_train() -> None:
    """A membership that forgets to stop the old generation is found out."""
    simulation = elastic_sim.Simulation(1, Size(min=1, max=4, wanted=4))
    for _ in range(4):
        simulation.start()
    simulation.run(20.0)
    assert (simulation.split_brains, simulation.lost_members()) == (0, 0)
    simulation.worlds[99] = [("m1", 0), ("m2", 0)]
    for name in ("m1", "m2"):
        simulation.processes[(name, 0)].generation = 99
    simulation.worlds[1] = [("m3", 0), ("m4", 0)]
    simulation.run(2.0)
    assert simulation.split_brains > 0


def test_a_change_costs_the_coordinator_no_more_than_its_messages() -> None:
    """Ten times the members cost far less than a hundred times the work; their messages grow at
    most as n log n, which is 10 ** 1.2 from 50 to 500."""
    costs = ([elastic_sim.cost_of_changes(n) for _ in range(3)] for n in (50, 500))
    smaller, larger = (map(min, zip(*of_size, strict=True)) for of_size in costs)
    (seconds, messages), (more_seconds, more_messages) = smaller, larger
    assert more_seconds / seconds < 50
    assert more_messages / messages <= 10**1.2


def test_a_spare_is_taken_in_when_more_are_wanted() -> None:
    """One that has been ready for long joins once there is room, without a word of its own."""
    membership = Membership(Size(min=1, max=2, wanted=1), Timing(gather_s=0.0, join_s=0.1))
    for name in ("a", "b"):
        rank = (name, 0)
        membership.join(rank, local_size=1, node="", generation=0, holding=False, now_s=0.0)
        membership.ready(rank, 0.0)
    assert membership.change is not None
    membership.formed(("a", 0), membership.change.number, True, 0.0, 1.0)
    assert (membership.current, membership.state) == (("a",), "Running")
    membership.scale(2, [], 2.0)
    assert membership.due_s() <= 2.2
    sent = [one for one in membership.tick(2.2) if isinstance(one, Send)]
    assert [(one.to, one.message["type"]) for one in sent] == [(("a", 0), "hold")]
