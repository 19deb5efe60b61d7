"""Running code in a process of its own, in which Triton interprets its kernels."""

import os
import subprocess
import sys

import pytest


def assert_equal_interpreted(code):
    """Run ``code``, which prints "equal" if it gets to its end; without Triton the test is skipped."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.stdout.strip() == "equal", ran.stderr
