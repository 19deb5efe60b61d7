"""Modules of others train as before, with everything on."""

from functools import cache

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.transforms.blocks import find_blocks
from tests.foreign import BLOCKS, FOREIGN
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

STEPS = 4


class Report(Callback):
    """Keeps what took effect."""

    def on_train_end(self, trainer, pl_module):
        context = applied(trainer.strategy)
        self.parts = context.report.parts if context else {}


def fit(name, tmp_path, *callbacks):
    module, batch = FOREIGN[name]()
    report = Report()
    torch.manual_seed(1)
    trainer(tmp_path, callbacks=[*callbacks, report], epochs=1).fit(
        module, DataLoader([batch] * STEPS, batch_size=None)
    )
    return module, report.parts


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the module after a training without anything of ours."""
    return cache(lambda name: fit(name, tmp_path_factory.mktemp("plain"))[0])


@pytest.mark.parametrize("name", FOREIGN)
def test_blocks_are_the_expected_ones(name):
    module, _ = FOREIGN[name]()
    module.configure_model()
    assert [*find_blocks(module)] == BLOCKS[name]


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("name", FOREIGN)
def test_recomputed_training_is_bitwise_the_same(name, save, tmp_path, plain):
    plain = plain(name)
    recomputed, parts = fit(name, tmp_path, ActivationCheckpoint(save=save))
    assert len(plain.losses) == STEPS
    assert plain.losses[0] != plain.losses[-1]
    assert [a.item() for a in recomputed.losses] == [b.item() for b in plain.losses]
    for key, value in plain.state_dict().items():
        assert torch.equal(recomputed.state_dict()[key], value), key
    part = parts["ActivationCheckpoint"]
    assert part["blocks"] == BLOCKS[name]
    assert 0 < part["bytes_kept"] < part["bytes_without"]


# Dynamo compiles no recurrent layer and not what holds one: the rest is to be named.
COMPILED = {"lstm": ["net.embedding", "net.head"]}


@pytest.mark.parametrize("name", FOREIGN)
def test_compiled_and_recomputed_training_is_the_same(name, tmp_path, plain):
    plain = plain(name)
    checkpoint, compile_ = ActivationCheckpoint(save="nothing"), Compile(backend="aot_eager", blocks=COMPILED.get(name))
    changed, parts = fit(name, tmp_path, compile_, checkpoint)
    torch.testing.assert_close(changed.losses, plain.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(changed.named_buffers()), dict(plain.named_buffers()), rtol=1e-5, atol=1e-6)
    assert parts["ActivationCheckpoint"]["blocks_run"] == len(BLOCKS[name])
    assert [*changed.state_dict()] == [*plain.state_dict()]
    assert not any("forward" in vars(m) for m in changed.modules())


def test_a_recurrent_net_is_not_compiled_and_says_so(tmp_path, plain):
    plain = plain("lstm")
    compile_ = Compile(backend="aot_eager", on_failure="raise")
    with pytest.raises(RuntimeError, match=r"Recurrent\) ran and has no graph.*Name other blocks"):
        fit("lstm", tmp_path, compile_, ActivationCheckpoint(save="nothing"))
    with pytest.warns(UserWarning, match=r"Recurrent\) runs uncompiled.*LSTM"):
        changed, _ = fit("lstm", tmp_path, Compile(backend="aot_eager"), ActivationCheckpoint(save="nothing"))
    assert changed.losses == plain.losses
