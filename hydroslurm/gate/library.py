"""Find the native gate for the installed torch. There is one per user and torch;
:mod:`hydroslurm.gate.build` makes what is missing.

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
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import GateError, UntrustedFile

SITE_DIR_ENV = "HYDROSLURM_GATE_DIR"
SOURCES = Path(__file__).parent / "native"
LIBRARY = "hs_gate.so"
MANIFEST = "hs_gate.json"
"""Beside the library: its checksum, and what it was built from."""
STANDARDS = ("-std=c++17", "-std=c++20")
FLAGS = (
    *("-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)

NVTX_HEADER = "nvtx3/nvToolsExt.h"
NVTX_FOLDERS = ("cu13/include", "nvtx/include")
"""In the packages nvidia-nvtx and nvidia-nvtx-cu12, whose common folder is `nvidia`."""


@dataclass(frozen=True)
class Torch:
    """The torch that a gate is built for.

    Attributes:
        nvtx: the folder with NVTX's headers; None if missing, and the gate then emits no marks.
    """

    version: str
    cxx11_abi: bool
    root: Path
    nvtx: Path | None = None


def installed_torch() -> Torch:
    """Import and describe this interpreter's torch.

    Raises:
        GateError: it cannot be imported.
    """
    try:
        import torch
    except ImportError as error:
        raise GateError(
            f"the native gate needs torch, which cannot be imported: {error}"
        ) from error
    return Torch(
        version=str(torch.__version__),
        cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
        root=Path(torch.__file__).parent,
        nvtx=nvtx_headers(os.environ),
    )


def nvtx_headers(environ: Mapping[str, str]) -> Path | None:
    """Find NVTX's headers in NVIDIA's Python package, else in a CUDA toolkit (CUDA_HOME)."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    folders = [package / folder for package in packages for folder in NVTX_FOLDERS]
    if toolkit := environ.get("CUDA_HOME"):
        folders.append(Path(toolkit) / "include")
    return next((folder for folder in folders if (folder / NVTX_HEADER).is_file()), None)


def source_files() -> list[Path]:
    """Return all sources, headers included, in a fixed order."""
    return sorted(file for end in ("cpp", "h") for file in SOURCES.glob(f"*.{end}"))


def abi_number() -> int:
    """Read ``HS_GATE_ABI`` from the sources."""
    match = re.search(r"#define HS_GATE_ABI (\d+)", (SOURCES / "gate.h").read_text())
    assert match, "gate.h defines the number of its ABI"
    return int(match[1])


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


@contextlib.contextmanager
def to_load() -> Iterator[Library]:
    """Yield the library for the installed torch, to be loaded within the block; build a missing
    one. A private one is removed at the end of the block.

    Raises:
        GateError: as :func:`hydroslurm.gate.build.ensure`.
    """
    torch = installed_torch()
    library = find(os.environ, torch=torch)
    if library is None:
        from hydroslurm.gate.build import ensure  # nearly every start finds one

        library = ensure(os.environ, torch=torch)
    try:
        yield library
    finally:
        if library.origin == "private":
            shutil.rmtree(library.path.parent.parent, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Whether the folder's library matches its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest["sha256"] == checksum(folder / LIBRARY))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
