"""Parts of a module that compute in float32 under `BF16Precision`, on one device and on ranks alike."""

import re
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _common_utils
from transformers.modeling_outputs import BaseModelOutput

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.transforms.float8.convert import float8_linears
from tests.strategies.cases import CASES, WIDTH, Block, Case, on_ranks, simply_on_ranks, train


class Registered(nn.Module):
    """A class whose subclasses have to say a name, as those of tensor decompositions do."""

    def __init_subclass__(cls, name):
        cls.kind = name


class Spectral(Registered, name="spectral"):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64) * 0.1)
        self.mix = nn.Linear(width, width)
        self.types = set()

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.types.add((x.dtype, self.mix.weight.dtype))
        return x + self.mix(torch.fft.irfft(torch.fft.rfft(x) * self.modes))


class Fourier(Case):
    """A Fourier neural operator in small: bfloat16 knows no Fourier transform."""

    def build(self):
        self.layers = nn.ModuleList(nn.Sequential(Spectral(), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)


class Wide(Case):
    """The same of a width that float8 takes."""

    def build(self):
        width = 2 * WIDTH
        self.layers = nn.ModuleList(nn.Sequential(Spectral(width), nn.Linear(width, width), nn.GELU()) for _ in "ab")
        self.head = nn.Linear(width, 1)

    def run(self, x):
        return super().run(torch.cat([x, x.flip(-1)], -1))


class Encoder(nn.Module):
    """An outermost module that holds blocks, and to which more bits matter from the start."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.rounded = []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.rounded.append(bool((x == x.bfloat16()).all()))
        for layer in self.layers:
            x = layer(x)
        return x


class Encoded(Case):
    def build(self):
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x):
        return self.head(self.encoder(x))


class TwiceTied(Case):
    """Two outermost modules share a weight; another one's is read outside of it, and so is one of the rest."""

    def build(self):
        super().build()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.project.weight

    def run(self, x):
        penalty = self.layers[0].up.weight.float().square().mean() + self.head.weight.square().mean()
        return super().run(self.back(self.project(x))) + penalty


class Outermost(Case):
    """Its only module is one that is float32, of complex weights; the loss is computed outside of it."""

    def build(self):
        self.net = Spectral()

    def run(self, x):
        found = self.net(x)
        if found.dtype is not torch.float32:
            raise AssertionError(found.dtype)
        return found.mean(-1, keepdim=True)


class RegisteredLinear(Registered, name="linear"):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.mix(x)


class Uncommon(Outermost):
    """Its only module is of a class that FSDP2 cannot make a group of, and of low precision."""

    def build(self):
        self.net = RegisteredLinear()


class Named(RegisteredLinear, name="named"):
    def forward(self, x):
        return BaseModelOutput(last_hidden_state=super().forward(x))


class UncommonOutput(Outermost):
    """The same, of a class that returns what models of transformers do."""

    def build(self):
        self.net = Named()

    def run(self, x):
        found = self.net(x).last_hidden_state
        if found.dtype is not torch.float32:
            raise AssertionError(found.dtype)
        return found.mean(-1, keepdim=True)


CASES |= {"Outermost": Outermost, "Uncommon": Uncommon, "UncommonOutput": UncommonOutput} | {
    "Fourier": Fourier,
    "Wide": Wide,
    "Encoded": Encoded,
    "TwiceTied": TwiceTied,
}
KEPT = ["layers.*.0"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def options(weights="masters"):
    return {"plugins": [BF16Precision(in_float32=KEPT, weights=weights)]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one device makes of it, by masters, in float32 and by autocast."""
    folder = tmp_path_factory.mktemp("alone")
    kinds = {"masters": options(), "autocast": options("autocast"), "float32": {}}
    return {kind: train("Fourier", folder, **asked) for kind, asked in kinds.items()}


@pytest.mark.parametrize("kind", ["masters", "autocast"])
def test_one_device_trains_within_the_band_of_float32(kind, alone):
    model, _, found = alone[kind]
    assert found["losses"] == pytest.approx(alone["float32"][2]["losses"], rel=0.02)
    assert found["losses"] != alone["float32"][2]["losses"]
    assert [layer[0].types for layer in model.layers] == [{(torch.float32, torch.float32)}] * 2
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.complex64}
    assert [*model.state_dict()] == [*Fourier().state_dict()]
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_is_in_float32_is_reported(tmp_path):
    told = {}

    def ask(model):
        model.on_train_end = lambda: told.update(applied(model.trainer.strategy).report.parts["Precision"])

    train("Fourier", tmp_path, steps=1, prepare=ask, callbacks=[Compile(backend="aot_eager")], **options())
    assert told["in_float32"] == ["layers.0.0", "layers.1.0"]
    assert told["lines"][1] == "in float32: layers.0.0, layers.1.0"


def test_without_it_the_error_says_which_part_and_how(tmp_path):
    with pytest.raises(RuntimeError, match="Unsupported dtype BFloat16") as error:
        train("Fourier", tmp_path, plugins=[BF16Precision(weights="masters")])
    assert (
        "let layers.0.0 (Spectral) compute in float32, with in_float32=['layers.*.*'] of a precision"
        in (error.value.__notes__[0])
    )


@pytest.mark.parametrize("callbacks", [[Compile(backend="aot_eager")], [ActivationCheckpoint(save="nothing")]])
def test_compiled_and_recomputed_it_is_the_same(callbacks, alone, tmp_path):
    _, _, found = train("Fourier", tmp_path, callbacks=callbacks, **options())
    assert found["losses"] == pytest.approx(alone["masters"][2]["losses"], rel=1e-5)


def ddp(tmp_path):
    model, _, found = train("Fourier", tmp_path, strategy="ddp", ranks=2, **options())
    return found | {"types": [layer[0].types for layer in model.layers]}


def test_ddp_trains_the_same(ranks, alone, tmp_path):
    found = ranks(ddp, tmp_path)
    assert found["losses"] == pytest.approx(alone["masters"][2]["losses"], rel=2e-3)
    assert found["types"] == [{(torch.float32, torch.float32)}] * 2


def fitted(tmp_path, run, name, options):  # ranks import this file with it, and so know its cases
    try:
        return run(name, tmp_path, {}, 2, options)
    except RuntimeError as error:  # of a torch whose groups are of one type
        if "FSDP2Strategy(outside=['head.weight'])" not in str(error):
            raise
        return run(name, tmp_path, {"outside": ["head.weight"]}, 2, options)


PARTS = {
    "Fourier": BF16Precision(in_float32=KEPT, weights="masters"),
    "Encoded": BF16Precision(in_float32=["encoder"]),  # blocks inside of one
    "TwiceTied": BF16Precision(in_float32=["project", "back", "head"], weights="masters"),
    "Outermost": BF16Precision(in_float32=["net"], weights="masters"),
}


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks], ids=["fsdp2", "simple_fsdp"])
@pytest.mark.parametrize("name", PARTS)
def test_shards_train_the_same(run, name, ranks, tmp_path):
    found = ranks(fitted, tmp_path, run, name, {"plugins": [PARTS[name]]})
    right = train(name, tmp_path, plugins=[PARTS[name]])[2]
    assert found["losses"] == pytest.approx(right["losses"], rel=2e-3)
    for key, weight in right["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("case", ["Uncommon", "UncommonOutput"])
def test_a_class_that_can_be_no_group_is_cast_around_all_the_same(ranks, tmp_path, case):
    asked = {"plugins": [BF16Precision(weights="masters")]}
    found, expected = ranks(fitted, tmp_path, on_ranks, case, asked), train(case, tmp_path, **asked)[2]
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-2)


def float8(in_float32=KEPT):
    return Float8Precision(in_float32=in_float32, emulate=True)


def in_float8(tmp_path, run=None):
    """Train by ``run``; return what comes of it, and the names of the layers that multiplied in float8."""
    converted = []

    class Asked(Wide):
        def on_train_start(self):
            converted.extend(float8_linears(self))

    options = {"plugins": [float8()]}
    with patch.dict(CASES, Wide=Asked):
        found = train("Wide", tmp_path, **options)[2] if run is None else run("Wide", tmp_path, {}, 2, options)
    return found | {"float8": converted}


@pytest.fixture(scope="module")
def alone_in_float8(tmp_path_factory):
    return in_float8(tmp_path_factory.mktemp("float8"))


def test_beside_float8_it_trains_as_without(alone_in_float8, tmp_path):
    expected = train("Wide", tmp_path, **options())[2]
    assert alone_in_float8["float8"] == ["layers.0.1", "layers.1.1"]
    assert alone_in_float8["losses"] == pytest.approx(expected["losses"], rel=0.05)
    assert alone_in_float8["losses"] != expected["losses"]


def test_layers_in_them_that_float8_would_take_are_named_with_the_reason(tmp_path):
    precision = float8()
    train("Wide", tmp_path, steps=1, plugins=[precision])
    left = {name: why for name, why in precision.conversion.skipped.items() if name.endswith("mix")}
    assert left == dict.fromkeys(["layers.0.0.mix", "layers.1.0.mix"], "computes in float32")


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks], ids=["fsdp2", "simple_fsdp"])
def test_shards_in_float8_train_the_same(run, ranks, alone_in_float8, tmp_path):
    found = ranks(in_float8, tmp_path, run)
    assert found["losses"] == pytest.approx(alone_in_float8["losses"], rel=5e-3)
    assert found["float8"] == alone_in_float8["float8"]


def test_float8_of_nothing_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"compute in float32, by in_float32=\['layers\.\*'\]"):
        train("Wide", tmp_path, plugins=[float8(["layers.*"])])


def test_what_is_given_to_an_outermost_one_is_not_rounded_before(tmp_path):
    encoder = train("Encoded", tmp_path, plugins=[BF16Precision(in_float32=["encoder"])])[0].encoder
    assert encoder.rounded
    assert not any(encoder.rounded)


def failing(tmp_path):
    try:
        on_ranks("Fourier", tmp_path, {}, 2, {"plugins": [BF16Precision(weights="masters")]})
    except RuntimeError as error:
        return str(error)


def test_under_shards_the_error_says_which_part_and_how(ranks, tmp_path):
    said = ranks(failing, tmp_path)
    assert said.startswith("training_step calls an operator that does not support torch.bfloat16: Unsupported dtype")
    assert "let layers.0.0 (Spectral) compute in float32" in said


@dataclass
class Fields:
    """What blocks hand on, and what the model returns."""

    values: torch.Tensor
    spectrum: torch.Tensor


class OfFields(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral, self.out = Spectral(), nn.Linear(WIDTH, WIDTH)

    def forward(self, fields):
        values = fields.values + torch.tanh(self.spectral(self.out(fields.values)))
        return Fields(values, torch.fft.rfft(values.float()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(OfFields() for _ in range(2))

    def forward(self, fields):
        for layer in self.layers:
            fields = layer(fields)
        return fields


class Dataclasses(Case):
    """Blocks and the model are given dataclasses and return them; the loss is of what the model returns."""

    types: ClassVar[set] = set()

    def build(self):
        self.model = Model()

    def loss(self, x):
        found = self.model(Fields(x, torch.fft.rfft(x)))
        self.types.add((found.values.dtype, found.spectrum.dtype))
        return (found.values.sum(-1) - x.sum(-1)).square().mean() + found.spectrum.abs().mean()


CASES["Dataclasses"] = Dataclasses


def with_dataclasses(tmp_path, run):
    Dataclasses.types.clear()
    kept = {"plugins": [BF16Precision(in_float32=["model.layers.*.spectral"])]}
    result = train("Dataclasses", tmp_path, **kept)[2] if run is None else run("Dataclasses", tmp_path, {}, 2, kept)
    return result["losses"], Dataclasses.types


LOOKS = hasattr(_common_utils, "collect_grad_tensors")  # FSDP2, into dataclasses for what it casts
BY_FSDP2 = pytest.param(on_ranks, marks=pytest.mark.skipif(not LOOKS, reason="torch's FSDP2 knows no dataclass"))


@pytest.mark.parametrize("run", [None, BY_FSDP2, simply_on_ranks], ids=["masters", "fsdp2", "simple_fsdp"])
def test_fields_of_dataclasses_have_the_types_of_other_tensors(run, ranks, tmp_path):
    plain = train("Dataclasses", tmp_path)[2]["losses"]
    losses, types = with_dataclasses(tmp_path, run) if run is None else ranks(with_dataclasses, tmp_path, run)
    assert types == {(torch.float32, torch.complex64)}
    assert losses == pytest.approx(plain, rel=0.02)


class InDouble(Case):
    """Computes in float64, in blocks that are called one by one and in those of a model."""

    def build(self):
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.net = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def run(self, x):
        for layer in (*self.layers, self.net):
            x = layer(x.double())
        return self.head(x)


class PartInDouble(Case):
    """A part that computes in float64, from coordinates that are."""

    def build(self):
        super().build()
        self.places = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def run(self, x):
        return super().run(self.places(x.double()).to(x.dtype))


DOUBLE = {kind.__name__: kind for kind in (InDouble, PartInDouble)}
CASES |= DOUBLE


def in_double(tmp_path, name, run):
    rounded = {"plugins": [BF16Precision(weights="masters")]}
    return (train(name, tmp_path, **rounded)[2] if run is None else run(name, tmp_path, {}, 2, rounded))["losses"]


@pytest.mark.parametrize("name", DOUBLE)
@pytest.mark.parametrize("run", [None, on_ranks, simply_on_ranks], ids=["masters", "fsdp2", "simple_fsdp"])
def test_what_computes_in_float64_does_so_beside_bfloat16(run, name, ranks, tmp_path):
    plain = train(name, tmp_path)[2]["losses"]
    losses = in_double(tmp_path, name, run) if run is None else ranks(in_double, tmp_path, name, run)
    assert losses == pytest.approx(plain, rel=1e-12 if name == "InDouble" else 0.02)


class Mixing(nn.Module):
    """Multiplies with a tensor that it makes in float32; no block, so that the model's own group gathers it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return x + torch.ones(x.shape) @ self.weight


class Mixes(Case):
    def build(self):
        super().build()
        self.mixing = Mixing()

    def run(self, x):
        return super().run(self.mixing(x))


CASES["Mixes"] = Mixes


def mixing(tmp_path, precision):
    return on_ranks("Mixes", tmp_path, {}, 2, {"plugins": [precision]})["losses"]


def told_of_two_types(tmp_path):
    with pytest.raises(RuntimeError) as failed:
        mixing(tmp_path, BF16Precision(weights="masters"))
    return str(failed.value)


def test_a_tensor_of_another_type_is_not_said_to_be_read_outside_and_each_cure_works(ranks, tmp_path):
    said = ranks(told_of_two_types, tmp_path)
    assert "two dtypes" in said
    assert "outside" not in said
    (pattern,) = re.findall(r"in_float32=(\[.*?\])", said)
    for precision in (BF16Precision(weights="masters", in_float32=eval(pattern)), BF16Precision()):
        losses = ranks(mixing, tmp_path, precision)
        assert losses[-1] < losses[0]
