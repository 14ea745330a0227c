"""What a loop of the script's own keeps in an elastic run."""

from __future__ import annotations

from pathlib import Path

from elasticstory import START, ElasticStory

VARIABLES = (
    START
    + """
    import signal

    class Meter:
        count = 0

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
)


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
