"""What the strategies that shard have in common; what they do with it is tested by each."""

import inspect
import re
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

import lightning_ups  # noqa: F401  (registers the names)
from lightning_ups.callbacks import Compile
from lightning_ups.order import Context
from lightning_ups.order.run import Placement
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from lightning_ups.strategies.sharding import ShardingStrategy, ShardStep, check_known, check_sharding
from tests.strategies import cases
from tests.strategies.cases import CASES, on_ranks, simply_on_ranks
from tests.strategies.test_parity import check, expected
from tests.toys import Net, loader, trainer

BOTH = (FSDP2Strategy, SimpleFSDPStrategy)


@pytest.mark.parametrize("strategy", BOTH)
def test_both_apply_the_one_order(strategy):
    assert issubclass(strategy, ShardingStrategy)
    placement = Placement.of(strategy)
    assert (placement.shards, placement.ours) == (True, True)
    assert placement.whole_graph is (strategy is SimpleFSDPStrategy)


def test_a_user_switches_by_changing_the_name():
    fsdp2, simple = (inspect.signature(strategy).parameters for strategy in BOTH)
    assert list(simple.keys() - fsdp2.keys()) == ["overlap"]
    for name in simple.keys() & fsdp2.keys():
        assert simple[name].default == fsdp2[name].default, name
    assert fsdp2.keys() <= simple.keys()  # what it cannot do it refuses by name


@pytest.mark.parametrize(("name", "strategy"), [("fsdp2", FSDP2Strategy), ("simple_fsdp", SimpleFSDPStrategy)])
def test_a_name_is_enough(name, strategy):
    assert type(StrategyRegistry.get(name)) is strategy


@pytest.mark.parametrize("strategy", BOTH)
def test_one_that_is_given_among_callbacks_says_where_it_belongs(tmp_path, strategy):
    where = rf"{strategy.__name__} is given as a callback, but it is a strategy\..*strategy={strategy.__name__}\("
    with pytest.raises(AttributeError, match=where):
        trainer(tmp_path, callbacks=[strategy()]).fit(Net(), loader())
    assert not hasattr(strategy(), "state_key")


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("tasks", "nodes", "options", "cure"),
    [
        (
            2,
            1,
            {"devices": 1},
            r"counts 2 processes where 1 .* product is 2, or start as many processes as devices: 1\.$",
        ),
        (
            1,
            1,
            {"devices": 2},
            r"counts 1 processes where 2 .* product is 1, or start as many processes as devices: 2\.$",
        ),
        (2, 1, {"devices": 2, "num_nodes": 2}, r"product is 2, or start as many processes as devices: 4\.$"),
        (2, 2, {"devices": 2}, "devices=1"),  # in Lightning's words
    ],
)
def test_processes_that_srun_started_are_those_that_the_trainer_asks_for(
    tmp_path, monkeypatch, strategy, tasks, nodes, options, cure
):
    slurm = {"NTASKS": tasks, "NTASKS_PER_NODE": tasks // nodes, "NNODES": nodes, "JOB_ID": 7, "JOB_NAME": "train"}
    last = {"PROCID": tasks - 1, "LOCALID": tasks // nodes - 1, "NODEID": nodes - 1}
    for name, value in {**slurm, **last}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(ValueError, match=cure):
        trainer(tmp_path, strategy=strategy(), **options).fit(Net(), loader())


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("timeout_minutes", "5", "Use a number."),
        ("sigterm_every", 2.5, "Use a whole number."),
        ("sigterm_every", None, "Use a whole number."),
        ("replicate_size", None, "Use a whole number."),
        ("communication_multiprocessors", True, "Use a whole number, or None."),
        ("communication_multiprocessors", 2.5, "Use a whole number, or None."),
    ],
)
def test_a_wrong_kind_is_named_with_its_cure(strategy, name, value, cure):
    given = f"{strategy.__name__}({name}={value!r})"
    with pytest.raises(TypeError, match=f"{re.escape(given)}.*{re.escape(cure)}"):
        strategy(**{name: value})


@pytest.mark.parametrize("strategy", BOTH)
def test_an_empty_list_of_blocks_is_refused(strategy):
    match = rf"^{strategy.__name__}\(blocks=\[\]\) is an empty list\..*Name some, or leave blocks out\.$"
    with pytest.raises(ValueError, match=match):
        strategy(blocks=[])


@pytest.mark.parametrize("strategy", BOTH)
def test_an_empty_path_is_refused(strategy):
    match = rf"^{strategy.__name__}\(flight_recorder=''\) is an empty path\..*Name one, or leave flight_recorder out\.$"
    with pytest.raises(ValueError, match=match):
        strategy(flight_recorder="")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reshard_after_forward", 2.0),
        ("prefetch", 1.5),
        ("tensor_parallel_size", None),
    ],
)
def test_a_wrong_kind_of_what_fsdp2_alone_does_is_named(name, value):
    with pytest.raises(TypeError, match=re.escape(f"FSDP2Strategy({name}={value!r})")):
        FSDP2Strategy(**{name: value})


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (3, "=3 is a int. A plan says how each module is split"),
        (["gpt"], "=['gpt'] is a list. A plan says how each module is split"),
        ({"head": 3}, "={'head': 3} holds a int."),
        ({"head": ["colwise"]}, "={'head': ['colwise']} holds a list."),
        ({3: "colwise"}, "={3: 'colwise'} holds a int."),
        ({}, "={} is empty."),
        ({"head": "columns"}, " has the style 'columns'."),
        ("gtp", "='gtp' is not the name of a plan."),
    ],
    ids=str,
)
def test_what_is_no_plan_is_refused_at_once(strategy, plan, what):
    with pytest.raises((TypeError, ValueError), match=rf"{re.escape(f'tensor_parallel_plan{what}')}.*Use one of \("):
        strategy(tensor_parallel_size=2, tensor_parallel_plan=plan)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"process_group_backend": "nccl"}, "process_group_backend='nccl') cannot clip.*cpu:gloo,cuda:nccl"),
    ],
    ids=str,
)
def test_a_backend_for_what_is_offloaded(options, given):
    what, cure = given.split(".*")
    with pytest.raises((TypeError, ValueError), match=rf"{re.escape(what)}.*{re.escape(cure)}"):
        FSDP2Strategy(offload=True, **options)
    FSDP2Strategy(offload=True, process_group_backend="cpu:GLOO")


def test_choices_are_checked_in_the_name_of_the_strategy():
    check_known(object(), "x", 1, (1, 2))
    with pytest.raises(ValueError, match=r"object\(x=3\) is not a known choice.*Use one of \(1, 2\)"):
        check_known(object(), "x", 3, (1, 2))
    check_sharding(object(), "none", replicate_size=1, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"object\(sharding='none', replicate_size=2.*contradicts itself"):
        check_sharding(object(), "none", replicate_size=2, reshard_after_forward=None)


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("name", "number", "cure"),
    [
        ("sigterm_every", 0, "Use 1 or more."),
        ("sigterm_every", 10**30, "Use 1 or more, up to 9223372036854775807."),
        ("replicate_size", 0, "Use 1 or more."),
        ("communication_multiprocessors", 0, "Use 1 or more, or None."),
        ("timeout_minutes", -1, "Give more than 0"),
        ("timeout_minutes", float("inf"), "which is a year, such as 30"),
        ("timeout_minutes", 10**30, "which is a year, such as 30"),
    ],
)
def test_what_is_no_such_number_is_refused_at_once(strategy, name, number, cure):
    with pytest.raises(ValueError, match=rf"{strategy.__name__}\({name}={number}\) is out of range.*{cure}"):
        strategy(**{name: number})


@pytest.mark.parametrize("name", ["prefetch", "tensor_parallel_size", "reshard_after_forward"])
@pytest.mark.parametrize("number", [0, -1])
def test_what_fsdp2_alone_counts_is_checked_too(name, number):
    with pytest.raises(ValueError, match=rf"FSDP2Strategy\({name}={number}\) is out of range.*Use 1 or more"):
        FSDP2Strategy(**{name: number})


def spread(tmp_path):
    trainer(tmp_path, strategy=FSDP2Strategy(reshard_after_forward=3), devices=2).fit(Net(), loader())


def test_what_cannot_be_spread_evenly_is_refused(ranks, tmp_path):
    text = r"(?s)\(reshard_after_forward=3\) is given where parameters are sharded over 2\..*that divides it, or True"
    with pytest.raises(AssertionError, match=text):
        ranks(spread, tmp_path)


def recorded(tmp_path):
    strategy = FSDP2Strategy(flight_recorder=tmp_path / "hangs")
    with pytest.warns(UserWarning, match=r"flight_recorder=.*has no effect.*NCCL's.*gloo communicates"):
        trainer(tmp_path, strategy=strategy, epochs=1).fit(Net(), loader())
    return (tmp_path / "hangs").exists()


def test_a_recorder_of_what_is_not_there_says_so(fresh_process, tmp_path):
    assert fresh_process(recorded, tmp_path) is False


def test_what_is_asked_of_nccl_is_refused_where_there_is_none(tmp_path):
    strategy = FSDP2Strategy(communication_multiprocessors=8)
    with pytest.raises(ValueError, match=r"=8\) would have no effect.*about NCCL, and gloo communicates.*Leave it out"):
        trainer(tmp_path, strategy=strategy).fit(Net(), loader())


class _TwoLayers(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@dataclass(frozen=True)
class _Forgetful(ShardStep):
    part, missed = "Forgetful", "They are nowhere"
    replicated: tuple[str, ...]

    def shard(self, module, blocks, mesh):
        return SimpleNamespace(
            layout=(("data_parallel", mesh),),
            blocks=tuple(blocks),
            share_of_blocks=0.5,
            replicated=dict.fromkeys(self.replicated),
        )

    def report(self, done, context):
        context.report.note(self.part, "and more", more=True)


def _context():
    return Context(device=torch.device("cpu"), mesh=2, training=True, precision=None)  # type: ignore[arg-type]


def test_a_parameter_that_is_left_out_is_an_error():
    module = _TwoLayers()
    names = [name for name, _ in module.named_parameters()]
    context = _context()
    with pytest.raises(
        RuntimeError, match=rf"Forgetful would never reduce .* of {names[-1]}\. They are nowhere, .*rep"
    ):
        _Forgetful(None, tuple(names[:-1])).change(module, context)
    assert not context.report.parts


def test_a_sharding_says_what_it_made():
    module, context = _TwoLayers(), _context()
    names = [name for name, _ in module.named_parameters()]
    with _Forgetful(("body.*",), tuple(names)).change(module, context):
        pass
    part = context.report.parts["Forgetful"]
    assert part["lines"] == [
        "2 blocks as named, with 50% of the parameters' bytes, over data_parallel=2",
        f"whole on every device: {', '.join(names)}",
        "and more",
    ]
    facts = {key: value for key, value in part.items() if key != "lines"}
    assert facts == {
        "blocks": ["body.0", "body.1"],
        "mesh": {"data_parallel": 2},
        "share_of_blocks": 0.5,
        "replicated": names,
        "more": True,
    }


def named_anew(tmp_path, strategy):
    callbacks = [Compile(backend="aot_eager")]
    model, data = cases.Case(), DataLoader(cases.data(), batch_size=8)

    def validated(blocks):
        options = {"devices": 2, "callbacks": callbacks if strategy is SimpleFSDPStrategy else []}
        trainer(tmp_path, strategy=strategy(blocks=blocks), **options).validate(model, data, verbose=False)

    validated(["layers.*"])
    validated(["layers.*"])
    with pytest.raises(ValueError, match="build the module anew") as error:
        validated(["layers.1"])
    return str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", BOTH)
def test_other_blocks_than_those_of_an_earlier_run_are_refused(ranks, tmp_path, strategy):
    text = ranks(named_anew, tmp_path, strategy)
    assert text.startswith("Case was sharded by an earlier run in other blocks: layers.0, layers.1;")
    assert f"{strategy.__name__}(blocks=['layers.1']) names layers.1." in text


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


def told_of_halving(tmp_path, sync):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = trainer(tmp_path, strategy=FSDP2Strategy(sync=sync), epochs=1, devices=2, accumulate_grad_batches=2)
        run.fit(Looks(), DataLoader(cases.data(), 4))
    return [str(warning.message) for warning in told if "on_after_backward" in str(warning.message)]


class Looks(cases.Case):
    def on_after_backward(self):
        pass


@pytest.mark.parametrize("sync", ["last", "every"])
def test_a_hook_that_finds_no_gradients_between_microbatches_is_told(ranks, tmp_path, sync):
    told = ranks(told_of_halving, tmp_path, sync)
    assert len(told) == (sync == "last")
    assert all("Looks.on_after_backward" in text and "sync='every'" in text for text in told)


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


def past_manual_backward(tmp_path, run):
    CASES["PastManualBackward"] = PastManualBackward
    run("PastManualBackward", tmp_path, {}, 2, {})


@pytest.mark.parametrize("run", [on_ranks, simply_on_ranks])
def test_a_backward_that_would_leave_gradients_of_one_device_is_refused(ranks, tmp_path, run):
    with pytest.raises(
        AssertionError, match=r"(?s)is stepped after loss\.backward\(\).*Call self\.manual_backward\(loss\)"
    ):
        ranks(past_manual_backward, tmp_path, run)
