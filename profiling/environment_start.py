"""What a start waits for where its environment is not in the page cache: a folder against a
squashfs image of the same files.

A copy of this Python's virtual environment, as a folder and as a squashfs image mounted through a
loop device, both on the disk of `--directory`. The start imports torch and makes an optimizer. Cold
means that the pages of the folder's files, or of the image, were dropped (POSIX_FADV_DONTNEED)
before the start; the names and inodes of the folder stay in memory, so that its cold start is
flattered. `slow_folder_s` is a start from the folder, with its pages in memory, where each call on
one of its files takes 1 ms more, as on a busy file server (slow_calls.c): an image is mounted by
the kernel, which asks the server for blocks only. `file_calls` counts the system calls that take a
path in the environment, failed ones included: each of them is at least one round trip on a network
file system with a cold cache.

Needs root, to mount; mksquashfs, and strace for the count.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from built_runs import SLOW_US, compile_slow_calls
from harness import finish, interleaved, median_ratio, parser, scratch

START = (
    "import torch; layer = torch.nn.Linear(4, 4); torch.optim.Adam(layer.parameters()); "
    "import os; os._exit(0)"
)


class Environments:
    """One virtual environment in two shapes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "environment"
        self.image = folder / "environment.squashfs"
        self.mounted = folder / "mounted"
        self.mounted.mkdir()
        run("cp", "-a", sys.prefix, self.folder)
        quick = ("-comp", "zstd", "-Xcompression-level", "3", "-no-progress", "-quiet")
        run("mksquashfs", self.folder, self.image, *quick)
        os.sync()  # pages that are not yet on the disk cannot be dropped

    def cold_folder(self) -> float:
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                drop_pages(path)
        return start(self.folder)

    def cold_image(self) -> float:
        drop_pages(self.image)
        return self.warm_image()

    def warm_image(self) -> float:
        run("mount", "-t", "squashfs", "-o", "loop,ro", self.image, self.mounted)
        try:
            return start(self.mounted)
        finally:
            run("umount", self.mounted)

    def warm_folder(self) -> float:
        return start(self.folder)

    def slow_folder(self) -> float:
        library = compile_slow_calls(self.folder.parent)
        slow = {
            "LD_PRELOAD": str(library),
            "SLOW_BELOW": f"{self.folder}/",
            "SLOW_US": str(SLOW_US),
        }
        return start(self.folder, environ={**os.environ, **slow})

    def file_calls(self) -> tuple[int, int]:
        """System calls with a path in the environment during a start, and how many paths."""
        trace = self.folder.with_name("trace")
        strace: list[str | Path] = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", trace]
        run(*strace, self.folder / "bin/python", "-c", START)
        paths = re.findall(rf'"({re.escape(str(self.folder))}[^"]*)"', trace.read_text())
        return len(paths), len(set(paths))


def drop_pages(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def start(environment: Path, *, environ: Mapping[str, str] | None = None) -> float:
    """Seconds until a Python of this environment has an optimizer."""
    begin = time.perf_counter()
    run(environment / "bin/python", "-c", START, environ=environ)
    return time.perf_counter() - begin


def run(*words: str | Path, environ: Mapping[str, str] | None = None) -> None:
    argv = [str(word) for word in words]
    subprocess.run(argv, env=environ, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    wanted = parser("A cold start from a folder and from a squashfs image.", directory=True)
    chosen = wanted.parse_args()
    missing = [one for one in ("mksquashfs", "strace", "mount") if shutil.which(one) is None]
    if missing or os.geteuid() != 0:
        sys.exit(f"environment_start.py needs root, and {', '.join(missing) or 'has all programs'}")
    with scratch("environment", chosen) as folder:
        both = Environments(folder)
        arms: dict[str, Callable[[], float]] = {
            name: partial(getattr(both, name))
            for name in ("cold_folder", "cold_image", "warm_folder", "warm_image", "slow_folder")
        }
        calls, paths = both.file_calls()
        seen = interleaved(arms, rounds=1 if chosen.quick else 3)
        sizes = {"image_mb": both.image.stat().st_size / 1e6}
    result = {
        **{f"{name}_s": statistics.median(values) for name, values in seen.items()},
        "cold_image_ratio_to_cold_folder": median_ratio(seen, "cold_image", "cold_folder"),
        "cold_image_ratio_to_slow_folder": median_ratio(seen, "cold_image", "slow_folder"),
        "slow_us": SLOW_US,
        "file_calls": calls,
        "paths": paths,
        **sizes,
        "starts": len(seen["cold_folder"]),
    }
    finish(chosen, "environment: a start from a folder and from a squashfs image", result)


if __name__ == "__main__":
    main()
