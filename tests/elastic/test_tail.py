"""What a script does behind its training: with a group of all who have trained, and to its end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elasticstory import START, ElasticStory
from processes import wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.training.attempts import finished_step

TAIL = (
    START
    + """
    import signal
    torch.manual_seed(options.get("seed", 0))
    net = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train(step):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        print("STEP", json.dumps({"step": step, "size": dist.get_world_size()}))
        time.sleep(0.02)

    if options["shape"] == "run":
        with hydroslurm.Run(model=model, optimizer=optimizer, elastic=True, every_s=0) as run:
            for step in run.steps(20):
                train(step)
    else:
        state = hydroslurm.elastic.State(model=model, optimizer=optimizer, step=0)

        @hydroslurm.elastic.run
        def loop(state):
            while state.step < 20:
                train(state.step)
                state.step += 1
                state.commit()

        loop(state)
    print("TAIL", dist.get_world_size(), flush=True)
    if options.get("fails") and dist.get_rank() == 1:
        if options["fails"] == "by a signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("in the evaluation")
    ranks = torch.ones(2, 3)
    dist.all_reduce(ranks, group=dist.new_group())
    if dist.get_rank() == 0:
        while "held" in options and not os.path.exists(options["held"]):
            time.sleep(0.01)
        torch.save({"ranks": ranks, **net.state_dict()}, options["final"])
    print("DONE", json.dumps({"ranks": int(ranks[0, 0])}))
"""
)


def state_of(folder: ElasticFolder) -> str:
    return (folder.read(folder.status_json) or {}).get("state", "")


@pytest.mark.parametrize("shape", ["run", pytest.param("state", marks=pytest.mark.long)])
def test_all_who_have_trained_do_together_what_follows(tmp_path: Path, shape: str) -> None:
    """They evaluate in one group, in groups of their own, and the first saves the final model,
    which a new coordinator waits for too; whoever comes late does nothing of it."""
    told = {"shape": shape, "final": str(tmp_path / "final.pt"), "held": str(tmp_path / "go")}
    with ElasticStory(tmp_path, program=TAIL, max=3) as story:
        story.start_all("abc", **told)
        story.wait_for("trained")
        story.start("waits", seed=1, **told)
        assert not story.entries("finished")
        assert state_of(story.folder) != "Succeeded"
        wait_until(lambda: len(story.entries("done")) == 2, str(story))
        story.kill_coordinator()
        story.start_coordinator()
        (tmp_path / "go").touch()
        assert [story.done(name)["ranks"] for name in "abc"] == [3, 3, 3]
        story.wait_for("finished")
        wait_until(lambda: state_of(story.folder) == "Succeeded", str(story))
        story.start("late", seed=1, **told)
        for name in ("waits", "late"):
            assert story.ended(name) == 0
            assert not [one for one in story.members[name].lines if one.startswith("TAIL")]
        assert (finished_step(RunDir(story.folder.run)) is not None) == (shape == "run")
        assert (tmp_path / "final.pt").exists()
        assert not story.entries("failure")


@pytest.mark.parametrize(
    "fails", ["by a signal", pytest.param("by an error", marks=pytest.mark.long)]
)
def test_a_tail_that_fails_is_no_success(tmp_path: Path, fails: str) -> None:
    """Its collectives fail on all ranks; one failure is charged. Others come, train nothing, and
    do it again with the weights of the end."""
    told = {"shape": "run", "final": str(tmp_path / "final.pt")}
    with ElasticStory(tmp_path, program=TAIL, max=2) as story:
        story.start_all("ab", fails=fails, **told)
        assert all(story.ended(name) != 0 for name in "ab")
        failure = story.wait_for("failure")
        assert "what follows the training" in failure["reason"]
        assert len(story.entries("failure")) == 1
        assert finished_step(RunDir(story.folder.run)) is None
        assert state_of(story.folder) != "Succeeded"
        story.start_all("cd", seed=1, **told)
        assert all(story.ended(name, limit_s=30) == 0 for name in "cd")
        assert not story.steps("c")
        story.wait_for("finished")
        assert finished_step(RunDir(story.folder.run)) is not None
        if fails == "by a signal":
            assert -signal.SIGKILL in [story.members[name].wait() for name in "ab"]
