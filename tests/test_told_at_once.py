from tests import told_at_once


def test_what_runs_for_long_is_named_the_longest_first():
    begun = {"a": 100.0, "b": 20.0, "c": 70.0}
    lines = told_at_once.running_long(120.0, begun=begun, long_s=45.0)
    assert lines == ["RUNNING for 100 s: b", "RUNNING for 50 s: c"]


def test_what_has_ended_is_named_no_more(monkeypatch, capsys):
    clock = iter([11.0, 70.0, 71.0, 72.0])
    monkeypatch.setattr(told_at_once, "_begun", {})
    monkeypatch.setattr(told_at_once.time, "monotonic", lambda: next(clock))
    told_at_once.pytest_runtest_logstart("long")
    told_at_once.pytest_runtest_logfinish("long")
    told_at_once.pytest_runtest_logstart("short")
    told_at_once.pytest_runtest_logfinish("short")
    assert told_at_once._begun == {}
    assert capsys.readouterr().out == "\nTOOK 59 s: long\n"
