"""TunedDDPStrategy on two ranks: as stock DDP where arithmetic is unchanged, near it with compression."""

import re
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile, OptimizerOffload
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision
from lightning_ups.strategies import TunedDDPStrategy, tuned_ddp
from tests.toys import Net, data, trainer

ALL = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class Scheduled(Net):
    """Has groups, a schedule and a buffer that its forward writes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch, index):
        return super().training_step(self.norm(batch), index)

    def configure_optimizers(self):
        matrices, vectors = ([p for p in self.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
        )
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Manual(Scheduled):
    """Accumulates two microbatches by hand."""

    def __init__(self, *, blocks=False):
        super().__init__()
        self.automatic_optimization, self.blocks = False, blocks

    def training_step(self, batch, index):
        optimizer, is_last = self.optimizers(), index % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last or not self.blocks):
            self.manual_backward(super().training_step(batch, index))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


class Unused(Net):
    """Uses another layer in every second step."""

    def training_step(self, batch, index):
        self.losses.append(self.head(batch + self.layers[index % 2](batch)).square().mean())
        return self.losses[-1]


def fit(folder, strategy, module=None, *, epochs=2, path=None, save=None, devices=2, size=4, **options):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = module or Scheduled()
    made = trainer(folder, strategy=strategy, devices=devices, epochs=epochs, **options)
    made.fit(module, DataLoader(data().repeat(4, 1), batch_size=size), ckpt_path=path)
    if save:
        made.save_checkpoint(save)
    if devices > 1:
        everywhere = [None, None]
        dist.all_gather_object(everywhere, [parameter.tolist() for parameter in module.parameters()])
        assert everywhere[0] == everywhere[1]
    return [loss.item() for loss in module.losses], {n: value.tolist() for n, value in module.state_dict().items()}


def both(folder, name):
    """Train by stock DDP and by ours."""
    kind, options, settings = CASES[name]
    stock = "ddp_find_unused_parameters_true" if settings.get("find_unused_parameters") else "ddp"
    return [fit(folder, each, kind(), **options()) for each in (stock, TunedDDPStrategy(**settings))]


CASES = {  # module, options of the Trainer, arguments of the strategy
    "measured": (Scheduled, dict, {}),
    "small buckets": (Scheduled, dict, {"bucket_mb": 0.0005}),
    "accumulation and clipping": (Scheduled, lambda: ALL, {"bucket_mb": 0.001}),
    "static graph": (Scheduled, dict, {"static_graph": True}),
    "manual": (Manual, dict, {}),
    "manual, static graph": (Manual, dict, {"static_graph": True}),
    "unused": (Unused, dict, {"find_unused_parameters": True}),
    "sharded state": (Scheduled, lambda: ALL, {"shard_optimizer_state": True}),
    "sharded state, manual": (Manual, dict, {"shard_optimizer_state": True}),
    "sharded state, unused": (Unused, dict, {"find_unused_parameters": True, "shard_optimizer_state": True}),
    "bf16-mixed": (Scheduled, lambda: {"precision": "bf16-mixed", **ALL}, {"shard_optimizer_state": True}),
    "BF16Precision": (Scheduled, lambda: {"plugins": [BF16Precision()], **ALL}, {"shard_optimizer_state": True}),
    "masters": (Net, lambda: {"plugins": [BF16Precision(weights="masters")], **ALL}, {}),
    "blocks": (Net, lambda: {"callbacks": [Compile(backend="aot_eager")], **ALL}, {}),
    "whole": (Net, lambda: {"callbacks": [Compile(backend="aot_eager", scope="model")]}, {"static_graph": True}),
    "split graphs": (
        Net,
        lambda: {"callbacks": [Compile(backend="aot_eager", scope="model")], **ALL},
        {"bucket_mb": 0.0005, "shard_optimizer_state": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_bit_for_bit_as_stock_ddp(ranks, tmp_path, name):
    stock, ours = ranks(both, tmp_path, name)
    assert ours == stock


KINDS = {"automatic": (Scheduled, {}, ALL), "manual": (Manual, {"blocks": True}, {})}


def static_and_not(folder, name):
    kind, arguments, options = KINDS[name]
    return [fit(folder, TunedDDPStrategy(static_graph=s), kind(**arguments), **options)[0] for s in (True, False)]


@pytest.mark.parametrize("name", KINDS)
def test_a_static_graph_can_begin_with_an_accumulation(ranks, tmp_path, name):
    static, plain = ranks(static_and_not, tmp_path, name)
    assert static == pytest.approx(plain, rel=1e-5)


class Counting(TunedDDPStrategy):
    """Counts reductions; the model of these tests is one bucket."""

    reductions = 0

    def _register_hook(self):
        def counted(state, bucket):
            self.reductions += 1
            return allreduce_hook(None, bucket)

        self.model.register_comm_hook(None, counted)


COUNTS = {  # module, options of the Trainer, reductions in four batches
    "each batch": (Scheduled, {}, 4),
    "accumulation": (Scheduled, {"accumulate_grad_batches": 2}, 2),
    "manual": (Manual, {}, 4),  # each `manual_backward` reduces
    "manual, blocked": (partial(Manual, blocks=True), {}, 2),  # by `toggle_model(sync_grad=False)`
}


def count(folder, name):
    kind, options, _ = COUNTS[name]
    strategy = Counting(bucket_mb=1)
    fit(folder, strategy, kind(), epochs=1, **options)
    return strategy.reductions


@pytest.mark.parametrize("name", COUNTS)
def test_gradients_are_reduced_once_for_each_optimizer_step(ranks, tmp_path, name):
    assert ranks(count, tmp_path, name) == COUNTS[name][-1]


SHARDED = {"shard_optimizer_state": True}
STRATEGIES = {"ddp": lambda: "ddp", "tuned": TunedDDPStrategy, "sharded": lambda: TunedDDPStrategy(**SHARDED)}


def resume(folder, first, second):
    whole = fit(folder, "ddp", epochs=4)
    for name in (first, "ddp"):
        fit(folder, STRATEGIES[name](), save=folder / f"{name}.ckpt")
    one, other = (torch.load(folder / f"{name}.ckpt", weights_only=False) for name in (first, "ddp"))
    for key in ("optimizer_states", "state_dict", "lr_schedulers"):
        assert repr(one[key]) == repr(other[key])
    return whole, fit(folder, STRATEGIES[second](), epochs=4, path=folder / f"{first}.ckpt")


@pytest.mark.parametrize(
    ("first", "second"), [("sharded", "sharded"), ("sharded", "ddp"), ("ddp", "sharded"), ("tuned", "tuned")]
)
def test_checkpoints_are_those_of_stock_ddp_and_resume_bit_for_bit(ranks, tmp_path, first, second):
    (losses, weights), (rest, found) = ranks(resume, tmp_path, first, second)
    assert rest == losses[len(losses) // 2 :]
    assert found == weights


def resume_both(folder):
    return [fit(folder, STRATEGIES[name](), epochs=4, path=folder / "one.ckpt") for name in ("sharded", "ddp")]


def test_a_checkpoint_goes_to_one_device_and_back(ranks, tmp_path):
    ranks(save_sharded, tmp_path)
    fit(tmp_path, "auto", epochs=3, path=tmp_path / "ranks.ckpt", save=tmp_path / "one.ckpt", devices=1)
    sharded, stock = ranks(resume_both, tmp_path)
    assert sharded == stock
    assert len(sharded[0]) == 4


def save_sharded(folder):
    fit(folder, STRATEGIES["sharded"](), save=folder / "ranks.ckpt")


def compressed(folder):
    settings = [{}, {"compression": "bf16"}, {"compression": "powersgd", "powersgd_start": 4, "powersgd_rank": 2}]
    # A measured size would let PowerSGD begin with other factors from run to run.
    return [fit(folder, TunedDDPStrategy(bucket_mb=25, **each), epochs=10)[0] for each in settings]


def test_compression_changes_the_loss_by_little(ranks, tmp_path):
    plain, bf16, powersgd = (torch.tensor(losses) for losses in ranks(compressed, tmp_path))
    assert torch.equal(plain[:5], powersgd[:5])  # PowerSGD has not begun
    assert 0 < (bf16 - plain).abs().max() < 0.01 * plain.max()
    assert 0 < (powersgd - plain).abs().max() < 0.02 * plain.max()


def low(folder):
    from torchao.optim import AdamW8bit

    dtypes = []

    class Low(Net):
        def configure_optimizers(self):
            return AdamW8bit(self.parameters(), lr=1e-2, bf16_stochastic_round=True)

    all_reduce = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        dtypes.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(tuned_ddp.dist, "all_reduce", noted):
        fit(folder, TunedDDPStrategy(bucket_mb=1), Low(), plugins=[BF16WeightsPrecision()], epochs=1)
    return dtypes


def test_bfloat16_gradients_are_reduced_in_float32(ranks, tmp_path):
    dtypes = ranks(low, tmp_path)
    assert dtypes.count(torch.float32) >= 4
    assert torch.bfloat16 not in dtypes


def logged(folder):
    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.layers.append(nn.Sequential(nn.Linear(8, 2**17), nn.Linear(2**17, 8)))

    with patch.object(tuned_ddp, "rank_zero_info") as told:
        fit(folder, TunedDDPStrategy(), Wide(), epochs=1)
        fit(folder, TunedDDPStrategy(bucket_mb=3), Wide(), epochs=1)
    return [call.args[0] for call in told.call_args_list]


def test_the_size_of_buckets_is_measured_and_logged_once(ranks, tmp_path):
    (line,) = ranks(logged, tmp_path)
    assert re.fullmatch(r"TunedDDPStrategy: buckets of \d+ MiB; a reduction of 1 MiB [\d.]+ ms, 4 MiB .* ms\.", line)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_mb": 0}, "bucket_mb"),
        ({"compression": "fp8"}, "compression"),
        ({"powersgd_rank": 0}, "powersgd_rank"),
        ({"powersgd_start": 1}, "powersgd_start"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=rf"TunedDDPStrategy\({words}="):
        TunedDDPStrategy(**options)


@pytest.mark.parametrize("options", [{"powersgd_rank": 8}, {"powersgd_start": 10, "compression": "bf16"}])
def test_settings_of_powersgd_without_it_are_refused(options):
    with pytest.raises(ValueError, match="with compression='powersgd' alone"):
        TunedDDPStrategy(**options)


@pytest.mark.parametrize(
    ("settings", "other", "words"),
    [
        (SHARDED, "masters", "shard_optimizer_state.*weights='masters'.*exclude each other"),
        ({"compression": "bf16"}, "masters", "compression.*weights='masters'.*exclude each other"),
        (SHARDED, "offload", "shard_optimizer_state=True.*OptimizerOffload exclude each other"),
    ],
)
def test_what_excludes_each_other_is_refused_before_training(fresh_process, tmp_path, settings, other, words):
    with pytest.raises(AssertionError, match=words):
        fresh_process(refused, tmp_path, settings, other)


def refused(folder, settings, other):
    masters = {"plugins": [BF16Precision(weights="masters")]}
    options = masters if other == "masters" else {"callbacks": [OptimizerOffload()]}
    fit(folder, TunedDDPStrategy(**settings), devices=1, **options)


def test_one_device_trains(fresh_process, tmp_path):
    assert fresh_process(alone, tmp_path)


def alone(folder):
    return fit(folder, "tuned_ddp", devices=1) == fit(folder, "ddp", devices=1)
