"""One optimizer step."""

import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.sharding.optimizer_step import explaining_shards, kinds_of, one_kind_at_a_time
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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return self.scale * self.b(self.a(x))


def trained(how, sharded, as_on_a_gpu=False):
    if as_on_a_gpu:  # there an optimizer takes lists by default
        devices = "_get_foreach_kernels_supported_devices"
        with mock.patch.object(sys.modules["torch.optim.optimizer"], devices, return_value=["cpu"]):
            return trained(how, sharded)
    model = Model()
    if sharded:
        fully_shard(model.a, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("one",)))
        fully_shard(model.b, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "three")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    x, own = torch.ones(2, 4), vars(optimizer).get("step")

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with one_kind_at_a_time(optimizer):
        for _ in range(3):
            loss = optimizer.step(closure)
            scheduler.step()
    weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return loss.item(), weights, len(kinds_of(optimizer)), groups, vars(optimizer).get("step") is own


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {}], ids=repr)
def test_two_meshes_and_a_whole_vector_by_one_optimizer(ranks, how, as_on_a_gpu):
    loss, weights, kinds, groups, restored = ranks(trained, how, True, as_on_a_gpu)
    right, expected, one, _, _ = trained(how, False)
    assert loss == pytest.approx(right, rel=1e-5)
    torch.testing.assert_close(weights, expected)
    assert (kinds, one) == (3, 1)
    assert groups == [5]
    assert restored


def test_one_kind_needs_nothing():
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1, foreach=True)
    step = optimizer.step
    with one_kind_at_a_time(optimizer):
        assert optimizer.step == step


SAID = "aten.view.default got mixed torch.Tensor and DTensor"


class Failing(torch.optim.Optimizer):
    def __init__(self, error):
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.error = error

    def step(self, closure=None):
        if closure is not None:
            closure()
        raise self.error


def test_an_optimizer_that_cannot_is_named_with_a_cure():
    optimizer = Failing(RuntimeError(f"{SAID}.\nand more"))
    said = r"Failing cannot step sharded parameters: .*DTensor\. .*AdamW"
    with pytest.raises(RuntimeError, match=said), explaining_shards(optimizer):
        optimizer.step()


class Dispatched(Failing):
    """Fails in a function of another module."""

    def __init__(self, error, module):
        super().__init__(error)
        self.module = {"__name__": module, "error": error}
        exec("def fail():\n    raise error", self.module)

    def step(self, closure=None):
        self.module["fail"]()


def test_what_torch_takes_for_granted_of_shards_without_a_word():
    optimizer = Dispatched(AssertionError(), "torch.distributed.tensor._dispatch")
    said = r"Dispatched cannot step sharded parameters: DTensor does not support it\. .*AdamW"
    with pytest.raises(RuntimeError, match=said), explaining_shards(optimizer):
        optimizer.step()


@pytest.mark.parametrize("error", [AssertionError("of its own"), RuntimeError("no memory")])
def test_other_errors_of_an_optimizer_stay_as_they_are(error):
    optimizer = Failing(error)
    with pytest.raises(type(error)) as seen, explaining_shards(optimizer):
        optimizer.step()
    assert seen.value is error


def test_an_error_of_the_closure_is_not_the_optimizers():
    error = RuntimeError(SAID)

    def closure():
        raise error

    optimizer = Failing(RuntimeError("never"))
    with pytest.raises(RuntimeError) as seen, explaining_shards(optimizer):
        optimizer.step(closure)
    assert seen.value is error


def test_an_error_outside_a_step_is_not_the_optimizers():
    error = RuntimeError(SAID)
    with pytest.raises(RuntimeError) as seen, explaining_shards(Failing(error)):
        raise error
    assert seen.value is error
