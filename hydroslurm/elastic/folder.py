"""Files of an elastic run in its run folder: its coordinator's address, its history, its status.

    elastic/key               of this run's connections: 64 hexadecimal digits, mode 0600
    elastic/options.json      the coordinator's options
    elastic/claim.json        which coordinator is the newest; an older one ends when it sees this
    elastic/coordinator.json  its address
    elastic/ledger.jsonl      every change, appended; all that a new coordinator needs
    elastic/status.json       the run's status, for ``describe`` and ``top``

Whoever reads the key can stop the run and change its weights, so only the owner may. It is a file
rather than MUNGE's key because members come and go for weeks, on nodes that do not exist yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from hydroslurm.coordination.authentication import KEY_BYTES
from hydroslurm.core.files import (
    append_entry,
    entries_of,
    open_regular,
    parse_json,
    read_regular,
    write_atomically,
)
from hydroslurm.core.rundir import Below, RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.elastic.autoscale import AutoscalePolicy
from hydroslurm.elastic.roster import Batch, LearningRate, Size, Summation, Timing
from hydroslurm.errors import RunFolderError, UsageError

MEMBER_ENV = "HYDROSLURM_MEMBER"
"""Name of this process's member; default: the array element, or the job."""
_FILE_BYTES = 16 << 20
"""A status has up to 1 KB for each of 16,384 members."""


@dataclass(frozen=True, kw_only=True)
class ElasticFolder:
    """The paths; ``run``: the run folder."""

    run: Path

    key_file = Below("key")
    options_json = Below("options.json")
    claim_json = Below("claim.json")
    coordinator_json = Below("coordinator.json")
    ledger_jsonl = Below("ledger.jsonl")
    status_json = Below("status.json")

    @property
    def root(self) -> Path:
        return RunDir(self.run).elastic

    # --- the key

    def make_key(self) -> bytes:
        """Return the key of this run; make it if there is none yet."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.root, what="the folder of an elastic run", shared=True)
        with contextlib.suppress(FileExistsError):
            write_atomically(self.key_file, secrets.token_hex(KEY_BYTES), exclusive=True)
        return self.key()

    def key(self) -> bytes:
        """Return the key of this run.

        Raises:
            RunFolderError: there is none.
            UntrustedFile: others could have written it.
        """
        try:
            check_trusted(self.key_file, what="the key of an elastic run", shared=True)
            if self.key_file.stat().st_mode & 0o077:
                raise RunFolderError(
                    f"{self.key_file} can be read by others, who could take the run over. Remove "
                    "it, and start the run again"
                )
            key = bytes.fromhex(read_regular(self.key_file, limit_bytes=256).decode())
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.key_file} is not the key of an elastic run: {error}. Is {self.run} the "
                "folder of a run that was submitted with `elastic:`?"
            ) from error
        if len(key) != KEY_BYTES:
            raise RunFolderError(f"{self.key_file} has {len(key)} bytes, {KEY_BYTES} are wanted")
        return key

    # --- documents that are replaced as a whole

    def write(self, path: Path, document: Mapping[str, Any]) -> None:
        """Replace one of the JSON files."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document).encode())

    def read(self, path: Path) -> dict[str, Any] | None:
        """Read one of the JSON files; None if it is missing or invalid.

        Raises:
            UntrustedFile: others could have written it.
        """
        try:
            check_trusted(path, what=f"{path.name} of an elastic run", shared=True)
            document = parse_json(read_regular(path, limit_bytes=_FILE_BYTES))
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def options(self) -> CoordinatorOptions:
        """Return the options that the run was submitted with.

        Raises:
            UsageError: they are missing or invalid.
        """
        document = self.read(self.options_json)
        if document is None:
            raise UsageError(
                f"{self.options_json} is not there: `hydroslurm submit` writes it for a spec with "
                "`elastic:`"
            )
        try:
            return msgspec.convert(document, CoordinatorOptions)
        except ValueError as error:
            raise UsageError(f"the options of an elastic run: {error}") from error

    def write_options(self, options: CoordinatorOptions) -> None:
        """Write the options of a submitted run."""
        self.write(self.options_json, msgspec.to_builtins(options))

    # --- the ledger

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append one line durably: a power cut must not undo what others act on."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = {"kind": kind, "epoch_ns": time.time_ns(), **data}
        append_entry(self.ledger_jsonl, entry)

    def ledger(self) -> Iterator[dict[str, Any]]:
        """Yield the lines so far; skip torn and foreign ones."""
        try:
            file = os.fdopen(open_regular(self.ledger_jsonl), "rb")
        except FileNotFoundError:
            return
        with file:
            yield from (entry for entry in entries_of(file) if isinstance(entry.get("kind"), str))


class CoordinatorOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``options.json``, written from a job spec, which has validated it.

    Attributes:
        batch: ``keep_global``: a step has as many samples at every size as at full size;
            ``per_rank``: each rank keeps its batch size, so that the step follows the size.
        summation: ``fixed_order`` adds gradients in one order at every size, see
            :mod:`hydroslurm.elastic.reduction`; with ``all_reduce`` the order varies.
        averaging_every: the ranks train independently and average weights at this interval, in
            steps; 0: they sum the gradients in each step.
        engine: how the ranks form a generation.
        lr, lr_warmup_steps: how the learning rate follows the size, and over how many steps; see
            :mod:`hydroslurm.elastic.learning_rate`.
        ranks_each: with ``restart`` a member is an agent; the number of ranks it starts.
        size, timing: see there.
        autoscale: rules that choose the size; None: only people do.
    """

    batch: Batch = "keep_global"
    summation: Summation = "all_reduce"
    averaging_every: int = 0
    engine: Literal["in_place", "restart"] = "in_place"
    lr: LearningRate = "none"
    lr_warmup_steps: int = 0
    ranks_each: int = 1
    size: Size = Size()
    timing: Timing = Timing()
    autoscale: AutoscalePolicy | None = None


def member_name(environ: Mapping[str, str]) -> str:
    """Return the name of this node's member: its array element, or its job."""
    if name := environ.get(MEMBER_ENV):
        return name
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID", "")
