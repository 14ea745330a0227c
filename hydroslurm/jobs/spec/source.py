"""Read YAML into plain values, and remember the line of each.

PyYAML's safe loader reads it, restricted to the tags of plain data and without aliases. Limits on
file size and nesting depth are far above any real job spec and stop a hostile file. Dates stay
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hydroslurm.errors import SpecError

MOST_BYTES = 1 << 18
"""The largest file that is read."""
DEEPEST = 40
LONGEST_NUMBER = 40

_TAG = "tag:yaml.org,2002:"
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
    """

    path: KeyPath
    message: str


@dataclass(frozen=True)
class Source:
    """The contents of a file.

    Attributes:
        name: the file's name, for messages.
        value: made of dict, list, str, int, float, bool and None.
        lines: the line on which each key or list item begins, from 1.
    """

    name: str
    value: Any
    lines: Mapping[KeyPath, int]

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
        SpecError: not YAML, more or less than one document, nested too deep, an alias, a tag that
            is not plain data, or a duplicate key.
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
    return Source(name, value, loader.lines)


def _line(at: yaml.Node | yaml.Event) -> int:
    mark = at.start_mark
    return 1 if mark is None else int(mark.line) + 1


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its dates and its ``=``, for people who write them mean the text; and
    without aliases and merges, which let a short text stand for any amount of data."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's name, never modified
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.lines: dict[KeyPath, int] = {}
        self._name = name
        self._level = 0

    def error(self, at: yaml.Node | yaml.Event, message: str) -> SpecError:
        return SpecError(f"{self._name}:{_line(at)}: {message}")

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise self.error(event, f"an alias (*{event.anchor}) is not allowed; write it out")
        if self._level > DEEPEST:
            raise self.error(event, f"nests deeper than {DEEPEST} levels; is it a job spec?")
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def value_of(self, node: yaml.Node, path: KeyPath) -> Any:
        """Build a value, and note its line, and those of all that it holds."""
        if node.tag not in _PLAIN:
            shown = node.tag.replace(_TAG, "!!", 1)[:60]
            message = f"the tag {shown} is not allowed; a job spec holds plain values only"
            raise self.error(node, message)
        if isinstance(node, yaml.MappingNode):
            value: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = self._key(key_node)
                inner = (*path, key)
                if key in value:
                    shown = key if len(key) <= 60 else f"{key[:57]}..."
                    first = self.lines[inner]
                    raise self.error(key_node, f"duplicate key {shown!r}, first on line {first}")
                value[key] = self._item(value_node, inner, _line(key_node))
            return value
        if isinstance(node, yaml.SequenceNode):
            return [
                self._item(item, (*path, index), _line(item))
                for index, item in enumerate(node.value)
            ]
        return self._scalar(node)

    def _item(self, node: yaml.Node, path: KeyPath, line: int) -> Any:
        self.lines[path] = line
        return self.value_of(node, path)

    def _key(self, node: yaml.Node) -> str:
        """Field names are text, even where YAML would read a number or a boolean."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, "a list or a mapping cannot be the name of a field")
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
