import warnings

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.sharding import StepState
from tests.strategies.cases import Case, data
from tests.toys import trainer


class Recording(Case):
    """Notes the state of the optimizer step in each training step, and after it."""

    def __init__(self, *, manual=False):
        super().__init__()
        self.automatic_optimization, self.seen, self.states = not manual, [], []

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self._note()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self._note()
        return loss

    def _note(self):
        step = self.trainer.strategy._step
        self.states.append(step)
        self.seen.append((step.number, step.name, step.is_manual, step.accumulates, step.has_accumulated))


def recorded(tmp_path, manual, accumulate):
    warnings.simplefilter("ignore")
    module = Recording(manual=manual)
    lightning = trainer(
        tmp_path, strategy=FSDP2Strategy(), devices=dist.get_world_size(), epochs=1, accumulate_grad_batches=accumulate
    )
    lightning.fit(module, DataLoader(data(), batch_size=2))
    state = lightning.strategy._step
    return module.seen, len({id(state) for state in module.states}), None if state is None else state.is_manual


def test_a_step_has_one_state_from_its_first_microbatch_to_its_end(ranks, tmp_path):
    seen, states, left = ranks(recorded, tmp_path, False, 2)
    first, second = (True, False), (False, True)  # whether it accumulates, and has accumulated
    assert seen[:4] == [(n, "training_step", False, *each) for n in (0, 1) for each in (first, second)]
    assert states == len(seen) // 2
    assert left is None


def test_a_manual_step_begins_the_next_one_when_an_optimizer_has_stepped(ranks, tmp_path):
    seen, states, left = ranks(recorded, tmp_path, True, 1)
    assert [(number, manual) for number, _, manual, _, _ in seen[:3]] == [(0, True), (1, True), (1, True)]
    assert states == len(seen) // 2 + 1
    assert left is False


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_only_a_training_step_trains(name):
    assert StepState(name=name).is_training is (name == "training_step")
