"""What the strategies that shard have in common; what they do with it is tested by each."""

import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

import lightning_ups  # noqa: F401  (registers the names)
from lightning_ups.callbacks import Compile
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from tests.strategies import cases
from tests.strategies.cases import CASES, on_ranks, simply_on_ranks, two_ranks
from tests.strategies.test_parity import check, expected
from tests.toys import Net, loader, trainer

BOTH = (FSDP2Strategy, SimpleFSDPStrategy)


@pytest.mark.parametrize(("name", "strategy"), [("fsdp2", FSDP2Strategy), ("simple_fsdp", SimpleFSDPStrategy)])
def test_a_name_is_enough(name, strategy):
    assert type(StrategyRegistry.get(name)) is strategy


@pytest.mark.parametrize("strategy", BOTH)
def test_one_that_is_given_among_callbacks_says_where_it_belongs(tmp_path, strategy):
    where = rf"{strategy.__name__} is given as a callback, but it is a strategy\..*strategy={strategy.__name__}\("
    with pytest.raises(AttributeError, match=where):
        trainer(tmp_path, callbacks=[strategy()]).fit(Net(), loader())
    assert not hasattr(strategy(), "state_key")


COMMON = [
    ({"sharding": "half"}, "Use one of .*'full'"),
    ({"initialise_on": "gpu"}, "Use one of .*'device'"),
    ({"save": "ful"}, r"Use one of \('sharded', 'full'\)"),
    ({"save": "full", "async_save": True}, "contradicts itself.*python -m lightning_ups export"),
    ({"on_unreplayable": "no"}, r"Use one of \('warn', 'refuse'\)"),
    ({"sharding": "none", "replicate_size": 2}, "contradicts itself.*Leave replicate_size out"),
    ({"sigterm_every": 0}, "is out of range.*Use 1 or more"),
    ({"replicate_size": 0}, "is out of range.*Use 1 or more"),
    ({"blocks": []}, "is an empty list.*Name some"),
    ({"blocks": "layers.*"}, r"given as the string.*Write \["),
]
OWN = {
    FSDP2Strategy: [
        ({"sync": "never"}, "Use one of .*'last'"),
        ({"outside": "scale"}, r"given as the string.*Write \["),
        ({"tensor_parallel_size": 2}, "Give both"),
        ({"tensor_parallel_size": 2, "tensor_parallel_plan": "gtp"}, "does not say how modules are split"),
        ({"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt", "reshard_after_forward": 2}, "Use True or False"),
        ({"reshard_after_forward": "yes"}, "is not a known choice"),
        ({"reshard_after_forward": 0}, "is out of range"),
        ({"prefetch": 0}, "is out of range.*Use 1 or more"),
        ({"tensor_parallel_size": 0}, "is out of range.*Use 1 or more"),
        ({"sharding": "gradients", "reshard_after_forward": "auto"}, "contradicts itself"),
        *(({"unused_parameters": True, "reshard_after_forward": keep}, "contradicts itself") for keep in (True, 2)),
    ],
    SimpleFSDPStrategy: [({"overlap": "all"}, "Use one of .*'blocks'")],
}


@pytest.mark.parametrize(
    ("strategy", "arguments", "text"),
    [(strategy, *case) for strategy in BOTH for case in COMMON + OWN[strategy]],
)
def test_wrong_arguments_are_refused_at_once(strategy, arguments, text):
    with pytest.raises((TypeError, ValueError), match=rf"(?s){text}"):
        strategy(**arguments)


@two_ranks
def test_what_cannot_be_spread_evenly_is_refused(tmp_path):
    text = r"\(reshard_after_forward=3\) is given where parameters are sharded over 2\..*that divides it, or True"
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path, strategy=FSDP2Strategy(reshard_after_forward=3), devices=2).fit(Net(), loader())


@two_ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", BOTH)
def test_other_blocks_than_those_of_an_earlier_run_are_refused(tmp_path, strategy):
    callbacks = [Compile(backend="aot_eager")] if strategy is SimpleFSDPStrategy else []
    model, data = cases.Case(), DataLoader(cases.data(), batch_size=8)

    def validate(blocks):
        run = trainer(tmp_path, strategy=strategy(blocks=blocks), devices=2, callbacks=callbacks)
        run.validate(model, data, verbose=False)

    validate(["layers.*"])
    validate(["layers.*"])
    text = r"^Case was sharded .* in other blocks: layers\.0, layers\.1;.*\['layers\.1'\]\) names layers\.1\..* anew"
    with pytest.raises(ValueError, match=text):
        validate(["layers.1"])


# Callbacks that run a part of training and go back


class Tuned(cases.Case):
    lr = 0.3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(tmp_path, strategy):
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.1, num_training_steps=30)
    compiling = [Compile(backend="aot_eager")] if strategy is SimpleFSDPStrategy else []
    made = strategy if strategy == "ddp" else strategy()
    model, data = Tuned(), DataLoader(cases.data().repeat(30, 1), batch_size=8)
    trainer(tmp_path, callbacks=[finder, *compiling], strategy=made, devices=2, epochs=1).fit(model, data)
    return model.lr, cases.losses_of(model, len(model.losses))


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.filterwarnings("ignore")
def test_a_learning_rate_is_found_as_under_ddp(ranks, tmp_path, strategy):
    (lr, losses), (right, others) = (ranks(tuned, tmp_path / str(s), s) for s in (strategy, "ddp"))
    assert lr == pytest.approx(right) != Tuned.lr
    assert losses == pytest.approx(others, rel=1e-4)


# Backward, and the hooks around it


class BoundsGradients(cases.Scalar):
    """Bounds all gradients in a hook after backward: of an average, and not of one device's part."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.05, 0.05)


class WritesAround(cases.Case):
    """Writes to weights in the hooks before and after backward, in the last step too."""

    def on_before_backward(self, loss):
        with torch.no_grad():
            self.layers[0].up.bias.add_(0.1)

    def on_after_backward(self):
        with torch.no_grad():
            self.layers[1].up.weight.mul_(0.5)
        self.layers[1].up.bias.data.clamp_(-0.1, 0.1)


AROUND = {kind.__name__: kind for kind in (BoundsGradients, WritesAround)}


def around_backward(tmp_path, name, run):
    CASES[name] = AROUND[name]
    return run(name, tmp_path, {}, 2, {})


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks])
@pytest.mark.parametrize("name", AROUND)
def test_hooks_around_backward_are_those_of_one_device(ranks, tmp_path, name, run):
    CASES[name] = AROUND[name]
    check(ranks(around_backward, tmp_path, name, run), expected(name, tmp_path, {}))


class HalvesGradients(cases.Scalar):
    """Halves what is accumulated after each microbatch."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


def halved(tmp_path, strategy):
    CASES["HalvesGradients"] = HalvesGradients
    return on_ranks("HalvesGradients", tmp_path, strategy, 2, {"accumulate": 2})


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none", "sync": "every"}], ids=str)
def test_what_a_hook_makes_of_gradients_between_microbatches_counts_as_under_ddp(ranks, tmp_path, strategy):
    check(ranks(halved, tmp_path, strategy), ranks(halved, tmp_path, "ddp"))


class Looks(cases.Case):
    def on_after_backward(self):
        pass


@two_ranks
@pytest.mark.parametrize("sync", ["last", "every"])
def test_a_hook_that_finds_no_gradients_between_microbatches_is_warned_of(tmp_path, sync):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = trainer(tmp_path, strategy=FSDP2Strategy(sync=sync), epochs=1, devices=2, accumulate_grad_batches=2)
        run.fit(Looks(), DataLoader(cases.data(), 4))
    texts = [str(warning.message) for warning in told if "Looks.on_after_backward" in str(warning.message)]
    assert len(texts) == (sync == "last" and dist.get_rank() == 0)
    assert all("sync='every'" in text for text in texts)


class Watches(Callback):
    """Does nothing, after each backward."""

    def on_after_backward(self, trainer, pl_module):
        pass


def watched(tmp_path, ranks_with):
    warnings.simplefilter("ignore")
    callbacks = [Watches()] if dist.get_rank() in ranks_with else []
    options = {"epochs": 1, "devices": 2, "accumulate_grad_batches": 2, "callbacks": callbacks}
    model = cases.Case()
    trainer(tmp_path, strategy=FSDP2Strategy(), **options).fit(model, DataLoader(cases.data(), 4))
    return [loss.item() for loss in model.losses]


def test_a_hook_between_microbatches_may_be_on_one_device_alone(ranks, tmp_path):
    assert ranks(watched, tmp_path, [0]) == ranks(watched, tmp_path, [])


class PastManualBackward(cases.Scalar):
    """Runs the backward by itself, and not by ``manual_backward``."""

    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        self.loss(batch).backward()
        optimizer.step()


@two_ranks
@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks])
def test_a_backward_that_would_leave_gradients_of_one_device_is_refused(tmp_path, run):
    CASES["PastManualBackward"] = PastManualBackward
    text = r"is stepped after loss\.backward\(\).*Call self\.manual_backward\(loss\)"
    with pytest.raises(RuntimeError, match=text):
        run("PastManualBackward", tmp_path, {}, 2, {})
