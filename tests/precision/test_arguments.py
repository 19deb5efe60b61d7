import re
from pathlib import Path

import pytest

from lightning_ups.precision import Float8Precision, TEPrecision

BOTH = pytest.mark.parametrize("kind", [Float8Precision, TEPrecision])


@BOTH
@pytest.mark.parametrize(
    ("given", "first", "cure"),
    [
        (
            {"tokens": 4096},
            "(filter='all', tokens=4096) would not look at tokens",
            "Use filter='auto'",
        ),
        ({"table": Path("times.json")}, "(filter='all', table='times.json')", "Use filter='auto', or leave table out."),
        ({"filter": "auto", "tokens": 0}, "(tokens=0) is no number of rows", "Give a whole number of 1 or more"),
        ({"filter": "auto", "tokens": "4096"}, "(tokens='4096')", "Give a whole number of 1 or more"),
        ({"include": []}, "(include=[]) is an empty list.", "Name some, or leave include out."),
        ({"filter": "auto", "table": ""}, "(table='') is an empty path.", "Name one, or leave table out."),
        ({"head": True, "include": ["a.*"]}, "(include=['a.*'], head=True)", "Add the names outside the blocks to"),
    ],
    ids=str,
)
def test_what_would_have_no_effect_is_refused(kind, given, first, cure):
    with pytest.raises(ValueError, match=rf"{kind.__name__}{re.escape(first)}.*{re.escape(cure)}"):
        kind(**given)


@BOTH
def test_what_has_one_is_taken(kind):
    taken = kind(filter="auto", tokens=4096, table="times.json", include=["a.*"])
    assert (taken.tokens, taken.table) == (4096, "times.json")
    assert kind(head=True).head


def test_evaluation_in_float8_without_a_recipe_is_refused():
    with pytest.raises(
        ValueError, match=r"recipe=None, evaluate=True\).*leave number_format, evaluate and fp8_attention"
    ):
        TEPrecision(recipe=None, evaluate=True)


@pytest.mark.parametrize(
    ("make", "given", "cure"),
    [
        (lambda: TEPrecision(recipe="delayed", amax_history="16"), "TEPrecision(amax_history='16')", "a whole number"),
        (lambda: TEPrecision(recipe="delayed", margin="1"), "TEPrecision(margin='1')", "Use a whole number."),
    ],
)
def test_a_wrong_kind_is_named_with_its_cure(make, given, cure):
    with pytest.raises(TypeError, match=f"{re.escape(given)}.*{re.escape(cure)}"):
        make()
