"""The files of an elastic run, below its run folder: where its coordinator is, what has happened to
it, and how it stands.

    elastic/key               of this run's connections: 64 hexadecimal digits, mode 0600
    elastic/options.json      what the coordinator is started with
    elastic/claim.json        which coordinator is the newest; an older one ends when it sees it
    elastic/coordinator.json  where it listens
    elastic/ledger.jsonl      every change, appended; all that a new coordinator needs
    elastic/status.json       how the run stands, for ``describe`` and ``top``

Whoever reads the key may stop the run and change its weights, so it is the owner's alone. It is a
file and not MUNGE's, because members come and go for weeks, on nodes that do not exist yet.
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
from hydroslurm.core.files import open_regular, parse_json, read_regular, write_atomically
from hydroslurm.core.journal import append_entry, entries_of
from hydroslurm.core.rundir import Below, RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.elastic.autoscale import AutoscalePolicy
from hydroslurm.elastic.roster import Size, Timing
from hydroslurm.errors import RunFolderError, UsageError

MEMBER_ENV = "HYDROSLURM_MEMBER"
"""The name of this process's member; default: the array element, or the job."""
_FILE_BYTES = 16 << 20
"""A status has up to 1 KB of each of 16,384 members."""


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

    @staticmethod
    def at(place: str) -> Path:
        """The run folder that :data:`ELASTIC_ENV` names."""
        return Path(place).absolute()

    @property
    def root(self) -> Path:
        return RunDir(self.run).elastic

    # --- the key

    def make_key(self) -> bytes:
        """The key of this run, made if there is none yet."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.root, what="the folder of an elastic run", shared=True)
        with contextlib.suppress(FileExistsError):
            write_atomically(self.key_file, secrets.token_hex(KEY_BYTES), exclusive=True)
        return self.key()

    def key(self) -> bytes:
        """The key of this run.

        Raises:
            RunFolderError: there is none.
            UntrustedFile: it is not this user's alone.
        """
        try:
            check_trusted(self.key_file, what="the key of an elastic run", shared=True)
            if self.key_file.stat().st_mode & 0o077:
                raise RunFolderError(
                    f"{self.key_file} can be read by others, who could take the run over. Remove "
                    "it, and start the run anew"
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
        """One of the JSON files; None if it is not there (yet), or is none.

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
        """What the run was submitted with.

        Raises:
            UsageError: there is nothing, or it is wrong.
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
        """Write what the run is submitted with."""
        self.write(self.options_json, msgspec.to_builtins(options))

    # --- the ledger

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append one line, durably: what follows from it is not undone by a power cut."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = {"kind": kind, "epoch_ns": time.time_ns(), **data}
        append_entry(self.ledger_jsonl, entry)

    def ledger(self) -> Iterator[dict[str, Any]]:
        """The lines so far, however many; one that is torn or is no line of ours is skipped."""
        try:
            file = os.fdopen(open_regular(self.ledger_jsonl), "rb")
        except FileNotFoundError:
            return
        with file:
            yield from (one for one in entries_of(file) if isinstance(one.get("kind"), str))


class CoordinatorOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``options.json``, written of a job spec, which has checked them.

    Attributes:
        host: the address to listen at, "" for the one by which this node is known.
        batch: ``keep_global``: a step has as many samples as with all members, whatever the size;
            ``per_rank``: each rank has its batch size, and the step follows the size.
        summation: ``fixed_order`` adds the gradients up in one order for every size, see
            :mod:`hydroslurm.elastic.fixed_order`; ``all_reduce`` as the size has it.
        averaging_every: the ranks train apart, and their weights are averaged so often, in steps;
            0: the gradients are summed in each step.
        engine: how the ranks form a generation.
        lr, lr_warmup_steps: how the learning rate follows, and in how many steps; see
            :mod:`hydroslurm.elastic.learning_rate`.
        ranks_each: with ``restart`` a member is one agent, which starts so many ranks.
        size, timing: see there.
        autoscale: the rules by which the size is chosen; None: by people only.
    """

    host: str = ""
    batch: str = "keep_global"
    summation: str = "all_reduce"
    averaging_every: int = 0
    engine: str = "in_place"
    lr: Literal["none", "linear", "sqrt"] = "none"
    lr_warmup_steps: int = 0
    ranks_each: int = 1
    size: Size = Size()
    timing: Timing = Timing()
    autoscale: AutoscalePolicy | None = None


def member_name(environ: Mapping[str, str]) -> str:
    """What this node's member is called: its array element, or its job."""
    if name := environ.get(MEMBER_ENV):
        return name
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID", "")
