"""Horovod's shape: State, commit, and a function that is called again after each change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elasticstory import ElasticStory
from processes import wait_until

from hydroslurm.core.exitcodes import RUN_AGAIN

TRAIN = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import hydroslurm

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(options.get("seed", 0))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = hydroslurm.elastic.State(model=model, optimizer=optimizer, batch=0, sizes=[])

    def reset():
        print("RESET", dist.get_world_size())

    state.register_reset_callbacks([reset])

    @hydroslurm.elastic.run
    def train(state):
        total = torch.zeros(1)
        for state.batch in range(state.batch, options["batches"]):
            generator = torch.Generator().manual_seed(state.batch * 100 + dist.get_rank())
            x = torch.randn(4, 8, generator=generator)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(total)  # a collective of the script's own, which raises
            optimizer.step()
            print("STEP", json.dumps({
                "step": state.batch, "size": dist.get_world_size(), "at_s": time.monotonic(),
            }))
            time.sleep(0.0 if os.path.exists("../hurry") else 0.2)
            state.batch += 1
            state.commit()
        return state.batch

    print("RETURNED", train(state))
    weights = sum(value.detach().double().sum() for value in net.parameters())
    print("DONE", json.dumps({"weights": weights.item()}))
"""


@pytest.mark.parametrize("signo", [signal.SIGTERM, signal.SIGKILL])
def test_a_state_goes_on_with_who_is_left(tmp_path: Path, signo: int) -> None:
    """A member goes, another comes: the rest have the same weights, and all batches were trained;
    a collective of the script's own may raise meanwhile."""
    story = ElasticStory(tmp_path, program=TRAIN, max=3)
    try:
        for name in "abc":
            story.start(name, batches=150)
        story.wait_for_step("a", size=3)
        story.signal("b", signo)
        story.wait_for_step("a", size=2)
        assert story.members["b"].wait() == (RUN_AGAIN if signo == signal.SIGTERM else -signo)
        story.start("d", batches=150, seed=5)
        story.wait_for_step("d", size=3)
        (tmp_path / "hurry").touch()
        ends = [story.done(name) for name in "acd"]
        assert ends[0] == ends[1] == ends[2], story
        assert {one["step"] for one in story.steps("a")} == set(range(150))
        wait_until(lambda: "RETURNED 150" in story.members["a"].lines, str(story))
        assert story.members["a"].lines.count("RESET 3") == 2
    finally:
        story.close()
