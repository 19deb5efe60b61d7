import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the benchmark itself"),
]


@pytest.fixture
def script(import_benchmark, monkeypatch):
    monkeypatch.setenv("UPS_BENCH_SIZE", "tiny")
    yield import_benchmark("same_bits")
    if dist.is_initialized():
        dist.destroy_process_group()


def test_on_a_cpu_runs_are_the_same_and_resumed_ones_too(script):
    found = script.same(deterministic=False, compiled=False)
    assert (found["runs part at step"], found["gradients apart"], found["state apart"]) == (None, 0, 0)
    assert found["resumed parts at step"] is None
    assert found["of state"] == 4 * found["of gradients"], "weights, two moments and a step each"
    assert [len(losses) for losses in found["losses"]] == [6, 6, 2]


def test_what_differs_is_told(script, monkeypatch):
    """A gradient that is another in each run, and a checkpoint with other weights."""
    stock, turns = script.Watch.on_before_optimizer_step, []

    def disturbed(watch, trainer, module, optimizer):
        if trainer.global_step == 0:
            turns.append(None)
            script._local(module.model.head.weight.grad).add_((-1) ** len(turns))
        stock(watch, trainer, module, optimizer)

    monkeypatch.setattr(script.Watch, "on_before_optimizer_step", disturbed)
    found = script.same(deterministic=False, compiled=False)
    assert found["runs part at step"] == 2
    assert found["largest relative difference"] > 0
    assert found["which"] == ["model.head.weight"]
    assert found["resumed parts at step"] is None
    fit = script._fit

    def late(folder, *, ckpt_path=None, kept=None, **options):
        if kept is not None:
            kept["model.head.weight"] += 1
        return fit(folder, ckpt_path=ckpt_path, kept=kept, **options)

    monkeypatch.setattr(script, "_fit", late)
    assert script.same(deterministic=False, compiled=False)["state apart"] == 1
