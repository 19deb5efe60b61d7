"""The site builds without warnings and without network, and every link of it leads somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs")


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
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.html"} <= start.links
