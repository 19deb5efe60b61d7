"""The site builds without warnings and without network, and every link of it leads somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.test_docs import ROOT, blocks, check_parses, resolve, shells

pytest.importorskip("mkdocs")
sys.path.insert(0, str(ROOT / "docs"))
import reference


class Links(HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.loads, self.anchors = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        elif tag in ("img", "script") and given.get("src"):
            self.loads.add(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {page: Links(page.read_text()) for page in folder.rglob("*.html") if page.name != "404.html"}


def test_links_and_anchors_exist(site):
    dead = []
    for page, found in site.items():
        for link in found.links | found.loads:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:|//", link):
                continue
            path = (page.parent / unquote(target)).resolve() if target else page
            path = path / "index.html" if path.is_dir() else path
            known = path.exists() and (not anchor or path.suffix != ".html" or unquote(anchor) in site[path].anchors)
            dead += [] if known else [f"{page.name}: {link}"]
    assert dead == []


def test_nothing_is_loaded_from_the_network(site):
    assert {load for found in site.values() for load in found.loads if re.match(r"\w+:|//", load)} == set()


def test_every_page_is_in_the_navigation(site):
    start = next(
        found for page, found in site.items() if page.name == "index.html" and (page.parent / "search").exists()
    )
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | {*reference.pages()}
    assert {page.replace(".md", ".html") for page in pages} - {"index.html"} <= start.links


def test_every_public_class_and_command_has_a_page_whose_yaml_is_parsed():
    pages = reference.pages()
    names = {Path(path).stem for path in pages}
    assert {name for name, part in shells().items() if isinstance(part, type)} | {*reference.TOOLS} <= names
    examples = [block for text in pages.values() for block in blocks(text, "yaml")]
    assert len(examples) > 25
    for example in examples:
        check_parses(example)


def test_every_class_of_the_reference_has_a_docstring():
    directives = [line[4:] for text in reference.pages().values() for line in text.splitlines() if line[:4] == "::: "]
    assert directives
    assert all(resolve(name).__doc__ for name in directives)
