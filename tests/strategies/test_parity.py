import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies.cases import CASES, NAMES, WIDTH, Case, data, on_ranks, simply_on_ranks, train
from tests.toys import trainer

ONE_DEVICE = {}


def expected(name, tmp_path, options):
    key = (name, *sorted(options.items()))
    if key not in ONE_DEVICE:
        ONE_DEVICE[key] = train(name, tmp_path / "one", **options)[2]
    return ONE_DEVICE[key]


def check(result, right, rel=1e-5):
    assert result["losses"] == pytest.approx(right["losses"], rel=rel)
    assert right["losses"][-1] != right["losses"][0]
    assert result["weights"].keys() == right["weights"].keys()
    for name, weight in right["weights"].items():
        torch.testing.assert_close(
            result["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


# What is in no block, where that is more than a fifth of the bytes.
OUTSIDE_BLOCKS = {
    "Tied": "what two blocks share belongs to neither",
    "Recurrent": "recurrent layers of the model itself are no blocks",
    "MixedTypes": "what is not of its block's type is whole on every device",
    "Meta": "what two blocks share belongs to neither",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Normed"])
def test_two_ranks_are_one_device(ranks, tmp_path, name):
    result = ranks(on_ranks, name, tmp_path, {}, 2, {})
    check(result, expected(name, tmp_path, {}))
    assert (result["share"] >= 0.8) is (name not in OUTSIDE_BLOCKS), result["share"]


SIMPLY = ("Tied", "Manual", "Meta", "Recurrent")  # each of another kind; the others are slow tests


@pytest.mark.parametrize(
    "name",
    [name if name in SIMPLY else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "Normed"],
)
def test_two_ranks_are_one_device_by_tensor_code(ranks, tmp_path, name):
    check(ranks(simply_on_ranks, name, tmp_path, {}, 2, {}), expected(name, tmp_path, {}))


OPTIONS = {
    "clip": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate": 4},
    "accumulate and clip": {"accumulate": 4, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strategy", [{}, {"sync": "every"}, {"sharding": "gradients"}, {"sharding": "none"}], ids=repr)
def test_options_of_the_trainer(ranks, tmp_path, strategy, options):
    check(ranks(on_ranks, "Scalar", tmp_path, strategy, 2, options), expected("Scalar", tmp_path, options))


@pytest.mark.parametrize("options", [OPTIONS["accumulate and clip"]], ids=repr)
@pytest.mark.parametrize(
    "strategy", [{}, *(pytest.param({"sharding": s}, marks=pytest.mark.slow) for s in ("gradients", "none"))], ids=repr
)
def test_options_of_the_trainer_by_tensor_code(ranks, tmp_path, strategy, options):
    check(ranks(simply_on_ranks, "Scalar", tmp_path, strategy, 2, options), expected("Scalar", tmp_path, options))


LAYOUTS = {
    "full": {},
    "copies": {"replicate_size": 2},
    "copies, kept": {"replicate_size": 2, "sharding": "gradients"},
    "spread over two": {"reshard_after_forward": 2},
    "reduced each time": {"replicate_size": 2, "sync": "every"},
    "prefetched": {"prefetch": 1},
}


@pytest.mark.parametrize("strategy", LAYOUTS.values(), ids=LAYOUTS)
def test_four_ranks_are_one_device(four_ranks, tmp_path, strategy):
    options = {"accumulate": 2, "gradient_clip_val": 0.1}
    check(four_ranks(on_ranks, "Scalar", tmp_path, strategy, 4, options), expected("Scalar", tmp_path, options))


REPLICATED = pytest.param({"replicate_size": 2}, marks=pytest.mark.slow)  # a layout of the test above


@pytest.mark.parametrize("strategy", [{}, REPLICATED], ids=repr)
@pytest.mark.parametrize("name", ["Case", "Tied", "Frozen", "LoRA", "Manual", "Meta"])
def test_four_ranks_train_what_two_do(four_ranks, tmp_path, name, strategy):
    check(four_ranks(on_ranks, name, tmp_path, strategy, 4, {}), expected(name, tmp_path, {}))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"replicate_size": 2}, {"sharding": "none"}], ids=repr)
@pytest.mark.parametrize("name", ["Scalar", "Tied", "Frozen", "Manual", "Meta", "Gpt"])
def test_four_ranks_are_one_device_by_tensor_code(four_ranks, tmp_path, name, strategy):
    options = {} if name == "Manual" else {"accumulate": 2, "gradient_clip_val": 0.1}
    check(four_ranks(simply_on_ranks, name, tmp_path, strategy, 4, options), expected(name, tmp_path, options))


def gpt_case(tmp_path, plan, ranks, model):
    return on_ranks(model, tmp_path, plan, ranks, {"data_ranks": max(1, ranks // 2)})


@pytest.mark.parametrize(
    ("model", "plan", "replicate"),
    [
        ("Gpt", "gpt", 1),
        ("Gpt", "gpt", 2),
        ("GptNormed", "gpt", 1),
        pytest.param("GptNormed", "gpt", 2, marks=pytest.mark.slow),
        ("Llama", "llama", 1),
        pytest.param("Llama", "llama", 2, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_is_one_device(four_ranks, tmp_path, model, plan, replicate):
    strategy = {"tensor_parallel_size": 2, "tensor_parallel_plan": plan, "replicate_size": replicate}
    check(four_ranks(gpt_case, tmp_path, strategy, 4, model), expected(model, tmp_path, {}), rel=1e-5)


def compiled_gpt_case(tmp_path, *callbacks):
    strategy = {"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"}
    options = {
        "data_ranks": 1,
        "callbacks": [Compile(backend="aot_eager", losses=True, on_failure="raise"), *callbacks],
    }
    return on_ranks("Gpt", tmp_path, strategy, 2, options)


@pytest.mark.parametrize("callbacks", [[], [ActivationCheckpoint(save="nothing")]], ids=["kept", "recomputed"])
def test_tensor_parallel_compiled_is_one_device(ranks, tmp_path, callbacks):
    # The embedding returns a tensor that waits for a collective, and the first block is compiled.
    check(ranks(compiled_gpt_case, tmp_path, *callbacks), expected("Gpt", tmp_path, {}), rel=1e-5)


def evaluations(tmp_path, model, strategy, devices):
    """The loss of a validation before fit, of those in it, and of one after it."""
    warnings.simplefilter("ignore")
    module, losses = CASES[model](), []
    module.on_validation_epoch_end = lambda: losses.append(module.trainer.callback_metrics["val_loss"].item())
    loader = DataLoader(data(), batch_size=16)
    lightning = trainer(tmp_path, strategy=strategy, devices=devices, epochs=2)
    lightning.validate(module, loader, verbose=False)
    lightning.fit(module, loader, loader)
    lightning.validate(module, loader, verbose=False)
    return losses


def split_evaluations(tmp_path, model, plan):
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan=plan)
    return evaluations(tmp_path, model, strategy, 2)


@pytest.mark.parametrize(("model", "plan"), [("Gpt", "gpt"), ("Llama", "llama")])
def test_tensor_parallel_evaluates_as_one_device(ranks, tmp_path, model, plan):
    right = evaluations(tmp_path, model, "auto", 1)
    assert len(right) == 5, "one before, one of the sanity check, two in fit, one after"
    assert right[0] != right[-1]
    assert ranks(split_evaluations, tmp_path, model, plan) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("strategy", [{"meta_device": True}, {"meta_device": True, "offload": True}], ids=repr)
def test_what_is_built_on_the_meta_device_unasked_is_one_device_too(ranks, tmp_path, strategy):
    check(ranks(on_ranks, "Configured", tmp_path, strategy, 2, {}), expected("Configured", tmp_path, {}))


class Nested(Case):
    """Blocks within a module that is recomputed as a whole, and ends outside of them."""

    def build(self):
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 256), _Bent()) for _ in range(2)))
        self.model.append(nn.Linear(WIDTH, 1))

    def run(self, x):
        return self.model(x)


class _Bent(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(256, WIDTH)

    def forward(self, x):
        return self.down(x.sin().tanh().sigmoid())


def recomputed_around_shards(tmp_path):
    CASES["Nested"] = Nested
    strategy = {"blocks": ["model.0", "model.1"]}
    found = []
    for number, save in enumerate(("matmuls", ["aten.addmm", "aten._to_copy"])):
        options = {"callbacks": [ActivationCheckpoint(blocks=["model"], save=save)], "accumulate": 2}
        found.append(on_ranks("Nested", tmp_path / str(number), strategy, 2, options))
    return found, train("Nested", tmp_path / "one")[2]


def test_what_holds_sharded_blocks_is_recomputed_and_still_one_device(ranks, tmp_path):
    # Its second run gathers what the first had whole, and looks for no writes: operations that no checkpoint may count.
    found, alone = ranks(recomputed_around_shards, tmp_path)
    for each in found:
        check(each, alone)
