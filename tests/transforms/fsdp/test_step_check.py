import warnings
from contextlib import suppress

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.fsdp import StepCheck
from tests.strategies.cases import Case, data
from tests.toys import trainer


class Noting(StepCheck):
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def _note(self, moment):
        self.calls.append(f"{self.name} {moment}")

    def begin(self, step, undo):
        self._note(f"begin {step.name}")
        undo.callback(self._note, "undo")

    def end(self, step):
        self._note("end")

    def before_free(self):
        self._note("before_free")

    def before_backward(self, step):
        self._note("before_backward")

    def after_reduction(self):
        self._note("after_reduction")


class Failing(Case):
    def training_step(self, batch, index):
        if index == 1:
            raise KeyError(index)
        return super().training_step(batch, index)


def noted(tmp_path):
    warnings.simplefilter("ignore")
    calls, module = [], Failing()
    lightning = trainer(tmp_path, strategy=FSDP2Strategy(), devices=dist.get_world_size(), epochs=1)
    module.on_train_start = lambda: lightning.strategy._checks.extend([Noting("a", calls), Noting("b", calls)])
    with suppress(KeyError):
        lightning.fit(module, DataLoader(data(), batch_size=4))
    return calls


def test_a_strategy_calls_its_checks_at_these_moments(ranks, tmp_path):
    calls = ranks(noted, tmp_path)
    failed = calls.index("a begin training_step", 1)
    assert calls[:failed] == [
        *("a begin training_step", "b begin training_step", "b undo", "a undo", "b end", "a end"),
        *("a before_free", "b before_free", "a before_backward", "b before_backward"),
        *("a after_reduction", "b after_reduction"),
    ]
    assert calls[failed:] == ["a begin training_step", "b begin training_step", "b undo", "a undo"]
