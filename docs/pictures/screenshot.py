"""Write `report.png`, the top of `raw/report.html`, a report of the quickstart on two CPU cores that other work shared.

It needs Chromium, which Debian has: ``PYTHONPATH=docs python -m pictures.screenshot``.
"""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,870")

if __name__ == "__main__":
    page = (HERE / "raw/report.html").as_uri()
    subprocess.run(["chromium", *OPTIONS, f"--screenshot={HERE / 'report.png'}", page], check=True, capture_output=True)
