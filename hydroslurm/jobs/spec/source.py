"""Read YAML into plain values, and remember the line of each.

PyYAML's safe loader reads it, restricted to the tags of plain data. Limits on file size, nesting
depth and the size after alias expansion are far above any real job spec and stop a hostile file.
Dates stay text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hydroslurm.errors import SpecError

MOST_BYTES = 1 << 18
"""The largest file that is read."""
MOST_EXPANDED = 1 << 20
"""Values and characters that aliases may expand a file to."""
DEEPEST = 40
LONGEST_NUMBER = 40

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_PLAIN = {f"{_TAG}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")}
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")

KeyPath = tuple[str | int, ...]
"""The path of a value: field names and list indices."""


@dataclass(frozen=True)
class Complaint:
    """A problem that a value of the right type has, perhaps because of other fields.

    Attributes:
        path: of the field that most likely has to change.
        message: what was found, what was wanted, what to do.
        because: the other fields that cause it.
    """

    path: KeyPath
    message: str
    because: tuple[KeyPath, ...] = ()


@dataclass(frozen=True)
class Source:
    """The contents of a file.

    Attributes:
        name: the file's name, for messages.
        value: made of dict, list, str, int, float, bool and None.
        lines: the line on which each key or list item begins, from 1.
        written: each scalar as the file spells it.
    """

    name: str
    value: Any
    lines: Mapping[KeyPath, int]
    written: Mapping[KeyPath, str]

    def line_of(self, path: KeyPath) -> int:
        """The line of a value, or of its nearest existing parent if it is missing."""
        for end in range(len(path), -1, -1):
            line = self.lines.get(path[:end])
            if line is not None:
                return line
        return 1


def path_text(path: KeyPath) -> str:
    """Format a path for people: ``replicaSpecs[0].template``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def read_source(path: Path) -> Source:
    """Read a file.

    Raises:
        SpecError: the file cannot be read; or as :func:`parse_source`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise SpecError(f"{path}: is larger than {MOST_BYTES >> 10} KiB; is it a job spec?")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: is not UTF-8 text ({error.reason})") from error
    return parse_source(text, name=str(path))


def parse_source(text: str, *, name: str) -> Source:
    """Parse one YAML document.

    Raises:
        SpecError: not YAML, more or less than one document, nested too deep, too large with its
            aliases expanded, a tag that is not plain data, or a duplicate key.
    """
    try:
        loader = _Loader(text, name)
        try:
            if not loader.check_node():
                raise SpecError(f"{name}: is empty; wanted a job spec (hydroslurm schema)")
            node = loader.get_node()
            assert node is not None
            if loader.check_node():
                second = "a second document begins here; wanted one job per file"
                event = loader.peek_event()  # type: ignore[no-untyped-call]
                raise loader.error(event, second)
            loader.lines[()] = _line(node)
            value = loader.value_of(node, ())
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SpecError(_message(error, name, text)) from error
    return Source(name, value, loader.lines, loader.written)


def _line(at: yaml.Node | yaml.Event) -> int:
    mark = at.start_mark
    return 1 if mark is None else int(mark.line) + 1


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its dates and its ``=``: people who write them mean the text.

    An alias counts with all that it stands for: a hostile file ends neither the stack nor the
    memory.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's name, never modified
        first: [(tag, pattern) for tag, pattern in resolvers if tag in {*_PLAIN, _MERGE}]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.lines: dict[KeyPath, int] = {}
        self.written: dict[KeyPath, str] = {}
        self._name = name
        self._open: list[object] = []
        self._expanded = 0
        self._most_expanded = max(MOST_EXPANDED, 2 * len(text))

    def error(self, at: yaml.Node | yaml.Event, message: str) -> SpecError:
        return SpecError(f"{self._name}:{_line(at)}: {message}")

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        with self._deeper(self.peek_event()):  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

    @contextlib.contextmanager
    def _deeper(self, at: yaml.Node | yaml.Event) -> Iterator[None]:
        if any(at is other for other in self._open):
            raise self.error(at, "contains itself")
        if len(self._open) > DEEPEST:
            raise self.error(at, f"nests deeper than {DEEPEST} levels; is it a job spec?")
        self._open.append(at)
        yield
        self._open.pop()

    def value_of(self, node: yaml.Node, path: KeyPath) -> Any:
        """Build a value, and note its line and spelling, and those of all that it holds."""
        if node.tag not in _PLAIN:
            shown = node.tag.replace(_TAG, "!!", 1)[:60]
            message = f"the tag {shown} is not allowed; a job spec holds plain values only"
            raise self.error(node, message)
        self._count(node, path)
        if isinstance(node, yaml.ScalarNode):
            self.written[path] = str(node.value)
            return self._scalar(node)
        with self._deeper(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [
                self._item(item, (*path, index), _line(item))
                for index, item in enumerate(node.value)
            ]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """Build a mapping: its own fields override those merged in (``<<:``), and of these the
        first override the others."""
        merged: dict[str, Any] = {}
        for source in reversed(list(self._sources(node))):
            merged |= self.value_of(source, path)
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self._key(key_node, path)
            inner = (*path, key)
            if key in own:
                shown = key if len(key) <= 60 else f"{key[:57]}..."
                first = self.lines[inner]
                raise self.error(key_node, f"duplicate key {shown!r}, first on line {first}")
            own[key] = self._item(value_node, inner, _line(key_node))
        return merged | own

    def _sources(self, node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                is_list = isinstance(value_node, yaml.SequenceNode)
                for source in value_node.value if is_list else [value_node]:
                    if not isinstance(source, yaml.MappingNode):
                        raise self.error(key_node, "<<: wanted a mapping, or a list of mappings")
                    yield source

    def _count(self, node: yaml.Node, path: KeyPath) -> None:
        self._expanded += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._expanded > self._most_expanded:
            # an alias has the line of its anchor: name the field of the document that holds it
            raise SpecError(
                f"{self._name}:{self.lines.get(path[:1], 1)}: with its aliases expanded this is "
                f"more than {MOST_EXPANDED >> 20} MiB; is it a job spec?"
            )

    def _item(self, node: yaml.Node, path: KeyPath, line: int) -> Any:
        self.lines[path] = line
        return self.value_of(node, path)

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        """Field names are text, even where YAML would read a number or a boolean."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, "a list or a mapping cannot be the name of a field")
        self._count(node, path)
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
            length = len(node.value)
            message = f"is a number of {length} characters; put it in quotes if it is text"
            raise self.error(node, message)
        try:
            return self.construct_object(node)
        except (yaml.YAMLError, ValueError, ArithmeticError, KeyError, IndexError) as error:
            kind = node.tag.replace(_TAG, "", 1)
            shown = str(node.value)[:60]
            raise self.error(node, f"{shown!r} is not a valid {kind}") from error


def _message(error: yaml.YAMLError, name: str, text: str) -> str:
    """PyYAML's error in one line."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        odd = error.character if isinstance(error.character, int) else ord(error.character)
        return f"{name}:{line}: is not YAML: holds the character U+{odd:04X}; is it a text file?"
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    problem = str(getattr(error, "problem", None) or str(error).splitlines()[0])
    if "'\\t'" in problem:
        return f"{where}: is not YAML: a tab; indent with spaces"
    context = getattr(error, "context", None)
    return f"{where}: is not YAML: {problem[:200]}{f' ({context})' if context else ''}"
