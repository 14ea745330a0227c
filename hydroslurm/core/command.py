"""The command line of this process's program. It identifies a training after a requeue, when the
numbers of job step and processes have changed."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.proc import PARENT, stat_of

_OF_A_START = frozenset({
    "local_rank", "node_rank", "machine_rank", "global_rank", "host", "hostname", "nodelist",
    "port", "master_addr", "master_port", "main_process_ip", "main_process_port", "dist_url",
    "init_method", "rdzv_endpoint", "rdzv_id",
    "resume", "resume_from", "resume_from_checkpoint", "restart_count",
})  # fmt: skip
"""Options whose values differ between ranks, or between two starts of one training."""
_DATE = re.compile(
    r"\b20\d\d([-_.]?)[01]\d\1[0-3]\d(?:[-_T .]*[0-2]\d[-_:.]?[0-5]\d(?:[-_:.]?[0-5]\d)?)?(?!\d)"
    r"|\b1[5-9]\d{8}\b"
)
_LAUNCHERS = frozenset({
    "submitit", "hydroslurm", "coverage", "cProfile", "profile", "pdb", "debugpy", "trace",
    "viztracer", "scalene", "memory_profiler",
})  # fmt: skip
"""Modules that run what they are given: their own names say nothing."""
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Command:
    """A program and its arguments. Only digests are kept: arguments may hold secrets.

    Attributes:
        script: the name of a ``.py`` file, or of a module; "" for all others.
        exact: of all words.
        stable: without those that differ between ranks or starts: ranks, hosts, ports, dates, and
            what to resume from.
    """

    script: str = ""
    exact: str = ""
    stable: str = ""

    @classmethod
    def of_this_process(cls) -> Command:
        """This process's, or, for a worker of multiprocessing or joblib, its parent's."""
        words, parent = tuple(sys.orig_argv), os.getppid()
        while _is_worker(words) and parent > 1:
            words, parent = _of_process(parent)
        return cls.of(words[1:])

    @classmethod
    def of(cls, words: Sequence[str]) -> Command:
        """``words``: after the interpreter."""
        return cls(_script(words), _digest(words), _digest(_stable(words)))


def _is_worker(words: Sequence[str]) -> bool:
    return "--multiprocessing-fork" in words or any(
        word.startswith(("from multiprocessing.", "joblib.externals.loky")) for word in words
    )


def _of_process(pid: int) -> tuple[tuple[str, ...], int]:
    """Its command line and its parent; nothing where /proc does not show it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return tuple(map(os.fsdecode, words)), int(stat_of(pid)[PARENT])
    except OSError:
        return (), 0


def _script(words: Sequence[str]) -> str:
    rest = iter(words)
    for word in rest:
        if word == "-m":
            module = next(rest, "")
            return "" if module.partition(".")[0] in _LAUNCHERS else module
        if word == "-c":
            return ""
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return Path(word).name if word.endswith(".py") else ""
    return ""


def _stable(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if dropping and not is_option:
            dropping = False
            continue
        dropping = False
        key = name.lstrip("-+").lower().replace("-", "_").rpartition(".")[2]
        if (is_option or equals) and key in _OF_A_START:
            dropping = not equals
            continue
        kept.append(_DATE.sub("DATE", word))
    return kept


def _digest(words: Sequence[str]) -> str:
    text = "\0".join(words).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
