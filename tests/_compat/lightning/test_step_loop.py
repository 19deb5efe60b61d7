import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_ups._compat.lightning.step_loop import Logged, StepLoop
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_parts_of_a_step_train_and_count_as_the_whole(tmp_path):
    found = []
    for in_parts in (False, True):
        model, run = Net(), trainer(tmp_path, epochs=3, accumulate_grad_batches=2, max_steps=4)
        loop = StepLoop(run)

        def train(stock, optimizer, batch_idx, kwargs, loop=loop):
            _, is_first, steps = loop.phase(batch_idx)
            outputs = []

            def closure():
                with loop.uncounted():
                    outputs.append(loop.closure(optimizer, batch_idx, kwargs))
                loop.count(is_first=is_first, steps=False)
                return outputs[0]["loss"]

            if steps:
                loop.optimizer_step(batch_idx, closure)
            else:
                closure()
            return outputs[0]

        if in_parts:
            with loop.replaced(train):
                run.fit(model, loader(2))
        else:
            run.fit(model, loader(2))
        found.append((model.state_dict(), run.fit_loop.state_dict()))
    (weights, progress), (others, other) = found
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    assert progress == other


class Logs(LightningModule):
    def __init__(self):
        super().__init__()
        self._current_fx_name = "training_step"


def test_what_is_recorded_is_not_logged_and_numbers_are_refused():
    module = Logs()
    logged = Logged(module)
    with logged.recording():
        module.log("x", torch.ones(()))
        module.log_dict({"y": torch.zeros(())})
        with pytest.raises(RuntimeError, match=r"self.log\('n'\) gets a float"):
            module.log("n", 1.0)
    assert logged.values == [1, 0]
    assert "log" not in vars(module)
