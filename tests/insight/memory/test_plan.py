from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

import lightning_ups.callbacks
from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload
from lightning_ups.insight.memory import plan as plan_module
from lightning_ups.insight.memory.account import GIB
from lightning_ups.insight.memory.described_run import Uncountable
from lightning_ups.insight.memory.devices import Device
from lightning_ups.insight.memory.plan import Planner
from lightning_ups.models import GPTModule
from lightning_ups.order import Placement, Run
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.test_docs import checked_calls


def planner(
    *callbacks,
    strategy=SingleDeviceStrategy,
    devices=1,
    gib=None,
    batch=(4, 65),
    precision=None,
    module=None,
    **settings,
):
    module = module or gpt(2)
    with torch.device("meta"):
        module.configure_model()
    run = Run(
        module=module,
        strategy=Placement.of(strategy),
        precision=precision or BF16Precision(weights="masters"),
        callbacks=callbacks,
        accelerator="cuda",
        num_devices=devices,
        num_nodes=1,
    )
    device = None if gib is None else Device(name="small", gib=gib, capability=(8, 0))
    return Planner(run, torch.empty(batch, dtype=torch.long, device="meta"), settings=settings, device=device)


def fitting(gib_beyond):
    """Return the size of a device of which so much more than nothing is usable."""
    return 0.6 + gib_beyond / 0.97


def gpt(blocks):
    """Return the tiny GPT with this number of blocks: each makes a dry run slower. Two are gathered at once."""
    module = GPTModule(size="tiny")
    module.config = replace(module.config, num_layers=blocks)
    return module


def names(plan):
    return [variant.name for variant in plan.variants()]


def test_variants_of_a_plain_run():
    plan = planner()
    assert names(plan)[0] == "Compile"
    assert {"ActivationCheckpoint(save=matmuls)", "ActivationCheckpoint(save=nothing)", "OptimizerOffload"} <= {
        *names(plan)
    }
    assert not any("FSDP2" in name or "DDP" in name for name in names(plan))  # one device has nothing to shard over


def test_declared_callbacks_are_not_variants():
    plan = planner(Compile(), ActivationCheckpoint(save="nothing"), OptimizerOffload())
    assert "Compile" not in names(plan)
    assert "OptimizerOffload" not in names(plan)
    assert "AdamW8bit" not in names(plan)  # its state cannot be on the host
    assert "no checkpointing" in names(plan)
    assert "ActivationCheckpoint(save=nothing)" not in names(plan)
    assert "ActivationCheckpoint(save=matmuls)" in names(plan)


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, FSDP2Strategy])
def test_the_variant_of_eight_bit_adamw_is_what_that_optimizer_takes(strategy):
    torchao = pytest.importorskip("torchao.optim")
    plan = planner(batch=(1, 9), strategy=strategy, devices=1 if strategy is SingleDeviceStrategy else 2)
    (variant,) = [v for v in plan.variants() if v.name == "AdamW8bit"]
    chosen = Planner(plan.run, plan.batch, settings={}, optimizers=lambda m: torchao.AdamW8bit(m.parameters(), lr=1e-3))
    found, right = plan.moment(variant), chosen.moment(chosen.declared)
    assert found.on_host == 0
    assert found.total == pytest.approx(right.total, rel=0.02)
    assert found.of("optimizer state") == pytest.approx(right.of("optimizer state"), rel=0.1)


def offered(*args, **options):
    return next((v for v in planner(*args, **options).variants() if v.name == "ActivationOffload"), None)


def test_activation_offload_is_a_variant_where_blocks_run_separately():
    alone, with_inputs = offered(), offered(ActivationCheckpoint(save="nothing"))
    assert alone.rank > with_inputs.rank
    assert "slower" in alone.price
    assert "slower" not in with_inputs.price
    assert yaml.safe_load(alone.yaml) == {"trainer.callbacks+": [{"class_path": "ActivationOffload"}]}
    assert offered(Compile()) is not None
    assert offered(Compile(scope="auto"), strategy=FSDP2Strategy, devices=2) is not None
    for callback in (
        ActivationOffload(), Compile(scope="model"), Compile(scope="auto"), Compile(mode="reduce-overhead")
    ):  # fmt: skip
        assert offered(callback) is None
    assert offered(strategy=SimpleFSDPStrategy, devices=2) is None


WIDE = (64, 257)  # of the tiny GPT, with products of 4 MiB and more


@pytest.mark.parametrize(
    "others", [(), (ActivationCheckpoint(save="nothing"),), (Compile(),)], ids=["alone", "recomputed", "compiled"]
)
def test_the_variant_of_offloading_equals_the_callback(others):
    plan, declared = (
        planner(*callbacks, *others, batch=WIDE, module=gpt(3)) for callbacks in ((), (ActivationOffload(),))
    )
    (variant,) = [v for v in plan.variants() if v.name == "ActivationOffload"]
    found = declared.moment(declared.declared)
    assert plan.moment(variant) == found
    assert found.on_host > 0
    assert found.total < plan.moment(plan.declared).total
    assert plan.moment(plan.declared).on_host == 0


def test_the_memory_of_the_host_that_offloading_takes():
    plan = planner(OptimizerOffload(), ActivationOffload(), batch=WIDE)
    step = plan._step(plan.declared, samples=64)
    state = step.fixed.of("optimizer state", "master weights")
    assert plan.moment(plan.declared).on_host == step.on_host + state > state > 0


def test_offloading_that_moves_nothing_is_an_error():
    plan = planner()  # whose blocks save less than a MiB at a time
    (variant,) = [v for v in plan.variants() if v.name == "ActivationOffload"]
    with pytest.raises(Uncountable, match=r"^ActivationOffload would move nothing.* Use larger batches"):
        plan.moment(variant)
    assert not plan.moves_nothing()
    assert planner(ActivationOffload()).moves_nothing()
    assert not planner(ActivationOffload(), batch=WIDE).moves_nothing()


def test_the_largest_batch_where_what_is_too_small_stays():
    # What goes into a block has 64 KiB in each sample. Of 4 it stays, of 8 it goes, and the line through the two
    # leads elsewhere.
    others = (ActivationCheckpoint(save="nothing"), ActivationOffload(min_mb=0.3))
    plan = planner(*others, gib=fitting(0.6), batch=(4, 257), module=gpt(3))
    assert plan.moves_nothing()
    largest = plan.largest_batch(plan.declared)
    assert plan._holds(plan.declared, plan._step(plan.declared, samples=largest))
    assert not plan._holds(plan.declared, plan._step(plan.declared, samples=int(1.03 * largest) + 1))


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDP2Strategy])
def test_variants_have_valid_yaml_and_python(strategy):
    for variant in planner(ActivationCheckpoint(), strategy=strategy, devices=2).variants():
        written = yaml.safe_load(variant.yaml)
        assert written is not None or all(line.startswith("# ") for line in variant.yaml.splitlines())
        callbacks = (written or {}).get("trainer.callbacks+", [])
        assert all(item["class_path"] in vars(lightning_ups.callbacks) for item in callbacks)
        assert variant.python
        assert checked_calls(variant.python) == len(callbacks) + ("FSDP2Strategy(" in variant.python)


def test_halved_batches_accumulate_wide_gradients():
    plan = planner(batch=(2, 65))
    halved = next(variant for variant in plan.variants() if "accumulated twice" in variant.name)
    accumulated = planner(batch=(1, 65))
    accumulated._microbatches = 2
    wide = plan._step(halved, samples=1).peaks["backward"].of("gradients")
    assert wide == accumulated._step(accumulated.declared, samples=1).peaks["backward"].of("gradients")
    assert wide > 1.5 * plan._step(plan.declared, samples=2).peaks["backward"].of("gradients")


def test_variants_of_sharding():
    assert {"FSDP2Strategy(sharding=gradients)", "FSDP2Strategy(sharding=full)"} <= {
        *names(planner(strategy=DDPStrategy, devices=4))
    }
    ours = names(planner(strategy=FSDP2Strategy, devices=4, sharding="gradients"))
    assert "DDP: no sharding" in ours
    assert "FSDP2Strategy(sharding=full)" in ours
    assert "FSDP2Strategy(sharding=gradients)" not in ours


def test_copies_of_the_model_are_not_divided():
    plan = planner(strategy=FSDP2Strategy, devices=8, replicate_size=4)
    alone = planner(strategy=FSDP2Strategy, devices=2)
    assert plan.moment(plan.declared).of("parameters") == alone.moment(alone.declared).of("parameters")


def test_offloaded_by_the_strategy():
    plan = planner(strategy=FSDP2Strategy, devices=2, offload=True)
    assert plan.moment(plan.declared).of("parameters", "gradients", "optimizer state") == 0


def test_offloaded_by_a_callback():
    plain, declared = planner(), planner(OptimizerOffload(chunk_mb=0.01, resident=0.25))
    before, after = plain.moment(plain.declared), declared.moment(declared.declared)
    assert before.of("optimizer state") > 0
    # A quarter stays; which moment is the peak may be another one.
    fixed = declared._step(declared.declared, samples=4).fixed
    assert after.of("optimizer state") == pytest.approx(fixed.of("optimizer state") / 4, rel=0.01)
    assert after.of("master weights") == pytest.approx(fixed.of("master weights") / 4, rel=0.01)


@pytest.mark.parametrize("update", ["host", "torchao"])
def test_optimizer_steps_on_the_host_need_no_chunks(update):
    masters = "autocast" if update == "torchao" else "masters"
    streamed, there = (planner(OptimizerOffload(update=u), precision=BF16Precision(weights=masters))
                       for u in ("device", update))  # fmt: skip
    before, after = (plan.moment(plan.declared) for plan in (streamed, there))
    fixed = streamed._step(streamed.declared, samples=4).fixed
    state = fixed.of("optimizer state", "master weights")
    assert state < 256 * 2**20, "so that a chunk has no more than all of it"
    assert before.held["temporaries", "host"] == pytest.approx(3 * state, rel=0.01)
    assert ("temporaries", "host") not in after.held
    assert after.of("optimizer state", "master weights") == 0


def test_host_resident_memory_is_not_on_the_device():
    callback = ActivationCheckpoint(save="matmuls")
    callback.host_resident = {"activations": 0.5}
    plain, hosted = planner(), planner(callback)
    # The dry run leaves it out, since its copies would be counted.
    assert hosted.moment(hosted.declared).of("activations") < plain.moment(plain.declared).of("activations")


def test_memory_of_other_batch_sizes_is_interpolated():
    plan = planner(precision=Precision())
    for samples in (3, 7, 16):
        exact = planner(precision=Precision(), batch=(samples, 65))
        found = plan.moment(plan.declared, samples=samples).total
        assert found == pytest.approx(exact.moment(exact.declared).total, rel=0.01)


def test_the_largest_batch_fits_and_the_next_does_not():
    plan = planner(gib=fitting(0.25))
    largest = plan.largest_batch(plan.declared)
    assert largest > 4
    for samples, fits in ((largest, True), (int(largest * 1.05) + 1, False)):
        exact = planner(batch=(samples, 65), gib=fitting(0.25))
        assert exact.fits(exact.declared) is fits


def test_the_longest_sequence():
    probe = planner(batch=(16, 193))
    needs = probe.moment(probe.declared).total + 17 * 2**20  # and what cuBLAS takes
    plan = planner(gib=fitting(1.01 * needs / GIB), batch=(16, 65))
    longest = plan.longest_sequence(plan.declared)
    assert longest % 64 == 1
    assert longest == 193
    assert plan.fits(plan.declared, tokens=longest)
    assert not plan.fits(plan.declared, tokens=longest + 64)


class Scores(LightningModule):
    """Keeps a score for each pair of positions, as attention without a kernel does."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch)
        return (hidden @ hidden.mT).exp().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_longest_sequence_of_a_module_whose_memory_grows_with_its_square(monkeypatch):
    seen = []
    measure = plan_module.measure_run
    monkeypatch.setattr(plan_module, "measure_run", lambda *a, **k: seen.append(1) or measure(*a, **k))
    plan = planner(gib=16, batch=(4, 64), module=Scores())
    longest = plan.longest_sequence(plan.declared)
    assert len(seen) <= 8, "each may take some seconds"
    assert plan.fits(plan.declared, tokens=longest)
    assert not plan.fits(plan.declared, tokens=int(1.06 * longest))


def test_the_longest_sequence_that_the_module_takes():
    plan = planner(gib=10, batch=(4, 65))
    assert 129 <= plan.longest_sequence(plan.declared) <= 257


def test_a_module_without_longer_sequences_is_an_error():
    plan = planner(gib=10, batch=(4, 257))
    with pytest.raises(Uncountable, match="max_seq_len"):
        plan.longest_sequence(plan.declared)


@pytest.mark.slow
def test_the_three_cheapest_cures():
    plan = planner()
    before = plan.moment(plan.declared).total
    cures = plan.cures()
    assert len(cures) == 3
    ranks = [variant.rank for variant, _ in cures]
    assert ranks == sorted(ranks)
    for variant, saved in cures:
        assert saved > 0
        assert before - plan.moment(variant).total == saved
        assert variant.yaml


# SimpleFSDPStrategy


def sizes_of(module):
    """Return the elements of one block, and of what no block has."""
    block = sum(p.numel() for p in module.model.layers[0].parameters())
    return block, sum(p.numel() for p in module.parameters()) - len(module.model.layers) * block


@pytest.mark.parametrize("callbacks", [pytest.param((), marks=pytest.mark.slow), (Compile(),)])
def test_one_graph_keeps_what_a_model_that_is_compiled_whole_keeps(callbacks):
    one = planner(Compile(scope="model"), precision=BF16Precision(weights="masters"), module=gpt(3))
    plan = planner(*callbacks, strategy=SimpleFSDPStrategy, devices=4, module=gpt(3))
    found, alone = plan.moment(plan.declared), one.moment(one.declared)
    assert (found.phase, found.place) == (alone.phase, alone.place) == ("backward", "")
    assert found.of("activations") == alone.of("activations") > 0
    block, rest = sizes_of(plan.run.module)
    # Bfloat16 is gathered, this block and the next, and float32 reduced.
    assert found.of("gather buffers") == 2 * (rest + 2 * block) + 4 * block
    assert found.of("parameters") == pytest.approx((rest + 3 * block), rel=1e-6)
    assert "Compile" not in names(plan)


def test_one_graph_reduces_gradients_as_they_come():
    recomputed = ActivationCheckpoint(save="nothing")
    plan = planner(recomputed, strategy=SimpleFSDPStrategy, devices=4, batch=(1, 9), module=gpt(3))
    step = plan._step(plan.declared, samples=1)
    largest = max(moment.of("temporaries") for moment in step.loose.values())
    block, rest = sizes_of(plan.run.module)
    # So few tokens need next to nothing, and no moment has the gradients of all blocks among it.
    assert largest < 2 * (rest + block)


def test_another_strategy_is_planned_without_the_settings_of_the_declared_one():
    plan = planner(devices=4, strategy=SimpleFSDPStrategy)
    (other,) = [variant for variant in plan.variants() if variant.name == "FSDP2Strategy(sharding=gradients)"]
    alone = planner(strategy=FSDP2Strategy, devices=4, sharding="gradients")
    assert plan.moment(other) == alone.moment(alone.declared)


def test_context_parallelism_splits_sequences():
    sharded = planner(strategy=FSDP2Strategy(), devices=2)
    split = planner(strategy=FSDP2Strategy(context_parallel_size=2), devices=2)
    one, two = (each.moment(each.declared) for each in (sharded, split))
    assert two.of("parameters") == one.of("parameters")
    before, after = (each._step(each.declared).saved.by_owner("activations") for each in (sharded, split))
    block = next(name for name in before if name)
    assert after[block] == pytest.approx(before[block] / 2, rel=0.05)
    assert "DDP: no sharding" not in {variant.name for variant in split.variants()}
    named = planner(strategy=FSDP2Strategy(context_parallel_size=2, context_parallel_module="model"), devices=2)
    with pytest.raises(Uncountable, match="context_parallel_module='model'"):
        named.moment(named.declared)


def test_stages_of_a_pipeline_are_not_planned():
    staged = planner(strategy=FSDP2Strategy(pipeline_parallel_size=2), devices=2)
    with pytest.raises(Uncountable, match="pipeline_parallel_size"):
        staged.moment(staged.declared)


def test_tensor_parallelism_splits_parameters_and_products():
    sharded = planner(strategy=FSDP2Strategy(), devices=2)
    split = planner(strategy=FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt"), devices=4)
    one, two = (each.moment(each.declared) for each in (sharded, split))
    for kind in ("parameters", "optimizer state"):
        assert two.of(kind) == pytest.approx(one.of(kind) / 2, rel=0.01)
    before, after = (each._step(each.declared).saved.by_owner("activations") for each in (sharded, split))
    block = next(name for name in before if name)
    assert 0.5 * before[block] < after[block] < 0.7 * before[block]  # each device has whole inputs of products
    assert not dist.is_initialized()
    assert not {variant.name for variant in split.variants()} & {
        "DDP: no sharding",
        "FSDP2Strategy(sharding=gradients)",
    }


def test_tensor_parallel_blocks_that_are_compiled_and_recomputed_are_counted():
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
    split = planner(Compile(), ActivationCheckpoint(save="nothing"), strategy=strategy, devices=4)
    kept = planner(Compile(), strategy=strategy, devices=4)
    assert split.moment(split.declared).of("activations") < kept.moment(kept.declared).of("activations")
