"""Decide whether a file or folder may be obeyed: who could have written or replaced it?

Asked of a library that is loaded, a folder that a daemon's configuration comes from, a checkpoint
that is resumed. What is merely *shown* (any content of any person's run folder) is read through
:mod:`hydroslurm.core.files` instead.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from hydroslurm.errors import UntrustedFile

SAFE_ENV = "HYDROSLURM_SAFE_DIRECTORY"
"""Environment variable: folders, with colons between, below which run folders and checkpoints are
trusted whoever owns them. Code is never loaded because of it."""


def check_trusted(
    path: Path, *, what: str, shared: bool = False, owners: Collection[int] = ()
) -> None:
    """Require that nobody but this user and root can have written or replaced ``path``.

    This checks the file itself, every folder above it, and likewise the targets of symbolic links
    on the way. A folder with the sticky bit that all can write (``/tmp``) is no danger to an
    entry in it that is ours. What is group-writable is trusted only where the group is the user's
    private one, as Debian and Red Hat make them. Root owns the machine already, so that its files
    are trusted.

    Args:
        path: must exist.
        what: names it in the message: "the gate library".
        shared: it may lie in a folder that people share, as run folders and checkpoints do in a
            lab's ``drwxrws---``; never for code. ``path`` itself must still be ours or root's, and
            a file only we can write. Folders may be the group's: refused would be how labs work,
            and colleagues cannot make files that are ours, they can only move them. A folder above
            may belong to somebody else, unless it lies in one where anybody can make folders: an
            administrator made ``/project/lab`` for a colleague, and a stranger ``/tmp/lab``.
            What lies below a folder of ``HYDROSLURM_SAFE_DIRECTORY`` is not looked at.
        owners: users who are believed as root is.

    Raises:
        UntrustedFile: somebody else owns it or could write it; the message says how to mend it.
        OSError: it cannot be looked at.
    """
    if shared and _is_declared_safe(path):
        return
    ends = {path.absolute(), _real(path)}
    otherwise = f", or trust all below a folder: {SAFE_ENV}=FOLDER" if shared else ""
    for place in _places(path):
        status = place.lstat()
        if status.st_uid not in (os.getuid(), 0, *owners) and (
            place in ends or not _may_be_anothers(place, status, shared=shared)
        ):
            raise UntrustedFile(
                f"{what} {path} is not used: {place} belongs to uid {status.st_uid}, and only what "
                f"belongs to you (uid {os.getuid()}) or to root is trusted. Remove it, or choose "
                f"another place{otherwise}"
            )
        # a link itself has no mode, and only the owner of its folder can replace it
        if not stat.S_ISLNK(status.st_mode) and _others_write(place, status, shared=shared):
            raise UntrustedFile(
                f"{what} {path} is not used: others can write {place} "
                f"(mode {stat.S_IMODE(status.st_mode):04o}). "
                f"Look at what lies there, then: chmod go-w {place}{otherwise}"
            )


def is_trusted(path: Path, *, shared: bool = False) -> bool:
    """:func:`check_trusted` as a question; False also where nothing is."""
    try:
        check_trusted(path, what="", shared=shared)
    except (OSError, UntrustedFile):
        return False
    return True


def _is_declared_safe(path: Path) -> bool:
    """For file systems that keep no owners (CIFS, all_squash), and for people who share on purpose.
    Symlinks that leave such a folder are not trusted."""
    named = os.environ.get(SAFE_ENV, "").split(os.pathsep)
    return any(_real(path).is_relative_to(_real(Path(one))) for one in named if one[:1] == "/")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() raises RuntimeError for a ring of links


def _may_be_anothers(place: Path, status: os.stat_result, *, shared: bool) -> bool:
    """Whether a place on the way may have another owner than us and root."""
    if stat.S_ISREG(status.st_mode) or place.parent.stat().st_mode & stat.S_IWOTH:
        return False
    return shared or (_is_hidden_root(status.st_uid) and not status.st_mode & 0o022)


@functools.cache
def _is_hidden_root(uid: int) -> bool:
    """Whether this may be the machine's root as it is seen from a container without one (Apptainer,
    rootless podman): user ids without a mapping all appear as "nobody" in a user namespace."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False
    return mapped != ["0", "0", "4294967295"] and uid == nobody


def _places(path: Path) -> Iterator[Path]:
    """The path, the folders above it, and those of all that links on it lead to."""
    todo, seen = [path.absolute()], set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        yield place
        if place.is_symlink():
            if len(seen) > 400:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            todo.append(place.parent / place.readlink())
        if place.name == "..":
            todo.append(place.resolve())
        if place.parent != place:
            todo.append(place.parent)


def _others_write(place: Path, status: os.stat_result, *, shared: bool) -> bool:
    mode = status.st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return False  # only the owner of an entry can replace it, and that one is looked at, too
    if mode & stat.S_IWOTH:
        return True
    if shared and stat.S_ISDIR(mode):
        return False
    return bool(mode & stat.S_IWGRP) and not _is_private_group(place, status.st_gid)


def _is_private_group(place: Path, gid: int) -> bool:
    """Whether a group has this user (or, for root's own, root) as its only member."""
    try:
        os.getxattr(place, "system.posix_acl_access")
        return False  # the group's bits are a mask then, for people who are named elsewhere
    except OSError:
        pass
    try:
        if gid == 0:
            return not set(grp.getgrgid(0).gr_mem) - {"root"}
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        group.gr_gid == me.pw_gid
        and group.gr_name == me.pw_name
        and not set(group.gr_mem) - {me.pw_name}
    )


def user_name() -> str:
    """This user's name; the number where the machine has no name for it, as in a container. Slurm's
    programs take either."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
