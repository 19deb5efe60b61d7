import pytest

from lightning_ups._compat.lightning.after_closure import after_closure
from tests.toys import Net, loader, trainer


class Tells(Net):
    def __init__(self):
        super().__init__()
        self.order = []

    def on_before_optimizer_step(self, optimizer):
        self.order.append("hook")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.order.append("clip")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        stock = optimizer.step

        def step(closure):
            closure()
            self.order.append("step")
            stock()

        optimizer.step = step
        return optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_comes_after_all_hooks_and_before_the_step_with_the_gradients_there(tmp_path):
    model, run, given = Tells(), trainer(tmp_path, epochs=1), []

    def note(optimizer):
        model.order.append("here")
        given.append(all(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    with after_closure(run.precision_plugin, note):
        run.fit(model, loader())
    assert model.order == ["hook", "clip", "here", "step"]
    assert given == [True]
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert given == [True]
    assert "_after_closure" not in vars(run.precision_plugin)
