"""The index of raw results is complete, and results that nothing cites are in the archive."""

import re
from pathlib import Path

from benchmarks import results_index

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_index_is_up_to_date():
    text = (RESULTS / "README.md").read_text()
    assert text == results_index.index(), "run `python benchmarks/results_index.py`"
    listed = re.findall(r"\]\(([\w./-]+)/README\.md\)", text)
    assert {*listed} == {path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.glob("**/20*/README.md")}


def test_what_is_cited_is_not_in_the_archive():
    """Pages, code, tests and other results cite a result by the name of its folder."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *RESULTS.glob("20*/README.md")]
    files += [path for room in ("tests", "benchmarks", "lightning_ups") for path in (ROOT / room).rglob("*.py")]
    text = "".join(path.read_text() for path in files)
    names = [path.name for path in (RESULTS / "archive").iterdir()]
    assert [name for name in names if re.search(rf"{name}\b(?!_)", text)] == []
