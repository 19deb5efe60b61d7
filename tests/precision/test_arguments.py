import re
from pathlib import Path

import pytest

from lightning_ups.precision import Float8Precision, TEPrecision

BOTH = pytest.mark.parametrize("kind", [Float8Precision, TEPrecision])


@BOTH
@pytest.mark.parametrize(
    ("given", "first", "cure"),
    [
        ({"tokens": 4096}, "(filter='all', tokens=4096) would not look at tokens", "Use filter='auto'"),
        ({"table": Path("times.json")}, "(filter='all', table='times.json')", "Use filter='auto', or leave table out."),
        (
            {"filter": "auto", "tokens": 0},
            "(tokens=0) is not a valid number of rows",
            "Give a whole number of 1 or more",
        ),
        ({"filter": "auto", "tokens": "4096"}, "(tokens='4096')", "Give a whole number of 1 or more"),
        ({"filter": "auto", "table": ""}, "(table='') is an empty path.", "Name one, or leave table out."),
        ({"filter": "fast"}, "(filter='fast') is not a known choice.", "Use one of ('all', 'auto')."),
        ({"include": []}, "(include=[]) is an empty list.", "Name some, or leave include out."),
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


@BOTH
def test_a_string_of_patterns_is_refused(kind):
    with pytest.raises(TypeError, match=r"given as the string 'head'.*Write \['head'\]"):
        kind(exclude="head")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"recipe": "rowise"}, "recipe 'rowise' is unknown. Use one of ('tensorwise', "),
        ({"number_format": "e5m2"}, "format 'e5m2' is unknown. Use one of ('e4m3', 'hybrid')"),
        ({"recipe": "rowwise", "all_gather": True}, "'rowwise' is given with all_gather=True"),
        ({"recipe": "rowwise", "number_format": "hybrid"}, "'rowwise' is given with number_format='hybrid'"),
    ],
    ids=str,
)
def test_what_a_float8_recipe_does_not_have_is_refused(given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Float8Precision(**given)


@pytest.mark.parametrize(
    ("given", "first", "cure"),
    [
        ({"recipe": "delay"}, "recipe='delay'", "Use one of ('delayed', 'current', 'block', 'mxfp8', None)"),
        ({"number_format": "e5m2"}, "number_format='e5m2'", "'hybrid', 'e4m3'"),
        ({"recipe": "delayed", "amax_compute": "mean"}, "amax_compute='mean'", "'most_recent'"),
        ({"fuse": "some"}, "fuse='some'", "'auto', 'all', 'none'"),
        ({"recipe": "delayed", "amax_history": 0}, "amax_history=0", "Use 1 or more"),
        ({"amax_history": 16}, "recipe='current') is given with amax_history=16", "Use recipe='delayed', or leave"),
        ({"recipe": "block", "margin": 1}, "(recipe='block') is given with margin=1", "leave margin out"),
        *(
            ({"recipe": None, **given}, "(recipe=None) is given with", f"or leave {next(iter(given))} out")
            for given in ({"number_format": "e4m3"}, {"evaluate": True}, {"filter": "auto"})
        ),
    ],
    ids=str,
)
def test_what_a_recipe_of_transformer_engine_does_not_take_is_refused(given, first, cure):
    with pytest.raises(ValueError, match=rf"{re.escape(first)}.*{re.escape(cure)}"):
        TEPrecision(**given)


@pytest.mark.parametrize("given", [{"amax_history": "16"}, {"margin": "1"}], ids=str)
def test_a_wrong_kind_is_named_with_its_cure(given):
    with pytest.raises(TypeError, match=rf"TEPrecision\({next(iter(given))}='1.*Use a whole number"):
        TEPrecision(recipe="delayed", **given)
