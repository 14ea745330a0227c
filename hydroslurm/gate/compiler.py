"""The command that compiles the native gate: compiler, torch, sources."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.errors import GateError, NoCompiler

SITE_DIR_ENV = "HYDROSLURM_GATE_DIR"
SOURCES = Path(__file__).parent / "native"
LIBRARY = "hs_gate.so"
MANIFEST = "hs_gate.json"
"""Beside the library: its checksum, and what it was built from."""
COMPILERS = ("c++", "g++", "clang++")
STANDARDS = ("-std=c++17", "-std=c++20")
FLAGS = (
    *("-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)
COMPILE_TIMEOUT_S = 600.0


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
