"""The kernel: interpreted where there is no GPU, and beside torch's fused step where there is one."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from lightning_ups.optim import MasteredOptimizer, MasterWeights
from tests.interpreted import assert_equal_interpreted
from tests.optim.test_adamw_step import EVEN, SHAPES, assert_close, by_ours, by_torch, parameters

INTERPRETED = """
import itertools

import torch
from lightning_ups.optim import adamw_step
from lightning_ups.optim.adamw_step import AdamWStep
from lightning_ups.optim.adamw_triton import Launch
from tests.optim.test_adamw_step import EVEN, SHAPES, assert_close, by_ours, parameters

def interpreted():
    step = AdamWStep()
    def steps(slots, settings, *, coefficient=None):
        step(slots, settings, coefficient=coefficient, skip=torch.ones(()))  # which changes nothing
        step(slots, settings, coefficient=coefficient, skip=torch.zeros(()))
    return steps

def by_specification(**options):
    adamw_step._launch_of = lambda kind: None
    optimizer = by_ours(others, **options)
    adamw_step._launch_of = Launch
    return optimizer

adamw_step._launch_of = Launch
for dtype, shapes in itertools.product((torch.float32, torch.bfloat16), (SHAPES, EVEN)):
    for coefficient in (None, torch.tensor(0.37)):
        weights, others = parameters(shapes=shapes), parameters(shapes=shapes)
        copies = {w: torch.zeros_like(w, dtype=torch.bfloat16) for w in weights}
        ours = by_ours(weights, steps=3, dtype=dtype, coefficient=coefficient, make=interpreted, copies=copies)
        theirs = by_specification(steps=3, dtype=dtype, coefficient=coefficient)
        assert_close(ours, theirs, weights, others)
        for weight, low in copies.items():  # the interpreter cuts off where a GPU rounds
            torch.testing.assert_close(low.float(), weight.detach(), rtol=2**-7, atol=1e-30)

# A step of masters in chunks, whose state is streamed: the launches of each chunk, for as many groups as it has.
from lightning_ups.optim import MasterWeights, OffloadedOptimizer
from lightning_ups.optim.master_weights import Writes
from tests.optim.offloading import LateMemory, grouped, train

launches = []
def counted(kind):
    launches.append(kind)
    return Launch(kind)

adamw_step._has_kernel = lambda device: True
# A copy that was cut off, and not rounded, would be taken for another's.
Writes.possible, MasterWeights.take_over = lambda *_: False, lambda *_, **__: None
def given(step, model, optimizer):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():  # those of a model would follow copies, which the interpreter cuts off
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.take_clip_coefficient(torch.tensor(0.3))

ends = []
for adamw_step._launch_of in (lambda kind: None, counted):
    wrap = lambda o: OffloadedOptimizer(o, memory=LateMemory(), chunk_bytes=20_000)
    ends.append(train(grouped(torch.optim.AdamW), masters=True, wrap=wrap, between=given, steps=3)[1])
assert launches
ours, theirs = ends
for one, other in zip(ours._inner.masters.of.values(), theirs._inner.masters.of.values(), strict=True):
    torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
for key, entries in ours.state_dict()["state"].items():
    torch.testing.assert_close(entries, theirs.state_dict()["state"][key], rtol=2e-6, atol=2e-6)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_interpreted_is_the_specification():
    assert_equal_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [None, 0.37])
@pytest.mark.parametrize("shapes", [SHAPES, EVEN], ids=["odd", "even"])
def test_the_kernel_is_torchs_fused_step(dtype, coefficient, shapes):
    weights, others = parameters("cuda", shapes), parameters("cuda", shapes)
    copies = {w: torch.empty_like(w, dtype=torch.bfloat16) for w in weights}
    scale = None if coefficient is None else torch.tensor(coefficient, device="cuda")
    ours = by_ours(weights, steps=4, dtype=dtype, coefficient=scale, copies=copies)
    theirs = by_torch(others, steps=4, dtype=dtype, coefficient=coefficient or 1.0)
    assert_close(ours, theirs, weights, others)
    assert all(torch.equal(low, weight.to(torch.bfloat16)) for weight, low in copies.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_a_step_over_masters_is_a_few_launches_however_many_weights():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(100))).cuda()
    masters = MasterWeights(model, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(AdamW(model.parameters()), masters)
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.take_clip_coefficient(torch.ones((), device="cuda"))
        if step < 5:
            optimizer.step()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        optimizer.step()
    kernels = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    assert sum("adamw_step_kernel" in name for name in kernels) == 1, kernels
    assert len(kernels) <= 12, kernels  # the counters of 200 steps are several launches of torch's
