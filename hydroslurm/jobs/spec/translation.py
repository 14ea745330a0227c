"""Translate a document of another format into ours, and list what has no equivalent. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.jobs.spec.source import Complaint, KeyPath, path_text


@dataclass(frozen=True)
class Translation:
    """A document in our own format.

    Attributes:
        value: for :class:`~hydroslurm.jobs.spec.job.TrainingJob`, not validated.
        origins: where in the document each part of ``value`` comes from.
        meaningless: fields of the document with no equivalent in Slurm, with the reason where it is
            not obvious from the name.
        refusals: errors found before validation, such as what looks like a typo of a known field.
    """

    value: Any
    origins: Mapping[KeyPath, KeyPath]
    meaningless: tuple[str, ...] = ()
    refusals: tuple[Complaint, ...] = ()

    def origin(self, path: KeyPath) -> KeyPath:
        """Where in the document a path of ``value`` comes from."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return (*self.origins[path[:end]], *path[end:])
        return path


@dataclass
class Translator:
    """Takes a document apart and keeps track of the fields that nobody has asked for.

    Attributes:
        document: what is taken apart.
        no_typos: names of fields without an equivalent that are spelt almost like one with one.
    """

    document: Mapping[str, Any]
    no_typos: Collection[str] = ()
    _value: dict[str, Any] = field(default_factory=dict)
    _origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    _used: set[KeyPath] = field(default_factory=set)
    _reasons: dict[KeyPath, str] = field(default_factory=dict)
    _known: dict[KeyPath, set[str]] = field(default_factory=lambda: defaultdict(set))
    _refusals: list[Complaint] = field(default_factory=list)

    def get(self, path: KeyPath) -> Any:
        """The value at this path, or None."""
        here: Any = self.document
        for end, part in enumerate(path):
            known = self._known[path[:end]]
            if isinstance(part, str):
                known.add(part)
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                return None
        return here

    def use(self, path: KeyPath) -> Any:
        """Get a value, and mark its field as understood."""
        self._used.add(path)
        return self.get(path)

    def put(self, own: KeyPath, path: KeyPath, value: Any) -> None:
        """Write ``value`` under ``own``, and mark ``path``, where it comes from, as understood."""
        self._write(own, value)
        self._origins[own] = path
        self._used.add(path)

    def move(self, own: KeyPath, path: KeyPath) -> None:
        """Copy a value unchanged, if there is one."""
        value = self.get(path)
        if value is not None:
            self.put(own, path, value)

    def open(self, own: KeyPath, path: KeyPath) -> bool:
        """Whether ``path`` is a mapping, whose fields are then asked for one by one. Anything else
        is copied unchanged, for the validation to report."""
        value = self.get(path)
        if isinstance(value, Mapping):
            self._write(own, {})
            self._origins[own] = path
            return True
        self.move(own, path)
        return False

    def items(self, own: KeyPath, path: KeyPath) -> range:
        """The indices of the list at ``path``; anything but a list is copied unchanged."""
        value = self.get(path)
        if isinstance(value, list):
            self._write(own, [])
            self._origins[own] = path
            return range(len(value))
        self.move(own, path)
        return range(0)

    def comes_from(self, own: KeyPath, path: KeyPath) -> None:
        """Record where a missing value would have been, for messages."""
        self._origins[own] = path

    def drop(self, path: KeyPath, why: str) -> None:
        """Record why a field has no meaning, if it is present."""
        if self.get(path) is not None:
            self._reasons[path] = why

    def refuse(self, path: KeyPath, message: str) -> None:
        """Record that a field cannot be honored: what was seen, and what was wanted."""
        self._used.add(path)
        self._refusals.append(Complaint(path, message))

    def translation(self) -> Translation:
        """The result: what was written, and what is left over."""
        known = {path[:end] for path in self._used for end in range(len(path))} | set(self._known)
        left = tuple(self._left((), self.document, known))
        meant = {path: name for path in left if (name := self._meant(path)) is not None}
        typos = (
            Complaint(path, f"there is no such field; did you mean {name!r}?")
            for path, name in meant.items()
        )
        return Translation(
            self._value,
            self._origins,
            tuple(self._message(path) for path in left if path not in meant),
            (*self._refusals, *typos),
        )

    def _write(self, own: KeyPath, value: Any) -> None:
        here: Any = self._value
        for part, following in itertools.pairwise(own):
            if isinstance(part, int):
                here = here[part]
            else:
                here = here.setdefault(part, [] if isinstance(following, int) else {})
        if isinstance(here, list):
            here.append(value)
        else:
            here[own[-1]] = value

    def _left(self, path: KeyPath, value: Any, known: set[KeyPath]) -> Iterator[KeyPath]:
        """The topmost paths under which nobody has asked for anything.

        Args:
            known: paths of everything that may contain what has been asked for.
        """
        if path in self._used or value in (None, {}, []):
            return
        if path in self._reasons or path not in known:
            yield path
        elif isinstance(value, Mapping):
            for name, one in value.items():
                yield from self._left((*path, name), one, known)
        elif isinstance(value, list):
            for number, one in enumerate(value):
                yield from self._left((*path, number), one, known)

    def _meant(self, path: KeyPath) -> str | None:
        name, holder = path[-1], path[:-1]
        known = self._known[holder]
        if path in self._reasons or not isinstance(name, str) or name in (*known, *self.no_typos):
            return None
        # what two resources of a vendor have in common is the vendor
        return nearest(name, sorted(known), cutoff=0.91 if "/" in name else 0.66)

    def _message(self, path: KeyPath) -> str:
        why = self._reasons.get(path)
        return path_text(path) + (f" ({why})" if why else "")


def nearest(name: str, valid: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name with the closest spelling, ignoring case, dashes and underscores, or with the
    same letters in another order; None when none is close.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    plain, bare = {_bare(one): one for one in valid}, _bare(name)[:60]
    near = difflib.get_close_matches(bare, list(plain), n=1, cutoff=cutoff)
    near = near or [one for one in plain if sorted(one) == sorted(bare)]
    return plain[near[0]] if near else None


def _bare(name: str) -> str:
    """The same for envName, env_name and ENV-NAME."""
    return name.lower().replace("_", "").replace("-", "")
