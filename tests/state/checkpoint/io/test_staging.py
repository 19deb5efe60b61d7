import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from lightning_ups.state.checkpoint.io import staging
from lightning_ups.state.checkpoint.io.staging import HostCopies, LocalShard, plain


def test_later_changes_do_not_reach_the_copy():
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "nested": [{"b": weight[0]}, 3, "text"], "pair": (weight[1], 1)}
    copy = HostCopies().copy(state)
    weight.zero_()
    assert copy["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copy["nested"][0]["b"].tolist() == [0, 1, 2]
    assert copy["nested"][1:] == [3, "text"]
    assert str(copy["pair"]) == str((torch.tensor([3.0, 4.0, 5.0]), 1))


def test_every_type_and_shape_comes_back():
    state = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 3).T,
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    copy = HostCopies().copy(state)
    assert {name: value.dtype for name, value in copy.items()} == {name: value.dtype for name, value in state.items()}
    assert all(torch.equal(copy[name], state[name]) for name in state)


def test_the_memory_is_used_again_and_tied_weights_are_copied_once():
    copies, weight = HostCopies(), torch.randn(100)
    first = copies.copy({"a": weight, "tied": weight})
    assert first["a"].data_ptr() == first["tied"].data_ptr()
    again = copies.copy({"a": weight + 1, "b": weight})
    assert again["a"].data_ptr() != again["b"].data_ptr()
    assert copies.copy({"a": weight})["a"].data_ptr() == again["a"].data_ptr()


class Wrapped(torch.Tensor):
    """A tensor that holds another and has no memory of its own, as float8 weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrap = lambda value: value.inner if isinstance(value, Wrapped) else value  # noqa: E731
        return function(*map(unwrap, args), **(kwargs or {}))


def test_two_wrapped_tensors_of_one_shape_are_two():
    state = {"a": Wrapped(torch.ones(3)), "b": Wrapped(torch.zeros(3))}
    for copy in (HostCopies().copy(state), plain(state)):
        assert type(copy["a"]) is torch.Tensor
        assert copy["a"].tolist() == [1, 1, 1]
        assert copy["b"].tolist() == [0, 0, 0]


def test_plain_tensors_stay_where_they_are():
    weight = torch.ones(3)
    assert plain({"a": weight})["a"] is weight


def sharded():
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 3), float(mesh.get_local_rank()))
    weight = DTensor.from_local(local, mesh, [Shard(0)])
    copy = HostCopies().copy({"w": weight})["w"]
    local.fill_(9)
    items = copy.__create_write_items__("w", copy)
    assert isinstance(copy, LocalShard)
    return copy.local.tolist(), list(items[0].index.offset)


def test_a_sharded_tensor_keeps_its_place(ranks):
    assert ranks(sharded) == ([[0, 0, 0], [0, 0, 0]], [0, 0])


def test_host_memory_is_pinned_once(monkeypatch):
    asked, stock = [], staging.pinned
    monkeypatch.setattr(staging, "pinned", lambda nbytes: asked.append(nbytes) or stock(nbytes))
    copies, state = HostCopies(), {f"w{n}": torch.randn(1000) for n in range(5)}
    for _ in range(3):
        copies.copy(state)
    copies.copy({"w0": state["w0"]})
    assert asked == [5 * 4096], "one piece for all tensors, kept for the next save"
    copies.close()


@pytest.mark.gpu(count=1)
def test_copies_from_a_gpu_land_in_pinned_memory():
    copies, state = HostCopies(), {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.arange(9, device="cuda")}
    first = copies.copy(state)
    assert copies._memory.is_pinned()
    assert all(torch.equal(first[name], state[name].cpu()) for name in state)
    assert copies.copy(state)["a"].data_ptr() == first["a"].data_ptr()
    copies.close()
