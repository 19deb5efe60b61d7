"""A plugin for runs that may be cut off: ``pytest -p tests.told_at_once`` prints each failure when it happens.

Tests that run for long are named while they do, so that one that hangs is known when the run is ended, and the slowest
are named with their times when they end.
"""

import os
import threading
import time
from functools import partial

LONG_S = 45.0

_begun: dict[str, float] = {}  # when each test began that runs now, on whatever worker
_ended = threading.Event()


def running_long(now, *, begun=_begun, long_s=LONG_S):
    """Return lines about tests that run for long, the longest first."""
    return [
        f"RUNNING for {now - at:.0f} s: {test}"
        for test, at in sorted(begun.items(), key=lambda item: item[1])
        if now - at >= long_s
    ]


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # the one that hears of all tests
        # While a test runs, what is printed is taken for its own: this is where it went before.
        shown = os.fdopen(os.dup(1), "w")
        watch = threading.Thread(target=_watch, args=(shown,), daemon=True)
        watch.start()
        session.config.add_cleanup(partial(_end, watch))


def _end(watch):
    _ended.set()
    watch.join()


def _watch(shown):
    with shown:
        while not _ended.wait(LONG_S):
            for line in running_long(time.monotonic(), long_s=LONG_S):
                print(f"\n{line}", file=shown, flush=True)


def pytest_runtest_logstart(nodeid):
    _begun[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid):
    now = time.monotonic()
    took = now - _begun.pop(nodeid, now)
    if took >= LONG_S:
        print(f"\nTOOK {took:.0f} s: {nodeid}", flush=True)  # noqa: T201


def pytest_runtest_logreport(report):
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)  # noqa: T201
