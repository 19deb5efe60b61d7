"""The pictures of the pages are what their scripts draw, from raw results and from the package."""

import re
import statistics
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT / "docs"))
pictures = import_module("pictures.__main__")


@pytest.mark.parametrize("name", [*pictures.DRAWN, *pictures.RECORDED])
def test_a_picture_is_what_its_script_draws(name):
    assert (PICTURES / f"{name}.svg").read_text() == pictures.draw(name), (
        f"run `PYTHONPATH=.:docs python -m pictures {name}`"
    )


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_complete(path):
    root = ElementTree.parse(path).getroot()
    assert root.get("viewBox")
    assert root.get("aria-label")
    assert re.findall(r"https?://(?!www\.w3\.org)", path.read_text()) == [], "nothing is loaded from the network"


def test_the_speedups_are_as_the_page_says():
    ratios = [ratio for _, ratio in import_module("zoo_results").speedups().values()]
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "results" / "measured.md").read_text())
    assert f"{len(ratios)} modules train with both" in page
    assert f"The median module is {statistics.median(ratios):.2f} times as fast" in page
    slow = sorted(ratio for ratio in ratios if ratio < 0.98)
    assert f"Three modules run at less than 0.98x in their last call ({slow[0]:.2f} to {slow[-1]:.2f})" in page
    assert len(slow) == 3


def test_the_table_of_families_is_that_of_the_raw_output():
    assert (ROOT / "docs" / "results" / "measured.md").read_text() == import_module("zoo_results").summary(), (
        "run `PYTHONPATH=docs python -m zoo_results`"
    )


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_table_of_a_gpu_is_that_of_the_raw_output(gpu):
    zoo_results = import_module("zoo_results")
    page = (ROOT / "docs" / "results" / f"{gpu.lower()}.md").read_text()
    assert page == zoo_results.page(gpu), "run `PYTHONPATH=docs python -m zoo_results`"


def test_every_picture_is_on_a_page():
    pages = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
    assert [path.name for path in PICTURES.glob("*.svg") if f"pictures/{path.name}" not in pages] == []
