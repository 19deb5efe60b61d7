"""Write `benchmarks/results/README.md`, the index of all raw results: what, when, hardware, script and a headline."""

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HEAD = """# Raw results

Each folder has the raw output of a measurement, with its command and remarks. This index is written by
`python benchmarks/results_index.py`. Results that no page cites are in `archive`.
"""
HARDWARE = re.compile(
    r"\b(?:(one|two|four|eight|\d)\s+)?(?:NVIDIA\s+)?(H200|H100|A100|B200)(?:s| GPUs?)?\b", re.IGNORECASE
)
SETUP = re.compile(r"torch 2\.\d+[.,]|\bcores\b|\bcommit\b|^Medians of|^One (?:run|GPU)\b", re.IGNORECASE)
MOST = 150  # characters of a headline


def index() -> str:
    """Return the text of the index, newest results first."""
    lines = [HEAD]
    for title, pattern in (("Cited", "20*"), ("Archive", "archive/20*")):
        lines += [f"## {title}\n", "| date | what | hardware | script | headline |", "|---|---|---|---|---|"]
        lines += [_row(folder) for folder in folders(pattern)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def folders(pattern: str) -> list[Path]:
    """Return the folders of results that are explained, newest first."""
    found = [path.parent for path in RESULTS.glob(f"{pattern}/README.md")]
    return sorted(found, key=lambda folder: folder.name, reverse=True)


def _row(folder: Path) -> str:
    text = (folder / "README.md").read_text()
    title = text.partition("\n")[0].removeprefix("# ").replace("|", "/")
    scripts = re.findall(r"\b(?:benchmarks|tests|examples)/(\w+)\.py\b|-m lightning_ups (\w+)", text)
    script = next((f"`{file}.py`" if file else f"`{command}`" for file, command in scripts), "")
    place = folder.relative_to(RESULTS).as_posix()
    return f"| {folder.name[:10]} | [{title}]({place}/README.md) | {_hardware(text)} | {script} | {_headline(text)} |"


def _hardware(text: str) -> str:
    found = HARDWARE.search(text)
    if found is None:
        return "CPU" if re.search(r"\bCPU\b|\bcores\b|gloo", text) else ""
    return f"{found[1].lower()} {found[2].upper()}" if found[1] else found[2].upper()


def _headline(text: str) -> str:
    """Return the first sentence of the prose that has a figure in bold, or any figure."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^(?:#.*|\|.*|    .*)$", "", text, flags=re.MULTILINE)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    sentences = re.split(r"(?<=[.:])\s+(?=[A-Z*`-])|\n\n", prose)
    plain = [" ".join(sentence.split()).lstrip("- ") for sentence in sentences]
    kept = [sentence for sentence in plain if re.search(r"\d", sentence) and not SETUP.search(sentence)]
    best = next((s for s in kept if re.search(r"\*\*[^*]*\d", s)), next(iter(kept), ""))
    best = best.replace("**", "").replace("|", "/").rstrip(":")
    return best if len(best) <= MOST else best[:MOST].rsplit(" ", 1)[0].rstrip(",;") + " ..."


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(index())
