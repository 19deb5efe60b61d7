"""Float8 under FSDP2 on two ranks: gathers in float8, scales, tensor parallelism, and checkpoints that move."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups.order import applied
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.float8.convert import float8_linears
from lightning_ups.transforms.float8.gather import gathers_in_float8
from tests.precision import float8_cases as wide
from tests.strategies import cases
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GATHERED = {"float8": {}, "bfloat16": {"all_gather": False}}
WEIGHTS, OTHERS = 2 * 2 * 32 * 64, 2 * (64 + 32)  # of the blocks: in float8, and biases, which stay


def steps_traffic(options, tmp_path, strategy=None):
    seen = []
    with wide.Traffic() as traffic:

        def watch(model):
            def started():
                traffic.bytes.clear()
                traffic.calls.clear()

            model.on_train_epoch_start = started
            model.on_train_epoch_end = lambda: seen.append((dict(traffic.bytes), dict(traffic.calls)))

        _, _, losses = wide.train(tmp_path, options, strategy=strategy, prepare=watch)
    assert seen[1] == seen[2]
    return seen[2], losses


def test_gathers_carry_a_byte_for_a_weight(ranks, tmp_path):
    found = {name: ranks(steps_traffic, options, tmp_path) for name, options in GATHERED.items()}
    sizes = {name: traffic["allgather_base"] for name, ((traffic, _), _) in found.items()}
    # Each block is gathered once for forward; the last is kept for its backward. Biases and ends are bfloat16.
    calls = [calls for (_, calls), _ in found.values()]
    assert calls[0]["allgather_base"] == calls[1]["allgather_base"]
    gathers_of_a_block = (sizes["bfloat16"] - sizes["float8"]) / (WEIGHTS / 2)
    assert gathers_of_a_block in (3, 4), sizes
    assert sizes["float8"] < 0.6 * sizes["bfloat16"]
    assert found["float8"][1] == pytest.approx(found["bfloat16"][1], rel=2e-2)


def test_all_scales_of_a_step_take_one_reduction(ranks, tmp_path):
    with_float8, without = (ranks(steps_traffic, options, tmp_path)[0][1] for options in GATHERED.values())
    difference = {kind: with_float8[kind] - without.get(kind, 0) for kind in with_float8}
    assert {kind: n for kind, n in difference.items() if n and "wait" not in kind and "wrap" not in kind} == {
        "all_reduce": 1
    }


def one_device(tmp_path, options, **more):
    return wide.train(tmp_path, options, ranks=1, **more)[2]


def losses(tmp_path, options, strategy=None):
    model, _, found = wide.train(tmp_path, options, strategy=strategy)
    state = model.state_dict()
    types = {type(wide.local(value)) for value in state.values()}, {value.dtype for value in state.values()}
    return found, [*state], types, len(float8_linears(model)), sum(map(gathers_in_float8, model.modules()))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_two_ranks_train_as_one_device(ranks, tmp_path, recipe):
    options = {"recipe": recipe}
    found, names, types, converted, gathered = ranks(losses, tmp_path, options)
    assert found == pytest.approx(one_device(tmp_path, options), rel=3e-2)
    assert found[-1] < found[0]
    assert names == [*wide.Wide().state_dict()]
    assert types == ({torch.Tensor}, {torch.float32})
    assert (converted, gathered) == (4, 4 if recipe == "tensorwise" else 0)


@pytest.mark.parametrize("options", [{}, {"all_gather": False}, {"recipe": "rowwise"}], ids=repr)
def test_tensor_parallel_after_conversion_trains_as_one_device(ranks, tmp_path, options):
    found, names, types, converted, _ = ranks(losses, tmp_path, options, wide.TENSOR_PARALLEL)
    assert found == pytest.approx(one_device(tmp_path, options), rel=3e-2)
    assert (names, types, converted) == ([*wide.Wide().state_dict()], ({torch.Tensor}, {torch.float32}), 4)


@pytest.mark.parametrize(
    ("options", "strategy"), [({}, None), ({"all_gather": False}, None), ({}, wide.TENSOR_PARALLEL)],
    ids=["gathered in float8", "gathered", "split"],
)  # fmt: skip
def test_the_format_of_gradients_is_kept_over_ranks(ranks, tmp_path, options, strategy):
    fine, coarse = (
        ranks(losses, tmp_path, {**options, "number_format": chosen}, strategy)[0] for chosen in ("e4m3", "hybrid")
    )
    assert fine[0] == coarse[0], "forward is the same"
    assert fine[1:] != coarse[1:]
    assert fine == pytest.approx(coarse, rel=2e-2)


@pytest.mark.slow
def test_tensor_parallel_and_sharding_together(four_ranks, tmp_path):
    found = four_ranks(on_four, tmp_path)
    assert found == pytest.approx(one_device(tmp_path, {}), rel=3e-2)


def on_four(tmp_path):
    return wide.train(tmp_path, {}, strategy=wide.TENSOR_PARALLEL, ranks=4, data_ranks=2)[2]


@pytest.mark.parametrize("strategy", [{"meta_device": True}, {"sharding": "gradients"}, {"sharding": "none"}], ids=repr)
def test_other_ways_to_shard(ranks, tmp_path, strategy):
    assert ranks(losses, tmp_path, {}, strategy)[0] == pytest.approx(one_device(tmp_path, {}), rel=3e-2)


def scales_and_weights(model):
    """Return, for each weight, its scale and the scale that its values now ask for."""
    pairs = []
    for layer in float8_linears(model).values():
        largest = cases.whole(layer.weight.detach().abs()).max().double()
        pairs.append((layer.weight._local_tensor._precomputed_scale.item(), (448.0 / largest).float().item()))
    return pairs


def scales_of_a_run(tmp_path):
    """Return pairs before and after each step, whose weights a callback has made eight times larger before it."""
    seen = []

    def watch(model):
        def started(*_):
            with torch.no_grad():
                for layer in model.layers:
                    layer.up.weight.mul_(8)

        step = model.training_step

        def training_step(*args):
            seen.append(scales_and_weights(model))
            return step(*args)

        model.on_train_batch_start, model.training_step = started, training_step
        model.on_train_batch_end = lambda *_: seen.append(scales_and_weights(model))

    wide.train(tmp_path, {}, prepare=watch, steps=2)
    return seen


def test_scales_are_those_of_the_weights_before_and_after_each_step_whoever_wrote_them(ranks, tmp_path):
    found = ranks(scales_of_a_run, tmp_path)
    assert len(found) == 4
    for pairs in found:
        assert all(scale == pytest.approx(right, rel=1e-6) for scale, right in pairs)


def saved(tmp_path, options, steps=4):
    """Train to the end, with a checkpoint half way."""
    path = tmp_path / f"half{wide.precision(options).__class__.__name__}.ckpt"

    def watch(model):
        def ended():
            if model.trainer.current_epoch == 1:
                model.trainer.save_checkpoint(path)

        model.on_train_epoch_end = ended

    model, _, found = wide.train(tmp_path, options, steps=steps, prepare=watch)
    return path, found, wide.whole_state(model)


def resumed(tmp_path, options, path, ranks):
    scales, model = [], wide.Wide()
    if ranks > 1 and options is not None:
        model.on_train_start = lambda: scales.extend(scales_and_weights(model))
    lightning = trainer(
        tmp_path,
        epochs=4,
        strategy=FSDP2Strategy() if ranks > 1 else "auto",
        devices=ranks,
        plugins=[wide.precision(options)],
    )
    loader = torch.utils.data.DataLoader(cases.data(), batch_size=cases.SAMPLES // ranks)
    lightning.fit(model, loader, ckpt_path=path)
    return cases.losses_of(model, 2), wide.whole_state(model), scales


@pytest.mark.parametrize("to", [{}, None], ids=["float8", "bfloat16"])
@pytest.mark.parametrize("begun", [{}, None], ids=["float8", "bfloat16"])
def test_a_checkpoint_moves_between_precisions(ranks, tmp_path, begun, to):
    path, whole, state = ranks(saved, tmp_path, begun)
    found, again, scales = ranks(resumed, tmp_path, to, path, 2)
    if begun == to:
        assert found == whole[2:]
        assert all(torch.equal(again[name], value) for name, value in state.items())
    else:
        assert found == pytest.approx(whole[2:], rel=3e-2)
        assert found != whole[2:]
    assert all(scale == pytest.approx(right, rel=1e-6) for scale, right in scales)
    assert len(scales) == (4 if to is not None else 0)


def one_file(tmp_path, options):
    path = tmp_path / "full.ckpt"
    _, lightning, _ = wide.train(tmp_path, options, strategy={"save": "full"}, steps=2)
    lightning.save_checkpoint(path)
    return path


@pytest.mark.parametrize("to", [{}, None], ids=["float8", "bfloat16"])
def test_one_file_of_a_sharded_float8_run_is_plain_and_goes_on_on_one_device(ranks, tmp_path, to):
    path = ranks(one_file, tmp_path, {})
    checkpoint = torch.load(path, weights_only=True)
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    moments = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
    assert {type(value) for value in moments} == {torch.Tensor}
    found, _, _ = resumed(tmp_path, to, path, 1)
    assert found == pytest.approx(one_device(tmp_path, {})[2:], rel=5e-2)


def second_fit(tmp_path, first, second):
    model, _, _ = wide.train(tmp_path, first, steps=1)
    model.losses.clear()
    lightning = trainer(tmp_path, epochs=2, strategy=FSDP2Strategy(), devices=2, plugins=[wide.precision(second)])
    lightning.fit(model, torch.utils.data.DataLoader(cases.data(), batch_size=8))
    return [loss.item() for loss in model.losses], len(float8_linears(model))


def test_a_second_fit_keeps_the_conversion(ranks, tmp_path):
    found, converted = ranks(second_fit, tmp_path, {}, {})
    assert converted == 4
    assert len(found) == 2


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, None, r"was converted by Float8Precision.*asks for no conversion.*Keep the precision"),
        (None, {}, r"was not converted by an earlier run.*asks for converted by Float8Precision"),
        ({}, {"all_gather": False}, r"Float8Precision\(all_gather=True\).*Float8Precision\(all_gather=False\)"),
    ],
    ids=["float8 to bfloat16", "bfloat16 to float8", "another gather"],
)
def test_another_conversion_of_a_sharded_module_is_refused(ranks, tmp_path, first, second, message):
    with pytest.raises(AssertionError, match=message):
        ranks(second_fit, tmp_path, first, second)


def reported(tmp_path):
    seen = []

    def watch(model):
        model.on_train_start = lambda: seen.append(applied(model.trainer.strategy).report)

    wide.train(tmp_path, {}, steps=1, prepare=watch)
    return seen[0].lines(), seen[0].parts["Precision"]


def test_what_is_gathered_is_reported(ranks, tmp_path):
    lines, facts = ranks(reported, tmp_path)
    assert "Precision: 4 linear layers multiply in float8, tensorwise, gathered in float8; 2 do not" in lines
    assert facts["gathered_in_float8"] is True
    assert facts["not_float8"] == dict.fromkeys(("embed", "head"), "outside the blocks")


class Reused(wide.Wide):
    """One layer in both blocks, and one weight in two layers."""

    def build(self):
        super().build()
        first, second = self.layers
        second.down = first.down
        first.gate, second.gate = nn.Linear(32, 32), nn.Linear(32, 32)
        second.gate.weight = first.gate.weight
        for layer in self.layers:
            layer.forward = MethodType(gated, layer)


def gated(self, x):
    return x + torch.tanh(self.gate(x)) * self.down(torch.tanh(self.up(x)))


cases.CASES["Reused"] = Reused


def reused(tmp_path, options):
    found, chosen = [], wide.precision(options)
    _, _, result = cases.train(
        "Reused", tmp_path, strategy=FSDP2Strategy(), ranks=2, plugins=[chosen], steps=4, data_ranks=None,
        prepare=lambda model: setattr(model, "on_train_end", lambda: found.append(facts(model))),
    )  # fmt: skip
    return result["losses"], found[0]


def facts(model):
    parts = applied(model.trainer.strategy).report.parts["Precision"]
    tied = model.layers[0].gate.weight is model.layers[1].gate.weight
    return parts.get("gathered_as_they_are"), tied, len([*model.parameters()])


def test_what_is_in_two_places_stays_one_thing(ranks, tmp_path):
    """A layer of two blocks computes in float8 in both; a weight of two layers is stepped once, as in bfloat16."""
    losses, (apart, tied, number) = ranks(reused, tmp_path, {})
    wanted, (_, _, expected) = ranks(reused, tmp_path, None)
    assert apart == ["layers.0.down", "layers.0.gate", "layers.1.gate"]
    assert tied
    assert number == expected
    assert losses == pytest.approx(wanted, rel=3e-2)
    assert losses != wanted


class Outside(wide.Wide):
    """Multiplies by the weight of a layer that it does not call."""

    def run(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(F.linear(x.bfloat16(), self.layers[0].up.weight))[:, :32])


class AskingBlock(wide.WideBlock):
    """Asks the weight of a layer for what torchao's tensors do not know, as PEFT's DoRA does."""

    def forward(self, x):
        weight = self.up.weight
        of_torchao = type(weight).__module__.startswith("torchao.")
        return super().forward(x) * (weight.dequantize() if of_torchao else weight).mean()


class Asking(wide.Wide):
    def build(self):
        super().build()
        self.layers = nn.ModuleList(AskingBlock() for _ in range(2))


cases.CASES |= {"Outside": Outside, "Asking": Asking}


def read_outside(tmp_path, options, case="Outside"):
    try:
        chosen = wide.precision(options)
        cases.train(case, tmp_path, strategy=FSDP2Strategy(), ranks=2, plugins=[chosen], steps=2, data_ranks=None)
    except (AssertionError, RuntimeError) as error:
        return getattr(error, "__notes__", [str(error)])
    return None


@pytest.mark.parametrize("case", ["Outside", "Asking"])
def test_a_weight_gathered_in_float8_and_read_elsewhere_says_what_to_set(ranks, tmp_path, case):
    notes = ranks(read_outside, tmp_path, {}, case)
    assert any("Set all_gather=False in Float8Precision" in note for note in notes)
    assert ranks(read_outside, tmp_path, {"all_gather": False}, case) is None
