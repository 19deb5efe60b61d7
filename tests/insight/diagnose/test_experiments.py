import torch
from lightning.pytorch import Callback

from lightning_ups.insight.diagnose import experiments
from lightning_ups.insight.diagnose.experiments import Bench, batch_size
from tests.toys import Net, loader, trainer


class Runs(Callback):
    def __init__(self, **runs):
        self.runs, self.facts = runs, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        bench = Bench(trainer, batch, seconds=0.05)
        self.facts = {name: run(bench) for name, run in self.runs.items()}


def facts(tmp_path, *, module=None, **runs):
    watch = Runs(**runs)
    trainer(tmp_path, callbacks=[watch], epochs=1, gradient_clip_val=1.0).fit(module or Net(), loader(8))
    return watch.facts


def test_the_parts_of_a_step(tmp_path):
    found = facts(tmp_path, parts=experiments.parts)["parts"]
    assert 0 < found["forward_s"] < found["backward_s"] < 2 * found["full_s"]
    assert found["batch_size"] == 8
    assert found["device_rate"] == 8 / found["full_s"]


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.sizes = set()

    def training_step(self, batch, index):
        self.sizes.add(len(batch))
        return super().training_step(batch, index)


def test_half_and_twice_the_batch(tmp_path):
    module = Counting()
    found = facts(tmp_path, module=module, batches=experiments.batches)["batches"]
    assert module.sizes == {4, 8, 16}
    assert found["rate_twice"] > found["rate_half"]  # so small a module has hardly any cost but a fixed one


def test_the_optimizer_is_compared_with_a_fused_one(tmp_path):
    found = facts(tmp_path, optimizer=experiments.optimizer)["optimizer"]
    assert found["optimizer_class"] == "AdamW"
    assert found["is_torch_optimizer"]
    assert not found["is_fused"]
    assert found["reference_optimizer_s"] > 0


def test_the_heaviest_operators_are_placed_under_the_roof(tmp_path):
    operators = facts(tmp_path, roofline=experiments.roofline)["roofline"]["operators"]
    assert 0 < len(operators) <= 5
    assert all(0 < each["share"] <= 1 and each["name"].startswith("aten::") for each in operators)


def test_what_needs_several_devices_or_a_gpu_is_left_out(tmp_path):
    assert facts(tmp_path, exchange=experiments.exchange, tf32=experiments.tf32) == {"exchange": {}, "tf32": {}}


def test_the_size_of_a_batch_is_that_of_most_tensors():
    batch = {"x": torch.ones(6, 2), "y": torch.ones(6), "scale": torch.ones(3), "name": "a", "one": torch.tensor(1)}
    assert batch_size(batch) == 6
    assert batch_size(["a"]) is None
