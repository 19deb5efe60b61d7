"""Print the CPU seconds of test tiers, and of their slowest files: ``python tests/count_seconds.py fast default slow``.

They hardly depend on what else the machine does; two cores take half of them, and more where a test waits. It is also
the plugin that counts them in each process of pytest. Processes that tests start are counted, if Linux is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = {"fast": ["-m", "fast"], "default": [], "slow": ["-m", "slow"]}
FOLDER = "COUNT_SECONDS"  # the variable with the folder to which each process of pytest writes
START = "start and collection"


def seconds():
    """Return the CPU seconds of this process and of its descendants, so far."""
    ticks, children = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # its own, and those of its children that have ended
    family = [os.getpid()]
    for pid in family:  # which grows
        family += children.get(pid, [])
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK") if ticks else time.process_time()


class Seconds:
    """Writes a line for each file of tests when its last test has ended."""

    def __init__(self, folder):
        self.file, self.before, self.name = Path(folder) / f"{os.getpid()}.jsonl", 0.0, START

    def pytest_runtest_logstart(self, location):
        if self.name != location[0]:
            self.write()
            self.name = location[0]

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        now = seconds()
        with self.file.open("a") as file:
            file.write(json.dumps([self.name, max(now - self.before, 0)]) + "\n")  # of ranks that ended nothing is left
        self.before = now


def pytest_configure(config):
    if FOLDER in os.environ and hasattr(config, "workerinput"):  # the process that starts the others runs no test
        config.pluginmanager.register(Seconds(os.environ[FOLDER]))


def count(options):
    """Run pytest with ``options``; return the seconds of each file, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        environment = {**os.environ, FOLDER: folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.count_seconds", *options]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        found = Counter()
        for path in Path(folder).glob("*.jsonl"):
            for name, spent in map(json.loads, path.read_text().splitlines()):
                found[name] += spent
        return found, time.monotonic() - begun


def table(tier, found, took, *, rows):
    """Return lines about a tier and its slowest files."""
    yield f"{tier}: {sum(found.values()):.0f} CPU seconds, {took:.0f} s by the clock"
    for name, spent in found.most_common(rows):
        yield f"  {spent:6.1f}  {name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", choices=TIERS, default=["fast", "default"])
    parser.add_argument("--rows", type=int, default=30, help="files to list")
    options = parser.parse_args()
    counted = {tier: count(TIERS[tier]) for tier in options.tiers}
    for tier, (found, took) in counted.items():
        print(*table(tier, found, took, rows=options.rows), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
