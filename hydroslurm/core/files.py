"""Files and texts that somebody else may have written: whose they are, and how they are read.

Two questions, which are never mixed up. *May it be obeyed?* A library that is loaded, a folder that
a daemon's configuration comes from, a checkpoint that is resumed: :func:`check_trusted`. *May it be
shown?* Any content of any person's run folder: :func:`read_regular` and :func:`parse_json`, which
never wait, never read without bound, and raise nothing but OSError and ValueError.
"""

from __future__ import annotations

import errno
import functools
import grp
import json
import math
import os
import pwd
import re
import stat
import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hydroslurm.errors import UntrustedFile

MAX_DEPTH = 64
"""Of lists and objects inside each other; what we write ourselves stays below ten."""

SAFE_ENV = "HYDROSLURM_SAFE_DIRECTORY"
"""Environment variable: folders, with colons between, below which run folders and checkpoints are
believed whoever owns them. Code is never loaded because of it."""

# --- may it be obeyed? --------------------------------------------------------------------------


def check_trusted(
    path: Path, *, what: str, shared: bool = False, owners: Collection[int] = ()
) -> None:
    """Require that nobody but this user and root can have written or replaced ``path``.

    Looked at are the file itself, every folder above it, and the same of whatever symbolic links on
    the way lead to. A folder with the sticky bit that all can write (``/tmp``) is no danger to an
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
    """For file systems that keep no owners (CIFS, all_squash), and for those who share on purpose.
    What links lead out of such a folder is not in it."""
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
    rootless podman): whoever has no number in a user namespace is shown there as one "nobody"."""
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
    if gid == 0:
        return not set(grp.getgrgid(0).gr_mem) - {"root"}
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        group.gr_gid == me.pw_gid
        and group.gr_name == me.pw_name
        and not set(group.gr_mem) - {me.pw_name}
    )


# --- may it be shown? ---------------------------------------------------------------------------


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file, never following a link in its last part, never waiting.

    Returns:
        A descriptor, closed by the caller, not inherited by children.

    Raises:
        OSError: it cannot be opened, or is a link, a FIFO, a device, a socket or a folder.
    """
    extra = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        _require_regular(status, path)  # opening some devices does something
    fd = os.open(path, flags | extra, mode)
    try:
        _require_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next(word for test, word in _KINDS if test(status.st_mode))
        raise OSError(errno.EINVAL, f"{kind}, where a regular file was expected", str(path))


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def read_regular(path: Path, *, limit_bytes: int) -> bytes:
    """The whole of a small regular file.

    Raises:
        OSError: as for :func:`open_regular`, or it is longer than ``limit_bytes``.
    """
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        what = f"longer than the {limit_bytes} bytes that such a file may have"
        raise OSError(errno.EFBIG, what, str(path))
    return data


def read_end(path: Path, *, most_bytes: int) -> bytes:
    """The last lines of a regular file: all of it, or what begins after the first newline within
    its last ``most_bytes``.

    Raises:
        OSError: as for :func:`open_regular`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes <= most_bytes:
            return file.read(most_bytes)
        file.seek(size_bytes - most_bytes)
        return file.read(most_bytes).partition(b"\n")[2]


def clean(text: str, *, most: int = 400) -> str:
    """Somebody else's text for a terminal, a page or one line: what is no printable character
    (escapes, newlines, marks that turn the direction of writing) is written out, and nothing is put
    on top of another."""
    text = text if len(text) <= most else f"{text[:most]} ..."
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() and not unicodedata.combining(c) else ascii(c)[1:-1] for c in text
    )


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, printable: bool = True) -> Any:
    """One JSON value, of numbers and texts that can be calculated with and printed.

    Args:
        printable: False lets lone surrogates pass.

    Raises:
        ValueError: not JSON; nested deeper than ``max_depth``; NaN or an infinity; an integer of
            more than 64 bits; a lone surrogate.
    """
    if isinstance(text, bytes):
        text = text.decode()
    check_depth(text, max_depth=max_depth)
    try:
        value = DECODER.decode(text)
    except RecursionError as error:  # where the caller's own stack was deep already
        raise ValueError("nested too deeply") from error
    if printable and "\\u" in text:
        _require_printable(value)
    return value


def check_depth(text: str, *, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError for JSON that is nested deeper; costs little where it holds few brackets."""
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[][{}]', text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
            if depth > max_depth:
                raise ValueError(f"nested deeper than {max_depth} levels")
        elif bracket in "]}":
            depth -= 1


def _require_printable(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text that cannot be printed: {error.reason}") from error


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _int64(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"an integer of more than 64 bits: {text[:40]}")
    return value


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64)
"""For those who read many lines; depth and surrogates are theirs to look at."""
