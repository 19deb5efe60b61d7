import pytest
import torch
from lightning.pytorch import Callback

from lightning_ups._compat.lightning.outputs import was_skipped
from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile, OptimizerOffload
from tests.toys import Net, loader, trainer


class Asks(Callback):
    def __init__(self):
        self.answers, self.began_at = [], None

    def on_train_batch_start(self, trainer, *args):
        self.began_at = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.answers.append(was_skipped(pl_module, outputs, began_at=self.began_at))


class SkipsEverySecond(Net):
    def __init__(self, *, wrap):
        super().__init__()
        self.wrap = wrap

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index % 2 else self.wrap(loss)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss, "more": torch.ones(2)}])
def test_a_step_that_returns_nothing_was_skipped(tmp_path, wrap):
    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=1).fit(SkipsEverySecond(wrap=wrap), loader(2))
    assert asks.answers == [False, True, False, True]


class StepsFromTheSecond(Manual):
    def __init__(self, *, first=1):
        super().__init__()
        self.first = first

    def training_step(self, batch, index):
        if index >= self.first:
            super().training_step(batch, index)
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_that_optimizes_itself_has_skipped_where_it_makes_no_step(tmp_path):
    asks = Asks()
    trainer(tmp_path, callbacks=[asks], epochs=2).fit(StepsFromTheSecond(), loader(4))
    assert asks.answers == [True, False, True, False]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_it_has_stepped_before_this_fit_does_not_count(tmp_path):
    asks, model = Asks(), StepsFromTheSecond(first=0)
    fitting = trainer(tmp_path, callbacks=[asks], epochs=1)
    fitting.fit(model, loader(4))
    model.first, fitting.fit_loop.max_epochs = 1, 2
    fitting.fit(model, loader(4))
    assert fitting.global_step == 3
    assert asks.answers == [False, False, True, False]


PROVING = {
    "compile": lambda: Compile(backend="aot_eager"),
    "recompute": ActivationCheckpoint,
    "offload activations": lambda: ActivationOffload(min_mb=0),
    "offload the optimizer": lambda: OptimizerOffload(update="host"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("callback", PROVING.values(), ids=PROVING)
def test_a_resumed_module_that_skips_its_first_batch_has_not_shown_that_nothing_was_done(tmp_path, callback):
    right = StepsFromTheSecond(first=0)
    fitting = trainer(tmp_path, epochs=1)
    fitting.fit(right, loader(4))
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    steps = []
    for callbacks in ([], [callback()]):
        resumed = trainer(tmp_path, callbacks=callbacks, epochs=3)
        resumed.fit(StepsFromTheSecond(), loader(4), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
        steps.append(resumed.global_step)
    assert steps == [4, 4]


class Raw(Manual):
    """Steps the optimizer itself, of which Lightning then counts no step."""

    def __init__(self, *, skips=()):
        super().__init__()
        self.skips = skips

    def training_step(self, batch, index):
        if index in self.skips:
            return
        super().training_step(batch, index)
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.step()
        optimizer.zero_grad()


class AsksTwice(Asks):
    """Beside another one, and no longer than for some batches."""

    def on_train_batch_end(self, *args):
        if len(self.answers) < 6:
            super().on_train_batch_end(*args)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("asked", [Asks, AsksTwice])
def test_steps_that_lightning_does_not_count_are_heard_from_the_second_batch_on(tmp_path, asked):
    asks = [asked(), AsksTwice()] if asked is Asks else [asked()]
    fitting = trainer(tmp_path, callbacks=asks, epochs=3)
    fitting.fit(Raw(skips=[2]), loader(2))
    assert fitting.global_step == 0
    expected = [True, False, True, False, False, False, True, False, False, False, True, False]
    assert all(each.answers == expected[: len(each.answers)] for each in asks)
    assert bool(fitting.optimizers[0]._optimizer_step_post_hooks) == (asked is Asks)  # who no longer asks leaves none


class Plain(torch.optim.SGD):
    """Was made by hand, without what torch's own have."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)
        del self._optimizer_step_post_hooks

    def step(self, closure=None):
        pass

    step.hooked = True


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_optimizer_that_takes_no_hooks_is_not_heard(tmp_path):
    asks, model = Asks(), Raw()
    model.configure_optimizers = lambda: Plain(model.parameters())
    trainer(tmp_path, callbacks=[asks], epochs=1).fit(model, loader(4))
    assert asks.answers == [True, True]


NO_EFFECT = {
    "recompute": (lambda: ActivationCheckpoint(blocks=["unused"]), "did not call the forward of any block"),
    "save": (lambda: ActivationCheckpoint(blocks=["layers.*"], save=["aten.mm"]), "keeps nothing"),
    "offload the optimizer": (lambda: OptimizerOffload(update="host"), "keeps no state"),
}


class Unused(torch.nn.Linear):
    def forward(self, x):  # its own, which no compiled code of other tests has recomputed
        return super().forward(x)


class Stateless(Raw):
    def __init__(self):
        super().__init__()
        self.unused = Unused(8, 8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_activations_that_stay_are_told_where_lightning_counts_no_step(tmp_path):
    with pytest.warns(UserWarning, match="moved nothing in the first step"):
        trainer(tmp_path, callbacks=[ActivationOffload(min_mb=1000)], epochs=1).fit(Stateless(), loader(2))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("callback", "said"), NO_EFFECT.values(), ids=NO_EFFECT)
def test_what_has_no_effect_is_told_where_lightning_counts_no_step(tmp_path, callback, said):
    with pytest.raises(RuntimeError, match=said):
        trainer(tmp_path, callbacks=[callback()], epochs=1).fit(Stateless(), loader(2))
