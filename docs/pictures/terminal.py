"""Terminal recordings: `raw/NAME.txt` has a command in its first line, then what it printed but for progress."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 124
STYLES = (  # as the commands print them, for which a file has no colors
    (r"^\$ .*", "bold green"),
    (r"^[a-z][a-z ]+$|^[a-z]+(?: next)?(?=  )", "bold"),
    (r"(?<=  )yes(?=  )|(?<=  )nothing$|verify: passed|\+[\d.]+%", "green"),
    (r"(?<=  )no(?=  )|\bnot installed\b", "yellow"),
    (r"\blimited\b", "cyan"),
)


def draw(name: str) -> str:
    """Return the picture of one recording."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in (Path(__file__).parent / f"raw/{name}.txt").read_text().rstrip().splitlines():
        shown = Text(line)
        for pattern, style in STYLES:
            shown.highlight_regex(pattern, style)
        console.print(shown, soft_wrap=False)
    console.print()
    picture = console.export_svg(title="lightning_ups", unique_id=name)
    picture = re.sub(r"<!--.*?-->", "", picture)
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # they would be loaded from the network
    picture = picture.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    return picture.replace("<svg ", f'<svg role="img" aria-label="What {name} prints" ', 1)
