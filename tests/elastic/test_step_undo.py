"""A step that a death cuts off is undone wholly: whatever the script keeps beside its weights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elasticstory import START, ElasticStory

KEEPS_MUCH = (
    START
    + """
    import copy, signal
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    torch.manual_seed(0)

    class Net(nn.Module):  # with a key encoder as in MoCo
        def __init__(self):
            super().__init__()
            self.query, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("mean", torch.zeros(4))
            self.forwards, self.queue, self.last = 0, [], {}

        def forward(self, x):
            self.forwards += 1
            self.queue.append(float(self.forwards))
            for one, other in zip(self.key.parameters(), self.query.parameters()):
                one.data = one.data * 0.9 + other.data * 0.1
            out = self.norm(self.query(x))
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            self.last["forward"] = self.forwards
            return out + 0.1 * self.key(x)

    class Shadow:
        def __init__(self, net):
            self.shadow = {name: one.detach().clone() for name, one in net.named_parameters()}
            self.updates = 0

        def update(self, net):
            self.updates += 1
            for name, one in net.named_parameters():
                self.shadow[name].mul_(0.9).add_(one.detach(), alpha=0.1)

        def state_dict(self):
            return {"shadow": self.shadow, "updates": self.updates}

        def load_state_dict(self, state):
            self.shadow, self.updates = state["shadow"], state["updates"]

    def die(place):
        now = place, run.step, dist.get_rank(), run.generation
        if now == (options["place"], options["at"], 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD([net.norm.weight, *net.query.parameters()], lr=0.1, momentum=0.9)
    second = torch.optim.SGD([net.norm.bias], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_pre_hook(lambda *_: die("in step"))
    swa, teacher, shadow = AveragedModel(net), copy.deepcopy(net).requires_grad_(False), Shadow(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    extra = {"swa": swa, "ema": average, "teacher": teacher, "shadow": shadow}
    with hydroslurm.Run(
        model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, elastic=True, every_s=0
    ) as run:
        own = Shadow(net)
        run.register("own", own, per_rank=True)
        run.register("second", second)
        for step in run.steps(options["steps"]):
            print("STEP", json.dumps({"step": step, "size": dist.get_world_size()}), flush=True)
            shadow.update(net)
            own.update(net)
            scheduler.step()
            for part in range(1 + options["parts"]):
                drawn = torch.Generator().manual_seed(2 * step + part)
                x = torch.randn(4, 8, generator=drawn)
                if part == options["parts"]:
                    die("before backward")
                loss = (model(x) - x[:, :4]).square().mean()
                net.zero_grad()
                loss.backward()
                if part == options["parts"]:
                    die("before step")
                optimizer.step()
                second.step()
                with torch.no_grad():
                    if options["clips"]:
                        net.query.weight.clamp_(-0.3, 0.3).mul_(0.99)
            swa.update_parameters(net)
            average.update_parameters(net)
            for one, other in zip(teacher.parameters(), net.parameters()):
                one.data.mul_(0.9).add_(other.data, alpha=0.1)
            time.sleep(0.02)
    things = {"net": net, "swa": swa, "ema": average, "teacher": teacher, "optimizer": optimizer}
    things |= {"shadow": shadow, "scheduler": scheduler, "own": own, "second": second}

    def numbers(node):
        if isinstance(node, torch.Tensor):
            return node.double().flatten().tolist()
        if isinstance(node, dict):
            return [one for value in node.values() for one in numbers(value)]
        if isinstance(node, (list, tuple)):
            return [one for value in node for one in numbers(value)]
        return [node] if isinstance(node, (int, float)) else []

    print("DONE", json.dumps({
        **{name: numbers(one.state_dict()) for name, one in things.items()},
        "attributes": [net.forwards, *net.queue, *net.last.values()],
    }))
"""
)
"""Each rank trains the same batches, so that the result does not depend on their number."""


@pytest.mark.parametrize(
    ("place", "parts", "clips", "at", "comes"),
    [
        pytest.param("before backward", 0, False, 5, False, marks=pytest.mark.long),
        pytest.param("before step", 0, True, 5, False, marks=pytest.mark.long),
        ("in step", 0, True, 5, True),
        ("before backward", 2, False, 0, False),
        pytest.param("before step", 2, False, 5, False, marks=pytest.mark.long),
    ],
)
def test_nothing_of_a_dropped_step_is_left(
    tmp_path: Path, place: str, parts: int, clips: bool, at: int, comes: bool
) -> None:
    """Averages, teachers, attributes, buffers, schedulers, several optimizers, and the weights of a
    step with several backwards: all are at the end as in a run in which nobody died; so they are on
    one that comes later, but for what is each rank's own. The gradient is the mean over the ranks,
    whatever the size."""
    told = {"parts": parts, "clips": clips, "at": at, "steps": 150 if comes else 12}
    (tmp_path / "alone").mkdir()
    with (
        ElasticStory(tmp_path / "alone", program=KEEPS_MUCH, max=1) as alone,
        ElasticStory(tmp_path / "together", program=KEEPS_MUCH, max=3) as story,
    ):
        alone.start("x", place="", **told)
        story.start_all("abc", place=place, **told)
        dead = story.wait_for("failure")["member"]
        if comes:
            story.start("d", place=place, **told)
            story.wait_for_step("d", size=3)
        ends = {name: story.done(name) for name in story.members if name != dead}
        wanted = alone.done("x")
        assert story.members[dead].wait() == -signal.SIGKILL
        if comes:
            ends["d"]["own"] = wanted["own"]
        for member, end in ends.items():
            for name, numbers in wanted.items():
                same = pytest.approx(numbers, rel=1e-4, abs=1e-6)
                assert end[name] == same, (member, name, str(story))
