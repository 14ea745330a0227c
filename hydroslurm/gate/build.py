"""Build the native gate: compile it, test it in a child, put it in place."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hydroslurm.core.events import EventKind
from hydroslurm.core.files import fsync_folder, open_regular
from hydroslurm.core.threads import thread
from hydroslurm.core.trust import check_trusted, is_trusted
from hydroslurm.errors import GateError, GateSelfTestFailed, NoCompiler, UntrustedFile
from hydroslurm.gate.library import (
    FLAGS,
    LIBRARY,
    MANIFEST,
    SITE_DIR_ENV,
    STANDARDS,
    Library,
    Torch,
    abi_number,
    cache_root,
    checksum,
    find,
    key_of,
    source_files,
)
from hydroslurm.gate.protocol import Action, Cause

COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 600.0
SELF_TEST_TIMEOUT_S = 180.0
LOCK_TIMEOUT_S = 900.0


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


def _put_in_place(workshop: Path, target: Path) -> None:
    """Install the manifest last: readers use a library only with its manifest."""
    target.mkdir(mode=0o755, exist_ok=True)
    (workshop / LIBRARY).chmod(0o755)  # regardless of the umask: others must not write it
    for name in (LIBRARY, MANIFEST):
        with (workshop / name).open("rb") as file:
            os.fsync(file.fileno())
        (workshop / name).replace(target / name)
    fsync_folder(target)


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


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return ``$CXX`` (with its flags), else the first of c++, g++ and clang++ on PATH.

    Raises:
        NoCompiler: there is none.
    """
    wanted = shlex.split(environ.get("CXX", ""))
    for name, *flags in [wanted] if wanted else [[name] for name in COMPILERS]:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return [path, *flags]
    raise NoCompiler(
        "it has to be built, and no C++ compiler was found (looked for "
        f"{wanted[0] if wanted else ', '.join(COMPILERS)}). Install one (apt-get install g++), or "
        "on a machine that has one run `hydroslurm gate build --out DIR` and set "
        f"{SITE_DIR_ENV}=DIR here"
    )


def compile_library(
    compiler: Sequence[str], target: Path, *, torch: Torch, sources: Sequence[Path] | None = None
) -> list[str]:
    """Compile sources, by default the gate's, into one shared library; return the command that
    worked.

    Raises:
        GateError: no standard that we know compiles.
    """
    errors = ""
    sources = source_files() if sources is None else sources
    for standard in STANDARDS:
        command = compile_command(compiler, target, sources, standard=standard, torch=torch)
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GateError(f"the native gate could not be compiled: {error}") from error
        if done.returncode == 0:
            return command
        errors = errors or done.stderr
    tail = "\n".join(errors.strip().splitlines()[-20:])
    raise GateError(
        f"the native gate does not compile with {compiler[0]} against torch {torch.version}:\n"
        f"{tail}\nTry another compiler (CXX=g++), or report this with the lines above"
    )


def compile_command(
    compiler: Sequence[str], target: Path, sources: Sequence[Path], *, standard: str, torch: Torch
) -> list[str]:
    """Return the command line. torch's headers count as system headers: only our code may warn."""
    return [
        *compiler,
        standard,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        "-isystem",
        str(torch.root / "include"),
        *(["-DHS_WITH_NVTX", "-isystem", str(torch.nvtx)] if torch.nvtx else []),
        *(str(source) for source in sources if source.suffix == ".cpp"),
        "-o",
        str(target),
        f"-L{torch.root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-ldl",
        "-Wl,-z,defs",
    ]


def self_test_in_child(library: Path) -> None:
    """Let a child process hold and release an operator with a library.

    Raises:
        GateSelfTestFailed: it fails; the message has the child's output.
    """
    # `python -m` would first search the working directory, which others may write
    program = (
        "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
        "from hydroslurm.gate.build import self_test; self_test(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2]), str(library)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SELF_TEST_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise GateSelfTestFailed(
            f"the self-test of the native gate did not end in {SELF_TEST_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode != 0:
        raise GateSelfTestFailed(
            f"the native gate was built, but its self-test ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-1000:]}"
        )


def self_test(library: str) -> None:
    """Hold this thread at an operator and release it; call it in a process of its own.

    Raises:
        GateError: it does not hold, does not release, or changes a result.
    """
    import torch

    from hydroslurm.gate.native_gate import NativeGate

    gate = NativeGate(Path(library))
    gate.start([])
    gate.request(Action.PAUSE, Cause.API)
    seen: list[EventKind] = []
    # while this thread sleeps to start the helper, it may count as parked before it is held
    held = {EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD}

    def read_until(done: Callable[[], bool]) -> None:
        while not done():
            seen.extend(event.kind for event in gate.wait_events(1.0))

    def resume_when_held() -> None:
        read_until(lambda: EventKind.PARKED in seen and not held.isdisjoint(seen))
        gate.request(Action.RESUME, Cause.API)

    read_until(lambda: EventKind.GATE_CLOSED in seen)
    helper = thread(resume_when_held, name="hydroslurm-self-test", daemon=False)
    helper.start()
    total = torch.ones(3, requires_grad=True).sum()
    total.backward()  # type: ignore[no-untyped-call]
    helper.join()
    read_until(lambda: EventKind.FIRST_OPERATOR_RELEASED in seen)
    gate.stop()
    if EventKind.RESUMED not in seen or float(total.detach()) != 3.0:
        raise GateSelfTestFailed(
            f"saw {seen}, and {float(total.detach())} for the sum of three ones"
        )
