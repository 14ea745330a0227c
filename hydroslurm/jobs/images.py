"""Containers: what this cluster runs an image with, and how. srun and the PATH decide; the rest is
pure.

pyxis   srun starts each task inside: the image's own Python runs ``hydroslurm.jobs.task``, so the
        image must contain hydroslurm.
Apptainer, Singularity
        the task becomes ``apptainer exec``. Its first process stays between Slurm and the rank and
        forwards all signals except SIGURG (seen in Apptainer's monitor_linux.go); where only srun's
        tasks are signalled (proctrack/cgroup), the rank gets no warning before the time limit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from hydroslurm.errors import LaunchError

PROGRAMS = ("apptainer", "singularity")
_REGISTRY = re.compile(r"(?P<host>localhost|[^/@]*[.:][^/@]*)/(?P<rest>.+)")


class Runtime(str, Enum):
    """What runs an image."""

    PYXIS = "pyxis"
    """srun --container-image, which a SPANK plugin adds."""
    APPTAINER = "apptainer"
    """Or Singularity, which takes the same options."""


def find_runtime(environ: Mapping[str, str]) -> Runtime | None:
    """pyxis if srun has it, else Apptainer (or Singularity) if it is on the PATH, else None."""
    srun = shutil.which("srun", path=environ.get("PATH", ""))
    if srun is not None:
        try:
            helped = subprocess.run(
                [srun, "--help"], env=dict(environ), capture_output=True, timeout=10.0, check=False
            )
            if b"--container-image" in helped.stdout:
                return Runtime.PYXIS
        except (OSError, subprocess.TimeoutExpired):
            pass
    return None if find_program(environ) is None else Runtime.APPTAINER


def find_program(environ: Mapping[str, str]) -> str | None:
    """The path of Apptainer or Singularity."""
    path = environ.get("PATH", "")
    return next((found for name in PROGRAMS if (found := shutil.which(name, path=path))), None)


def no_runtime(image: str, where: str = "this cluster") -> LaunchError:
    """The error if nothing can run an image."""
    return LaunchError(
        f"image {image!r}: {where} has neither pyxis (srun --container-image) nor Apptainer on the "
        "PATH, so no container can be started. Omit the image and use a Python environment on a "
        "shared file system, or ask the administrators for one of the two"
    )


def contained_argv(
    argv: Sequence[str],
    *,
    image: str,
    program: str,
    folders: Sequence[Path],
    working_directory: str,
    has_gpus: bool,
) -> tuple[str, ...]:
    """The command line that runs ``argv`` in an image by Apptainer.

    Args:
        argv: the program and its arguments.
        image: a Docker reference, a URI, or the path of a .sif file.
        program: Apptainer or Singularity.
        folders: to be visible in the container under the same path.
        working_directory: where it starts.
        has_gpus: whether the host's driver is needed.

    Raises:
        LaunchError: a path that --bind cannot express.
    """
    binds = [word for folder in _visible(folders) for word in ("--bind", folder)]
    gpus = ["--nv"] if has_gpus else []
    return (
        program, "exec", *gpus, *binds, "--pwd", working_directory, apptainer_image(image), *argv,
    )  # fmt: skip


def contained_environ(
    environ: Mapping[str, str], outer: Mapping[str, str], *, program: str
) -> dict[str, str]:
    """``environ`` for Apptainer: what differs from ``outer`` is repeated with the prefix that makes
    it override the image's variables. Not with --env, which others can see in the process list."""
    prefix = f"{Path(program).name.upper()}ENV_"
    ours = {name: value for name, value in environ.items() if outer.get(name) != value}
    return {**environ, **{f"{prefix}{name}": value for name, value in ours.items()}}


def pyxis_options(image: str, *, folders: Sequence[Path], working_directory: str) -> list[str]:
    """srun's options for tasks in an image; arguments as for :func:`contained_argv`.

    Raises:
        LaunchError: a path that --container-mounts cannot express.
    """
    mounts = ",".join(f"{folder}:{folder}" for folder in _visible(folders))
    return [
        f"--container-image={pyxis_image(image)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={working_directory}",
    ]


def _visible(folders: Sequence[Path]) -> list[str]:
    """Each once, where options can name it."""
    names = list(dict.fromkeys(map(str, folders)))
    for name in names:
        if ":" in name or "," in name:
            raise LaunchError(f"{name!r} has a : or a , in it, and cannot be bound in a container")
    return names


def apptainer_image(image: str) -> str:
    """Docker references need a scheme here."""
    return image if "://" in image or _is_path(image) else f"docker://{image}"


def pyxis_image(image: str) -> str:
    """enroot wants a # between registry and image: ``nvcr.io#nvidia/pytorch:24.05-py3``."""
    name = image.removeprefix("docker://")
    match = _REGISTRY.fullmatch(name)
    if "://" in name or "#" in name or _is_path(name) or match is None:
        return name
    return f"{match['host']}#{match['rest']}"


def _is_path(image: str) -> bool:
    return image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))
