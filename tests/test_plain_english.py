"""Reject idioms that readers have to read twice. The allow-list has the offenders of today, and may only shrink."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IDIOMS = (
    r"(is|are|was|be|been) told",
    r"told (of|at once|apart)",
    r"take it that",
    r"of which (nothing|none)",
    r"it is a switch",
    r"by hand",
    r"as it stands",
    r"come together",
    r"put aside",
    r"has no part in",
    r"(?<!there )is no (number|name|list|file|class|checkpoint)\b",
    r"goes on with",
    r"in each other's way",
    r"where (it|that|there) is (none|one|no)\b",
    r"stands? for",
    r"what (is|was) (said|heard)",
    r"takes? (it|them) away",
    r"in vain",
    r"amid the",
)
PATTERN = re.compile("|".join(f"(?:{idiom})" for idiom in IDIOMS), re.IGNORECASE)
LEGITIMATE = ("told_at_once",)  # the name of a module
# Lines with an idiom, by folder. Lower a number when a folder has fewer; a folder that is not listed has none.
ALLOWED = {
    "lightning_ups/callbacks": 1,
    "lightning_ups/commands": 2,
    "lightning_ups/optim": 1,
    "lightning_ups/optim/offload": 2,
    "lightning_ups/precision": 2,
    "tests": 11,
    "tests/_compat/lightning": 8,
    "tests/_compat/optional": 10,
    "tests/_compat/torch": 18,
    "tests/benchmarks": 30,
    "tests/callbacks": 23,
    "tests/callbacks/logs": 17,
    "tests/commands": 4,
    "tests/examples": 2,
    "tests/kernels": 8,
    "tests/kernels/attention": 2,
    "tests/optim": 5,
    "tests/optim/offload": 3,
    "tests/order": 6,
    "tests/precision": 16,
    "tests/state/checkpoint": 10,
    "tests/state/resume": 6,
    "tests/strategies": 15,
    "tests/transforms": 7,
    "tests/transforms/casting": 2,
    "tests/transforms/compile": 9,
    "tests/transforms/recompute": 1,
    "tests/transforms/simple_fsdp": 1,
    "tests/transforms/te": 1,
}


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("docs",) else 3]) or "."


@cache
def offenders() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    files += [*(ROOT / "lightning_ups").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for path in files:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            # In identifiers, words are joined by underscores.
            if PATTERN.search(line.replace("_", " ")) and not any(use in line for use in LEGITIMATE):
                found.setdefault(folder_of(path), []).append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize("folder", sorted({*offenders(), *ALLOWED}))
def test_a_folder_has_no_new_idioms(folder):
    lines = offenders().get(folder, [])
    assert len(lines) <= ALLOWED.get(folder, 0), "\n".join(lines)


def test_idioms_are_found():
    assert PATTERN.search("The user is told of it.")
    assert PATTERN.search("def test_a_fault_is_told".replace("_", " "))
    assert not PATTERN.search("Return the number of rows.")
