"""A script with the change that a page of the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def changed(script: str, page: str) -> str:
    """The text of a script after the first diff on this page. Its hunks, parted by ``@@``, have to
    be found in their order; quotes and comments may differ.

    Raises:
        ValueError: a hunk is not found; names its first line.
    """
    found = re.search(r"^```diff\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)
    assert found is not None, f"{page} has no diff"
    left, done = script.splitlines(), []
    for hunk in re.split(r"^@@\n", found[1], flags=re.M):
        lines = hunk.splitlines()
        before = [_plain(line[1:]) for line in lines if line[:1] != "+"]
        place = next(
            (
                at
                for at in range(len(left))
                if [_plain(line) for line in left[at : at + len(before)]] == before
            ),
            None,
        )
        if place is None:
            raise ValueError(f"{page}: no place for the hunk that begins with {lines[0]!r}")
        done += [*left[:place], *(line[1:] for line in lines if line[:1] != "-")]
        left = left[place + len(before) :]
    return "\n".join([*done, *left]) + "\n"


def _plain(line: str) -> str:
    return re.sub(r"\s*#.*", "", line).replace("'", '"').rstrip()
