"""``hydroslurm scale``: an elastic job's number of members; and its part of ``describe``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydroslurm.cli.shared import Which, echo
from hydroslurm.core.files import clean, moment
from hydroslurm.errors import UntrustedFile

if TYPE_CHECKING:
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.slurm.values import Job

_CHANGED = (
    "generation", "suspended", "paused", "continued", "wanted", "trained", "finished", "gave_up",
)  # fmt: skip
_CHANGES = 12
"""How many changes are listed; the rest is counted."""
_SILENT_S = 15.0
"""A coordinator writes its status every second; the clocks of two nodes may differ this much."""


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
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.elastic.messages import scale as ask_to_scale
    from hydroslurm.errors import UsageError
    from hydroslurm.observe.find import locate
    from hydroslurm.slurm.client import open_client

    run, _ = locate(open_client(), which)
    folder = ElasticFolder(run=run.root)
    if not folder.root.is_dir():
        raise UsageError(
            f"job {which} is not elastic, so its size is fixed: give its spec an `elastic:` "
            "section and submit it again"
        )
    answer = ask_to_scale(folder, size, leave=leave or ())
    echo(f"{which}: {answer['message']}; {sizes(answer['status'])}")


def size_line(run: RunDir) -> str | None:
    """Say how many members an elastic job has, or why that is not believed; None for others."""
    from hydroslurm.elastic.folder import ElasticFolder

    folder = ElasticFolder(run=run.root)
    try:
        status = folder.read(folder.status_json)
    except UntrustedFile as error:
        return str(error)
    if status is None:
        return None
    return (
        f"{status['state']}, generation {status['generation']}, step {status['step']}: "
        f"{sizes(status)}"
    )


def sizes(status: Mapping[str, Any]) -> str:
    """Say how many members an elastic job has, wants and may have."""
    return (
        f"{status['size']} train, {status['wanted']} are wanted, {status['min']} to "
        f"{status['max']} are allowed"
    )


def elastic_lines(run: RunDir, slurm: Job | None) -> list[str]:
    """Return describe's lines about an elastic job's members and changes. ``slurm``: its
    coordinator's job; None if Slurm has none."""
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
            *(f"  {clean(_member_line(member))}" for member in status["members"]),
            *_silence_lines(status, slurm),
        ]
    lines += _taken_lines(entries)
    changes = [e for e in entries if e["kind"] in _CHANGED]
    restarts = status is not None and status["engine"] == "restart"
    resumed = {e["generation"]: e for e in entries if e["kind"] == "resumed"}
    more = f"; {len(changes) - _CHANGES} before these" if len(changes) > _CHANGES else ""
    lines.append(f"Changes:      {len(changes) or 'none yet'}{more}")
    for change in changes[-_CHANGES:]:
        cost = resumed.get(change.get("generation")) if restarts else change
        lines.append(f"  {clean(_change_line(change, cost))}")
    return lines


def member_lines(run: RunDir, name: str) -> list[str]:
    """Return describe's and status's lines about the job of one member of an elastic run."""
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.observe.job import JobView

    folder = ElasticFolder(run=run.root)
    asked = JobView(run, None).submission
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
    for member in status.get("members", ()):
        if member["id"] == name:
            return f"{_member_line(member)}, since {moment(int(member['since_epoch_s'] * 1e9))}"
    gone = [e for e in folder.ledger() if e.get("member") == name and e.get("reason")]
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
    """Warn if the status's writer is gone; otherwise its last status counts as current."""
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
    """Say what became of a silent coordinator, as far as Slurm knows."""
    if slurm is None or slurm.state.has_ended:
        return "its job has ended, and nothing starts another one"
    if slurm.state.is_waiting:
        return "its job waits in Slurm, and starts another one when it has its node again"
    state = slurm.state.value
    return f"its job is {state}; it continues when its process or its node does"


def _taken_lines(entries: list[dict[str, Any]]) -> list[str]:
    ended = [e for e in entries if e["kind"] == "ended"]
    taken = sum(e["how"] == "preemption" for e in ended)
    failed = [e for e in ended if e["how"] == "failure"]
    lines = [f"Ended:        {taken} preempted, {len(failed)} failed"]
    for e in failed[-3:]:
        text = f"{e['member']} on {e['node'] or '?'}: {e['reason']}"
        lines.append(f"  {clean(text)}")
    excluded: dict[str, str] = {}
    for e in entries:
        if e["kind"] == "excluded":
            excluded[e["node"]] = e["reason"]
        elif e["kind"] == "wanted" and not str(e.get("by")).startswith("autoscaler"):
            excluded.clear()
    lines += [f"Excluded:     node {clean(node)}: {clean(why)}" for node, why in excluded.items()]
    if excluded:
        lines.append("              `hydroslurm scale` takes them back, also with the same size")
    refused = [e for e in entries if e["kind"] in ("refused", "submitted")]
    if refused and refused[-1]["kind"] == "refused":
        lines.append(f"Waits:        {clean(refused[-1]['reason'])}")
    return lines


def _change_line(e: dict[str, Any], cost: dict[str, Any] | None) -> str:
    """``cost``: the entry that says how long the training paused; None: unknown."""
    at = moment(e["epoch_ns"])
    if e["kind"] == "wanted":
        by = f" by {e['by']}" if e.get("by") else ""
        return f"{at}  {e['size']} members are wanted{by}"
    if e["kind"] == "suspended":
        return f"{at}  suspended: {len(e['members'])} members are left of at least {e['min']}"
    if e["kind"] in ("paused", "continued"):
        waits = ": the others wait for it" if e["kind"] == "paused" else ""
        return f"{at}  {e['member']} on {e['node'] or '?'} was {e['kind']}{waits}"
    if e["kind"] == "trained":
        return f"{at}  trained to step {e['step']}; what follows the training is under way"
    if e["kind"] == "finished":
        return f"{at}  finished at step {e['step']}"
    if e["kind"] == "gave_up":
        return f"{at}  failed: {e['reason']}"
    parts = [f"generation {e['generation']} of {len(e['members'])} at step {e['step']}"]
    parts += [
        f"{word} {', '.join(e[name])}"
        for name, word in (("joined", "joined:"), ("left", "left:"), ("lost", "lost:"))
        if e.get(name)
    ]
    if cost is not None:
        parts.append(f"paused {cost['pause_s']:.2f} s, {cost['steps_lost']} steps lost")
    return f"{at}  {'; '.join(parts)} ({e['cause']})"
