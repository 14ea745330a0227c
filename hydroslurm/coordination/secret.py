"""The secret key of an attempt's ranks, and how each rank gets it.

The first source that works is used:

environment   ``HYDROSLURM_STEP_KEY``, which the supervisor, the agent and the plugin of
              ``srun --preempt`` give to a job step. A process's environment can be read by its own
              user only, its command line by everybody.
munge         the first rank makes a key and puts it into credentials that only the same user can
              read; the coordinator gives them to every caller, and never asks munged itself.
file          the first rank writes it, mode 0600, below the run folder, whose ownership is checked.

Without any of them several ranks are not connected. There is no fallback to a connection without a
key: a peer that can pause, stop and save has the rights of the job's owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.coordination.authentication import KEY_BYTES, Greeting, GreetingFailed
from hydroslurm.coordination.world import KEY_ENV, World, key_from
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import NoSecret, UntrustedFile

if TYPE_CHECKING:
    from hydroslurm.slurm.munge import Munge

KEYS = "keys"
"""The folder of key files in a run folder."""
_MOST_CREDENTIALS = 256
_HOLDS_KEY = b"hydroslurm key\0"


@dataclass(frozen=True, eq=False)
class Secret:
    """How this rank authenticates.

    Attributes:
        source: ``environment``, ``munge`` or ``file``.
        key: None on a rank that has not received it yet.
    """

    source: str
    key: bytes | None
    _munge: Munge | None = None
    _path: Path | None = None

    @property
    def port_key(self) -> bytes | None:
        """What the coordinator's ports are derived from; None if not all ranks know it beforehand:
        others can guess the ports then, and take them."""
        return self.key if self.source == "environment" else None

    def credentials(self, world: World) -> list[bytes]:
        """The key for ranks of this user that have none, one credential for each rank of a node:
        munged logs one that is read twice. Made by the first rank.

        Raises:
            MungeError: munged does not answer any more.
        """
        if self._munge is None or self.key is None:
            return []
        payload = _start_of_payload(world) + self.key
        count = min(world.local_world_size, _MOST_CREDENTIALS)
        return [self._munge.encode(payload) for _ in range(count)]

    def greeting(self, world: World) -> Greeting | None:
        """A greeting for one connection; None while the key's file does not exist yet.

        Raises:
            UntrustedFile: the key's file is not ours alone.
        """
        key = self.key or _received.get((os.getpid(), world.incarnation_id))
        if key is None and self._path is not None:
            key = _read(self._path)
            if key is None:
                return None
        opened = partial(self._open, world)
        return Greeting.of_rank(key=key, open_credential=opened, local_rank=world.local_rank)

    def _open(self, world: World, credential: bytes) -> bytes:
        if self._munge is None:
            raise GreetingFailed("not the coordinator of this job: it needs no key")
        from hydroslurm.slurm.munge import MungeError

        try:
            payload, uid = self._munge.decode(credential)
        except MungeError as error:
            raise GreetingFailed(f"it refuses this rank, with a credential: {error}") from error
        start = _start_of_payload(world)
        key = payload.removeprefix(start)
        if uid != os.getuid() or len(payload) != len(start) + KEY_BYTES or len(key) != KEY_BYTES:
            raise GreetingFailed(
                f"not the coordinator of this job: its credential is of uid {uid}, or of another"
            )
        return _received.setdefault((os.getpid(), world.incarnation_id), key)

    def forget(self) -> None:
        """Remove the key's file at the end of the attempt. For the first rank."""
        if self.key is not None and self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def find_secret(world: World, environ: Mapping[str, str], *, folder: Path | None) -> Secret:
    """The first source that works here.

    Args:
        folder: the run folder; None where there is none.

    Raises:
        NoSecret: there is none; the message says what to set up.
        UsageError: ``HYDROSLURM_STEP_KEY`` is no key.
    """
    from hydroslurm.slurm.munge import Munge, MungeError, socket_of  # a new key needs none of it

    socket = socket_of(environ)
    if (key := key_from(environ)) is not None:
        return Secret("environment", key)
    is_first = world.rank == 0
    try:
        munge = Munge(socket)
        munge.encode(b"")
        return Secret("munge", _own_key(world) if is_first else None, munge)
    except MungeError as error:
        no_munge = str(error)
    if folder is None:
        raise _nothing(no_munge, "this process belongs to no run folder")
    path = folder / KEYS / hashlib.sha256(world.incarnation_id.encode()).hexdigest()[:32]
    try:
        key = _write(path, _own_key(world)) if is_first else None
    except (OSError, UntrustedFile) as error:
        raise _nothing(no_munge, str(error)) from error
    return Secret("file", key, None, path)


def new_key() -> str:
    """A value for ``HYDROSLURM_STEP_KEY``."""
    return secrets.token_hex(KEY_BYTES)


_own: dict[tuple[int, str], bytes] = {}
_received: dict[tuple[int, str], bytes] = {}


def _own_key(world: World) -> bytes:
    """The key made by this process, the first rank: the same at each call in one incarnation."""
    return _own.setdefault((os.getpid(), world.incarnation_id), secrets.token_bytes(KEY_BYTES))


def _start_of_payload(world: World) -> bytes:
    return _HOLDS_KEY + hashlib.sha256(world.incarnation_id.encode()).digest()


def _write(path: Path, key: bytes) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_trusted(path.parent, what="the folder of the ranks' key")
    write_atomically(path, key)
    return key


def _read(path: Path) -> bytes | None:
    try:
        check_trusted(path, what="the ranks' key")
        key = read_regular(path, limit_bytes=KEY_BYTES)
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _nothing(no_munge: str, no_file: str) -> NoSecret:
    return NoSecret(
        "the ranks of this job have no way to prove to each other who they are, so that they stay "
        f"apart. {KEY_ENV} is not set; MUNGE: {no_munge}; a file in the run folder: {no_file}. "
        "One of these is enough: start the job with `srun --preempt`, a job spec or `hydroslurm "
        "agent`; have munged run on the nodes (Slurm's own with AuthType=auth/munge; "
        "HYDROSLURM_MUNGE_SOCKET names another socket); or name a run folder of yours that all "
        f"nodes see (HYDROSLURM_RUN_DIR); or export {KEY_ENV}=$(openssl rand -hex {KEY_BYTES}) "
        "before srun"
    )
