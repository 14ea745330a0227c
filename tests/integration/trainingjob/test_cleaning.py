"""Each cleanPolicy is carried out, also when the supervisor was killed. On a real Slurm."""

from __future__ import annotations

import pytest
from integration.trainingjob.scene import Scene

pytestmark = pytest.mark.slurm


@pytest.mark.scene("clean_Unfinished_one")
def test_unfinished_ends_those_that_still_run(scene: Scene) -> None:
    """A supervisor that is started again finds the attempt that runs; after its master has ended,
    those that still run are ended, and their scratch folders stay."""
    assert scene.final_condition().type == "Succeeded"
    assert len(scene.attempts) == 1
    assert "came to its own end" not in scene.printed(1)
    assert scene.seen["scratch"]


@pytest.mark.scene("clean_None_one")
def test_none_lets_the_others_come_to_their_own_end(scene: Scene) -> None:
    """The worker runs on behind a master that has succeeded, as long as it likes."""
    assert scene.seen["worker lived"]
    assert "came to its own end" in scene.printed(1)
    assert scene.final_condition().type == "Succeeded"
    assert scene.seen["scratch"]


@pytest.mark.parametrize(
    ("keeps_scratch"),
    [
        pytest.param(True, marks=pytest.mark.scene("clean_Unfinished_all"), id="Unfinished"),
        pytest.param(False, marks=pytest.mark.scene("clean_All_all"), id="All"),
    ],
)
def test_a_job_whose_shell_is_killed_too_is_cleaned_behind(
    scene: Scene, keeps_scratch: bool
) -> None:
    """Slurm ends the job and all its ranks; the janitor says so and removes what is to go."""
    verdict = scene.final_condition()
    assert (verdict.type, verdict.reason) == ("Failed", "SupervisorLost")
    assert "came to its own end" not in scene.printed(1)
    assert scene.seen["scratch"] is keeps_scratch
