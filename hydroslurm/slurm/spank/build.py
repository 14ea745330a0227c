"""Compile the SPANK plugin against the Slurm of this machine.

Slurm loads a plugin only when it was built with headers of its own release, so that it is compiled
here and never shipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from hydroslurm.errors import NoCompiler, SlurmMissing, SpankError

PLUGIN = "hydroslurm_spank.so"
_SOURCE = "hydroslurm_spank.c"
_HEADER = "slurm/spank.h"
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
        include: the folder that holds ``slurm/spank.h``; default: where the compiler looks.

    Raises:
        NoCompiler: no C compiler on the PATH (``CC`` names another one).
        SlurmMissing: no ``slurm/spank.h``.
        SpankError: it cannot be compiled or written.
    """
    compiler = _compiler(environ)
    flags = [*_FLAGS, *([f"-I{include}"] if include else [])]
    _require_header(compiler, flags, environ)
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
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copyfile(made, temporary)
            temporary.chmod(0o755)
            temporary.replace(target)  # a slurmd that has the old one loaded keeps it
        except OSError as error:
            raise SpankError(
                f"cannot write {target}: {error.strerror}. Name a place that you may write"
            ) from error
    return target


def source_text() -> str:
    """The plugin in C."""
    return resources.files(__package__).joinpath(_SOURCE).read_text()


def _compiler(environ: Mapping[str, str]) -> list[str]:
    named = environ.get("CC", "").split()
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0], path=environ.get("PATH")):
            return words
    raise NoCompiler(
        f"no C compiler {' '.join(named) or 'cc, gcc or clang'} on the PATH; install one (on "
        "Debian: apt-get install gcc), or name it in CC"
    )


def _require_header(compiler: list[str], flags: list[str], environ: Mapping[str, str]) -> None:
    probe = [*compiler, *flags, "-fsyntax-only", "-x", "c", "-include", _HEADER, "/dev/null"]
    if _run(probe, environ).returncode != 0:
        raise SlurmMissing(
            f"the compiler finds no {_HEADER}; install Slurm's headers (libslurm-dev on Debian and "
            "Ubuntu, slurm-devel on RPM systems), or name their folder with --include"
        )


def _run(words: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            env={**environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpankError(f"{words[0]} does not run: {error}") from error
