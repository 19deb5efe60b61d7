import pytest
from lightning.pytorch.profilers import SimpleProfiler

from lightning_ups.callbacks import AccelerationFlags
from tests.toys import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_profiler_times_each_hook_and_without_one_nothing_is_timed(tmp_path):
    for profiler in (SimpleProfiler(), None):
        run, places = trainer(tmp_path, callbacks=[AccelerationFlags()], epochs=1, profiler=profiler), []
        model = Net()
        model.on_train_start = lambda run=run, places=places: places.append("profile" in vars(run.profiler))
        run.fit(model, loader())
        assert places == [profiler is None]
        assert "profile" not in vars(run.profiler)
        if profiler is not None:
            assert profiler.recorded_durations["[LightningModule]Net.on_train_batch_end"]
