"""``hydroslurm autoscale``: what autoscaling would have done, by what was observed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.status import echo

if TYPE_CHECKING:
    from hydroslurm.elastic.autoscale_rules import AutoscalePolicy


def autoscale(
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Of an elastic run.")],
    spec: Annotated[
        Path | None, typer.Option(help="A job spec with other rules. Default: the run's own.")
    ] = None,
) -> None:
    """Show each change of size that the rules of elastic.autoscale ask for, with its reason, over
    the observations that the run has recorded. Changes nothing."""
    from hydroslurm.elastic.autoscale import replay
    from hydroslurm.elastic.autoscaler import read_observations
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.errors import UsageError

    folder = ElasticFolder(run=run.absolute())
    policy = folder.options().autoscale if spec is None else _rules_of(spec)
    if policy is None:
        raise UsageError(
            f"{spec or folder.options_json} has no rules: write them as elastic.autoscale in the "
            "job spec, and give it with --spec"
        )
    observations = read_observations(folder)
    if not observations:
        raise UsageError(
            f"{folder.observations_jsonl} has no observations. The coordinator records them for a "
            "run with elastic.autoscale; with dryRun: true it does nothing else"
        )
    last = None
    for seen, decision in replay(policy, observations):
        if decision != last and decision.size != seen.wanted:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.epoch_s))
            echo(f"{moment}  {seen.wanted} -> {decision.size}  {decision.reason}")
        last = decision
    assert last is not None
    echo(f"now: {observations[-1].wanted} -> {last.size}  {last.reason}")


def _rules_of(path: Path) -> AutoscalePolicy | None:
    from hydroslurm.elastic.autoscale_rules import AutoscalePolicy
    from hydroslurm.jobs.spec.reading import load

    elastic = load(path).job.elastic
    if elastic is None or elastic.autoscale is None:
        return None
    return AutoscalePolicy.from_json(elastic.autoscale.rules(), least=elastic.min, most=elastic.max)
