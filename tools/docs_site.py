"""Hooks of mkdocs: let pages link to files outside docs/, as they do on a code host.

README.md becomes the first page, CONTRIBUTING.md a page of its own, and the examples are copied. Links are
rewritten while a page is built, so the Markdown files keep relative links that a code host understands.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside docs/: path in the repository to path in the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for example in sorted((ROOT / "examples").glob("*.py")):
        name = example.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    sources = {target: source for source, target in PAGES.items()}
    return rewrite(markdown, source=sources.get(uri, f"docs/{uri}"), target=uri)


def rewrite(markdown: str, *, source: str, target: str) -> str:
    """Rewrite the relative links of `source`, a file of the repository, for its page `target`."""

    def moved(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        path = PAGES.get(path, path.removeprefix("docs/"))
        return os.path.relpath(path, os.path.dirname(target) or ".")

    texts = FENCE.split(markdown)
    return "".join(text if text.startswith("```") else LINK.sub(moved, text) for text in texts)
