"""The script that counts how easy it is to find one's way."""

import subprocess
import sys

import pytest

from tests import count_house
from tests.count_house import HERE


def test_the_script_prints_a_table():
    command = [sys.executable, HERE / "count_house.py", "--no-fit"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "| transforms: files, lines | " in printed
    assert "| files opened: A new refusal | two |" in printed


@pytest.mark.slow
def test_a_fit_enters_its_strategy_and_its_precision():
    entered = count_house.entered_by_a_fit(HERE.parent)
    assert {"strategies/fsdp2.py", "callbacks/compile.py", "callbacks/activation_checkpoint.py"} <= {*entered}
