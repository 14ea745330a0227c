"""Horovod's shape: State, commit, and a function that is called again after each change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elasticstory import SAMPLES, START, ElasticStory, times_seen

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.runtime import client

AS_HOROVOD_HAS_IT = (
    START
    + """
    import signal

    hydroslurm.install(run_dir="events", alone=True)

    def handler(signo, frame):
        print("THE SCRIPT'S OWN HANDLER")

    signal.signal(signal.SIGTERM, handler)
    torch.manual_seed(options.get("seed", 0))
    sampler = ResumableSampler(data)
    workers = 1 if options["gives_loader"] else 0
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    net = nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    @hydroslurm.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 4):
            if not options["gives_loader"]:
                sampler.set_epoch(state.epoch)
            for x, y, ids in state.loader if options["gives_loader"] else loader:
                if options.get("at_top"):  # as in Horovod's ImageNet example
                    (state.commit if state.batch % 10 == 0 else state.check_host_updates)()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                dist.all_reduce(torch.zeros(1))  # a collective of the script's own, which raises
                if (state.batch + 1) % options.get("window", 1) == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                print("STEP", json.dumps({
                    "step": state.batch, "epoch": state.epoch, "size": dist.get_world_size(),
                    "ids": ids.tolist(), "generation": 0, "lr": optimizer.param_groups[0]["lr"],
                }))
                time.sleep(0.0 if os.path.exists(options["hurry"]) else 0.1)
                state.batch += 1
                if options.get("at_top"):
                    continue
                if state.batch % 50 == 0:
                    state.commit()
                elif options["checks"]:
                    state.check_host_updates()

    def on_state_reset():
        print("RESET", dist.get_world_size())
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * dist.get_world_size()

    try:
        hydroslurm.elastic.State(model=model, loader=DataLoader(data))
    except hydroslurm.errors.UsageError as error:
        print("REFUSED", error)
    given = {"loader": loader} if options["gives_loader"] else {"sampler": sampler, "epoch": 0}
    state = hydroslurm.elastic.State(model=model, optimizer=optimizer, batch=0, **given)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    print("RETURNED", signal.getsignal(signal.SIGTERM) is handler)
    try:
        next(iter(getattr(state, "loader", ())), None)
    except hydroslurm.errors.UsageError as error:
        print("REFUSED", error)
    weights = sum(value.detach().double().sum() for value in net.parameters())
    lr = optimizer.param_groups[0]["lr"]
    print("DONE", json.dumps({"weights": weights.item(), "lr": lr, "batch": state.batch}))
"""
)


@pytest.mark.parametrize(
    ("at_top", "window", "gives_loader"),
    [
        (False, 4, True),
        pytest.param(False, 1, True, marks=pytest.mark.long),
        pytest.param(True, 1, True, marks=pytest.mark.long),
        pytest.param(True, 1, False, marks=pytest.mark.long),
    ],
)
def test_a_script_of_horovods_shape(
    tmp_path: Path, at_top: bool, window: int, gives_loader: bool
) -> None:
    """Commits now and then, a check at each batch: who leaves and who comes costs no batch, and
    happens at the next check; a death costs those since the last copy, at the next step of the
    optimizer. So it is where a commit comes before a batch is trained, or while gradients are
    accumulated. The learning rate follows, and each epoch has all samples. SIGTERM ends a
    pause and calls the script's handler too, which is restored afterwards; the script's own
    collectives may raise."""
    told = {"hurry": str(tmp_path / "hurry"), "checks": True, "gives_loader": gives_loader}
    told |= {"at_top": at_top, "window": window}
    with ElasticStory(tmp_path, program=AS_HOROVOD_HAS_IT, max=3) as story:
        story.start_all("abc", **told)
        story.wait_for_step("a", size=3)
        assert client.pause(story.members["b"].pid).done
        story.signal("b", signal.SIGTERM)
        assert story.ended("b") == RUN_AGAIN
        story.start("d", seed=5, **told)
        story.wait_for_step("d", size=3)
        batches = [one["step"] for one in story.steps("a")]
        assert at_top or batches == list(range(len(batches))), story
        assert story.members["b"].lines.count("THE SCRIPT'S OWN HANDLER") == 1
        story.signal("c", signal.SIGKILL)
        story.wait_for_step("a", size=2, times=4)
        (tmp_path / "hurry").touch()
        ends = [story.done(name) for name in "ad"]
        assert ends[0] == ends[1], story
        for one in story.steps("a"):
            assert one["lr"] == pytest.approx(0.001 * one["size"])
        for epoch, seen in times_seen(*story.all_steps()).items():
            assert set(seen) == set(range(SAMPLES)), epoch
        assert story.steps("a")[-1]["step"] + 1 == ends[0]["batch"]
        assert "RETURNED True" in story.members["a"].lines
        resets = [line for line in story.members["a"].lines if line.startswith("RESET")]
        assert resets[-3:] == ["RESET 2", "RESET 3", "RESET 2"]
        plain, *over = [line for line in story.members["d"].lines if line[:7] == "REFUSED"]
        assert "a DataLoader whose sampler is a SequentialSampler" in plain
        assert "Give it sampler=hydroslurm.data.ResumableSampler(dataset)" in plain
        assert ["epoch 3 is over, and state.epoch says 3 still" in one for one in over] == (
            [True] * gives_loader
        )


@pytest.mark.long
def test_a_death_is_no_matter_of_the_next_commit(tmp_path: Path) -> None:
    """Without checks in between: the optimizer does not step by what is no gradient, and the rest
    meet at once."""
    told = {"hurry": str(tmp_path / "hurry"), "checks": False, "gives_loader": False}
    with ElasticStory(tmp_path, program=AS_HOROVOD_HAS_IT, max=2) as story:
        story.start_all("ab", **told)
        story.wait_for_step("a", size=2)
        story.signal("b", signal.SIGKILL)
        story.wait_for_step("a", size=1)
        (tmp_path / "hurry").touch()
        story.done("a")
        assert max(one["step"] for one in story.steps("a") if one["size"] == 2) < 40, story
