"""Read YAML into plain values, and remember the line of each.

PyYAML's safe loader reads it, restricted to the tags of plain data. Limits on file size, nesting
depth and the size after alias expansion are far above any real job spec and stop a hostile file.
Dates stay text.
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
        because: the other fields that cause it.
    """

    path: KeyPath
    message: str
    because: tuple[KeyPath, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """How much a document holds, or may hold, after alias expansion.

    Attributes:
        values: keys, scalars, lists and mappings.
        content_bytes: all scalars together. Linux passes about 2 MiB of arguments to a program.
    """

    values: int
    content_bytes: int

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.values + other.values, self.content_bytes + other.content_bytes)

    def __sub__(self, other: Bounds) -> Bounds:
        return Bounds(self.values - other.values, self.content_bytes - other.content_bytes)


OF_A_FILE = Bounds(values=20_000, content_bytes=1 << 20)
RESOLVED = Bounds(values=20 * OF_A_FILE.values, content_bytes=20 * OF_A_FILE.content_bytes)
"""For the resolved spec in a run folder, which has every default filled in."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its dates and its ``=``: people who write them mean the text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's name, never modified
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN or "merge" in tag]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


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
    return parse_source(text, name=str(path), bounds=OF_A_FILE)


def parse_source(text: str, *, name: str, bounds: Bounds = RESOLVED) -> Source:
    """Parse one YAML document.

    Raises:
        SpecError: not YAML, more or less than one document, over a limit, a tag that is not plain
            data, or a duplicate key.
    """
    lines: dict[KeyPath, int] = {}
    written: dict[KeyPath, str] = {}
    try:
        _check_bounds(text, name, bounds)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise SpecError(f"{name}: is empty; wanted a job spec (hydroslurm schema)")
            lines[()] = _line(node)
            value = _value(node, (), _Reading(loader, name, lines, written))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SpecError(_message(error, name, text)) from error
    return Source(name, value, lines, written)


@dataclass(frozen=True)
class _Reading:
    loader: _Loader
    name: str
    lines: dict[KeyPath, int]
    written: dict[KeyPath, str]

    def error(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(f"{self.name}:{_line(node)}: {message}")


def _line(at: yaml.Node | yaml.Event) -> int:
    mark = at.start_mark
    return 1 if mark is None else int(mark.line) + 1


def _value(node: yaml.Node, path: KeyPath, reading: _Reading) -> Any:
    if node.tag not in _PLAIN:
        shown = node.tag.replace(_TAG, "!!", 1)[:60]
        raise reading.error(
            node, f"the tag {shown} is not allowed; a job spec holds plain values only"
        )
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, reading)
    if isinstance(node, yaml.SequenceNode):
        found = []
        for index, item in enumerate(node.value):
            where = (*path, index)
            reading.lines[where] = _line(item)
            found.append(_value(item, where, reading))
        return found
    reading.written[path] = str(node.value)
    return _scalar(node, reading)


def _mapping(node: yaml.MappingNode, path: KeyPath, reading: _Reading) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (key_node, value_node) in _fields(node, reading).items():
        where = (*path, key)
        reading.lines[where] = _line(key_node)
        found[key] = _value(value_node, where, reading)
    return found


def _fields(node: yaml.MappingNode, reading: _Reading) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The key and value of each field. A field overrides one that is merged in (``<<:``), and the
    first mapping that is merged overrides the others. PyYAML's own ``flatten_mapping`` writes
    merged fields into the node, where an alias finds them as duplicates."""
    own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key_node, value_node in node.value:
        if key_node.tag == f"{_TAG}merge":
            is_list = isinstance(value_node, yaml.SequenceNode)
            for source in value_node.value if is_list else (value_node,):
                if not isinstance(source, yaml.MappingNode):
                    wanted = "expected a mapping or list of mappings for merging"
                    raise yaml.MarkedYAMLError(
                        "while constructing a mapping",
                        node.start_mark,
                        f"{wanted}, but found {source.id}",
                        source.start_mark,
                    )
                merged = _fields(source, reading) | merged
            continue
        key = _key(key_node, reading)
        if key in own:
            shown = key if len(key) <= 60 else f"{key[:57]}..."
            first = _line(own[key][0])
            raise reading.error(key_node, f"duplicate key {shown!r}, first on line {first}")
        own[key] = key_node, value_node
    return merged | own


def _key(node: yaml.Node, reading: _Reading) -> str:
    """Field names are text, even where YAML would read a number or a boolean."""
    if not isinstance(node, yaml.ScalarNode):
        raise reading.error(node, "a list or a mapping cannot be the name of a field")
    return str(node.value)


def _scalar(node: yaml.Node, reading: _Reading) -> Any:
    if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
        raise reading.error(
            node, f"is a number of {len(node.value)} characters; put it in quotes if it is text"
        )
    try:
        return reading.loader.construct_object(node)
    except (yaml.YAMLError, ValueError, ArithmeticError, KeyError, IndexError) as error:
        kind = node.tag.replace(_TAG, "", 1)
        shown = str(node.value)[:60]
        raise reading.error(node, f"{shown!r} is not a valid {kind}") from error


def _check_bounds(text: str, name: str, bounds: Bounds) -> None:
    """Check the limits before anything is built, on PyYAML's event stream, which needs no
    recursion."""
    now = Bounds(0, 0)
    sizes: dict[str, Bounds] = {}
    heights: dict[str, int] = {}
    opened: list[tuple[str | None, Bounds]] = []
    below = [0]  # of each collection that is open: levels within it so far, aliases expanded
    documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        where = f"{name}:{_line(event)}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise SpecError(f"{where}: a second document begins here; wanted one job per file")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, now))
            below.append(0)
            now += Bounds(1, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            height = below.pop() + 1
            below[-1] = max(below[-1], height)
            if anchor is not None:
                sizes[anchor], heights[anchor] = now - before, height
        elif isinstance(event, yaml.ScalarEvent):
            size = Bounds(1, len(event.value.encode(errors="replace")))
            now += size
            if event.anchor is not None:
                sizes[event.anchor], heights[event.anchor] = size, 0
        elif isinstance(event, yaml.AliasEvent):
            anchor = str(event.anchor)
            if anchor in (one for one, _ in opened):
                raise SpecError(f"{where}: *{anchor[:60]} contains itself")
            now += sizes.get(anchor, Bounds(1, 0))
            below[-1] = max(below[-1], heights.get(anchor, 0))
        if len(opened) + below[-1] > DEEPEST:
            raise SpecError(f"{where}: nests deeper than {DEEPEST} levels; is it a job spec?")
        if now.values > bounds.values or now.content_bytes > bounds.content_bytes:
            raise SpecError(
                f"{where}: with its aliases expanded this is more than {bounds.values} values "
                f"or {bounds.content_bytes >> 20} MiB; is it a job spec?"
            )


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
