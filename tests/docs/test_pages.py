"""README, docs/ and CONTRIBUTING against the code: links, names, messages and tables are true."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
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


def _links(path: Path) -> Iterator[tuple[str, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path.read_text())):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_and_anchor_resolves(page: Path) -> None:
    """A link leads to a file of the repository, and its anchor to a heading there."""
    for file, anchor in _links(page):
        if Path(file).name in GENERATED and page.parent == ROOT / "docs":
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {file}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {file}#{anchor}"


def test_readme_is_one_page() -> None:
    """At most 200 lines of 120 characters, with the picture and the two commands."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120] == []
    text = "\n".join(lines)
    for wanted in ("make demo", "make test", "docs/images/timeline.png"):
        assert wanted in text


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_named_exists(name: str) -> None:
    """What these pages call a file, a folder or a module is one."""
    text = (ROOT / name).read_text()
    roots = "hydroslurm|tests|profiling|docs|examples|sbatch"
    paths = re.findall(rf"`((?:{roots})/[\w./*-]*)`", text)
    assert paths
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{name} names {path}"
    modules = re.findall(r"`(hydroslurm(?:\.\w+)+)`", text)
    for module in modules:
        base = ROOT / module.replace(".", "/")
        assert base.is_dir() or base.with_suffix(".py").is_file() or _attribute(module), module


def _attribute(dotted: str) -> bool:
    return getattr(hydroslurm, dotted.split(".")[1], None) is not None


def test_the_ways_of_a_pause_and_a_stop_name_what_is_there() -> None:
    """In CONTRIBUTING's tables each row names a file, and functions or classes that are in it."""
    rows = re.findall(
        r"^\| \d+ \| `([^`]+)` \| ([^|]*) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M
    )
    assert len(rows) >= 12
    for path, names in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+?)(?:\(\))?`", names):
            assert re.search(rf"\b{name.split('.')[-1]}\b", text), f"{path} has no {name}"


def test_architecture_and_architecture_test_name_the_same_rooms() -> None:
    """Every folder of the package has its row, and nothing else has."""
    package = ROOT / "hydroslurm"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    text = (ROOT / "docs/architecture.md").read_text()
    assert set(re.findall(r"^\| `hydroslurm/(\w+)` \|", text, flags=re.M)) == rooms


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


def test_the_run_folder_is_drawn_as_the_code_spells_it() -> None:
    """Each name in the tree of environment.md stands in core/rundir.py too."""
    page = (ROOT / "docs/environment.md").read_text()
    tree = page.partition("## The run folder")[2].partition("```\n")[2].partition("```")[0]
    spelled = (ROOT / "hydroslurm/core/rundir.py").read_text()
    names = re.findall(r"[\w./-]+", " ".join(line[:31] for line in tree.splitlines()[1:]))
    assert len(names) > 15
    for name in names:
        assert name in spelled, name


def test_every_verb_and_public_name_has_its_place() -> None:
    """The command line's page has each verb of help, and the API's page each public name."""
    verbs = re.findall(r"^  (\w+)  ", CliRunner().invoke(app, ["help"]).output, flags=re.M)
    assert len(verbs) > 15
    page = SITE.cli_page()
    for verb in verbs:
        assert f"\n## hydroslurm {verb}\n" in page
    api = SITE.api_page()
    for name in set(hydroslurm.__all__) - {"data"}:
        assert f".{name}\n" in api


def test_verbs_and_options_in_the_pages_exist() -> None:
    """What a page calls `hydroslurm VERB --option` can be called."""
    cli = SITE.cli_page()
    verbs = set(re.findall(r"^#+ hydroslurm (\w+)", cli, flags=re.M))
    for path in PAGES:
        code = "\n".join(_code(path.read_text()))
        for verb, rest in re.findall(r"^hydroslurm ([a-z]+)\b([^\n|]*)", code, flags=re.M):
            assert verb in verbs, f"{path.name}: hydroslurm {verb}"
            for option in re.findall(
                r"(?<= )--[a-z][\w-]+", re.split(r"#| -- | [\w/]+\.py", rest)[0]
            ):
                assert option in cli, f"{path.name}: hydroslurm {verb} {option}"


def test_events_that_are_named_exist() -> None:
    """several-ranks.md lists kinds of events, and each is one."""
    text = (ROOT / "docs/several-ranks.md").read_text()
    kinds = re.findall(r"`(\w+)`", text.partition("In the event log: ")[2].partition("\n\n")[0])
    assert len(kinds) > 8
    assert set(kinds) <= {kind.value for kind in EventKind}


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
