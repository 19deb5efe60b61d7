import pytest

from lightning_ups.config.output import clock, note, readable_count, shell_word, short_path, titled


def test_notes_go_to_stderr(capsys):
    note("look")
    assert capsys.readouterr() == ("", "look\n")


def test_titled():
    first, second = titled("order", ["a", "word " * 30])
    assert first == "order     a"
    assert len(second.splitlines()) == 2
    assert second.startswith(" " * 10)


def test_readable_count():
    numbers = {999: "999", 1500: "1.5 k", 853_000_000: "853 M", 7_000_000_000: "7 B"}
    assert {number: readable_count(number) for number in numbers} == numbers


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "a") == "a"
    assert short_path("s3://a/b") == "s3://a/b"
    assert short_path("/elsewhere") == "/elsewhere"
    assert shell_word(tmp_path / "a b") == "'a b'"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (125.9, "2:05"), (3600, "60:00")])
def test_a_clock_has_minutes_and_seconds(seconds, text):
    assert clock(seconds) == text
