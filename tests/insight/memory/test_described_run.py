import logging
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile
from lightning_ups.insight.memory.described_run import Change, Uncountable, measure_run, optimizer_share
from lightning_ups.models import GPTModule
from lightning_ups.order import Placement, Run
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.foreign import FOREIGN

BATCH = torch.empty(2, 65, dtype=torch.long, device="meta")


def on_meta(module):
    with torch.device("meta"):
        module.configure_model()
    return module


def gpt(blocks, kind=GPTModule):
    """Return the tiny GPT with this number of blocks: each makes a dry run slower."""
    module = kind(size="tiny")
    module.config = replace(module.config, num_layers=blocks)
    return on_meta(module)


def run(module=None, *callbacks, precision=None, strategy=SingleDeviceStrategy, devices=1):
    module = module or gpt(2)
    return Run(
        module=module,
        strategy=Placement.of(strategy),
        precision=precision or Precision(),
        callbacks=callbacks,
        accelerator="cuda",
        num_devices=devices,
        num_nodes=1,
    )


def peak(*args, change=None, batch=BATCH, **options):
    return measure_run(run(*args, **options), batch, change=change).peak.total


def test_the_module_stays_as_it_is():
    asked = run()
    before = {name: id(p) for name, p in asked.module.named_parameters()}
    measure_run(asked, BATCH)
    assert {name: id(p) for name, p in asked.module.named_parameters()} == before
    assert asked.module._trainer is None
    assert "log" not in vars(asked.module)


def test_memory_of_parameters_masters_and_state_by_precision():
    fixed = {
        name: measure_run(run(precision=precision), BATCH).fixed
        for name, precision in {
            "32": Precision(),
            "masters": BF16Precision(weights="masters"),
            "autocast": BF16Precision(weights="autocast"),
            "true": HalfPrecision("bf16-true"),
        }.items()
    }
    numbers = sum(p.numel() for p in run().module.parameters())
    sizes = {name: (m.of("parameters"), m.of("master weights"), m.of("optimizer state")) for name, m in fixed.items()}

    def near(*sizes):
        return pytest.approx([size * numbers for size in sizes], rel=0.02)

    assert list(sizes["32"]) == list(sizes["autocast"]) == near(4, 0, 8)
    assert list(sizes["masters"]) == near(2, 4, 8)
    assert list(sizes["true"]) == near(2, 0, 4)


def test_autocast_keeps_casts_of_the_weights():
    stock, ours = (
        measure_run(run(precision=precision), BATCH).saved.of("activations")
        for precision in (MixedPrecision("bf16-mixed", "cpu"), BF16Precision(weights="masters"))
    )
    products = sum(p.numel() for p in run().module.parameters() if p.dim() == 2) - 256 * 128  # without the embedding
    assert stock - ours >= 2 * products


def test_declared_checkpointing_and_what_is_asked_instead():
    plain = peak()
    assert peak(None, ActivationCheckpoint(save="nothing")) < plain
    nothing, matmuls = (peak(change=Change(checkpointing=save)) for save in ("nothing", "matmuls"))
    assert nothing < matmuls < plain
    assert peak(None, ActivationCheckpoint(save="nothing")) == nothing
    assert peak(None, ActivationCheckpoint(save="nothing"), change=Change(checkpointing="off")) == plain


def test_declared_compilation_and_what_is_asked_instead():
    plain = measure_run(run(), BATCH).saved.of("activations")
    declared = measure_run(run(None, Compile()), BATCH).saved.of("activations")
    assert declared < plain
    assert measure_run(run(), BATCH, change=Change(compiling="blocks")).saved.of("activations") == declared
    assert measure_run(run(None, Compile()), BATCH, change=Change(compiling="off")).saved.of("activations") == plain


def saved_of(step):
    """Return what is kept for backward, of blocks and besides."""
    owners = step.saved.by_owner("activations")
    return [owners.get(f"model.layers.{i}", 0) for i in range(4)], owners.get("", 0)


LONG = torch.empty(4, 257, dtype=torch.long, device="meta")
INPUT = 4 * 256 * 128 * 2  # bytes of what goes into a block of the tiny GPT, in bfloat16


def offloading(*others, **options):
    return long(ActivationOffload(min_mb=0, **options), *others)


def long(*callbacks):
    return measure_run(run(gpt(4), *callbacks, precision=BF16Precision(weights="masters")), LONG)


def test_declared_offloading_leaves_the_last_block():
    plain = long()
    blocks, besides = saved_of(plain)
    moved = offloading()
    kept, outside = saved_of(moved)
    # Of the block before the last stays its result, which the last one saves; of the embedding, nothing.
    assert kept == [0, 0, INPUT, blocks[3]]
    assert outside == besides - INPUT
    # What a block saves is what it makes, with its input in place of its result.
    assert moved.on_host == sum(blocks)
    assert plain.on_host == 0


@pytest.mark.parametrize("compiles", [False, True])
def test_with_checkpointing_the_inputs_of_blocks_move(compiles):
    others = [ActivationCheckpoint(save="nothing"), *([Compile()] if compiles else [])]
    assert offloading(*others).on_host == 4 * INPUT


def test_activations_of_compiled_blocks_are_offloaded():
    blocks, _ = saved_of(long(Compile()))
    moved = offloading(Compile())
    assert saved_of(moved)[0] == [0, 0, INPUT, blocks[3]]
    assert moved.on_host == sum(blocks)


def test_nothing_is_offloaded_from_one_graph():
    assert offloading(Compile(scope="model")).on_host == 0


def test_under_sharding_parameters_are_of_the_type_of_computation_and_nothing_steps():
    step = measure_run(run(precision=BF16Precision(weights="masters"), strategy=FSDP2Strategy, devices=4), BATCH)
    assert step.fixed.of("parameters") == pytest.approx(2 * sum(step.elements.values()), rel=0.02)
    assert step.fixed.of("optimizer state") == step.fixed.of("master weights") == 0


@pytest.mark.parametrize("filter", ["all", "auto"])
def test_float8_for_another_gpu_is_planned(filter):
    step = measure_run(run(precision=Float8Precision(weights="masters", filter=filter)), BATCH)
    assert sum(step.in_float8.values()) > 0


def test_the_share_of_the_optimizer():
    share = optimizer_share(run())
    assert share.state == pytest.approx(8, rel=0.05)
    assert share.stepping < 0.1  # it is fused
    chosen = optimizer_share(run(), optimizers=lambda m: torch.optim.SGD(m.parameters(), lr=1, momentum=0.9))
    assert chosen.state == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("kind", "needs"), [("AdamW8bit", 2 * (1 + 4 / 256)), ("AdamW4bit", 2 * (0.5 + 4 / 128))])
def test_low_bit_state_that_is_declared(kind, needs):
    def make(module):
        return getattr(pytest.importorskip("torchao.optim"), kind)(module.parameters(), lr=1e-3)

    step = measure_run(run(), BATCH, optimizers=make)
    elements = sum(step.elements.values())
    assert needs * elements < step.fixed.of("optimizer state") < 1.1 * needs * elements
    masters = measure_run(run(precision=BF16Precision(weights="masters")), BATCH, optimizers=make)
    assert masters.fixed.of("optimizer state") == step.fixed.of("optimizer state")
    assert optimizer_share(run(), optimizers=make).state == pytest.approx(needs, rel=0.1)


@pytest.mark.parametrize("name", sorted({*FOREIGN} - {"configure_model", "manual"}))
def test_modules_of_other_libraries(name):
    module, batch = FOREIGN[name]()
    step = measure_run(run(module), batch)
    assert step.peaks["backward"].total > step.fixed.total > 0
    assert step.saved.of("activations") > 0
    assert sum(step.elements.values()) == sum(p.numel() for p in module.parameters())
    assert sum(step.trained.values()) == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_manual_optimization_is_refused():
    module, batch = FOREIGN["manual"]()
    with pytest.raises(Uncountable, match=r"^Manual uses manual optimization.*TokenThroughput"):
        measure_run(run(module), batch)


class Depends(LightningModule):
    """Its shapes depend on numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, _):
        y = self.layer(batch)
        return y[y > 0].sum() if y.shape[0] > 1 else y.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Failing(Depends):
    """Takes a function of the module and the batch as its step."""

    def __init__(self, step):
        super().__init__()
        self.inner, self.step = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), step

    def training_step(self, batch, _):
        return self.step(self, batch)


def fail(*_):
    raise FileNotFoundError


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (
            Depends(),
            (3, 4),
            r"Depends.training_step .* at test_described_run\.py:\d+, `return y\[.*nonzero.*TokenThroughput",
        ),
        (Depends(), (3, 5), r"RuntimeError.*TokenThroughput"),
        (
            Failing(lambda module, batch: module.inner(**batch)),
            (3, 4),
            r"Sequential\(\.\.\.\) argument after",
        ),
        (Failing(fail), (3, 4), "FileNotFoundError"),
        (Failing(lambda *_: None), (1, 4), "Failing.training_step returned NoneType"),
        (Failing(lambda _, batch: torch.zeros(4, 4).expand(len(batch), 4)), (8, 4), "must match the existing"),
    ],
    ids=["needs values", "shapes", "long text", "no text", "no loss", "sizes"],
)
def test_a_step_that_cannot_be_counted_names_the_reason_and_logs_nothing(monkeypatch, module, shape, reason):
    logged = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    with pytest.raises(Uncountable, match=reason):
        measure_run(run(module), torch.empty(shape))
    assert not logged


def test_a_step_that_needs_values_for_other_batches_only_is_counted():
    assert measure_run(run(Depends()), torch.empty(1, 4)).peak.total > 0


class Metrics(Depends):
    """Computes metrics, and takes its loss from one that is differentiable."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(4), "f1": MulticlassF1Score(4)}, prefix="train/"
        )
        self.squared = MeanSquaredError()

    def training_step(self, batch, _):
        y, target = self.layer(batch), torch.zeros(len(batch), dtype=torch.long)
        self.log("accuracy", self.accuracy(y, target).item())
        self.accuracy.update(y, target)
        self.log_dict({f"{name}_on_step": value for name, value in self.metrics(y, target).items()})
        self.metrics["f1"].update(y, target)
        return self.squared(y, torch.zeros_like(y))


def test_metrics_do_not_need_values():
    assert measure_run(run(Metrics()), torch.empty(8, 4)).peaks["backward"].total > 0


class Sampling(Depends):
    """Draws from distributions, which check their arguments by number."""

    def training_step(self, batch, _):
        y = self.layer(batch)
        drawn = torch.distributions.Normal(y, y.exp()).rsample()
        return drawn.sum() - torch.distributions.Categorical(logits=y).entropy().mean()


def test_distributions_do_not_need_values():
    assert measure_run(run(Sampling()), torch.empty(3, 4)).peak.total > 0


class Wide(LightningModule):
    """Takes numbers, and not the numbers of tokens."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), nn.Linear(512, 512), nn.Sigmoid())

    def training_step(self, batch, _):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_of_numbers_are_cast_as_the_run_casts_them():
    saved = {}
    for name, options in {
        "32": {},
        "half": {"precision": HalfPrecision("bf16-true")},
        "masters": {"precision": BF16Precision(weights="masters")},
        "sharded": {"precision": BF16Precision(weights="masters"), "strategy": FSDP2Strategy, "devices": 2},
        "sharded, stock": {"precision": MixedPrecision("bf16-mixed", "cuda"), "strategy": FSDP2Strategy, "devices": 2},
    }.items():
        step = measure_run(run(Wide(), **options), torch.empty(1024, 512))
        saved[name] = step.saved.of("activations")
    numbers = 1024 * 512
    # The results of two sigmoids, and the batch as it is cast where that is not the batch from then on.
    sizes = {"32": 4 + 4, "half": 2 + 2, "masters": 2 + 2 + 2, "sharded": 2 + 2 + 2, "sharded, stock": 2 + 2 + 2}
    assert saved == {name: pytest.approx(size * numbers, rel=0.01) for name, size in sizes.items()}


class Spectral(nn.Module):
    """Knows no bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64)), nn.Linear(64, 64)

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x)[..., :8] @ self.weight, n=64))


def test_float32_layers_stay_float32_under_sharding():
    asked = run(Wide(), precision=BF16Precision(weights="masters", in_float32=["net.1"]))
    asked.module.net = nn.Sequential(nn.Linear(64, 64), Spectral(), nn.Linear(64, 64))
    sharded = replace(asked, strategy=Placement.of(FSDP2Strategy), num_devices=2)
    saved = [measure_run(each, torch.empty(256, 64)).saved.of("activations") for each in (asked, sharded)]
    assert saved[0] == saved[1] > 0


@pytest.mark.parametrize(
    ("weights", "options", "compiles"),
    [("masters", {}, False), ("masters", {"fused": True}, False), ("autocast", {}, True)],
    ids=str,
)
def test_a_one_kernel_optimizer_step_has_no_temporaries(weights, options, compiles):
    def taken(**others):
        step = measure_run(
            run(None, *([Compile()] if compiles else []), precision=BF16Precision(weights=weights)),
            BATCH,
            optimizers=lambda module: torch.optim.AdamW(module.parameters(), **options, **others),
        )
        elements = sum(step.elements.values())
        assert step.fixed.of("optimizer state") == pytest.approx(8 * elements, rel=0.02)
        return step.peaks["optimizer"].of("temporaries") / elements

    assert taken() == 0
    assert taken(maximize=True) > 3.9  # torch's own, which the kernel is not: of masters, it wants wide gradients
