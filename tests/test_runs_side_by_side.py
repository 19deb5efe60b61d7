"""Runs that share a process, at the same time or one in a hook of the other: each trains as it does alone."""

import threading
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops import fit_loop
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups._compat import patches
from lightning_ups.callbacks import (
    AccelerationFlags,
    ActivationCheckpoint,
    ActivationOffload,
    Compile,
    DevicePrefetch,
    ExactResume,
    OptimizerOffload,
    RunManifest,
    StepGuard,
    TokenThroughput,
)
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.toys import Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

CALLBACKS = {
    "recomputed": lambda: [ActivationCheckpoint()],
    "recomputed_products": lambda: [ActivationCheckpoint(save="nothing")],
    "budget": lambda: [ActivationCheckpoint(memory_budget=0.5), Compile(backend="aot_eager")],
    "compiled": lambda: [Compile(backend="eager")],
    "compiled_and_recomputed": lambda: [Compile(backend="aot_eager"), ActivationCheckpoint()],
    "activations_offloaded": lambda: [ActivationOffload(min_mb=0)],
    "optimizer_offloaded": lambda: [OptimizerOffload()],
    "guarded": lambda: [StepGuard()],
    "resumable": lambda: [ExactResume()],
    "prefetched": lambda: [DevicePrefetch()],
    "flags": lambda: [AccelerationFlags()],
    "measured": lambda: [TokenThroughput(), RunManifest()],
}
KINDS = {
    "stock": dict,
    **{name: (lambda make=make: {"callbacks": make()}) for name, make in CALLBACKS.items()},
    "bf16": lambda: {"plugins": [BF16Precision()]},
    "masters": lambda: {"plugins": [BF16Precision(weights="masters")]},
    "float8": lambda: {"plugins": [Float8Precision(emulate=True)]},
}
SHARDED = {
    "fsdp2": lambda: {"strategy": FSDP2Strategy()},
    "fsdp2_bf16": lambda: {"strategy": FSDP2Strategy(), "plugins": [BF16Precision()]},
    "fsdp2_recomputed": lambda: {"strategy": FSDP2Strategy(), "callbacks": [ActivationCheckpoint()]},
    "simple": lambda: {"strategy": SimpleFSDPStrategy(), "callbacks": [Compile(backend="eager")]},
}


class Together(Callback):
    """Begins each training step only when the other run begins its next one, too."""

    def __init__(self, barrier):
        self.barrier = barrier

    def on_train_batch_start(self, *_):
        self.barrier.wait(60)

    on_before_optimizer_step = on_train_batch_start


class Nested(Callback):
    """Runs another fit within the second step of this one."""

    def __init__(self, run):
        self.run, self.steps = run, 0

    def on_train_batch_end(self, *_):
        self.steps += 1
        if self.steps == 2:
            self.run()


@pytest.fixture(autouse=True)
def one_request_for_a_loader_at_a_time(monkeypatch):
    """Lightning changes the class DataLoader during each, for all threads."""
    stock, lock = fit_loop._request_dataloader, threading.Lock()

    def request(source):
        with lock:
            return stock(source)

    monkeypatch.setattr(fit_loop, "_request_dataloader", request)


class Wide(Net):
    """Of widths that float8 takes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 1)


def prepare(tmp_path, options, *callbacks):
    """Return a function that trains, and returns the losses and what is left on the module."""
    callbacks = [*options.pop("callbacks", ()), *callbacks]
    model = Wide()  # before threads start, which share one generator of random numbers
    batches = DataLoader(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), batch_size=4)
    lightning = trainer(tmp_path, callbacks=callbacks, epochs=2, devices=1, **options)

    def fit():
        lightning.fit(model, batches)
        return [loss.item() for loss in model.losses], left_on(model)

    return fit


def fit(tmp_path, options, *callbacks):
    return prepare(tmp_path, options, *callbacks)()


def left_on(model):
    return [
        name
        for name, module in model.named_modules()
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]


def in_threads(tmp_path, *kinds):
    barrier, results = threading.Barrier(len(kinds)), {}  # kinds are functions that return options of a Trainer
    fits = [prepare(tmp_path / str(i), make(), Together(barrier)) for i, make in enumerate(kinds)]

    def run(index, fit):
        try:
            results[index] = fit()
        except Exception as error:  # noqa: BLE001  (the thread of the test raises it)
            barrier.abort()
            results[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(fits)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results[0], results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_in_two_threads_train_as_each_alone(tmp_path, kind):
    alone = fit(tmp_path, KINDS[kind]())
    before = {*patches._PLACES}
    assert in_threads(tmp_path, KINDS[kind], KINDS[kind]) == (alone, alone)
    assert {*patches._PLACES} == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_a_hook_of_another_trains_as_alone(tmp_path, kind):
    alone, inner = fit(tmp_path, KINDS[kind]()), []
    before = {*patches._PLACES}
    outer = fit(tmp_path, KINDS[kind](), Nested(lambda: inner.append(fit(tmp_path, KINDS[kind]()))))
    assert (outer, inner) == (alone, [alone])
    assert {*patches._PLACES} == before


def test_runs_of_different_kinds_do_not_mix(tmp_path):
    one, other = KINDS["compiled_and_recomputed"], KINDS["masters"]
    assert in_threads(tmp_path, one, other) == (fit(tmp_path, one()), fit(tmp_path, other()))


def sharded_in_threads(tmp_path, kind):
    warnings.simplefilter("ignore")
    alone = fit(tmp_path, SHARDED[kind]())
    before = {*patches._PLACES}
    return alone, in_threads(tmp_path, SHARDED[kind], SHARDED[kind]), {*patches._PLACES} - before


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_runs_in_two_threads_train_as_each_alone(fresh_process, tmp_path, kind):
    alone, both, left = fresh_process(sharded_in_threads, tmp_path, kind)
    assert both == (alone, alone)
    assert left == set()


def sharded_within(tmp_path, kind):
    warnings.simplefilter("ignore")
    alone, inner = fit(tmp_path, SHARDED[kind]()), []
    before = {*patches._PLACES}
    outer = fit(tmp_path, SHARDED[kind](), Nested(lambda: inner.append(fit(tmp_path, SHARDED[kind]()))))
    return alone, outer, inner, {*patches._PLACES} - before


@pytest.mark.parametrize("kind", SHARDED)
def test_a_sharded_run_in_a_hook_of_another_trains_as_alone(fresh_process, tmp_path, kind):
    alone, outer, inner, left = fresh_process(sharded_within, tmp_path, kind)
    assert (outer, inner) == (alone, [alone])
    assert left == set()
