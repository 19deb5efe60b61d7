import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_ups.optim import MasteredOptimizer, MasterWeights, TorchAOOffloaded
from lightning_ups.optim.offload import torchao as offload_torchao
from lightning_ups.optim.offload.torchao import invalid_reasons
from tests.optim.offloading import Net, grouped


def test_what_it_cannot_do_is_refused_with_every_reason():
    model = Net()
    optimizer = MasteredOptimizer(AdamW(model.parameters()), MasterWeights(model, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"which have none of these limits\.$") as error:
        TorchAOOffloaded(optimizer, clips=True)
    for reason in ("on cuda or xpu", "before they are clipped", "knows no masters of them"):
        assert reason in str(error.value)
    assert "sharded" not in str(error.value)


def test_state_that_is_there_would_be_lost():
    model = Net()
    optimizer = AdamW(model.parameters())
    assert not any("state" in reason for reason in invalid_reasons(optimizer, clips=False))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert any("the state that is there" in reason for reason in invalid_reasons(optimizer, clips=False))


def reasons_of_a_rank():
    assert dist.is_initialized()
    return invalid_reasons(AdamW(Net().parameters()), clips=False)


def test_ranks_exchange_gradients_after_it_has_copied_them(ranks):
    assert any("before ranks exchange them" in reason for reason in ranks(reasons_of_a_rank))


class Standin:
    """What torchao's class has of attributes, on a machine that has no GPU; it steps in place."""

    def __init__(self, params, optimizer_class):
        self.optim_dict, self.param_d2h_map, self.d_param_groups, self.d_opt = {}, {}, [], None
        self.queue = {}  # of gradients that were sent to the host
        for group in params:
            mine = group.pop("params")
            small = [p for p in mine if p.numel() < 100]
            for p in mine:
                if p.numel() >= 100:
                    self.param_d2h_map[p] = p
                    self.optim_dict[p] = optimizer_class([{"params": [p], **group}])
            if small:
                self.d_param_groups.append({"params": small, **group})
        if self.d_param_groups:
            self.d_opt = optimizer_class(self.d_param_groups)

    def step(self):
        for optimizer in (*self.optim_dict.values(), self.d_opt):
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in (*self.optim_dict.values(), self.d_opt):
            optimizer.zero_grad()

    def state_dict(self):
        return {"offloaded": [o.state_dict() for o in self.optim_dict.values()], "on-device": self.d_opt.state_dict()}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optim_dict.values(), state_dict["offloaded"], strict=True):
            optimizer.load_state_dict(state)
        self.d_opt.load_state_dict(state_dict["on-device"])


@pytest.fixture
def standin(monkeypatch):
    import torchao.optim

    monkeypatch.setattr(torchao.optim, "CPUOffloadOptimizer", Standin)
    monkeypatch.setattr(offload_torchao, "DEVICES", ("cpu",))


def train(wrap, *, steps, saved=None):
    model = Net()
    model[2].weight.requires_grad_(False)
    optimizer = wrap(grouped(SGD, momentum=0.9)(model))
    schedule = StepLR(optimizer, 2, gamma=0.1)
    if saved:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        schedule.load_state_dict(saved[2])
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 64), 0.1 * step)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.state_dict(), optimizer.state_dict(), schedule.state_dict(), optimizer


def test_schedulers_reach_it_and_it_resumes(standin):
    right = train(lambda o: o, steps=range(6))[0]
    ours = train(lambda o: TorchAOOffloaded(o, clips=False), steps=range(6))
    assert all(torch.equal(ours[0][name], value) for name, value in right.items())
    assert [group["lr"] for group in ours[3].param_groups] == pytest.approx([1e-5, 3e-6])
    saved = train(lambda o: TorchAOOffloaded(o, clips=False), steps=range(3))
    again = train(lambda o: TorchAOOffloaded(o, clips=False), steps=range(3, 6), saved=saved)
    assert all(torch.equal(again[0][name], value) for name, value in right.items())
    assert ours[3].host_bytes > 0
    assert ours[3].undo() is ours[3].stepper
    assert not ours[3].state


def test_a_step_that_is_left_out_leaves_no_gradient_in_the_queue(standin):
    ours = TorchAOOffloaded(AdamW(nn.Linear(64, 64).parameters()), clips=False)
    ours._offloaded.queue["a weight"] = "sent"
    ours.zero_grad()
    assert not ours._offloaded.queue


def test_state_of_another_kind_is_refused(standin):
    ours = TorchAOOffloaded(AdamW(nn.Linear(64, 64).parameters()), clips=False)
    with pytest.raises(ValueError, match=r"or the checkpoint of a run with update='torchao'\.$"):
        ours.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.gpu(count=1)
def test_torchaos_own_on_a_gpu():
    model, other = Net().cuda(), Net().cuda()
    ours, plain = TorchAOOffloaded(AdamW(model.parameters()), clips=False), AdamW(other.parameters())
    for _ in range(3):
        for one, optimizer in ((model, ours), (other, plain)):
            optimizer.zero_grad()
            one(torch.ones(2, 64, device="cuda")).square().mean().backward()
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_groups_that_it_would_never_step_are_refused(standin):
    model = Net()
    ours = TorchAOOffloaded(SGD(model[0].parameters(), lr=0.1), clips=False)
    added = {"params": [*model[2].parameters()], "lr": 0.1}
    with pytest.raises(ValueError, match=r"or give the optimizer all parameters at first\.$"):
        ours.add_param_group(added)
    with pytest.raises(ValueError, match=r"or give the optimizer all parameters at first\.$"):
        ours.param_groups = [*ours.param_groups, added]
    assert len(ours.param_groups) == 1
