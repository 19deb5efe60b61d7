"""A plugin for runs that may be cut off: ``pytest -p tests.told_at_once`` prints each failure when it happens."""


def pytest_runtest_logreport(report):
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)  # noqa: T201
