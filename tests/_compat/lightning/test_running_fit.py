from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ups._compat.lightning.running_fit import run_step, save_interval, step_arguments
from tests.toys import Net, loader, trainer


class Again(Callback):
    """Runs each step once more."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.arguments = [*step_arguments(trainer, batch)]
        self.interval = save_interval(trainer)
        run_step(trainer, batch)


def test_a_step_runs_outside_of_the_loop(tmp_path):
    module, again = Net(), Again()
    trainer(tmp_path, callbacks=[again], epochs=2).fit(module, loader(4))
    assert len(module.losses) == 8
    assert len({loss.item() for loss in module.losses}) == 8
    assert again.arguments == ["batch", "batch_idx"]
    assert again.interval == 0


def test_the_interval_of_saves_is_in_batches(tmp_path):
    again, save = Again(), ModelCheckpoint(tmp_path, every_n_train_steps=3)
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer(tmp_path, callbacks=[again, save], epochs=1, **options).fit(Net(), loader(4))
    assert again.interval == 6
