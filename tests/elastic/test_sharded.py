"""Members that shard the model over their ranks, and replicate it over members (HSDP)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from elasticstory import BEGIN, START, ElasticStory
from torch import nn

from hydroslurm.core.exitcodes import RUN_AGAIN

BATCHES = 250
SHARDED = (
    BEGIN
    + """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store, rank = dist.FileStore(options["store"], 2), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(options.get("seed", 0))
    net = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 1))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = hydroslurm.elastic.State(model=net, optimizer=optimizer, batch=0)

    @hydroslurm.elastic.run
    def train(state):
        while state.batch < options["batches"]:
            x = torch.randn(24, 8, generator=torch.Generator().manual_seed(state.batch))
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
            loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            if options.get("sums"):
                dist.all_reduce(loss.detach())  # of the script's own, which raises
            optimizer.step()
            print("STEP", json.dumps({"step": state.batch, "size": dist.get_world_size()}))
            time.sleep(0.0 if os.path.exists(options["hurry"]) else 0.1)
            if state.batch == 100 and dist.get_rank() // 2 == 0:
                group = mesh.get_group()
                dcp.save(net.state_dict(), checkpoint_id=options["saved"], process_group=group)
            state.batch += 1
            state.commit()

    train(state)
    weights = [one.full_tensor().double().square().sum().item() for one in net.parameters()]
    print("DONE", json.dumps({"weights": weights, "node": dist.get_world_size()}))
"""
)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[ElasticStory]:
    with ElasticStory(tmp_path, program=SHARDED, max=3, gather_s=0.2) as one:
        yield one


def start(story: ElasticStory, name: str, **options: object) -> None:
    files = {file: str(story.root / file) for file in ("hurry", "saved")}
    files["store"] = str(story.root / f"store-{name}")
    for place in range(2):
        story.start(name, local=(place, 2), batches=BATCHES, **files, **options)


def undisturbed() -> list[float]:
    """What the scripts say of their weights, for a training by one process that shards nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(BATCHES):
        x = torch.randn(24, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return [one.detach().double().square().sum().item() for one in net.parameters()]


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.long)])
def test_shards_stay_while_members_change(story: ElasticStory, sums: bool) -> None:
    """One comes and leaves, of the next a rank is killed, a third one comes: the weights are those
    of a training that nothing befell, and behind it the ranks of a node have their group again."""
    import torch.distributed.checkpoint as dcp

    start(story, "a", sums=sums)
    story.wait_for_step("a.1", size=2)  # the weights are those that it begins with
    start(story, "b", sums=sums, seed=1)
    story.wait_for_step("a.1", size=4)
    story.signal("b.1", signal.SIGTERM)
    assert [story.ended("b.0"), story.ended("b.1")] == [0, RUN_AGAIN], story
    start(story, "c", sums=sums, seed=2)
    story.wait_for_step("c.0", size=4)
    story.signal("c.1", signal.SIGKILL)
    assert story.ended("c.0") == RUN_AGAIN, story
    start(story, "d", sums=sums, seed=3)
    story.wait_for_step("d.1", size=4)
    (story.root / "hurry").touch()
    ends = [story.done(f"{name}.{place}") for name in "ad" for place in range(2)]
    assert ends[0] == ends[1] == ends[2] == ends[3], story
    assert ends[0]["node"] == 2
    saved = {"0.weight": torch.zeros(17, 8)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(saved, checkpoint_id=story.root / "saved", no_dist=True)
    assert saved["0.weight"].abs().sum() > 1
    assert ends[0]["weights"] == pytest.approx(undisturbed(), rel=1e-4)
    assert {one["step"] for one in story.steps("a.0")} == set(range(BATCHES))
    changes = story.entries("generation")
    assert max(one["steps_lost"] for one in changes) <= 1
    assert [one["ranks"] for one in changes][-1] == 4


REFUSED = (
    START
    + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from hydroslurm.elastic.sharded import Shards

    mesh = init_device_mesh("cpu", (1,))
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net[0], mesh=mesh)
    for make in (
        lambda: Shards([net[0]], local_size=2),
        lambda: Shards([fully_shard(net, mesh=mesh, ignored_params={net[1].weight})], local_size=1),
        lambda: hydroslurm.Run(model=net, elastic=True),
    ):
        try:
            make()
        except hydroslurm.errors.UsageError as error:
            print("REFUSED", error)
"""
)


def test_what_cannot_be_replicated_is_refused(tmp_path: Path) -> None:
    """A mesh of other ranks than the member's, a weight that no shard has, a Run, which would save
    one rank's part: each with what to do."""
    with ElasticStory(tmp_path, program=REFUSED, max=1) as story:
        story.start("a")
        assert story.ended("a") == 0, story
        said = [line for line in story.members["a"].lines if line.startswith("REFUSED")]
        mesh, weight, run = said
        assert "one mesh of one dimension, over the 2 ranks" in mesh
        assert "1.weight belongs to no shard" in weight
        assert "say `elastic: {engine: restart}`" in run
        assert "hydroslurm.elastic.State" in run
