"""Containers: what this cluster can run an image with, and how. Asked of srun and of the PATH,
never assumed; apart from that pure.

pyxis   srun starts each task inside: ``hydroslurm.jobs.task`` is run by the
        image's own Python, so that the image must hold hydroslurm.
Apptainer, Singularity
        the task becomes ``apptainer exec``. Its first process stays between Slurm and the rank and
        hands signals on, but for SIGURG (seen in Apptainer's monitor_linux.go); where only srun's
        tasks are signalled (proctrack/cgroup) the rank hears no warning before the time limit.
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
    """srun's own --container-image, which a SPANK plugin adds."""
    APPTAINER = "apptainer"
    """Or Singularity, which takes the same words."""


def find_runtime(environ: Mapping[str, str]) -> Runtime | None:
    """pyxis where srun knows it, else Apptainer (or Singularity) where it is on the PATH; None."""
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
    """Apptainer's or Singularity's, on the PATH."""
    path = environ.get("PATH", "")
    return next((found for name in PROGRAMS if (found := shutil.which(name, path=path))), None)


def no_runtime(image: str, where: str = "this cluster") -> LaunchError:
    """What to say where there is none."""
    return LaunchError(
        f"image {image!r}: {where} has neither pyxis (srun --container-image) nor Apptainer on the "
        "PATH, so that no container can be started. Leave the image out and use a Python "
        "environment on a shared file system, or ask the administrators for one of them"
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
    """The words by which Apptainer runs other words in an image.

    Args:
        argv: what is run.
        image: a reference as Docker's, a URI, or the path of a .sif file.
        program: Apptainer or Singularity.
        folders: visible in the container under the same path.
        working_directory: where it is started.
        has_gpus: whether the host's driver is needed.

    Raises:
        LaunchError: a path that --bind cannot be told.
    """
    binds = []
    for folder in dict.fromkeys(map(str, folders)):
        if ":" in folder or "," in folder:
            raise LaunchError(
                f"{folder!r} has a : or a , in it, and cannot be bound in a container"
            )
        binds += ["--bind", folder]
    gpus = ["--nv"] if has_gpus else []
    return (
        program, "exec", *gpus, *binds, "--pwd", working_directory, apptainer_image(image), *argv,
    )  # fmt: skip


def contained_environ(
    environ: Mapping[str, str], outer: Mapping[str, str], *, program: str
) -> dict[str, str]:
    """``environ`` for Apptainer: what differs from ``outer`` is also named so that it counts above
    what the image sets. Not by --env, which others see in the list of processes."""
    prefix = f"{Path(program).name.upper()}ENV_"
    ours = {name: value for name, value in environ.items() if outer.get(name) != value}
    return {**environ, **{f"{prefix}{name}": value for name, value in ours.items()}}


def pyxis_options(image: str, *, folders: Sequence[Path], working_directory: str) -> list[str]:
    """srun's, for tasks in an image; arguments as of :func:`contained_argv`.

    Raises:
        LaunchError: a path that --container-mounts cannot be told.
    """
    mounts = []
    for folder in dict.fromkeys(map(str, folders)):
        if ":" in folder or "," in folder:
            raise LaunchError(f"{folder!r} has a : or a , in it, and cannot be mounted by pyxis")
        mounts.append(f"{folder}:{folder}")
    return [
        f"--container-image={pyxis_image(image)}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={working_directory}",
    ]


def apptainer_image(image: str) -> str:
    """Docker's references need a scheme here."""
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
