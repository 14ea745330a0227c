"""Generations that cannot meet, of real processes: each error is tried a limited number of times,
is named, and whoever causes it goes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from elasticstory import TRAIN, ElasticStory, goes_on
from processes import captured

from hydroslurm.elastic.group import MEETING_S

UNREACHABLE = TRAIN.replace(
    "torch.manual_seed(options",
    'if options.get("unreachable"): os.environ["GLOO_SOCKET_IFNAME"] = "none0"\n'
    "    torch.manual_seed(options",
)
"""On some members gloo has no interface to listen at."""


def test_a_newcomer_with_another_model_ends_with_its_own_error(tmp_path: Path) -> None:
    """What fails on one rank alone is not tried again: its process ends, and is charged with it."""
    program = TRAIN.replace("nn.Linear(8, 16)", "nn.Linear(8, options.get('width', 16))").replace(
        "*rest, nn.ReLU(), nn.Linear(16, 1)", "nn.ReLU(), nn.Linear(options.get('width', 16), 1)"
    )
    with ElasticStory(tmp_path, program=program, max=2) as story:
        story.start("a", epochs=1000, step_s=0.03)
        story.wait_for_step("a", size=1)
        story.start("b", epochs=1000, width=17)
        assert story.ended("b") == 1, story
        assert "Load it into the class that it was saved from" in str(story)
        goes_on(story, "a")
        assert [one["member"] for one in story.entries("failure")] == ["b"], story
        assert len(story.entries("forming")) <= 3, story


@pytest.mark.long
def test_a_run_that_cannot_begin_ends_with_the_reason(tmp_path: Path) -> None:
    """After six tries the member ends, and so does the coordinator."""
    with ElasticStory(tmp_path, program=UNREACHABLE, max=1) as story:
        story.start("a", unreachable=True)
        assert story.ended("a") == 1, story
        assert story.coordinator is not None
        assert story.coordinator.wait(30) == 1
        (gave_up,) = story.entries("gave_up")
        assert "6 generations in a row could not meet, the last: a: " in gave_up["reason"]
        assert gave_up["reason"] in str(story.members["a"].lines)
        assert len(story.entries("forming")) == 6, story


DYING = TRAIN.replace(
    "torch.manual_seed(options",
    """import signal
    from hydroslurm.elastic import member, transfer
    transfer.PIECE_BYTES = 1 << 9
    def dies_at(owner, name, times):
        act, left = getattr(owner, name), [times]
        def counted(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments, **options)
        setattr(owner, name, counted)
    if options.get("dies"):
        name, times = options["dies"]
        dies_at(*{
            "meeting": (member.Member, "get_values"), "transfer": (transfer._Link, "move"),
        }[name], times)
    torch.manual_seed(options""",
)
"""A newcomer may be told before which message of a meeting, or of a transfer, it dies."""


def test_a_newcomer_may_die_before_any_message(tmp_path: Path) -> None:
    """From the moment when it has said where it listens until it has the whole state: the others
    train on at once, without anybody who waits for it."""
    deaths = [("meeting", 0), ("meeting", 1), ("meeting", 2), ("transfer", 0), ("transfer", 5)]
    with ElasticStory(tmp_path, program=DYING, max=3) as story:
        story.start_all("ab", epochs=1000, step_s=0.03)
        story.wait_for_step("a", size=2)
        for number, dies in enumerate(deaths):
            one = story.start(f"c{number}", dies=dies)
            assert one.wait() == -signal.SIGKILL, str(story)
            for name in "ab":
                goes_on(story, name)
        generations, failures = story.entries("generation"), story.entries("failure")
    assert {len(one["members"]) for one in generations} <= {2, 3}
    assert max(one["pause_s"] for one in generations) < MEETING_S / 2, generations
    assert [one["member"] for one in failures] == [f"c{number}" for number in range(len(deaths))]


ABORTED = """
    import os, socket, sys
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from hydroslurm.elastic.group import GenerationGroup
    from hydroslurm.elastic.roster import Form

    listener, opened = socket.create_server(("127.0.0.1", 0)), []

    class Member:
        local_rank, broken = 0, False
        store = FileStore(sys.argv[1], 2)

        def set_value(self, key, value):  # while the ranks meet, a thread opens a connection
            opened.append(socket.create_connection(listener.getsockname()))
            self.store.set(key, value)

        def get_values(self, keys, *, timeout_s):
            return [self.store.get(key) for key in keys]

    torch.set_num_threads(1)
    rank = int(os.fork() == 0)
    group, x = GenerationGroup(Member(), backend="gloo"), torch.ones(1)
    group.form(Form(1, 1, rank, 2, 2, 0, needs=(1,), fresh=False, cause=""))
    beside = dist.new_group([0, 1])
    dist.all_reduce(x)
    group.abort()
    for one in opened:
        one.sendall(b"x")
    dist.all_reduce(x, group=beside)
    assert x == 4, x
    try:
        dist.all_reduce(x)
    except RuntimeError:
        os._exit(0 if rank or not os.wait()[1] else 1)
    os._exit(1)
"""


def test_an_abort_is_of_the_generations_own_connections(tmp_path: Path) -> None:
    """Collectives of the generation fail. A group that the script has made beside it, and what
    another thread has connected while the ranks met, stay."""
    done = captured(
        [sys.executable, "-c", textwrap.dedent(ABORTED), str(tmp_path / "store")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
