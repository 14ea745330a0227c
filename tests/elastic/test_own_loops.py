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


def test_a_framework_is_refused_in_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members would each train alone, without a word."""
    monkeypatch.setenv(ELASTIC_ENV, str(tmp_path))
    with pytest.raises(UsageError, match=r"FrameworkRun trains with a fixed .*engine: restart"):
        FrameworkRun("lightning", dict)
