import gc
import weakref

from lightning.pytorch import Callback

from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.order import applied
from tests.toys import Net, loader, trainer


class Watched(Callback):
    """Looks at the state of the run, in training and within a fit inside it."""

    def __init__(self, *, inner=None):
        self.inner, self.state = inner, None

    def on_train_batch_end(self, trainer, *_):
        self.state = weakref.ref(applied(trainer.strategy).state)
        assert self.state().watches_gradients
        if self.inner is not None:
            self.inner()
            assert self.state() is applied(trainer.strategy).state


def fit(tmp_path, watched):
    trainer(tmp_path, callbacks=[ActivationCheckpoint(), watched], epochs=1).fit(Net(), loader())
    gc.collect()
    return watched.state


def test_a_run_has_a_state_of_its_own_which_ends_with_it(tmp_path):
    inner = Watched()
    outer = fit(tmp_path, Watched(inner=lambda: fit(tmp_path, inner)))
    assert inner.state is not None
    assert (outer(), inner.state()) == (None, None)
