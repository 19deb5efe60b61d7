from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_ups.insight.dry_run.stand_ins import StandInOptimizer, StandInTrainer, replace_methods
from tests.toys import Net


def test_attributes_of_a_trainer_are_copied_and_written_to_the_stand_in(tmp_path):
    real = SimpleNamespace(loggers=[CSVLogger(tmp_path)], rows=[1], should_stop=False)
    trainer = StandInTrainer(real, lambda value, name: [*value], world_size=2)
    trainer.rows.append(2)
    trainer.should_stop = True
    trainer.logger.log_metrics({"a": 1.0})
    trainer.logger.experiment.metrics["a"] = 2.0
    assert (real.rows, real.should_stop, trainer.world_size) == ([1], False, 2)
    assert trainer.logger.log_dir == real.loggers[0].log_dir
    assert not real.loggers[0].experiment.metrics


def test_an_optimizer_calls_its_closure_and_does_nothing_else():
    optimizer = StandInOptimizer()
    assert optimizer.step(lambda: 3) == 3
    assert optimizer.zero_grad() is optimizer.load_state_dict({}) is None
    with optimizer.toggle_model(sync_grad=True):
        assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("schedulers", [0, 1, 2])
def test_methods_of_the_module_return_one_or_all(schedulers):
    module, optimizers, seen = Net(), [StandInOptimizer()], []
    replace_methods(module, optimizers=optimizers, schedulers=schedulers, backward=seen.append)
    assert module.log("a", 1) is None
    assert module.optimizers() is optimizers[0]
    found = module.lr_schedulers()
    assert (found is None) if not schedulers else (len(found) == 2 if schedulers == 2 else found.step() is None)
    module.manual_backward(1)
    assert seen == [1]
