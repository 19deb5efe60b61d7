import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ups import callbacks
from lightning_ups.order import DtypePolicy, PrecisionCapabilities, policy_of
from lightning_ups.order.capabilities import capabilities_of
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader, trainer


def test_precisions_state_what_they_do():
    assert capabilities_of(MixedPrecision("bf16-mixed", "cpu")) == PrecisionCapabilities()
    assert capabilities_of(BF16Precision()) == PrecisionCapabilities()
    assert capabilities_of(BF16Precision(weights="masters")).holds_masters
    assert capabilities_of(Float8Precision(recipe="tensorwise", all_gather=True)).wants_float8_gathers
    assert not capabilities_of(Float8Precision(recipe="tensorwise")).wants_float8_gathers, "it is only allowed"


@pytest.mark.parametrize(
    ("precision", "param"),
    [(MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16), (BF16Precision(), torch.bfloat16), (Precision(), None)],
    ids=lambda value: type(value).__name__,
)
def test_what_a_precision_stands_for(precision, param):
    assert policy_of(precision).param is param


def test_what_has_no_policy():
    assert policy_of(HalfPrecision("bf16-true")) is None
    assert policy_of(MixedPrecision("16-mixed", "cpu")) is None
    assert policy_of(type("Custom", (Precision,), {})()) is None  # inherits the name "32-true"


def test_lightnings_bf16_mixed_is_autocast():
    assert policy_of(MixedPrecision("bf16-mixed", "cpu")).autocast
    assert not policy_of(Precision()).autocast


def test_patterns_of_what_computes_in_float32_are_read_and_kept():
    policy = DtypePolicy.bf16_mixed(in_float32=["net.*"])
    assert policy.in_float32 == ("net.*",)
    assert (policy.param, policy.reduce, policy.output) == (torch.bfloat16, torch.float32, torch.float32)


def test_a_callback_without_brackets_is_named_before_the_run(tmp_path):
    made = trainer(tmp_path, callbacks=[callbacks.Compile])
    with pytest.raises(AttributeError, match=r"Write Trainer\(callbacks=\[Compile\(\.\.\.\)\]\)"):
        made.fit(Net(), loader())
    assert callbacks.Compile().state_key == "Compile"


@pytest.mark.parametrize("name", callbacks.__all__)
def test_every_callback_gives_the_hint_without_brackets(name):
    with pytest.raises(AttributeError, match="brackets"):
        str(getattr(callbacks, name).state_key)


@pytest.mark.parametrize("kind", [BF16Precision, FSDP2Strategy])
def test_lightning_itself_refuses_other_classes_without_brackets(tmp_path, kind):
    where = {"plugins": [kind]} if kind is BF16Precision else {"strategy": kind}
    with pytest.raises((MisconfigurationException, ValueError), match=kind.__name__):
        trainer(tmp_path, **where)
