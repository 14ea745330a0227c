"""Elastic runs around loops that fetch their own batches, and what cannot be elastic."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elasticstory import ElasticStory

from hydroslurm.elastic.folder import ELASTIC_ENV
from hydroslurm.errors import UsageError
from hydroslurm.integrations.framework_run import FrameworkRun

STEPS = """
    import json, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import hydroslurm

    class Net(torch.nn.Linear):
        scale = 1.0

        def forward(self, x):
            return self.scale * super().forward(x)

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    net = Net(8, 1)
    model = DistributedDataParallel(net)
    first = torch.optim.SGD([net.weight], lr=0.01)
    second = torch.optim.SGD([net.bias], lr=0.01)
    with hydroslurm.Run(model=model, optimizer=first, elastic=True, every_s=0) as run:
        run.register("second", second)
        for step in run.steps(60):
            if step == 3:
                net.scale = 0.5  # who comes later has it from the others
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            net.zero_grad()
            loss.backward()
            first.step()
            second.step()
            print("STEP", json.dumps({
                "step": step, "size": dist.get_world_size(), "at_s": time.monotonic(),
            }))
            time.sleep(options["step_s"])
    weights = [value.item() for value in net.weight[0]] + [net.bias.item()]
    print("DONE", json.dumps({"weights": weights}))
"""


def test_ranks_count_alike_where_nobody_knows_their_samples(tmp_path: Path) -> None:
    """run.steps(): the gradient is the mean over the ranks, whatever the size, and a death changes
    nothing that any optimizer steps."""
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    with (
        ElasticStory(tmp_path / "alone", program=STEPS, max=1) as alone,
        ElasticStory(tmp_path / "together", program=STEPS, max=3) as story,
    ):
        alone.start("x", step_s=0.0)
        story.start_all("ab", step_s=0.05)
        story.wait_for_step("a", size=2, times=5)
        story.start("c", step_s=0.05)
        story.wait_for_step("a", size=3)
        story.signal("b", signal.SIGKILL)
        ends = [story.done(name)["weights"] for name in "ac"]
        assert ends[0] == ends[1], story
        assert ends[0] == pytest.approx(alone.done("x")["weights"], rel=1e-4, abs=1e-5)


VARIABLES = """
    import json, os, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import hydroslurm

    class Meter:
        count = 0

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    meter, best = Meter(), 9.0
    ema = {name: one.detach().clone() for name, one in model.named_parameters()}
    with hydroslurm.Run(model=model, optimizer=optimizer, elastic=True, every_s=0) as run:
        for step in run.steps(40):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            if step == options.get("dies_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            for name, one in model.named_parameters():
                ema[name].lerp_(one.detach(), 0.1)
            meter.count, best = meter.count + 1, min(best, loss.item())
            print("STEP", json.dumps({
                "step": step, "size": dist.get_world_size(), "at_s": time.monotonic(),
                "kept": [meter.count, best, ema["module.weight"].tolist()],
            }))
            time.sleep(options["step_s"])
"""


def test_what_a_loop_keeps_in_variables(tmp_path: Path) -> None:
    """Who comes later has it from the others. A step that fails and is trained again counts twice
    there, which is said."""
    with ElasticStory(tmp_path, program=VARIABLES, max=3) as story:
        story.start("a", step_s=0.05)
        story.start("b", step_s=0.05, dies_at=30)
        story.wait_for_step("a", size=2, times=5)
        story.start("c", step_s=0.05)
        assert story.ended("a") == story.ended("c") == 0, story
        kept = [{one["step"]: one["kept"] for one in story.steps(name)} for name in "ac"]
        assert 1 < len(kept[1]) < len(kept[0])
        assert all(kept[0][step] == kept[1][step] for step in kept[1]), story
        assert kept[0][29][0] == 30
        for name in "ac":
            line = story.members[name].expect("hydroslurm: step 30 is trained again")
            assert "it may count twice in " in line
            assert all(one in line for one in ("meter.count", "best", "ema"))


def test_a_framework_is_refused_in_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members would each train alone, without a word."""
    monkeypatch.setenv(ELASTIC_ENV, str(tmp_path))
    with pytest.raises(UsageError, match=r"FrameworkRun trains with a fixed .*engine: restart"):
        FrameworkRun("lightning", dict)
