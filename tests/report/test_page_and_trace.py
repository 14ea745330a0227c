"""report.html needs nothing else, and is a page whatever the names in it are; trace.json is what
the Trace Event Format asks for."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from report.ranklog import RankLog
from report.views import history_of

from hydroslurm.core.events import EventKind
from hydroslurm.report.figures import Report
from hydroslurm.report.history import History
from hydroslurm.report.trace import MOST_EVENTS, trace_of
from hydroslurm.report.views import MOST_ON_PAGE, page
from hydroslurm.report.writing import write_trace

HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)>&amp;</td></table>'


class Reader(HTMLParser):
    """Tags and their attributes, the text, and what was opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(history: History, *, missing: tuple[str, ...] = ()) -> str:
    report = Report(history, unread=missing)
    return page(report, pictures=[("a <b>picture</b>", b"\x89PNG")])


def test_hostile_names_stay_text() -> None:
    """Names of a run, an operator, a host and a reason are shown and not obeyed."""
    log = RankLog(host=HOSTILE).trains(0, attempt=1)
    begin = {"pause": 1, "requested_mono_ns": log.mono_ns(4)}
    log.add(EventKind.GATE_CLOSED, 4, causes=[HOSTILE], **begin)
    log.add(EventKind.FIRST_OPERATOR_HELD, 4, operator=HOSTILE, phase="forward", **begin)
    log.add(EventKind.PARKED, 4, held=1, **begin)
    log.add(EventKind.RESUMED, 5, pause=1)
    log.add(EventKind.FIRST_OPERATOR_RELEASED, 5, pause=1)
    log.stop(10, step=40, reason=HOSTILE)
    read = Reader(page_of(history_of(log, name=HOSTILE), missing=(HOSTILE,)))
    assert read.open == []
    assert {tag for tag, _ in read.tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "img", "section",
        "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "footer",
    }  # fmt: skip
    assert all(not name.startswith("on") for _, attrs in read.tags for name in attrs)
    text = "".join(read.words)
    assert text.count(HOSTILE) >= 5


def test_nothing_is_fetched() -> None:
    """Pictures are inside, there is no script and no address, and a policy forbids both."""
    text = page_of(history_of(RankLog().installed().pause(3).uninstalled(9)))
    read = Reader(text)
    sources = [attrs.get("src") or attrs.get("href") for _, attrs in read.tags]
    assert all((source or "data:").startswith("data:") for source in sources)
    assert not re.search(r"https?:|url\(|@import", text)
    policy = next(attrs for tag, attrs in read.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in str(policy["content"])
    assert any(attrs.get("alt") == "a <b>picture</b>" for tag, attrs in read.tags if tag == "img")


def test_long_tables_are_cut_and_say_so() -> None:
    """A run of thousands of pauses gives a page that can be opened; a job that has not started has
    one, too."""
    log = RankLog().installed()
    for number in range(MOST_ON_PAGE + 30):
        log.pause(1 + 3 * number)
    text = page_of(history_of(log.uninstalled(9999)))
    assert text.count("<tr>") < 3 * MOST_ON_PAGE
    assert "30 more are left out" in text
    read = Reader(page_of(History(name="run")))
    assert "No events yet." in read.words
    assert read.open == []


def two_attempts() -> History:
    first = RankLog(pid=1).trains(0, attempt=1).pause(4, for_s=2)
    first.add(EventKind.DRAINED, 4.1, pause=1, drain_us=9e4)
    return history_of(
        first.stop(10, step=40), RankLog(pid=2, restart_count=1).trains(20, attempt=2, step=40)
    )


def check(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Every entry by the rules of its phase; the slices of one thread nest. Returns them."""
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in trace["traceEvents"]:
        assert entry["ph"] in ("X", "i", "M")
        assert isinstance(entry["name"], str)
        assert all(isinstance(entry[key], int) for key in ("pid", "tid"))
        assert isinstance(entry["ts"], (int, float))
        assert isinstance(entry["args"], dict)
        if entry["ph"] == "X":
            assert entry["dur"] > 0
            slices[entry["pid"], entry["tid"]].append(entry)
        elif entry["ph"] == "i":
            assert entry["s"] in ("g", "p", "t")
        else:
            assert entry["name"] in ("process_name", "process_sort_index", "thread_name")
    for mine in slices.values():
        ends: list[float] = []
        for entry in sorted(mine, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= entry["ts"] + 0.002:
                ends.pop()
            assert not ends or entry["ts"] + entry["dur"] <= ends[-1] + 0.002, entry
            ends.append(entry["ts"] + entry["dur"])
    return slices


def test_everything_that_took_time_is_a_slice() -> None:
    """A process per attempt with its name, slices that nest, and requests as instants; microseconds
    since the run's first event."""
    trace = trace_of(two_attempts())
    slices = check(trace)
    names = {entry["name"] for mine in slices.values() for entry in mine}
    assert names == {
        "starting", "training", "leaving", "pausing", "parked", "draining", "resuming", "saving",
        "committing", "requeueing",
    }  # fmt: skip
    instants = {entry["name"] for entry in trace["traceEvents"] if entry["ph"] == "i"}
    assert {"pause_request", "resume_request", "stop_request"} <= instants
    titles = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert titles == ["rank 0, attempt 1 (n1, pid 1)", "rank 0, attempt 2 (n1, pid 2)"]
    parked = next(entry for entry in trace["traceEvents"] if entry["name"] == "parked")
    assert round(parked["ts"]) == 4_000_080
    assert round(parked["dur"]) == 1_999_960


def test_torn_runs() -> None:
    """What has no end lasts to the last event, and what has no begin is left out."""
    log = RankLog().installed().pause(2).pause(5, until="parked")
    check(trace_of(history_of(log)))
    stopped = RankLog().trains(0, attempt=1).stop(10, step=4, until="save_staged")
    check(trace_of(history_of(stopped)))
    check(trace_of(History(name="nothing")))


def test_large_runs_are_cut_and_say_so(tmp_path: Path) -> None:
    """A trace never has more entries than a browser opens, and tells what is not in it."""
    log = RankLog().installed()
    for number in range(MOST_EVENTS // 10 + 50):
        log.pause(1 + 3 * number)
    written = json.loads(write_trace(history_of(log), tmp_path / "r" / "trace.json").read_text())
    assert len(written["traceEvents"]) <= MOST_EVENTS
    assert written["otherData"]["pauses_left_out"] == 50
