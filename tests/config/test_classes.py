import pytest
from lightning.pytorch import Callback

import lightning_ups.callbacks  # noqa: F401  (so that bare class names resolve)
from lightning_ups.config.classes import class_name, classes_of, find_class, is_public


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Timer", "Timer"),
        ("tests.cli_toys.Noted", "Noted"),
        ("Timr", None),
        ("tests.cli_toys.Nothing", None),
        ("nowhere.Net", None),
        (".Net", None),
    ],
)
def test_find_class(name, found):
    assert getattr(find_class(name, [Callback]), "__name__", None) == found


def test_class_name():
    assert class_name({"class_path": "a.b.C"}) == class_name("C") == "C"


def test_is_public():
    assert is_public("lightning_ups.callbacks.compile.Compile")
    assert is_public("lightning_ups.Compile")
    assert is_public("torch.optim.AdamW")
    assert not is_public("lightning_ups.Declaration")
    assert not is_public("lightning_ups.order.Declaration")


def test_classes_of():
    assert classes_of(list[Callback] | Callback | int | None) == [Callback]
    assert classes_of(dict[str, int]) == []
