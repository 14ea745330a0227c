"""What a reader sees of a run: the terminal's text, and the words in a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from matplotlib.figure import Figure
from report.ranklog import RankLog
from rich.console import Console

from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.figures import Figures, Report
from hydroslurm.report.history import History
from hydroslurm.report.views import report_view


def history_of(*logs: RankLog, name: str = "run") -> History:
    """The history of all these processes."""
    events = [event for log in logs for event in log.events]
    return History(name=name, attempts=attempts_of(events))


def figures_of(history: History, *sources: Any) -> Figures:
    """The figures of a run with these sources, as of :class:`Report`."""
    return Report(history, *sources).figures


def shown(history: History, *sources: Any, width: int = 80, max_rows: int = 40) -> list[str]:
    """The lines of the report in a terminal."""
    console = Console(file=io.StringIO(), width=width)
    console.print(report_view(Report(history, *sources), max_rows=max_rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def texts(figure: Figure) -> list[str]:
    """What is written into a picture's axes."""
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure: Figure) -> list[str]:
    """The labels of its legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def tells(thing: object, told: Mapping[str, Any]) -> None:
    """Each of these attributes; numbers nearly."""
    near = {
        key: pytest.approx(v, abs=0.01) if type(v) in (int, float) else v for key, v in told.items()
    }
    assert {key: getattr(thing, key) for key in told} == near
