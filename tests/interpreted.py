"""Running code in a process of its own, in which Triton interprets its kernels."""

import os
import subprocess
import sys

import pytest

# Triton makes an index of an array with one element, which numpy refuses from 2.4 on.
_INDEX = """
import triton.runtime.interpreter as interpreter

def _patched(tensor, scope, plain=interpreter._patch_lang_tensor):
    plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang_tensor = _patched
"""


def assert_equal_interpreted(code):
    """Run ``code``, which prints "equal" if it gets to its end; without Triton the test is skipped."""
    assert_equal_with_triton(_INDEX + code, TRITON_INTERPRET="1")


def assert_equal_with_triton(code, **environment):
    """Do the same without interpreting kernels, in a process that has ``environment``, too."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.stdout.strip() == "equal", ran.stderr
