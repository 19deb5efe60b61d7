import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_ups.insight.processes import end_group, exit_on_signals

PARENT = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
import time; time.sleep(60)
"""


def is_running(pid):
    """Return whether a process still runs after five seconds."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # ended; nobody has waited for it
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.1)
    return True


def test_a_process_ends_with_its_children():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True) as process:
        child = int(process.stdout.readline())
        end_group(process)
    assert process.returncode == -signal.SIGKILL
    assert not is_running(child)
    end_group(process)  # has no effect


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_exit_once_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    cleaned = []

    def interrupted():
        with exit_on_signals():
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                cleaned.append(1)

    with pytest.raises(SystemExit) as stop:
        interrupted()
    assert stop.value.code == 128 + number
    assert cleaned
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
