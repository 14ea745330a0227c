"""The command line of our own child processes, safe in the user's working directory."""

from __future__ import annotations

import sys

# `-I` would also hide what PYTHONPATH and `pip install --user` have
_PROGRAM = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); from runpy import run_module; "
    "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What ``-P -m`` does, which is Python 3.11's."""


def module_command(
    python: str, module: str, *arguments: str, unbuffered: bool = False
) -> list[str]:
    """As ``python -m module``, which would import from the working directory first: an ``nt.py`` or
    a ``queue.py`` of the user's would end the process."""
    knows_it = python == sys.executable and sys.version_info >= (3, 11)
    how = ["-P"] if knows_it else []
    how += ["-u"] if unbuffered else []
    how += ["-m"] if knows_it else ["-c", _PROGRAM]
    return [python, *how, module, *arguments]
