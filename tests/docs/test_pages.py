"""The site builds, strictly; README, docs/ and CONTRIBUTING say of the code what is true."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from processes import captured
from typer.testing import CliRunner

import hydroslurm
from hydroslurm.cli import app
from hydroslurm.core.events import EventKind

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "sbatch/README.md")
PAGES = (*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md")))
GENERATED = {"cli.md", "api.md", "contributing.md", "changelog.md"}
"""Pages that are there in the built site only: strict mkdocs checks the links to them."""

INTERNAL = {
    "HYDROSLURM_PROVE",
    "HYDROSLURM_ATTEMPT",
    "HYDROSLURM_BELOW",
    "HYDROSLURM_RANK_TAKEN",
    "HYDROSLURM_SUPERVISED",
    "HYDROSLURM_INCARNATION",
}
"""Variables that one process of ours sets for another: not for users."""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SITE = _load(ROOT / "docs/site.py")
TABLES = _load(ROOT / "profiling/readme_table.py")


def _prose(text: str) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def _code(text: str) -> Iterator[str]:
    """The blocks of shell commands, and the spans of code outside of blocks."""
    yield from re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)
    yield from re.findall(r"`([^`]+)`", re.sub(r"^#.*$", "", _prose(text), flags=re.M))


def _anchors(path: Path) -> set[str]:
    """The anchors that mkdocs and GitHub give the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", _prose(path.read_text()), flags=re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[ ]+", "-", heading) for heading in plain}


def test_every_link_and_anchor_resolves() -> None:
    """A link leads to a file of the repository, and its anchor to a heading there. README is one
    page: at most 200 lines of 120 characters, with the picture and the two commands."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text())):
            file, _, anchor = target.partition("#")
            made = Path(file).name in GENERATED and page.parent == ROOT / "docs"
            if made or target.startswith(("http://", "https://")):
                continue
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), f"{page.name} links to {file}"
            assert not anchor or anchor in _anchors(path), f"{page.name} links to {target}"
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 120
    for wanted in ("make demo", "make test", "docs/images/timeline.png"):
        assert wanted in text


def test_what_the_pages_name_is_there() -> None:
    """What CONTRIBUTING and the architecture call a file, a folder or a module is one; in
    CONTRIBUTING's tables each row names a file, and functions or classes that are in it; every
    folder of the package has its row in the architecture, and nothing else has; each name in
    environment.md's tree of a run folder stands in core/rundir.py too, and each event that
    several-ranks.md lists is one."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    architecture = (ROOT / "docs/architecture.md").read_text()
    roots = "hydroslurm|tests|profiling|docs|examples|sbatch"
    for text in (contributing, architecture):
        paths = re.findall(rf"`((?:{roots})/[\w./*-]*)`", text)
        assert paths
        assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []
        for module in re.findall(r"`(hydroslurm(?:\.\w+)+)`", text):
            base = ROOT / module.replace(".", "/")
            is_name = hasattr(hydroslurm, module.split(".")[1])
            assert base.is_dir() or base.with_suffix(".py").is_file() or is_name, module
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| ([^|]*) \|", contributing, flags=re.M)
    assert len(rows) >= 12
    for path, names in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+?)(?:\(\))?`", names):
            assert re.search(rf"\b{name.split('.')[-1]}\b", text), f"{path} has no {name}"
    rooms = {path.parent.name for path in (ROOT / "hydroslurm").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `hydroslurm/(\w+)` \|", architecture, flags=re.M)) == rooms
    page = (ROOT / "docs/environment.md").read_text()
    tree = page.partition("## The run folder")[2].partition("```\n")[2].partition("```")[0]
    names = re.findall(r"[\w./-]+", " ".join(line[:31] for line in tree.splitlines()[1:]))
    spelled = (ROOT / "hydroslurm/core/rundir.py").read_text()
    assert len(names) > 15
    assert [name for name in names if name not in spelled] == []
    ranks = (ROOT / "docs/several-ranks.md").read_text().partition("In the event log: ")[2]
    kinds = re.findall(r"`(\w+)`", ranks.partition("\n\n")[0])
    assert len(kinds) > 8
    assert set(kinds) <= {kind.value for kind in EventKind}


def test_every_variable_is_described() -> None:
    """environment.md lists what the code reads, and nothing that it does not; other pages too."""
    sources = [path for end in ("py", "cpp") for path in (ROOT / "hydroslurm").rglob(f"*.{end}")]
    code = "".join(path.read_text() for path in sources)
    read = set(re.findall(r"\"(HYDROSLURM_[A-Z_]+)\"", code)) - INTERNAL
    page = (ROOT / "docs/environment.md").read_text()
    listed = set(re.findall(r"^\| `(HYDROSLURM_[A-Z_]+)`", page, flags=re.M))
    assert listed - {"HYDROSLURM_REQUIRE_SLURM"} == read - {"HYDROSLURM_REQUIRE_SLURM"}
    for path in PAGES:
        used = set(re.findall(r"HYDROSLURM_[A-Z_]+[A-Z]", path.read_text()))
        assert used <= listed | {"HYDROSLURM_ALL_STOPS"}, f"{path.name}: {used - listed}"


def test_verbs_options_and_public_names() -> None:
    """The command line's page has each verb of help, and the API's page each public name. What a
    page calls `hydroslurm VERB --option` can be called."""
    cli, api = SITE.cli_page(), SITE.api_page()
    helped = re.findall(r"^  (\w+)  ", CliRunner().invoke(app, ["help"]).output, flags=re.M)
    verbs = set(re.findall(r"^#+ hydroslurm (\w+)", cli, flags=re.M))
    assert len(helped) > 15
    assert set(helped) <= verbs
    assert [name for name in {*hydroslurm.__all__} - {"data"} if f".{name}\n" not in api] == []
    for path in PAGES:
        code = "\n".join(_code(path.read_text()))
        for verb, rest in re.findall(r"^hydroslurm ([a-z]+)\b([^\n|]*)", code, flags=re.M):
            assert verb in verbs, f"{path.name}: hydroslurm {verb}"
            ours = re.split(r"#| -- | [\w/]+\.py", rest)[0]
            for option in re.findall(r"(?<= )--[a-z][\w-]+", ours):
                assert option in cli, f"{path.name}: hydroslurm {verb} {option}"


def test_messages_in_troubleshooting_are_messages() -> None:
    """Each quoted heading is what the code says; … stands for what differs from case to case."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quotes = re.findall(r"^### `(.*)`$", text, flags=re.M)
    assert len(quotes) >= 15
    said = _strings(ROOT / "hydroslurm")
    for quote in quotes:
        for part in quote.split("…"):
            if wanted := part.strip(" `"):
                assert wanted in said, f"nothing says {wanted!r}"


def _strings(folder: Path) -> str:
    """All text that modules hold, with a line between two of them and … for a value."""
    found: list[str] = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_the_figures_are_those_of_the_results() -> None:
    """Nobody has written a figure by hand: `profiling/bench.py --readme` would change nothing."""
    results = TABLES.load(ROOT / "profiling/results")
    for page, block in (
        ("README.md", TABLES.headlines(results)),
        ("docs/performance.md", TABLES.table(results)),
    ):
        text = (ROOT / page).read_text()
        assert TABLES.replace_between(text, block) == text


def test_the_site_is_whole_and_stands_alone(tmp_path: Path) -> None:
    """The API's page has an entry for each public name, with its text; no page needs a network: no
    font, script or style is of another host."""
    done = captured(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text()
    entries = set(re.findall(r'id="hydroslurm[\w.]*\.(\w+)"', api))
    assert set(hydroslurm.__all__) - {"data"} <= entries
    assert "One training over all its" in api
    loaded = r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"'
    for page in ("index.html", "cli.html", "api.html"):
        assert re.findall(loaded, (tmp_path / page).read_text()) == []
