import gc

import pytest
import torch
from torch import nn

from lightning_ups.optim.offload.memory import Memory
from lightning_ups.transforms import activation_offload
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.optim.offloading import LateMemory

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
CPU = torch.device("cpu")


class Block(nn.Module):
    """Has what is hard: one input for three products, parts with gaps, a mask, dropout, a weight that is reshaped."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.extra = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = self.qkv(normed).split(x.shape[-1], dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + normed @ self.extra.t()
        return x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.1))


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gradients(model, *, steps=2, autocast=False):
    """Return the gradients after each step, as bits."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 16, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        found += [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found


def assert_equal(one, other):
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def offloaded(model, memory=None, min_bytes=0, blocks=None):
    return offload_activations(
        model.blocks if blocks is None else blocks, memory=memory or LateMemory(), min_bytes=min_bytes, device=CPU
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("min_bytes", [0, 5_000])
def test_gradients_are_bitwise_equal(autocast, min_bytes):
    right = gradients(Model(), autocast=autocast)
    model = Model()
    with offloaded(model, min_bytes=min_bytes) as done:
        assert_equal(gradients(model, autocast=autocast), right)
    assert len(done.ran) == 4
    assert done.moved_bytes > 0
    assert done.late == 0
    assert_equal(gradients(model, autocast=autocast), right)


def saved_bytes(model, x):
    """Return what autograd holds on the device after a forward: each storage once, parameters not."""
    held, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    return sum(held.values()), loss


def test_what_blocks_save_is_moved_once_and_nothing_else():
    model, x = Model(), torch.randn(4, 16, 32, requires_grad=True)
    torch.manual_seed(0)
    saved, _ = saved_bytes(model, x)
    memory = LateMemory()
    with offloaded(model, memory) as done:
        torch.manual_seed(0)
        model(x).sum().backward()
    assert 0.9 * saved <= done.moved_bytes <= saved
    assert memory.on_host == done.moved_bytes


def test_parameters_views_and_casts_of_them_are_left_alone():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("table", torch.randn(64, 64))

        def forward(self, x):
            return (x @ self.weight.t()) @ self.table + nn.functional.linear(x, self.weight)

    block, x = Weights(), torch.randn(2, 64, requires_grad=True)
    for autocast in (False, True):
        with (
            offload_activations([block], memory=LateMemory(), min_bytes=1024, device=CPU) as done,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            block(x).float().sum().backward()
        # Each of the matrices would be 16384 bytes, or 8192 cast; a cast of a buffer is no parameter.
        assert done.moved_bytes == (0 if not autocast else 8192)


class Neighbours(nn.Module):
    """Sums what the neighbours in a graph have, by a sparse matrix that is a buffer or is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("matrix", torch.eye(4).to_sparse_coo())

    def forward(self, x, matrix):
        return (self.matrix + matrix) @ self.linear(x).tanh()


def test_sparse_tensors_stay_where_they_are():
    block, x, matrix = Neighbours(), torch.ones(4, 8, requires_grad=True), torch.ones(4, 4).to_sparse_coo()

    def found():
        return torch.autograd.grad(block(x, matrix).sum(), [x, *block.parameters()])

    right = found()
    with offload_activations([block], memory=LateMemory(), min_bytes=0, device=CPU) as done:
        assert_equal(found(), right)
    assert done.moved_bytes > 0
    assert done.left_bytes > 0


@pytest.mark.parametrize("through", [torch.func.jacrev, torch.func.jacfwd])
def test_torch_func_that_differentiates_a_block_is_refused_and_beside_it_is_not(through):
    block, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(3, 2)
    with offload_activations([block], memory=LateMemory(), min_bytes=0, device=CPU) as done:
        with pytest.raises(RuntimeError, match=r"torch\.func .* differentiates Sequential.*create_graph=True"):
            through(block)(x)
        torch.vmap(block)(x).sum().backward()
        through(nn.Linear(2, 2))(x)
    assert done.moved_bytes > 0


class Slopes(nn.Sequential):
    def forward(self, x):
        return torch.func.jacrev(super().forward)(x)


def test_a_block_that_differentiates_by_torch_func_says_what_to_do():
    block = Slopes(nn.Linear(2, 2), nn.Tanh())
    with offload_activations([block], memory=LateMemory(), min_bytes=0, device=CPU):
        with pytest.raises(RuntimeError, match=r"Slopes uses torch\.func .* ActivationOffload\(blocks="):
            block(torch.ones(2))
        with torch.no_grad():
            block(torch.ones(2))


def test_conjugate_and_negative_views_stay_what_they_are():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x):
            turned = (x * self.weight).conj()
            return turned * x + turned.imag * (x.conj() @ self.weight).imag

    def found(offloads):
        torch.manual_seed(0)
        block = Complex()
        x = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
        with offload_activations([block] if offloads else [], memory=LateMemory(), min_bytes=0, device=CPU) as done:
            block(2 * x).abs().sum().backward()
        return [x.grad, block.weight.grad], done

    (right, _), (ours, done) = found(offloads=False), found(offloads=True)
    assert_equal(ours, right)
    assert done.moved_bytes > 0
    assert done.left_bytes > 0


class Sigmoids(nn.Module):
    """Writes in place to what its blocks have saved, if it is told so."""

    def __init__(self, writes):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(3))
        self.writes = writes

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x.add_(1) if i == self.writes else x + 1
        return x


@pytest.mark.parametrize("memory", [LateMemory, lambda: Memory(CPU)])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_what_is_written_to_after_it_was_saved_is_an_error_as_without_it(writes, memory):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Sigmoids(writes), steps=1)
    model = Sigmoids(writes)
    with (
        offloaded(model, memory()),
        pytest.raises(RuntimeError, match=r"^A tensor of shape \[4, 16, 32\] and dtype float32 .* on its output\.$"),
    ):
        gradients(model, steps=1)
    right, model = gradients(Sigmoids(None)), Sigmoids(None)
    with offloaded(model, memory()):
        assert_equal(gradients(model), right)


def test_what_is_saved_before_and_after_a_write_is_saved_twice():
    class Twice(nn.Module):
        def forward(self, x):
            wide = x * 2
            unused = wide.sigmoid() * wide  # saves it, and is no part of the loss
            wide.mul_(3)
            return wide * wide, unused

    def found(offloads):
        x = torch.ones(4, 8, requires_grad=True)
        block = Twice()
        with offload_activations([block] if offloads else [], memory=Memory(CPU), min_bytes=0, device=CPU):
            block(x)[0].sum().backward()
        return x.grad

    assert torch.equal(found(offloads=True), found(offloads=False))


class Noisy(nn.Sequential):
    """Saves a tensor that its kernel fills afterwards, where it is an RReLU that trains."""

    def __init__(self, activation):
        super().__init__(*(nn.Sequential(nn.Linear(32, 32), activation) for _ in range(3)))


@pytest.mark.parametrize("pieces", [64, 2**20])
def test_what_is_filled_after_it_was_saved_is_an_error(monkeypatch, pieces):
    monkeypatch.setattr(activation_offload, "COMPARED_BYTES", pieces)
    x = torch.randn(16, 32)
    for block in (0, 2):  # followed by another, and last
        model = Noisy(nn.GELU())
        model[block][1] = nn.RReLU()
        with (
            offload_activations(model, memory=Memory(CPU), min_bytes=0, device=CPU),
            pytest.raises(
                RuntimeError, match=r"A tensor of 2048 bytes was written to after a block had saved it.*RReLU"
            ),
        ):
            model(x).sum().backward()
    model = Noisy(nn.RReLU()).eval()
    with offload_activations(model, memory=Memory(CPU), min_bytes=0, device=CPU):
        model(x).sum().backward()


def test_only_what_a_block_saves_first_is_compared(monkeypatch):
    compared = []
    equal = torch.equal
    model, x = Noisy(nn.GELU()), torch.randn(16, 32)
    model.requires_grad_(False)
    with offload_activations(model, memory=Memory(CPU), min_bytes=0, device=CPU) as done:
        monkeypatch.setattr(torch, "equal", lambda *pair: compared.append(pair[0].nbytes) or equal(*pair))
        model(x)
        assert not compared
        assert len(done.ran) == 3
        model.requires_grad_(True)
        for _ in range(3):
            model(x).sum().backward()
    assert len(compared) == done.moved_bytes // 2048 // 3 > 3


def test_memory_of_the_host_is_used_again():
    model, memory = Model(), LateMemory()
    with offloaded(model, memory):
        gradients(model, steps=1)
        once = memory.on_host
        gradients(model, steps=3)
    assert memory.on_host == once


def test_little_is_on_the_device_at_a_time():
    model, memory = Model(blocks=8), LateMemory()
    with offloaded(model, memory) as done:
        gradients(model, steps=2)
    each = done.moved_bytes / 2 / 8
    gc.collect()
    assert memory.on_device == 0
    assert memory.peak <= 2.5 * each


def test_the_block_before_is_brought_back_while_a_block_runs_backward():
    model, memory, order = Model(), LateMemory(), []
    load = memory.load

    def recorded(copies, *, after=()):
        order.append("load")
        return load(copies, after=after)

    memory.load = recorded
    for index, block in enumerate(model.blocks):
        block.register_full_backward_hook(lambda *_, i=index: order.append(i))
    with offloaded(model, memory) as done:
        gradients(model, steps=1)
    assert done.late == 0
    first = order.index(3)  # the last block, whose tensors are on the device still
    assert "load" in order[:first]  # those of the block before it have been asked for
    assert "load" not in order[order.index(1) :]  # and those of the first when the second begins


def test_with_recomputation_the_inputs_are_moved():
    right = gradients(Model())
    model = Model()
    with recompute(model.blocks, save="nothing"), offloaded(model) as done:
        assert_equal(gradients(model), right)
    inputs = 4 * 16 * 32 * 4
    assert done.moved_bytes == 2 * 4 * inputs


def test_compiled_code_saves_on_the_host():
    torch.compiler.reset()
    model, other = Model(), Model()
    names = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    others = {f"blocks.{i}": block for i, block in enumerate(other.blocks)}
    with compiled(others, Compiler(backend="aot_eager")):
        right = gradients(other)
    with compiled(names, Compiler(backend="aot_eager")) as graphs, offloaded(model) as done:
        assert_equal(gradients(model), right)
    assert done.moved_bytes > 0
    assert graphs is not None


def test_backward_twice_and_parts_that_are_never_run():
    model, right = Model(), Model()
    x = torch.randn(2, 16, 32, requires_grad=True)

    def twice(model):
        torch.manual_seed(3)
        model(x)  # a forward without a backward
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()]

    expected = twice(right)
    with offloaded(model):
        assert_equal(twice(model), expected)


def test_blocks_within_blocks_and_every_second_block():
    right = gradients(Model())
    for choose in (lambda m: m.blocks[::2], lambda m: [m, *m.blocks], lambda m: [m.blocks[1].up, m.blocks[1]]):
        model = Model()
        with offloaded(model, blocks=choose(model)) as done:
            assert_equal(gradients(model), right)
        assert done.moved_bytes > 0


def test_without_gradients_nothing_happens():
    model = Model()
    with offloaded(model) as done, torch.no_grad():
        model(torch.randn(2, 16, 32))
    assert not done.ran
    assert done.moved_bytes == 0


@pytest.mark.gpu(count=1)
def test_on_a_gpu():
    device = torch.device("cuda", 0)
    model, right = Model().to(device).eval(), Model().to(device).eval()
    x = torch.randn(64, 512, 32, device=device)
    torch.manual_seed(1)  # of dropout
    right(x).square().mean().backward()
    torch.manual_seed(1)
    with offload_activations(model.blocks, device=device) as done:
        model(x).square().mean().backward()
    assert done.moved_bytes > 2**22
    for one, other in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
