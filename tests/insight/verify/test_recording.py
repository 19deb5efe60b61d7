import pytest
import torch
from torch import nn

from lightning_ups.insight.verify.comparison import REST, band_between, departures, first_block
from lightning_ups.insight.verify.recording import Tape, Watch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def run(model, tape, *, calls=1):
    watch = Watch(model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)}, tape)
    for _ in range(calls):
        torch.manual_seed(1)
        model(torch.randn(8, 4)).square().sum().backward()
    watch.note_gradients(lambda p: p.grad)
    watch.note_loss(2.0)
    watch.close()
    model.zero_grad()
    return watch.steps[0]


def test_recorded_values_of_each_block():
    model, tape = Model(), Tape()
    step = run(model, tape)
    assert [*step.blocks] == ["layers.0", "layers.1", "layers.2", REST]
    first = step.blocks["layers.0"]
    x = first.given.view(8, 4)
    torch.testing.assert_close(first.added.view(8, 4), model.layers[0](x).detach() - x)
    assert first.gradient.numel() == 20
    assert first.norm == pytest.approx(first.gradient.norm().item())
    assert step.loss == 2.0
    assert step.norm == pytest.approx(sum(block.norm**2 for block in step.blocks.values()) ** 0.5)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_watching_changes_nothing():
    watched, plain = Model(), Model()
    Watch(watched, {"layers.1": watched.layers[1]}, Tape())
    for model in (watched, plain):
        torch.manual_seed(1)
        model(torch.randn(8, 4)).square().sum().backward()
    for p, q in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_an_error_stays_in_its_block():
    model, tape = Model(), Tape()
    right = run(model, tape)
    with torch.no_grad():
        model.layers[1].weight.mul_(3)
    found = run(model, tape)
    for name in ("layers.0", "layers.2"):
        assert torch.equal(found.blocks[name].added, right.blocks[name].added)
        assert torch.equal(found.blocks[name].gradient, right.blocks[name].gradient)
    assert found.blocks["layers.0"].passed is None  # its input is the batch
    assert torch.equal(found.blocks["layers.2"].passed, right.blocks["layers.2"].passed)
    assert not torch.equal(found.blocks["layers.1"].added, right.blocks["layers.1"].added)
    assert not torch.equal(found.blocks["layers.1"].passed, right.blocks["layers.1"].passed)
    assert not torch.equal(found.blocks["layers.2"].given, right.blocks["layers.2"].given)


def test_each_microbatch_has_its_own():
    model, tape = Model(), Tape()
    run(model, tape, calls=2)
    assert len(tape.inputs) == len(tape.gradients) == 6


def test_of_blocks_that_run_again_the_first_call_shows_where_an_error_is():
    model, tape = Model(), Tape()
    blocks = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}

    def twice():
        watch = Watch(model, blocks, tape)
        torch.manual_seed(1)
        x = torch.randn(8, 4)
        for layer in [*model.layers, *model.layers]:
            x = x + layer(x)
        x.square().sum().backward()
        watch.note_gradients(lambda p: p.grad)
        watch.note_loss(1.0)
        watch.close()
        model.zero_grad()
        return watch.steps

    right = twice()
    with torch.no_grad():
        model.layers[1].weight.mul_(3)
    found = departures(right, twice(), band_between(right, right))
    assert first_block(found, [*blocks]) == "layers.1"


def test_an_evaluation_is_not_taken_down():
    model, tape = Model(), Tape()
    Watch(model, {"layers.0": model.layers[0]}, tape)
    with torch.no_grad():
        model(torch.randn(8, 4))
    assert not tape.inputs
