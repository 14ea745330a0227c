"""The names in a checkpoint folder, and which leftovers may be removed.

step-000001234/                               committed: the only name that is ever believed
step-000001234.2/                             the same, saved again at this step: the newer one
.tmp-step-000001234.<place>.<pid>.<random>/   being written, or left by a save that was killed
.tmp-step-000001234.<place>.<pid>.<random>.joint/   the same of several ranks; the first named it
.old-step-000001234.<place>.<pid>.<random>/   being removed
.pin-step-000001234.<place>.<pid>.<random>/   empty: it is being loaded and must stay
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from hydroslurm.core.registry import place

STALE_S = 3600.0
"""A save of another node is dead after so long without a write. A live one writes a chunk every few
milliseconds, and nobody waits an hour for a hung file server."""

JOINT_STALE_S = 600.0
"""The same for a save of several ranks whose first one is known to be dead: the others may be about
to finish the commit from other machines, which takes a few calls and not minutes."""

_NAME = r"step-[0-9]{9,18}(?:\.(?:[2-9]|[1-9][0-9]{1,8}))?"
_STEP = re.compile(_NAME)
_LEFTOVER = re.compile(
    rf"\.(tmp|old|pin)-({_NAME})\.([0-9a-f]{{8}})\.([0-9]{{1,9}})\.[0-9a-f]+(\.joint)?"
)


def of_step(directory: Path, step: int, number: int = 1) -> Path:
    """``number``: 1 for the first save of this step, 2 for the next ..."""
    return directory / (f"step-{step:09d}" + (f".{number}" if number > 1 else ""))


def key_of(name: str) -> tuple[int, int] | None:
    """Step and number in the name of a committed folder; the newer checkpoint has the greater key.
    None for all other names."""
    if _STEP.fullmatch(name) is None:
        return None
    step, _, number = name.removeprefix("step-").partition(".")
    return int(step), int(number or 1)


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file: one in the checkpoint's folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def newest_number(names: Iterable[str], step: int) -> int:
    """The number of the newest save of a step among these names, 0 if there is none.

    Unfinished ones count: another thread may still commit one that it was told to give up.
    """
    found = [key_of(_unfinished_name(name) or name) for name in names]
    return max((key[1] for key in found if key is not None and key[0] == step), default=0)


def temporary(target: Path, *, joint: bool = False) -> Path:
    """A unique name for the save that becomes ``target``.

    ``joint``: for a save of several ranks; the process that chooses it sends it to the others.
    """
    path = _mine(target.parent, "tmp", target.name)
    return path.with_name(f"{path.name}.joint") if joint else path


def target_of(joint: str, step: int) -> str | None:
    """The final name of a joint save of this step in a folder of this name; None for a name that
    :func:`temporary` cannot have made."""
    match = _LEFTOVER.fullmatch(joint)
    if match is None or (match[1], match[5]) != ("tmp", ".joint"):
        return None
    key = key_of(match[2])
    return match[2] if key is not None and key[0] == step else None


def condemned(path: Path) -> Path:
    """A name for a folder while its files are removed."""
    return _mine(path.parent, "old", path.name)


def revoked(unfinished: Path) -> Path | None:
    """A new name for the folder of another process's unfinished save; None for all other names,
    including our own saves."""
    match = _LEFTOVER.fullmatch(unfinished.name)
    if match is None or match[1] != "tmp":
        return None
    if match[3] == place() and int(match[4]) == os.getpid():
        return None
    return _mine(unfinished.parent, "old", match[2])


def pin(path: Path) -> Path:
    """A name that says this process is loading a checkpoint."""
    return _mine(path.parent, "pin", path.name)


def pinned(name: str) -> str | None:
    """The checkpoint that a pin of this name keeps; None for all other names."""
    match = _LEFTOVER.fullmatch(name)
    return match[2] if match and match[1] == "pin" else None


def is_leftover(path: Path, *, now_epoch_s: float) -> bool:
    """Whether nobody is working on a ``.tmp-``, ``.old-`` or ``.pin-`` folder any more.

    Of a process on this machine, its pid tells; of one elsewhere, the age of the folder. The death
    of the process that named a joint save is not enough: another rank may be finishing it, so it
    must also have been untouched for a while.

    Raises:
        OSError: it cannot be examined; FileNotFoundError: someone else has removed it.
    """
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return False
    here, joint = match[3] == place(), match[5] is not None
    if here and (int(match[4]) == os.getpid() or _is_alive(int(match[4]))):
        return False
    if here and not joint:
        return True
    newest_epoch_s = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    return now_epoch_s - newest_epoch_s > (JOINT_STALE_S if here else STALE_S)


def _unfinished_name(name: str) -> str | None:
    match = _LEFTOVER.fullmatch(name)
    return match[2] if match and match[1] == "tmp" else None


def _mine(directory: Path, what: str, name: str) -> Path:
    return directory / f".{what}-{name}.{place()}.{os.getpid()}.{secrets.token_hex(4)}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process: a reused pid, or a save
        return True
    return True
