import pytest
import torch
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload
from lightning_ups.order import Declaration, Stage, applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


class Dropping(Net):
    def __init__(self, **options):
        super().__init__(**options)
        for layer in self.layers:
            layer.append(nn.Dropout(0.2))


class Reports(Declaration):
    stage = Stage.RECOMPUTE

    def on_train_end(self, trainer, *_):
        self.parts = applied(trainer.strategy).report.parts

    def change(self, module, context):
        return super().change(module, context)


def losses(tmp_path, callbacks=(), *, masters=False, **options):
    module = Dropping()
    plugins = [BF16Precision(weights="masters")] if masters else []
    trainer(tmp_path, callbacks=callbacks, plugins=plugins, epochs=3, **options).fit(module, loader())
    return torch.stack(module.losses), [p.detach() for p in module.parameters()]


def same(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


COMBINATIONS = {
    "alone": ([], {}),
    "checkpoint": ([ActivationCheckpoint(save="nothing")], {}),
    "matmuls": ([ActivationCheckpoint(save="matmuls")], {}),
    "masters": ([], {"masters": True}),
    "optimizer": ([OptimizerOffload(chunk_mb=0.001)], {"masters": True}),
    "accumulate": ([ActivationCheckpoint(save="nothing")], {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize(("others", "options"), COMBINATIONS.values(), ids=COMBINATIONS)
@pytest.mark.parametrize("first", [False, True])
def test_losses_and_weights_stay_as_they_are(tmp_path, others, options, first):
    right = losses(tmp_path, others, **options)
    ours, reports = ActivationOffload(min_mb=0), Reports()
    callbacks = [ours, *others] if first else [*others, ours]
    assert same(losses(tmp_path, [*callbacks, reports], **options), right)
    part = reports.parts["ActivationOffload"]
    assert part["lines"] == ["3 of 3 blocks offload what they save for backward to the host"]
    assert part["blocks_run"] == 3
    assert part["moved_bytes"] > 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_under_compile_it_is_right(tmp_path, checkpoint):
    others = [Compile(backend="aot_eager"), *([ActivationCheckpoint(save="nothing")] if checkpoint else [])]
    torch.compiler.reset()
    right = losses(tmp_path, others)
    reports = Reports()
    assert same(losses(tmp_path, [ActivationOffload(min_mb=0), reports, *others]), right)
    assert reports.parts["ActivationOffload"]["moved_bytes"] > 0


def test_one_graph_of_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^Compile makes one graph .* or leave the offloading out\.$"):
        losses(tmp_path, [ActivationOffload(), Compile(backend="aot_eager", scope="model")])


def test_compile_chooses_blocks_where_these_are_offloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.callbacks.compile._STEPS_FOR_WHOLE", 0)
    monkeypatch.setattr("lightning_ups.callbacks.compile._STEPS_FOR_BLOCKS", 0)
    torch.compiler.reset()
    right, reports = losses(tmp_path, [Compile(backend="aot_eager")]), Reports()
    chosen = Compile(backend="aot_eager", scope="auto")
    assert same(losses(tmp_path, [ActivationOffload(min_mb=0), chosen, reports]), right)
    assert reports.parts["Compile"]["scope"] == "blocks"
    assert "since ActivationOffload is given" in reports.parts["Compile"]["lines"][0]
    assert reports.parts["ActivationOffload"]["moved_bytes"] > 0


def test_every_second_block_by_pattern(tmp_path):
    reports = Reports()
    losses(tmp_path, [ActivationOffload(min_mb=0, blocks=["layers.*"], every_k=2), reports])
    assert reports.parts["ActivationOffload"]["blocks"] == ["layers.0", "layers.2"]


def test_no_effect_is_an_error_before_any_optimizer_steps(tmp_path):
    model = Net()
    before = [p.clone() for p in model.parameters()]
    fitting = trainer(tmp_path, epochs=1, callbacks=[ActivationOffload(min_mb=1000)])
    with pytest.raises(RuntimeError, match="moved nothing"):
        fitting.fit(model, loader(4))
    assert fitting.global_step == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_no_effect_is_an_error(tmp_path):
    match = r"a smaller min_mb, or leave the callback out\."
    with pytest.raises(RuntimeError, match=rf"{match} .*on_no_effect='warn'"):
        losses(tmp_path, [ActivationOffload()])
    with pytest.warns(UserWarning, match=match):
        assert same(losses(tmp_path, [ActivationOffload(on_no_effect="warn")]), losses(tmp_path))

    class Unused(Dropping):
        def __init__(self):
            super().__init__()
            self.others = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    with pytest.raises(RuntimeError, match=r"ActivationOffload\(blocks=\[\.\.\.\]\)\."):
        trainer(tmp_path, callbacks=[ActivationOffload(blocks=["others.*"])]).fit(Unused(), loader())


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"1 selects every block, 2 every second one\. Use 1 or more\.$"):
        ActivationOffload(every_k=0)
    with pytest.raises(TypeError):
        ActivationOffload(blocks="layers.*")


def on_ranks(tmp_path, strategy, callbacks):
    torch.manual_seed(0)
    module, reports = Net(), Reports()
    chosen = FSDP2Strategy() if strategy == "fsdp2" else strategy
    trainer(
        tmp_path,
        callbacks=[*callbacks, reports],
        strategy=chosen,
        devices=2,
        plugins=[BF16Precision(weights="masters")],
        epochs=3,
    ).fit(module, loader(4))
    part = reports.parts.get("ActivationOffload", {})
    return torch.stack(module.losses).tolist(), part.get("moved_bytes")


@pytest.mark.parametrize("others", [[], [ActivationCheckpoint(save="nothing")]], ids=["alone", "checkpoint"])
def test_two_ranks(ranks, tmp_path, others):
    moved = {}
    for strategy in ("ddp", "fsdp2"):
        right, _ = ranks(on_ranks, tmp_path, strategy, others)
        result, moved[strategy] = ranks(on_ranks, tmp_path, strategy, [ActivationOffload(min_mb=0), *others])
        assert result == right
    assert moved["fsdp2"] == moved["ddp"] > 0  # gathered parameters are parameters


class SkipsTheFirst(Net):
    def training_step(self, batch, index):
        return super().training_step(batch, index) if index else None


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None:UserWarning")
def test_a_first_batch_that_is_skipped_before_any_block_ran_is_no_first_step(tmp_path):
    module, reports = SkipsTheFirst(), Reports()
    trainer(tmp_path, callbacks=[ActivationOffload(min_mb=0), reports], epochs=1).fit(module, loader(2))
    assert reports.parts["ActivationOffload"]["blocks_run"] == 3


class Thawing(Net):
    """Trains its blocks from the second epoch on."""

    def on_train_epoch_start(self):
        self.layers.requires_grad_(self.current_epoch > 0)


def test_blocks_that_are_frozen_at_first_are_told_and_moved_later(tmp_path):
    model = Thawing()
    offload = ActivationOffload(min_mb=0)
    fitting = trainer(tmp_path, epochs=2, callbacks=[offload])
    with pytest.warns(UserWarning, match="has moved nothing so far: [0-9]+ blocks ran without needing gradients"):
        fitting.fit(model, loader())
    assert offload._unproven is None
