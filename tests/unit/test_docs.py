"""The documentation: the site builds without a warning, and the reference has every name and argument."""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import manyhands
import manyhands.testing
from manyhands.contract import Learner, Strategy
from manyhands.events import events
from manyhands.hosts.timeouts import Timeouts
from manyhands.strategies.local import Local, LocalLearner
from manyhands.transport.fields import MessageSet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly: a warning or a dead link fails here. Takes about 3 s."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_builds_strictly(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "design.html", "strategies/index.html", "contributing.html"} <= pages
    assert (site / "examples" / "clicks.py").read_text().startswith('"""')


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//[^>]*', text), path
        assert not re.findall(r'<link[^>]+href="?(?:https?:)?//[^>]*', text), path


def signature(page: str, name: str) -> str:
    """Return the call of `name` as the page shows it."""
    _, found, rest = page.partition(f'id="{name}"')
    assert found, f"{name} is not in the reference"
    return html.unescape(re.sub(r"<[^>]+>", "", rest.partition("</code></pre>")[0]))


def check(page: str, thing: Any) -> None:
    """Check that a function, or a class with its public methods, is on the page with all arguments."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    parameters = () if is_error(thing) else inspect.signature(thing).parameters
    shown = signature(page, name)
    for argument in parameters:
        if argument == "self":
            continue
        assert re.search(rf"\b{argument}\b", shown), f"{name} is shown without {argument}"
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if member.startswith("_"):
                continue
            assert f'id="{name}.{member}"' in page, f"{name}.{member} is not in the reference"
            if inspect.isfunction(value):
                check(page, value)


def is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def things(module: ModuleType) -> Iterator[Any]:
    """Yield the functions and classes of a package's `__all__`."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            yield thing
        else:
            assert name in ("__version__", "data", "words")


@pytest.mark.parametrize(
    ("package", "page"),
    [("manyhands", "manyhands"), ("manyhands.data", "data"), ("manyhands.word2vec", "words")],
)
def test_the_reference_has_every_public_name(site: Path, package: str, page: str) -> None:
    text = (site / "reference" / f"{page}.html").read_text()
    for thing in things(importlib.import_module(package)):
        check(text, thing)


def test_the_reference_names_what_is_no_function_or_class() -> None:
    page = (ROOT / "docs" / "reference" / "manyhands.md").read_text()
    for name in manyhands.__all__:
        thing = getattr(manyhands, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            assert f"`mh.{name}`" in page


@pytest.mark.parametrize(
    "name", [found.name for found in pkgutil.iter_modules(manyhands.testing.__path__)]
)
def test_the_reference_has_every_public_name_of_testing(site: Path, name: str) -> None:
    module = importlib.import_module(f"manyhands.testing.{name}")
    text = (site / "reference" / "testing.html").read_text()
    assert f'id="{module.__name__}"' in text
    for thing in vars(module).values():
        own = getattr(thing, "__module__", "") == module.__name__
        if own and not thing.__qualname__.startswith("_"):
            check(text, thing)


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_work_in_the_plain_files_too(page: Path) -> None:
    dead = [target for target in links(page) if not (page.parent / target).is_file()]
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_in_lists_have_four_spaces(page: Path) -> None:
    """With two, a code host shows them in the item, and mkdocs after the list."""
    lines = page.read_text().splitlines()
    assert not [line for line in lines if re.match(r" {1,3}(```|\|)", line)]


INTERNALS = [
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("design", "words")),
]
SOURCE = ROOT / "src" / "manyhands"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks that begin with one of our folders; in pages on the source, all modules."""
    ours = {path.name: path.parent for folder in (ROOT, SOURCE) for path in folder.iterdir()}
    missing = []
    for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py)?)`", page.read_text()):
        first = name.partition("/")[0]
        if first in ours and first != "runs" and not (ours[first] / name).exists():
            missing.append(name)
    if page in INTERNALS:
        known = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py")]
        for name in re.findall(r"`([a-z_0-9/]+\.py)`", page.read_text()):
            if not any(f"/{path}".endswith(f"/{name}") for path in known):
                missing.append(name)
    assert not missing


@pytest.mark.parametrize("page", INTERNALS, ids=lambda path: path.name)
def test_classes_that_are_named_exist(page: Path) -> None:
    words = {w for path in SOURCE.rglob("*.py") for w in re.findall(r"\w+", path.read_text())}
    named = set(re.findall(r"`((?:[A-Z][a-z]+){2,})`", page.read_text()))
    assert named <= words


def message_sets() -> Iterator[tuple[str, MessageSet]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if re.search(r"^\w+ = MessageSet\(", path.read_text(), re.MULTILINE):
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            for key, value in vars(importlib.import_module(name)).items():
                if isinstance(value, MessageSet):
                    yield f"{name}.{key}", value


def test_the_page_on_the_design_has_every_message() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    missing = {name: set(kinds.kinds) - named for name, kinds in message_sets()}
    assert missing, "no message was found"
    assert not {name: kinds for name, kinds in missing.items() if kinds}


CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_of_a_strategy_is_the_real_one() -> None:
    """Each piece of code on the page stands in a file, and every method that others call is shown."""
    page = ROOT / "docs" / "strategies" / "README.md"
    section = page.read_text().partition("### An example: `local`")[2].partition("\n### ")[0]
    *pieces, registry, case = CODE.findall(section)
    strategy = (SOURCE / "strategies" / "local.py").read_text()
    for piece in pieces:
        for part in re.split(r"\n\n(?=    (?:@|def ))", piece.strip("\n")):
            assert part in strategy
    assert registry in (SOURCE / "strategies" / "registry.py").read_text()
    assert case in (ROOT / "tests" / "strategies" / "test_conformance.py").read_text()
    methods = {name for cls in (Local, LocalLearner) for name in vars(cls) if name[0] != "_"}
    contract = {name for cls in (Strategy, Learner) for name in vars(cls)}
    shown = set(re.findall(r"def (\w+)\(", "\n".join(pieces)))
    assert shown >= methods & contract - {"name", "variants"}


def test_the_example_of_a_codec_is_the_real_one() -> None:
    page = ROOT / "docs" / "strategies" / "codecs.md"
    assert CODE.findall(page.read_text())[0] == (SOURCE / "codecs" / "int8.py").read_text()


def test_the_page_on_strategies_has_every_conformance_check() -> None:
    from manyhands.testing.conformance import CHECKS, IN_PROCESS, PAIRS

    page = (ROOT / "docs" / "strategies" / "README.md").read_text()
    table = page.partition("### The conformance suite")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    found = re.findall(r"`(\w+)`", " ".join(rows))
    checks = dict.fromkeys([*CHECKS, *IN_PROCESS, *PAIRS.values()])
    assert found == [check.__name__ for check in checks]


def test_the_pictures_are_what_the_policies_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ROOT / "docs" / "img"
    script = runpy.run_path(str(folder / "ps_pictures.py"))
    monkeypatch.setitem(script["main"].__globals__, "FOLDER", tmp_path)
    script["main"]()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in folder.glob("ps-*.svg")}


def test_the_page_on_the_run_folder_has_every_event_and_field() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` (\|.*)$", page, re.MULTILINE))
    kinds = {kind.__name__: kind for kind in events.Event.__subclasses__()}
    assert rows.keys() == kinds.keys()
    for name, kind in kinds.items():
        fields = {field.name for field in dataclasses.fields(kind)} - {"time"}
        assert fields <= set(re.findall(r"`(\w+)`", rows[name])), name


def test_the_page_on_the_design_has_every_timeout() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `(\w+_s)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert {name: float(value) for name, value in rows} == dataclasses.asdict(Timeouts())
