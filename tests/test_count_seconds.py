"""The script that counts CPU seconds of tests."""

import json
import subprocess
import sys
from collections import Counter

from tests import count_seconds


def test_seconds_of_processes_are_counted():
    before = count_seconds.seconds()
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert count_seconds.seconds() - before >= 0.25


def test_each_file_has_its_seconds(tmp_path, monkeypatch):
    now = iter([3.0, 5.0, 4.0])
    monkeypatch.setattr(count_seconds, "seconds", lambda: next(now))
    counting = count_seconds.Seconds(tmp_path)
    for file in ("a.py", "a.py", "b.py"):
        counting.pytest_runtest_logstart((file, 1, "test"))
    counting.pytest_sessionfinish()
    lines = [json.loads(line) for line in counting.file.read_text().splitlines()]
    assert lines == [[count_seconds.START, 3.0], ["a.py", 2.0], ["b.py", 0]]


def test_the_slowest_files_are_listed():
    found = Counter({"a.py": 2.0, "b.py": 3.0})
    assert [*count_seconds.table("fast", found, 4, rows=1)] == [
        "fast: 5 CPU seconds, 4 s by the clock",
        "     3.0  b.py",
    ]
