"""``hydroslurm scale``: how many members an elastic job has; and its part of ``describe``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydroslurm.cli.shared import Which, echo, moment
from hydroslurm.cli.status import size_line, sizes
from hydroslurm.core.files import clean
from hydroslurm.errors import UntrustedFile

if TYPE_CHECKING:
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.slurm.values import Job

_CHANGED = (
    "generation", "suspended", "paused", "continued", "wanted", "trained", "finished", "gave_up",
)  # fmt: skip
_CHANGES = 12
"""So many changes are listed; the rest is counted."""
_SILENT_S = 15.0
"""A coordinator writes its status every second; clocks of two nodes may be this far apart."""


def scale(
    which: Which,
    size: Annotated[int, typer.Argument(help="How many members are wanted.")],
    leave: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEMBER",
            help="This member leaves first, as describe names it; may be repeated. Default: the "
            "newest.",
        ),
    ] = None,
) -> None:
    """Change how many members an elastic job has.

    Those that train go on meanwhile.
    """
    from hydroslurm.elastic import control
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.errors import UsageError
    from hydroslurm.jobs.control.view import locate
    from hydroslurm.slurm.client import open_client

    run, _ = locate(open_client(), which)
    folder = ElasticFolder(run=run.root)
    if not folder.root.is_dir():
        raise UsageError(
            f"job {which} is not elastic, so its size is fixed: give its spec an `elastic:` "
            "section and submit it again"
        )
    answer = control.scale(folder, size, leave=leave or ())
    echo(f"{which}: {answer.message}; {sizes(answer.status)}")


def elastic_lines(run: RunDir, slurm: Job | None) -> list[str]:
    """What describe prints about the members of an elastic job, and their changes. ``slurm``: its
    coordinator's job, None where Slurm has none."""
    from hydroslurm.elastic.folder import ElasticFolder

    folder = ElasticFolder(run=run.root)
    status = folder.read(folder.status_json)
    entries = list(folder.ledger())
    if status is None:
        lines = ["Members:      its coordinator has not begun yet"]
    else:
        pace = f", {status['samples_per_s']:.1f} samples/s" if status["samples_per_s"] else ""
        lines = [
            f"Members:      {sizes(status)}",
            f"Generation:   {status['generation']}, {status['state']}, step {status['step']}{pace}",
            f"Engine:       {clean(status['engine'])}",
            *(f"  {clean(_member_line(one))}" for one in status["members"]),
            *_silence_lines(status, slurm),
        ]
    lines += _taken_lines(entries)
    changes = [one for one in entries if one["kind"] in _CHANGED]
    restarts = status is not None and status["engine"] == "restart"
    resumed = {one["generation"]: one for one in entries if one["kind"] == "resumed"}
    more = f"; {len(changes) - _CHANGES} before these" if len(changes) > _CHANGES else ""
    lines.append(f"Changes:      {len(changes) or 'none yet'}{more}")
    for one in changes[-_CHANGES:]:
        cost = resumed.get(one.get("generation")) if restarts else one
        lines.append(f"  {clean(_change_line(one, cost))}")
    return lines


def member_lines(run: RunDir, name: str) -> list[str]:
    """What describe and status print about the job of one member of an elastic run."""
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.jobs.control.view import submission_of

    folder = ElasticFolder(run=run.root)
    asked = submission_of(run)
    more = "" if asked is None else f"; hydroslurm describe {asked.job_id}"
    try:
        now = _member_now(folder, name)
    except (OSError, UntrustedFile) as error:
        return [f"Member:       {name} of {run.root}, which cannot be read: {error}"]
    return [
        f"Member:       {clean(now)}",
        f"Of:           {run.root}{more}",
        f"              {clean(size_line(run) or 'its coordinator has not begun yet')}",
    ]


def _member_now(folder: ElasticFolder, name: str) -> str:
    status = folder.read(folder.status_json) or {}
    for one in status.get("members", ()):
        if one["id"] == name:
            return f"{_member_line(one)}, since {moment(int(one['since_epoch_s'] * 1e9))}"
    gone = [one for one in folder.ledger() if one.get("member") == name and one.get("reason")]
    if gone:
        return (
            f"{name}  is none any more since {moment(gone[-1]['epoch_ns'])}: {gone[-1]['reason']}"
        )
    if status.get("state") in ("Succeeded", "Failed"):
        return f"{name}  has ended with the run"
    return f"{name}  has not joined yet: it waits in Slurm, or its script is still starting"


def _member_line(member: dict[str, Any]) -> str:
    ranks = f"{member['ranks']} rank{'' if member['ranks'] == 1 else 's'}"
    reason = f" ({member['reason']})" if member.get("reason") else ""
    return f"{member['id']}  {member['state']} on {member['node'] or '?'}, {ranks}{reason}"


def _silence_lines(status: dict[str, Any], slurm: Job | None) -> list[str]:
    """What was written last is taken for what is, unless its writer is gone."""
    silent_s = time.time() - status["written_epoch_s"]
    if silent_s < _SILENT_S or status["state"] in ("Succeeded", "Failed"):
        return []
    own = status["coordinator"]
    return [
        f"Coordinator:  has written nothing for {silent_s:,.0f} s (job {own['job_id']} on "
        f"{clean(own['node'])}): the above is its state then, and no member joins or leaves until "
        f"it is back: {_what_of(slurm)}"
    ]


def _what_of(slurm: Job | None) -> str:
    """What has become of a coordinator that is silent, as far as Slurm knows."""
    if slurm is None or slurm.state.has_ended:
        return "its job has ended, and nothing starts another one"
    if slurm.state.is_waiting:
        return "its job waits in Slurm, and starts another one when it has its node again"
    state = slurm.state.value
    return f"its job is {state}; it continues when its process or its node does"


def _taken_lines(entries: list[dict[str, Any]]) -> list[str]:
    ended = [one for one in entries if one["kind"] == "ended"]
    taken = sum(one["how"] == "preemption" for one in ended)
    failed = [one for one in ended if one["how"] == "failure"]
    lines = [f"Ended:        {taken} preempted, {len(failed)} failed"]
    for one in failed[-3:]:
        text = f"{one['member']} on {one['node'] or '?'}: {one['reason']}"
        lines.append(f"  {clean(text)}")
    excluded: dict[str, str] = {}
    for one in entries:
        if one["kind"] == "excluded":
            excluded[one["node"]] = one["reason"]
        elif one["kind"] == "wanted" and not str(one.get("by")).startswith("autoscaler"):
            excluded.clear()
    lines += [f"Excluded:     node {clean(node)}: {clean(why)}" for node, why in excluded.items()]
    if excluded:
        lines.append("              `hydroslurm scale` takes them back, also with the same size")
    refused = [one for one in entries if one["kind"] in ("refused", "submitted")]
    if refused and refused[-1]["kind"] == "refused":
        lines.append(f"Waits:        {clean(refused[-1]['reason'])}")
    return lines


def _change_line(one: dict[str, Any], cost: dict[str, Any] | None) -> str:
    """``cost``: what has told how long the training paused; None: nobody has yet, or can."""
    at = moment(one["epoch_ns"])
    if one["kind"] == "wanted":
        by = f" by {one['by']}" if one.get("by") else ""
        return f"{at}  {one['size']} members are wanted{by}"
    if one["kind"] == "suspended":
        return f"{at}  suspended: {len(one['members'])} members are left of at least {one['min']}"
    if one["kind"] in ("paused", "continued"):
        waits = ": the others wait for it" if one["kind"] == "paused" else ""
        return f"{at}  {one['member']} on {one['node'] or '?'} was {one['kind']}{waits}"
    if one["kind"] == "trained":
        return f"{at}  trained to step {one['step']}; what follows the training is under way"
    if one["kind"] == "finished":
        return f"{at}  finished at step {one['step']}"
    if one["kind"] == "gave_up":
        return f"{at}  failed: {one['reason']}"
    parts = [f"generation {one['generation']} of {len(one['members'])} at step {one['step']}"]
    parts += [
        f"{word} {', '.join(one[name])}"
        for name, word in (("joined", "joined:"), ("left", "left:"), ("lost", "lost:"))
        if one.get(name)
    ]
    if cost is not None:
        parts.append(f"paused {cost['pause_s']:.2f} s, {cost['steps_lost']} steps lost")
    return f"{at}  {'; '.join(parts)} ({one['cause']})"
