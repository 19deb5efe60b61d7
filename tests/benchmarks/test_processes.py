import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def finished(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import processes

    yield processes.finished
    sys.modules.pop("processes", None)


def run(finished, code, **options):
    begun = time.monotonic()
    return finished([sys.executable, "-uc", code], **options), time.monotonic() - begun


def test_all_ranks_are_told_who_they_are(finished):
    code = "import os; print('%(RANK)s of %(WORLD_SIZE)s at %(MASTER_PORT)s' % os.environ)"
    lines = sorted(run(finished, code, timeout=60, ranks=2)[0].split("\n")[:2])
    assert [line[:6] for line in lines] == ["0 of 2", "1 of 2"]
    assert lines[0].split()[-1] == lines[1].split()[-1], "one address"


def test_what_hangs_is_ended_with_what_it_started(finished):
    code = (
        "import subprocess, sys; print('begun'); subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    text, seconds = run(finished, code, timeout=3)
    assert text.startswith("begun")
    assert "ended after 3 s" in text
    assert seconds < 60


def test_ranks_do_not_wait_for_one_that_failed(finished):
    code = "import os, sys, time; sys.exit(1) if os.environ['RANK'] == '0' else time.sleep(600)"
    text, seconds = run(finished, code, timeout=300, ranks=2)
    assert "since a rank had failed" in text
    assert seconds < 120
