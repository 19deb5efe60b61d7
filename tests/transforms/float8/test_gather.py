from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ups.transforms.float8.convert import convert_to_float8, float8_linears
from lightning_ups.transforms.float8.gather import Scales, gathers_in_float8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(16, 32)), nn.Sequential(nn.Linear(32, 16)))


def test_only_what_was_converted_for_it_gathers_in_float8():
    plain, ordinary, gathered = model(), model(), model()
    convert_to_float8(ordinary, recipe="tensorwise", emulate=True)
    convert_to_float8(gathered, recipe="tensorwise", emulate=True, all_gather=True)
    counts = [sum(map(gathers_in_float8, each.modules())) for each in (plain, ordinary, gathered)]
    assert counts == [0, 0, 2]


def test_state_dicts_show_plain_weights_that_are_the_memory_of_the_parameters():
    module, right = model(), model().state_dict()
    convert_to_float8(module, recipe="tensorwise", emulate=True, all_gather=True)
    state = module.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert all(torch.equal(state[name], value) for name, value in right.items())
    state["0.0.weight"].zero_()
    assert not module[0][0].weight._tensor.any()
    module.load_state_dict(right)
    assert torch.equal(module.state_dict()["0.0.weight"], right["0.0.weight"])
    assert isinstance(module.state_dict(keep_vars=True)["0.0.weight"], nn.Parameter)


def test_without_such_weights_nothing_is_computed():
    module = model()
    convert_to_float8(module, recipe="rowwise", emulate=True)
    scales = Scales(float8_linears(module).values())
    scales.compute()
    scales.refresh()
    assert len(scales) == 0


def scales_of_shards():
    module = model()
    convert_to_float8(module, recipe="tensorwise", emulate=True, all_gather=True)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    scales, seen = Scales(float8_linears(module).values()), []

    def look():
        seen.append([layer.weight._local_tensor._precomputed_scale for layer in float8_linears(module).values()])

    look()
    scales.refresh()
    look()
    with torch.no_grad():
        module[0][0].weight.mul_(4)
    look()
    with patch(
        "lightning_ups._compat.optional.packages.RequirementCache", side_effect=AssertionError
    ):  # torchao was found
        scales.refresh()
    look()
    return [[None if scale is None else scale.item() for scale in each] for each in seen]


def test_scales_follow_the_weights(ranks):
    before, first, stale, second = ranks(scales_of_shards)
    assert before == [None, None]
    largest = [layer[0].weight.abs().max().item() for layer in model()]
    assert first == pytest.approx([448 / each for each in largest])
    assert stale == first
    assert second == pytest.approx([first[0] / 4, first[1]])
