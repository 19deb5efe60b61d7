"""Hooks of the site: what MkDocs asks for while it builds."""

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # pages that are written outside of docs/
    "results/raw.md": "benchmarks/results/README.md",
    "development/contributing.md": "CONTRIBUTING.md",
    "development/design.md": "DESIGN.md",
}
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s#]+)", re.MULTILINE)


def outside(page: str, target: str) -> Path | None:
    """Return the file that a link of a page leads to, if it is in the repository but not below ``docs/``."""
    if re.match(r"\w+:", target):
        return None
    path = (ROOT / "docs" / page).parent / target
    path = Path(os.path.normpath(path))
    return path.relative_to(ROOT) if path.is_file() and not path.is_relative_to(ROOT / "docs") else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the part of the navigation that is made from the package."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = reference.navigation([*reference.pages()])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and as plain text what pages link to outside of ``docs/``, such as raw results."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    for path, source in ELSEWHERE.items():
        files.append(File.generated(config, path, content=_moved((ROOT / source).read_text(), source)))
    targets = set()
    for page in files.documentation_pages():
        targets |= {outside(page.src_uri, target) for _, target in LINK.findall(page.content_string)}
    for target in sorted(targets - {None}):
        files.append(File.generated(config, f"source/{target}.txt", content=(ROOT / target).read_text()))
    return files


def _moved(text: str, source: str) -> str:
    """Let the links of ``source`` lead to the same files from a page two folders below the root."""
    here = Path(source).parent

    def moved(link: re.Match) -> str:
        if re.match(r"\w+:", link[2]):
            return link[0]
        return link[1] + os.path.relpath(here / link[2], "docs/development")

    text = re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)
    return LINK.sub(moved, text)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside of ``docs/`` lead to their copies."""
    here = os.path.dirname(page.file.src_uri)

    def copied(link: re.Match) -> str:
        target = outside(page.file.src_uri, link[2])
        return link[1] + (os.path.relpath(f"source/{target}.txt", here or ".") if target else link[2])

    return LINK.sub(copied, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let examples of docstrings look as elsewhere."""
    return html.replace("<p>Example::</p>", "<p>Example:</p>")
