"""Print the text of a report, without its styles and curves."""

import re
import sys
from pathlib import Path

page = re.sub(r"<(style|script).*?</\1>", "", Path(sys.argv[1]).read_text(), flags=re.DOTALL)
print("pictures that were logged:", len(re.findall(r"data:image/png", page)))
for line in re.sub(r"<[^>]+>", "\n", page).splitlines():
    if line.strip():
        print(line.strip())
