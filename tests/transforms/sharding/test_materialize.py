import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fsdp.recording import recording
from lightning_ups.transforms.sharding.materialize import is_on_meta, plan_initialisation
from tests.strategies.cases import two_ranks
from tests.transforms.fsdp.test_sharding import sharded_model

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Sizes that two and three devices do not divide, a scalar, a tie and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)) for _ in range(2))
        self.layers[1][0].weight = self.layers[0][0].weight
        self.scale, self.other = nn.Parameter(torch.randn(())), None
        self.register_buffer("table", torch.randn(3))
        self.norm = nn.LayerNorm(3)
        nn.init.normal_(self.norm.weight)


def whole(model):
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for name, t in tensors.items()}


def initialised():
    torch.manual_seed(3)
    expected = whole(Odd())
    after = torch.rand(1)
    torch.manual_seed(3)
    with recording() as record, torch.device("meta"):
        model = Odd()
    plan = plan_initialisation(model, record)
    sharded_model(model)
    plan.run(model, shards_on=CPU, device=CPU, draw_on=CPU)
    got = whole(model)
    tied = model.layers[1][0].weight is model.layers[0][0].weight
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    return different, tied, is_on_meta(model), torch.equal(torch.rand(1), after)


def test_the_weights_are_those_of_a_module_built_in_place(ranks):
    assert ranks(initialised) == ([], True, False, True)


def test_on_four_devices_too(four_ranks):
    assert four_ranks(initialised) == ([], True, False, True)


@two_ranks
def test_the_first_ranks_seed_counts():
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    with recording() as record, torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    plan = plan_initialisation(model, record)
    sharded_model(model)
    plan.run(model, shards_on=CPU, device=CPU, draw_on=CPU)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4))
    assert torch.equal(model[0].weight.full_tensor(), expected[0].weight)
    if rank:  # the others continue from their own state
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(1), drawn)


class Loose(nn.Module):
    """Tensors that are neither parameters nor buffers, as PEFT keeps the tokens of a prompt and metrics their sums."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tokens, self.sums = {"default": torch.arange(3)}, [torch.tensor(2.0)]
        self.other_tokens = {"default": torch.arange(4)}
        self.noise, self.none, self.same = torch.randn(2), None, self.linear.weight.detach()


def test_tensors_that_are_no_parameters_get_their_values_too():
    torch.manual_seed(3)
    expected = Loose()
    torch.manual_seed(3)
    with recording() as record, torch.device("meta"):
        model = Loose()
    plan_initialisation(model, record).run(model, shards_on=CPU, device=CPU, draw_on=CPU)
    assert torch.equal(model.tokens["default"], torch.arange(3))
    assert torch.equal(model.other_tokens["default"], torch.arange(4))
    assert torch.equal(model.sums[0], torch.tensor(2.0))
    assert torch.equal(model.noise, expected.noise)
    assert torch.equal(model.linear.weight, expected.linear.weight)


def test_what_cannot_be_repeated_is_named():
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(ValueError, match=r"(?s)cannot be repeated for Odd.*Build the module in configure_model"):
        plan_initialisation(model, None)


def test_resets_are_enough_for_what_has_them():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    plan = plan_initialisation(model, None)
    assert len(plan) == 4
    torch.manual_seed(1)
    plan = plan_initialisation(model, None)
    plan.run(model, shards_on=CPU, device=CPU, draw_on=CPU)
    torch.manual_seed(1)
    assert torch.equal(model[0].weight, nn.Linear(3, 3).weight)
