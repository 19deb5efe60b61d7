import math
import re
from pathlib import Path

import pytest
from torch import nn

from lightning_ups.callbacks import (
    AccelerationFlags,
    ActivationOffload,
    Compile,
    LeanProgressBar,
    OptimizerOffload,
    StepGuard,
    TokenThroughput,
)
from lightning_ups.order.arguments import check_finite, check_least, check_path, check_some


@pytest.mark.parametrize(
    ("make", "given", "cure"),
    [
        (lambda: Compile(blocks=[nn.Sequential]), "Sequential", "Write its name in the model"),
        (lambda: TokenThroughput(peak_tflops={"bf16": "989"}), "peak_tflops={'bf16': '989'}", "TFLOP/s"),
        (lambda: StepGuard(sigmas=0), "StepGuard(sigmas=0)", "Use a finite number, more than 0."),
        (lambda: AccelerationFlags(max_split_size_mb=10**30), "max_split_size_mb=1000", "less than 17592186044416."),
        (lambda: OptimizerOffload(chunk_mb=math.inf), "(chunk_mb=inf)", "Use a finite number, more than 0, or None."),
        (
            lambda: OptimizerOffload(resident=None),
            "(resident=None) is not a number",
            "Use a number, or leave resident out.",
        ),
        (lambda: LeanProgressBar(metrics="train_loss"), "(metrics='train_loss')", "such as ['train_loss']."),
        (lambda: ActivationOffload(min_mb=math.nan), "(min_mb=nan)", "Use a finite number, 0 or more."),
        (lambda: ActivationOffload(blocks=[]), "ActivationOffload(blocks=[])", "Name some, or leave blocks out."),
        (lambda: OptimizerOffload(on_no_effect="skip"), "OptimizerOffload(on_no_effect='skip')", "('raise', 'warn')"),
        (lambda: Compile(cache=""), "Compile(cache='')", "Name one, or leave cache out."),
    ],
)
def test_a_wrong_kind_is_named_with_its_cure(make, given, cure):
    with pytest.raises((TypeError, ValueError), match=f"{re.escape(given)}.*{re.escape(cure)}"):
        make()


@pytest.mark.parametrize("value", [None, "a", Path("a"), Path()])
def test_what_may_be_a_path_passes(value):
    check_path("x", value, of="Some", why="It is a file.")


def test_an_empty_path_is_refused():
    with pytest.raises(
        ValueError, match=r"^Some\(x=''\) is an empty path\. It is a file\. Name one, or leave x out\.$"
    ):
        check_path("x", "", of="Some", why="It is a file.")


def test_what_is_too_small_is_named_with_the_least():
    check_least("x", 2, 2, of="Some", why="It counts.")
    check_least("x", None, 2, of="Some", why="It counts.", optional=True)
    with pytest.raises(ValueError, match=r"^Some\(x=1\) is out of range\. It counts\. Use 2 or more\.$"):
        check_least("x", 1, 2, of="Some", why="It counts.")
    with pytest.raises(ValueError, match=r"Use 2 or more, or None\.$"):
        check_least("x", 1, 2, of="Some", why="It counts.", optional=True)


def test_what_is_not_finite_is_named_with_what_is():
    for value, above in ((0, None), (0.1, 0), (None, None)):
        check_finite("x", value, of="Some", why="It is a size.", above=above, optional=True)
    with pytest.raises(
        ValueError, match=r"^Some\(x=inf\) is out of range\. It is a size\. Use a finite number, 0 or more\.$"
    ):
        check_finite("x", math.inf, of="Some", why="It is a size.")
    check_finite("x", 1, of="Some", why="It is a share.", most=1)
    with pytest.raises(ValueError, match=r"Use a finite number, 0 or more, up to 1\.$"):
        check_finite("x", 1.5, of="Some", why="It is a share.", most=1)
    with pytest.raises(ValueError, match=r"Use a finite number, more than 0, or None\.$"):
        check_finite("x", 0, of="Some", why="It is a size.", above=0, optional=True)


def test_an_empty_list_is_refused_and_none_is_not():
    for some in (None, ["a"]):
        check_some("x", some, of="Some", why="It names blocks.")
    with pytest.raises(
        ValueError, match=r"^Some\(x=\[\]\) is an empty list\. It names blocks\. Name some, or leave x out\.$"
    ):
        check_some("x", [], of="Some", why="It names blocks.")
