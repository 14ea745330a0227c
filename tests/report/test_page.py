"""report.html needs nothing else, and is a page whatever the names in it are."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from report.ranklog import RankLog
from report.views import history_of

from hydroslurm.core.events import EventKind
from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.figures import Report
from hydroslurm.report.history import History
from hydroslurm.report.views import MOST_ON_PAGE, page

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
    report = Report(history, ExternalSources(missing=missing))
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
