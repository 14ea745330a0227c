"""Find or build the native gate for the installed torch, once per user and torch.

Search order; each folder holds one sub-folder per key:

1. ``$HYDROSLURM_GATE_DIR``, which a site fills with ``hydroslurm gate build --out DIR``;
2. ``$XDG_CACHE_HOME/hydroslurm/gate`` (default ``~/.cache``), where a missing one is built;
3. a private temporary folder, if the cache cannot be written or others could have written it.

The key covers all that the binary depends on: torch's version and C++ ABI, the machine and its C
library, our sources and the flags. A library is used only with a manifest that has its checksum:
the loader would crash on a truncated one. It runs with all its user's rights, so it is loaded only
if no other user can have put it there. The check covers the library and every folder above it, so
it cannot be replaced between the check and the loading either.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.files import fsync_folder, open_regular
from hydroslurm.core.trust import check_trusted, is_trusted
from hydroslurm.errors import GateError, UntrustedFile
from hydroslurm.gate.compiler import (
    FLAGS,
    LIBRARY,
    MANIFEST,
    SITE_DIR_ENV,
    STANDARDS,
    Torch,
    abi_number,
    compile_library,
    find_compiler,
    installed_torch,
    source_files,
)
from hydroslurm.gate.self_test import self_test_in_child

LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Library:
    """A gate on disk.

    Attributes:
        path: the shared library.
        key: covers all that it depends on.
        origin: ``site``, ``cache`` or ``private``.
        built_s: seconds its build took just now; None if it existed.
    """

    path: Path
    key: str
    origin: str
    built_s: float | None = None


def key_of(torch: Torch) -> str:
    """Return the folder name of the gate for this torch and machine."""
    facts = hashlib.sha256()
    for source in source_files():
        facts.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    libc = "-".join(platform.libc_ver())
    has_nvtx = torch.nvtx is not None
    facts.update(repr((FLAGS, STANDARDS, abi_number(), torch.cxx11_abi, libc, has_nvtx)).encode())
    version = re.sub(r"[^0-9A-Za-z.+]", "_", torch.version)
    return f"torch-{version}-{platform.machine()}-{facts.hexdigest()[:16]}"


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's gates.

    Raises:
        OSError: there is neither ``XDG_CACHE_HOME`` nor a home folder.
    """
    named = environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):
        return Path(named) / "hydroslurm" / "gate"
    try:
        return Path.home() / ".cache" / "hydroslurm" / "gate"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def find(environ: Mapping[str, str], *, torch: Torch) -> Library | None:
    """Return an existing gate that is intact and trusted; build nothing.

    Warns when it skips a site's folder that others can write, since somebody set that variable.
    Skips the cache silently, as the gate is then rebuilt.
    """
    key = key_of(torch)
    if site := environ.get(SITE_DIR_ENV):
        try:
            # the owner of this very file already decides what runs here: a site's account
            owner = Path(__file__).stat().st_uid
            if is_usable(Path(site) / key, owners={owner}):
                return Library(Path(site) / key / LIBRARY, key, "site")
        except UntrustedFile as error:
            _warn_once(
                f"hydroslurm: {error}. {SITE_DIR_ENV} is passed over; the gate of your own cache "
                "is used, or built there"
            )
    with contextlib.suppress(OSError, UntrustedFile):
        folder = cache_root(environ) / key
        if is_usable(folder):
            return Library(folder / LIBRARY, key, "cache")
    return None


def is_usable(folder: Path, *, owners: Collection[int] = ()) -> bool:
    """Whether it has an intact library. Raises UntrustedFile before it reads anything there.

    Args:
        owners: trusted besides this user and root.
    """
    try:
        check_trusted(folder / LIBRARY, what="the gate library", owners=owners)
    except OSError:
        return False
    return is_whole(folder)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def ensure(environ: Mapping[str, str], *, torch: Torch) -> Library:
    """Return the gate for this torch; build and self-test it if there is none yet.

    Any number of processes may call this at once: one builds, the others wait. A library of origin
    ``private`` is in its own temporary folder, which the caller removes after loading it.

    Raises:
        NoCompiler: it would have to be built, and there is no C++ compiler.
        GateSelfTestFailed: the built library does not work with this torch.
        GateError: the compiler failed (the message has its last lines), or every folder can be
            replaced by others.
    """
    library = find(environ, torch=torch)
    if library:
        return library
    key = key_of(torch)
    try:
        root = cache_root(environ)
        for folder in (root.parent.parent, root.parent, root):  # regardless of the umask
            folder.mkdir(mode=0o700, parents=folder is root.parent.parent, exist_ok=True)
        check_trusted(root, what="the gate's cache")
        with _locked(root / f"{key}.lock"):
            library = find(environ, torch=torch)
            return library or build(root, environ=environ, torch=torch)
    except (OSError, UntrustedFile) as error:
        where = environ.get("XDG_CACHE_HOME") or "~/.cache"
        warnings.warn(
            f"hydroslurm: the native gate cannot be kept in {where} ({error}); it is built again "
            "in every process, which takes about ten seconds. Point XDG_CACHE_HOME at a folder "
            "that only you can write, or let the site run `hydroslurm gate build --out DIR` and "
            f"set {SITE_DIR_ENV}=DIR",
            RuntimeWarning,
            stacklevel=2,
        )
    private = _private_folder()
    try:
        built = build(private, environ=environ, torch=torch)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return Library(built.path, built.key, "private", built.built_s)


@contextlib.contextmanager
def to_load() -> Iterator[Library]:
    """Yield the library of :func:`ensure`, to be loaded within the block, which removes a private
    one at its end."""
    library = ensure(os.environ, torch=installed_torch())
    try:
        yield library
    finally:
        if library.origin == "private":
            shutil.rmtree(library.path.parent.parent, ignore_errors=True)


def _private_folder() -> Path:
    """Make a folder that no other user can replace, as in TMPDIR they may.

    Raises:
        GateError: there is no place for one.
    """
    places = dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"])
    for place in places:
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="hydroslurm-gate-", dir=place))
            if is_trusted(folder):
                return folder
            folder.rmdir()
    raise GateError(
        f"the gate can be built nowhere: others could replace it in each of {', '.join(places)}. "
        "Point TMPDIR at a folder that you, and nobody else, can write"
    )


def build(root: Path, *, environ: Mapping[str, str], torch: Torch) -> Library:
    """Build into ``root/<key>``; self-test before replacing what is there.

    Raises:
        NoCompiler, GateSelfTestFailed, GateError: as for :func:`ensure`.
        OSError: the folder cannot be written.
        UntrustedFile: others can write it.
    """
    started = time.monotonic()
    compiler = find_compiler(environ)
    key = key_of(torch)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_trusted(root, what="the folder for the gate")  # a child of ours loads it there
    workshop = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=root))
    try:
        library = workshop / LIBRARY
        command = compile_library(compiler, library, torch=torch)
        self_test_in_child(library)
        built_s = time.monotonic() - started
        manifest = {
            "sha256": checksum(library),
            "torch": torch.version,
            "abi": abi_number(),
            "command": command,
            "built_s": round(built_s, 3),
        }
        (workshop / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _put_in_place(workshop, root / key)
        check_trusted(root / key / LIBRARY, what="the gate library")
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return Library(root / key / LIBRARY, key, "cache", built_s)


def is_whole(folder: Path) -> bool:
    """Whether the folder's library matches its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest["sha256"] == checksum(folder / LIBRARY))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _put_in_place(workshop: Path, target: Path) -> None:
    """Install the manifest last: readers use a library only with its manifest."""
    target.mkdir(mode=0o755, exist_ok=True)
    (workshop / LIBRARY).chmod(0o755)  # regardless of the umask: others must not write it
    for name in (LIBRARY, MANIFEST):
        with (workshop / name).open("rb") as file:
            os.fsync(file.fileno())
        (workshop / name).replace(target / name)
    fsync_folder(target)


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an inter-process lock, if the file system has locks.

    Go on without it (some network file systems have none), or when the holder takes longer than any
    build: two builders waste time, but each renames a complete library into place.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(fd)
