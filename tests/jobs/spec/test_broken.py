"""What is said of job specs that are none."""

from __future__ import annotations

import re

import pytest
from jobs.spec.broken_specs import BROKEN, Broken


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_message_names_field_line_and_fix(broken: Broken) -> None:
    """Every wrong field of a spec is said at once, in the message that is recorded, each with its
    line where the file has any."""
    assert broken.answer() == broken.recorded
    where = rf"{broken.name}\.yaml:[0-9]+: "
    assert broken.name == "01-empty" or re.search(where, broken.recorded)
