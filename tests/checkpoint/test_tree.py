"""States come back as exactly what they were, or are refused by name."""

from __future__ import annotations

import datetime
import enum
import json
import math
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.states import same
from hypothesis import given, settings
from hypothesis import strategies as st

from hydroslurm.checkpoint.tree import decode, encode, tensor_keys
from hydroslurm.errors import CheckpointCorrupt, UnsavableState

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def there_and_back(tree: Any) -> Any:
    encoded, tensors = encode(tree, prefix="extra")
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**20000), max_value=2**20000)
    | st.floats()
    | st.text()
    | st.sampled_from(["$tensor", "$", "$dict", "a.b", "a[0]", ""])
    | st.binary(max_size=20)
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])])
    | st.sampled_from([np.float32(1.5), np.int64(-1), np.bool_(True), np.datetime64("2020-01-01")])
    | st.builds(range, st.integers(0, 5), st.integers(0, 5))
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from([Path("a/b"), PurePosixPath("/a"), array("d", [1.5]), array("H", [])])
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.integers(0, 9),
)
ARRAYS = st.builds(
    lambda shape, kind: np.arange(math.prod(shape)).reshape(shape).astype(kind),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["f4", ">i8", "U3", "S2", "?", "c16", "M8[s]"]),
)
TREES = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=3))
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_round_trip(tree: Any) -> None:
    """Any tree of the types that can be saved comes back equal, in types, order and bits."""
    assert same(there_and_back(tree), tree)


def test_the_same_memory_is_kept_once() -> None:
    """Tied weights are one tensor in the file; another view of them is not lost. A dot in a name
    does not make two tensors one."""
    weight = torch.randn(4, 4)
    tree = {"a": weight, "b": weight.detach(), "c": weight.t(), "d": weight[1:]}
    encoded, tensors = encode(tree, prefix="model")
    assert len(tensors) == 3
    assert tensor_keys(encoded) == dict.fromkeys(tensors)
    assert same(decode(encoded, tensors), tree)
    alike = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    assert same(there_and_back(alike), alike)


def test_states_of_objects_keep_what_is_beside_the_values() -> None:
    """The versions of a model's modules, and what a Counter is."""
    model = torch.nn.BatchNorm2d(4).state_dict()
    back = there_and_back({"model": model, "counter": Counter("abca")})
    assert same(back["model"], model)
    assert back["model"]._metadata == model._metadata
    assert same(back["counter"], Counter("abca"))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (object(), ""),
        (lambda: None, ""),
        (Point(1, 2), ""),
        (Colour.RED, ""),
        (torch.randn(3, 3).to_sparse(), ""),
        (torch.empty(2, device="meta"), ""),
        (defaultdict(lambda: 1), ""),
        (type("Text", (str,), {})("a"), ""),
        (random.Random(1), ""),
        # other arrays can be saved: what is wrong with this one is what it holds
        (np.array([{"a": 1}], dtype=object), r"numpy\.\w+ of dtype object, "),
        (np.zeros(2, dtype=[("x", "f4")]), r"numpy\.\w+ of dtype \[\('x', '<f4'\)\], "),
        (np.zeros(1, dtype=[("x", "f4")])[0], r"numpy\.\w+ of dtype \[\('x', '<f4'\)\], "),
    ],
    ids=lambda one: type(one).__name__,
)
def test_unsavable_is_named(bad: object, named: str) -> None:
    """The first object that only pickle could save is refused with its place and its type."""
    with pytest.raises(UnsavableState, match=rf"^extra\.sampler\.queue\[3\] is a {named}"):
        encode({"sampler": {"queue": [0, 1, 2, bad]}}, prefix="extra")


def test_cycles_and_depth_are_refused() -> None:
    """A state that contains itself, or goes too deep, is an error and not a crash."""
    ring: list[Any] = []
    ring.append({"again": ring})
    with pytest.raises(UnsavableState, match=r"extra\[0\]\.again contains itself"):
        encode(ring, prefix="extra")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsavableState, match="too deeply"):
        encode(deep, prefix="extra")


@pytest.mark.parametrize(
    "encoded",
    [
        {"$import": "os.system"},
        {"$tensor": "gone"},
        {"$dtype": "load"},
        {"$numpy": ["O", "AAAAAAAAAAA="]},
        {"$defaultdict": ["eval", []]},
        {"$tuple": 3},
        {"$tuple": {"$range": [0, 10**18, 1]}},
        {"$deque": [{"$range": [0, 10**18, 1]}, None]},
        {"$dict": [{"$range": [0, 10**18, 1]}]},
        {"$ordered": [{"$range": [0, 10**18, 1]}, None]},
        {"$ordered": []},
    ],
)
def test_a_foreign_tag_is_refused(encoded: Any) -> None:
    """A tag chooses among known types; what is not in the table is a damaged checkpoint."""
    with pytest.raises(CheckpointCorrupt):
        decode(encoded, {})
