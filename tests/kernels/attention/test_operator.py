import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups._compat.torch.tensors.ops import costly_ops
from lightning_ups.kernels.attention import Documents, operator
from lightning_ups.kernels.attention.masks import dense_mask
from lightning_ups.kernels.attention.operator import attended_pairs, attention_forward
from tests.kernels.attention.cases import BAND, CASES, Case, expected, gradients, worst

FORWARD = torch.ops.lightning_ups.attention_forward.default


def by_operator(q, k, v, *, causal, window=None, documents=None, softcap=None, scale=None):
    cu_seqlens = None if documents is None else documents.cu_seqlens
    max_seqlen = q.shape[1] if documents is None else documents.max_seqlen
    scale = scale or q.shape[-1] ** -0.5
    return attention_forward(q, k, v, cu_seqlens, max_seqlen, causal, window or 0, softcap or 0.0, scale, "eager")[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_gradients_are_the_references(case):
    tensors, options = case.tensors(), case.options()
    assert worst(gradients(by_operator, tensors, options), expected(tensors, options)) < BAND


@pytest.mark.parametrize("case", [CASES[0], CASES[15]], ids=lambda case: case.name)
def test_torchs_own_checks_of_an_operator(case):
    q, k, v = (tensor.requires_grad_() for tensor in case.tensors())
    documents = case.options()["documents"]
    cu_seqlens = None if documents is None else documents.cu_seqlens
    request = (cu_seqlens, case.seq, case.causal, case.window or 0, case.softcap or 0.0, 0.25, "eager")
    torch.library.opcheck(FORWARD, (q, k, v, *request))
    with torch.no_grad():
        out, lse = attention_forward(q, k, v, *request)
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    torch.library.opcheck(
        torch.ops.lightning_ups.attention_backward.default, (torch.ones_like(out), q, k, v, out, lse, *request)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic):
    case = CASES[12]
    tensors, options = case.tensors(), case.options()
    compiled = torch.compile(by_operator, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert worst(gradients(compiled, tensors, options), expected(tensors, options)) < BAND


def test_only_inputs_output_and_log_sum_are_kept_for_backward():
    kept = []
    tensors = [tensor.requires_grad_() for tensor in Case("", seq=64).tensors()]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        out = by_operator(*tensors, causal=True)
    lse = 2 * 4 * 64
    assert sorted(kept) == sorted([*(tensor.numel() for tensor in tensors), out.numel(), lse])


def test_is_among_the_costly_operators():
    assert FORWARD in costly_ops()


def test_selective_checkpointing_keeps_the_output():
    ran = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(function)
            return function(*args, **(kwargs or {}))

    def run(saved):
        ran.clear()
        q, k, v = (tensor.requires_grad_() for tensor in CASES[0].tensors())

        def context():
            return create_selective_checkpoint_contexts(saved)

        with Watch():
            out = checkpoint(
                lambda q: by_operator(q.sin(), k, v, causal=True) * 2, q, use_reentrant=False, context_fn=context
            )
            out.sum().backward()
        return ran.count(FORWARD), ran.count(torch.ops.aten.sin.default), q.grad

    forwards, sines, grad = run([FORWARD])
    assert (forwards, sines) == (1, 2)
    forwards, sines, again = run([torch.ops.aten.mm.default])
    assert (forwards, sines) == (2, 2)
    assert torch.equal(grad, again)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"causal": True}, 128 * 128 / 2),
        ({"causal": False}, 128 * 128),
        ({"causal": True, "window": 16}, 128 * 16 - 16 * 16 / 2),
    ],
)
def test_operations_are_counted(device, options, pairs):
    batch, heads, dim = 2, 4, 16
    tensors = [tensor.to(device).requires_grad_() for tensor in Case("", seq=128).tensors()]
    with FlopCounterMode(display=False) as forward:
        out = by_operator(*tensors, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 4 * batch * heads * dim * pairs
    assert backward.get_total_flops() == 10 * batch * heads * dim * pairs


def test_operations_of_documents_are_counted():
    documents = Documents.from_ids(torch.tensor([[0] * 96 + [1] * 32] * 2))
    with FlopCounterMode(display=False) as counter:
        by_operator(*Case("", seq=128).tensors(), causal=True, documents=documents)
    assert counter.get_total_flops() == 4 * 2 * 4 * 16 * (96**2 + 32**2) / 2


def shards(placements):
    mesh = init_device_mesh("cpu", (2,))
    case = Case("", seq=24, heads=(4, 2))
    tensors = case.tensors()
    parts = [distribute_tensor(tensor, mesh, [placements]).requires_grad_() for tensor in tensors]
    out = by_operator(*parts, causal=True)
    assert isinstance(out, DTensor)
    out.sum().backward()
    lse = attention_forward(*parts, None, 24, True, 0, 0.0, 0.25, "eager")[1]
    torch.testing.assert_close(lse.full_tensor(), attention_forward(*tensors, None, 24, True, 0, 0.0, 0.25, "eager")[1])
    whole = [tensor.requires_grad_() for tensor in tensors]
    wanted = by_operator(*whole, causal=True)
    wanted.sum().backward()
    found = (out, *(part.grad for part in parts))
    for part, full in zip(found, (wanted, *(tensor.grad for tensor in whole)), strict=True):
        torch.testing.assert_close(part.full_tensor(), full)
    return str(out.placements[0]), str(parts[0].grad.placements[0])


@pytest.mark.parametrize("placement", [Shard(0), Shard(2), Replicate()], ids=str)
def test_sharded_by_batch_or_heads_stays_so(ranks, placement):
    out, grad = ranks(shards, placement)
    assert out == grad == str(placement)


def shards_of_sequence():
    mesh = init_device_mesh("cpu", (2,))
    tensors = Case("", seq=24, heads=(4, 2)).tensors()
    parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in tensors]
    out = by_operator(*parts, causal=True)
    torch.testing.assert_close(out.full_tensor(), by_operator(*tensors, causal=True))
    return str(out.placements[0])


def test_a_sharded_sequence_is_gathered_first(ranks):
    assert "S(1)" not in ranks(shards_of_sequence)


def test_a_gradient_that_nothing_sees_is_the_operators_without_it(monkeypatch):
    ran = []
    kernel = operator._unseen_backward
    monkeypatch.setattr(operator, "_unseen_backward", lambda *inputs: ran.append(1) or kernel(*inputs))

    def grads():
        tensors = [tensor.requires_grad_() for tensor in CASES[0].tensors()]
        return torch.autograd.grad(by_operator(*tensors, causal=True).square().sum(), tensors)

    quick = grads()
    assert ran == [1]
    with FlopCounterMode(display=False) as counter:
        seen = grads()
    assert ran == [1]
    assert torch.ops.lightning_ups.attention_backward in counter.get_flop_counts()["Global"]
    with torch.autograd.profiler.profile() as profile:
        grads()
    assert "lightning_ups::attention_backward" in {event.key for event in profile.key_averages()}
    assert all(torch.equal(a, b) for a, b in zip(quick, seen, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 64, 1000])
def test_pairs_are_those_of_the_mask_but_for_the_diagonal(causal, window):
    mask = dense_mask(512, 512, causal=causal, window=window or None, ids_BS=None, device=torch.device("cpu"))
    seen = 512 * 512 if mask is None else int(mask.sum())
    assert attended_pairs(512, 512, causal=causal, window=window) == pytest.approx(seen, abs=512)


def test_documents_are_counted_by_their_lengths():
    boundaries = torch.tensor([0, 100, 1000])
    assert attended_pairs(500, 500, causal=True, cu_seqlens=boundaries, batch=2) == (100**2 + 900**2) // 2


def test_fake_documents_are_counted_as_equally_long():
    with FakeTensorMode():
        boundaries = torch.zeros(11, dtype=torch.int32)
    assert attended_pairs(500, 500, causal=True, cu_seqlens=boundaries, batch=2) == 10 * 100**2 // 2
