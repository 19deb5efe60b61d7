from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config  # noqa: TID251
from torch._inductor.choices import InductorChoices  # noqa: TID251
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: TID251
from torch._inductor.runtime.hints import DeviceProperties  # noqa: TID251
from torch._inductor.utils import run_and_get_code  # noqa: TID251

from lightning_ups._compat.torch.compile.inductor import (
    combined_kernels,
    eager_precision_casts,
    eager_random_numbers,
    even_splits,
    graph_pass,
    tuned_blocks,
)


def seen_by_another_thread(name):
    seen = []
    thread = Thread(target=lambda: seen.append(getattr(config, name)))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (combined_kernels, "combo_kernels"),
        (eager_precision_casts, "emulate_precision_casts"),
        (eager_random_numbers, "fallback_random"),
        (tuned_blocks, "coordinate_descent_tuning"),
    ],
)
def test_it_holds_in_every_thread_and_ends(context, name):
    assert not getattr(config, name)
    with context():
        assert getattr(config, name)
        assert seen_by_another_thread(name)
    assert not getattr(config, name)
    assert not seen_by_another_thread(name)
    with pytest.raises(KeyError), context():
        raise KeyError
    assert not getattr(config, name)


H200 = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048, warp_size=32, major=9)
H200.warp_size_or_default = 32


@pytest.mark.parametrize("size", [16384 * 8192, 49152 * 11008])
def test_much_is_reduced_in_aligned_pieces_of_one_size(size, monkeypatch):
    monkeypatch.setattr(DeviceProperties, "create", lambda *_: H200)

    def split():
        return InductorChoices().reduction_split_factor(torch.device("cpu"), size, 1, inner_reduction=True)

    plain = split()
    with even_splits():
        even = split()
    assert size % (even * 16) == 0
    assert plain / 2 <= even <= plain * 2
    assert split() == plain


@pytest.mark.parametrize("size", [2**27 + 1, 1009 * 10007, 1000])
def test_what_has_no_such_pieces_is_split_as_before(size, monkeypatch):
    monkeypatch.setattr(DeviceProperties, "create", lambda *_: H200)
    arguments = (torch.device("cpu"), size, 1)
    plain = InductorChoices().reduction_split_factor(*arguments, inner_reduction=True)
    outer = InductorChoices().reduction_split_factor(*arguments, inner_reduction=False)
    with even_splits():
        assert InductorChoices().reduction_split_factor(*arguments, inner_reduction=True) == plain
        assert InductorChoices().reduction_split_factor(*arguments, inner_reduction=False) == outer


@pytest.mark.gpu
def test_a_maximum_on_a_gpu_loads_aligned_pieces():
    x = torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16)
    torch.compiler.reset()
    with even_splits(), config.patch(fx_graph_cache=False):
        found, (code,) = run_and_get_code(torch.compile(lambda x: x.abs().max()), x)
    assert found == x.abs().max()
    assert "r0_numel = 262144" in code


@config.patch(fx_graph_cache=False)  # else the passes of a graph that is in one do not run
def test_a_pass_goes_after_what_is_set_and_caches_know_it():
    done = []

    class First(CustomGraphPass):
        def __call__(self, graph):
            done.append("first")

        def uuid(self):
            return "first"

    def second(graph):
        done.append("second")

    def key(when):
        passes: Any = {"joint": config.joint_custom_pre_pass, "apart": config.post_grad_custom_pre_pass}
        return passes[when].uuid()

    torch.compiler.reset()
    with graph_pass("apart", second), graph_pass("joint", second):
        assert key("joint") == key("apart") is not None
        alone = key("apart")
    with config.patch(post_grad_custom_pre_pass=First()), graph_pass("apart", second):
        assert key("apart") != alone
        torch.compile(lambda x: x + 1)(torch.ones(3))
    assert done == ["first", "second"]
    done.clear()
    torch.compiler.reset()
    with config.patch(post_grad_custom_pre_pass=[First(), First()]), graph_pass("apart", second):
        torch.compile(lambda x: x + 2)(torch.ones(3))
    assert done == ["first", "first", "second"]
    with config.patch(post_grad_custom_pre_pass=lambda graph: done.append("raw")), graph_pass("apart", second):
        assert key("apart") is None
    assert config.joint_custom_pre_pass is config.post_grad_custom_pre_pass is None
