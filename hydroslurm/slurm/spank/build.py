"""Compile the SPANK plugin against the Slurm of this machine.

Slurm loads a plugin only when it was built with headers of its own release (major and minor: see
``_verify_syms`` in src/common/plugin.c). So it is compiled here and never shipped, and the release
of the headers is compared with srun's first: a plugin of another one would only show as a line on
stderr at every srun.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from hydroslurm.core.files import atomic_file
from hydroslurm.errors import NoCompiler, SlurmMissing, SpankError

PLUGIN = "hydroslurm_spank.so"
_SOURCE = "hydroslurm_spank.c"
_HEADER = "slurm/spank.h"
_MINIMAL_CONF = "ClusterName=none\nSlurmctldHost=localhost\n"
Release = tuple[int, int]
_LIMIT_S = 120.0
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
)


def build_plugin(out: Path, *, environ: Mapping[str, str], include: Path | None = None) -> Path:
    """Compile it to ``out``, a file or a folder; returns the file.

    Args:
        include: the folder that holds ``slurm/spank.h``; default: where the compiler looks, or the
            one beside srun, whichever is of srun's release.

    Raises:
        NoCompiler: no C compiler on the PATH (``CC`` names another one).
        SlurmMissing: no ``slurm/spank.h``.
        SpankError: the headers are not of srun's release; it cannot be compiled or written.
    """
    compiler = _compiler(environ)
    flags = [*_FLAGS, *_include_flags(compiler, environ, include)]
    target = out / PLUGIN if out.is_dir() else out
    source = source_text()
    with tempfile.TemporaryDirectory(prefix="hydroslurm-spank-") as folder:
        file = Path(folder) / _SOURCE
        file.write_text(source)
        made = Path(folder) / PLUGIN
        done = _run([*compiler, *flags, "-o", str(made), "-x", "c", str(file)], environ)
        if done.returncode != 0:
            raise SpankError(f"the plugin cannot be compiled:\n{done.stderr.strip()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as plugin:  # a slurmd that has loaded the old one keeps it
                os.fchmod(plugin.fileno(), 0o755)  # whatever the umask: all users load it
                plugin.write(made.read_bytes())
        except OSError as error:
            raise SpankError(
                f"cannot write {target}: {error.strerror}. Name a place that you may write"
            ) from error
    return target


def slurm_release(program: str, environ: Mapping[str, str]) -> Release:
    """Year and month of the Slurm that a client program is of: (22, 5) for 22.05.8.

    22.05 reads a slurm.conf even to tell its version, so it gets one: the site's may be missing, or
    name what is still to be made. Plugins in a prefix of Slurm's own are named.

    Raises:
        SpankError: it does not tell.
    """
    plugins = Path(program).resolve().parents[1] / "lib/slurm"
    named = f"PluginDir={plugins}\n" if plugins.is_dir() else ""
    with tempfile.TemporaryDirectory(prefix="hydroslurm-slurm-") as folder:
        conf = Path(folder) / "slurm.conf"
        conf.write_text(_MINIMAL_CONF + named)
        done = _run([program, "--version"], {**environ, "SLURM_CONF": str(conf)})
    told = re.search(r"\b(\d+)\.(\d+)", done.stdout)  # "slurm-wlm 22.05.8", "slurm 25.11.7"
    if done.returncode != 0 or told is None:
        message = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise SpankError(f"{program} --version names no release of Slurm: {message}")
    return int(told[1]), int(told[2])


def source_text() -> str:
    """The plugin in C."""
    return resources.files(__package__).joinpath(_SOURCE).read_text()


def _compiler(environ: Mapping[str, str]) -> list[str]:
    named = environ.get("CC", "").split()
    for argv in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(argv[0], path=environ.get("PATH")):
            return argv
    raise NoCompiler(
        f"no C compiler {' '.join(named) or 'cc, gcc or clang'} on the PATH; install one (on "
        "Debian: apt-get install gcc), or name it in CC"
    )


def _include_flags(
    compiler: list[str], environ: Mapping[str, str], include: Path | None
) -> list[str]:
    """``-I`` for the headers of the Slurm that is to load the plugin; empty where the compiler
    finds them by itself."""
    srun = shutil.which("srun", path=environ.get("PATH"))
    wanted = None if srun is None else slurm_release(srun, environ)
    beside = None if srun is None else Path(srun).resolve().parent.parent / "include"
    found: dict[Path | None, Release] = {}
    for folder in [include] if include else [None, beside]:
        if folder is not None and not (folder / _HEADER).is_file():
            continue  # the compiler would go on to its usual places
        release = _header_release(compiler, _i(folder), environ)
        if release is not None and wanted in (None, release):
            return _i(folder)
        if release is not None:
            found[folder] = release
    if not found or wanted is None:
        raise SlurmMissing(
            f"the compiler finds no {_HEADER}; install Slurm's headers (libslurm-dev on Debian and "
            "Ubuntu, slurm-devel on RPM systems), or name their folder with --include"
        )
    seen = ", ".join(f"{_text(of)} in {at or 'the usual place'}" for at, of in found.items())
    raise SpankError(
        f"{srun} is of Slurm {_text(wanted)} and {_HEADER} is of {seen}: Slurm refuses a plugin "
        f"that was built for another release. Install the headers of {_text(wanted)} (libslurm-"
        "dev, slurm-devel), or name the folder that holds them with --include"
    )


def _i(folder: Path | None) -> list[str]:
    return [f"-I{folder}"] if folder else []


def _header_release(
    compiler: list[str], flags: list[str], environ: Mapping[str, str]
) -> Release | None:
    """The release of the headers that the compiler finds; None for no headers."""
    probe = [*compiler, *flags, "-E", "-P", "-x", "c", "-include", _HEADER, "-dM", "/dev/null"]
    told = re.search(r"#define SLURM_VERSION_NUMBER (0x[0-9a-f]+)", _run(probe, environ).stdout)
    if told is None:
        return None
    number = int(told[1], 16)
    return number >> 16 & 0xFF, number >> 8 & 0xFF


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]:02d}"


def _run(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            env={**environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpankError(f"{argv[0]} does not run: {error}") from error
