import pytest

from lightning_ups.transforms.quoted import first_line, listed, quoted, several


@pytest.mark.parametrize(
    ("error", "line", "named", "whole"),
    [
        (NotImplementedError(), "NotImplementedError", "NotImplementedError", "NotImplementedError"),
        (ValueError(" \n"), "ValueError", "ValueError", "ValueError"),
        (ValueError("no good."), "no good", "ValueError: no good.", "ValueError: no good."),
        (ValueError("raised:\n  later\n"), "raised", "ValueError: raised:", "ValueError: raised:\n  later"),
        (KeyError("x"), "'x'", "KeyError: 'x'", "KeyError: 'x'"),
    ],
    ids=repr,
)
def test_an_error_is_quoted_by_what_it_says_or_its_class(error, line, named, whole):
    assert (first_line(error), quoted(error), quoted(error, whole=True)) == (line, named, whole)


def test_many_names_are_cut():
    assert listed(["a", "b"]) == "a, b"
    assert listed([*"abcdefg"]) == "a, b, c, d, e and 2 more"


def test_a_count_has_its_noun():
    assert [several(count, "block") for count in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
