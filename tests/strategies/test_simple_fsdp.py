"""What a user of SimpleFSDPStrategy meets: compilation, graphs, writes, precision, checkpoints, refusals."""

import logging
import warnings
from functools import cache, partial

import pytest
import torch
import torch._inductor.config as inductor_config  # noqa: TID251
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._dynamo import register_backend  # noqa: TID251  (the documented way to register a backend)
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.compile.overlap import collectives_of
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy, simple_fsdp
from lightning_ups.transforms.sharding import unsharded
from lightning_ups.transforms.simple_fsdp.parametrize import shards_of
from tests.strategies import any_module, cases
from tests.strategies.cases import CASES, data, losses_of, on_ranks, simply_on_ranks, two_ranks, weights_of
from tests.strategies.test_checkpoints import run_of
from tests.strategies.test_parity import check, expected
from tests.toys import trainer

PART = "SimpleFSDPStrategy"
LOGGER = logging.getLogger(__name__)


def loader(size=8):
    return DataLoader(data(), batch_size=size)


def made(tmp_path, *, name="Case", strategy=None, callbacks=None, **options):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    callbacks = [Compile(backend="aot_eager")] if callbacks is None else callbacks
    strategy = SimpleFSDPStrategy(**(strategy or {}))
    return CASES[name](), trainer(tmp_path, strategy=strategy, devices=2, callbacks=callbacks, **options)


def simply(tmp_path, name, options=None):  # ranks import this file with it, and so know its cases
    return simply_on_ranks(name, tmp_path, {}, 2, options or {})


def under(tmp_path, name, strategy):
    return on_ranks(name, tmp_path, strategy, 2, {})


# Compilation


class WideBlocks(cases.Case):
    def build(self):
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)))
        self.head = nn.Linear(16, 1)

    def run(self, x):
        return self.head(self.model(torch.cat([x, x], -1)))


def undeclared(tmp_path):
    with pytest.MonkeyPatch.context() as patch:  # inductor takes a minute here
        patch.setattr(simple_fsdp, "Compiler", partial(simple_fsdp.Compiler, backend="aot_eager"))
        warnings.simplefilter("ignore")
        seed_everything(3, verbose=False)
        model, reports = CASES["Case"](), []
        lightning = trainer(tmp_path, strategy="simple_fsdp", devices=2)
        model.on_train_end = lambda: reports.append(applied(lightning.strategy).report.parts[PART])
        lightning.fit(model, loader())
        again = [m for m in model.modules() if "forward" in vars(m)]
        return {"losses": losses_of(model, 5), "weights": weights_of(model)}, reports[0], again, unsharded(model)


def test_without_a_compile_the_strategy_compiles(ranks, tmp_path):
    result, report, left, whole = ranks(undeclared, tmp_path)
    check(result, expected("Case", tmp_path, {}))
    assert "3 roots compiled whole by inductor, since no Compile is given" in report["lines"]
    assert report["compiled"]["graphs"] >= 2  # two blocks are equal
    assert report["compiled"]["breaks"] == 0
    assert (left, whole) == ([], [])


def talks(module, *_):
    LOGGER.warning("%s is called", type(module).__name__)


@two_ranks
def test_a_given_compile_is_turned_into_one_of_whole_models_that_loggers_do_not_end(tmp_path):
    model, lightning = made(tmp_path, name="Gpt", epochs=1)
    model.model.layers[0].register_forward_pre_hook(talks)
    reports, keys = [], [None, None]

    def on_train_end():
        reports.append(applied(lightning.strategy).report.parts)
        dist.all_gather_object(keys, str(inductor_config.post_grad_custom_post_pass.uuid()))

    model.on_train_end = on_train_end
    lightning.fit(model, loader())
    parts = reports[0]
    assert keys[0] != keys[1]  # programs differ from rank to rank, and devices of two machines have one name
    assert "scope model, chosen under SimpleFSDPStrategy: 1 root by aot_eager" in parts["Compile"]["lines"]
    assert (parts["Compile"]["scope"], parts["Compile"]["fullgraph"], parts["Compile"]["graphs"]) == ("model", True, 1)
    assert parts[PART]["overlap"] == "none"
    assert parts[PART]["lines"][0].endswith("the passes are inductor's, and this is aot_eager")
    assert parts[PART]["loggers_left_out"]


BY_BLOCKS = r"or use FSDP2Strategy, under which blocks are compiled one by one\."


class Breaks(cases.Gpt):
    def build(self):
        super().build()
        self.model.register_forward_pre_hook(lambda *_: None)
        forward = type(self.model).forward

        class Broken(type(self.model)):
            def forward(self, x, *args, **kwargs):
                if x.sum() > 1e9:  # the host must know
                    return x
                return forward(self, x, *args, **kwargs)

        self.model.__class__ = Broken


def broken(tmp_path, compiles):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple_fsdp, "Compiler", partial(simple_fsdp.Compiler, backend="aot_eager"))
        model, lightning = made(tmp_path, name="Breaks", callbacks=[Compile(backend="aot_eager")] if compiles else [])
        reports = []
        model.on_train_end = lambda: reports.append(applied(lightning.strategy).report.parts)
        lightning.fit(model, loader())
    facts = reports[0]["Compile"] if compiles else reports[0][PART]["compiled"]
    return {"losses": losses_of(model, 5), "weights": weights_of(model)}, facts


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_cannot_be_one_graph_is_compiled_by_blocks(ranks, tmp_path, compiles):
    result, facts = ranks(broken, tmp_path, compiles)
    check(result, expected("Gpt", tmp_path, {}))
    assert (facts["eager"], facts["graphs"]) == (["model"], 1)  # of two equal blocks
    (told,) = facts["told"]
    assert told.startswith(
        "Compile: model (Broken) runs uncompiled in training, and the 2 blocks within it are compiled"
    )
    assert "Data-dependent branching, at" in told
    assert told.endswith("FSDP2Strategy may be faster.")


class Penalized(cases.Case):
    def training_step(self, batch, batch_idx):
        x = batch.requires_grad_()
        (slope,) = torch.autograd.grad(self.run(x).sum(), x, create_graph=True)
        loss = self.loss(x) + slope.square().mean()
        self.losses.append(loss.detach())
        return loss


def test_gradients_of_gradients_train_uncompiled(ranks, tmp_path):
    check(ranks(under, tmp_path, "Penalized", SimpleFSDPStrategy()), expected("Penalized", tmp_path, {}))


class Idioms(cases.Case):
    def run(self, x):
        return super().run(x) + next(self.parameters()).new_zeros(len(x), 1)


def test_what_a_parameter_makes_is_plain(ranks, tmp_path):
    check(ranks(simply, tmp_path, "Idioms"), expected("Idioms", tmp_path, {}))


class Inner(cases.Case):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        slopes = torch.autograd.grad(loss, [*self.parameters()], create_graph=True)
        return loss + 0.01 * sum(slope.square().sum() for slope in slopes)


def test_gradients_of_shards_are_refused(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)calls torch\.autograd\.grad.*Use strategy='ddp'"):
        ranks(simply, tmp_path, "Inner")
    check(*(ranks(under, tmp_path, "Inner", strategy) for strategy in ({}, "ddp")))


@two_ranks
def test_what_cannot_be_one_graph_is_an_error_in_the_first_step_if_asked_for(tmp_path):
    model, lightning = made(tmp_path, name="Breaks", callbacks=[Compile(backend="aot_eager", on_failure="raise")])
    with pytest.raises(RuntimeError, match=rf"(?s)^Compile failed on model.*{BY_BLOCKS}$") as error:
        lightning.fit(model, loader())
    # What the compiler advises elsewhere is refused here.
    assert "blocks=" not in str(error.value)
    assert "on_failure" not in str(error.value)


class PastForward(cases.Case):
    """Runs its layers, and not their forwards as a compiler has replaced them."""

    def run(self, x):
        for layer in (*self.layers, self.head):
            x = type(layer).forward(layer, x)
        return x


@two_ranks
@pytest.mark.parametrize("callbacks", [[], [Compile(backend="aot_eager")]], ids=["by the strategy", "by Compile"])
def test_advice_where_nothing_can_be_compiled(tmp_path, callbacks):
    model, lightning = made(tmp_path, name="PastForward", callbacks=callbacks)
    lightning.fit(model, loader())
    compiled = CASES["Case"]()
    compiled.head.compile(backend="eager")
    with pytest.raises(
        ValueError, match=rf"(?s)^head is compiled by the model itself, with torch.*{BY_BLOCKS}$"
    ) as error:
        made(tmp_path, callbacks=callbacks)[1].fit(compiled, loader())
    assert "blocks=" not in str(error.value)


# Graphs

_SEEN = []


@cache
def register():
    def compiler(kind):
        def keep(graph, inputs):
            _SEEN.append((kind, collectives_of(graph.graph)))
            return make_boxed_func(graph.forward)

        return keep

    aot = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    register_backend(lambda graph, inputs: aot(graph, inputs), name="ups_seen")


def graphs(tmp_path, strategy, save):
    register()
    _SEEN.clear()
    callbacks = [Compile(backend="ups_seen"), *([ActivationCheckpoint(save=save)] if save else [])]
    model, lightning = made(tmp_path, name="Gpt", strategy=strategy, callbacks=callbacks)
    lightning.fit(model, loader())
    return [*_SEEN], {"losses": losses_of(model, 5), "weights": weights_of(model)}


# 17 reads of 16 parameters, of which one is tied; what the head and the norm before it read, backward still has.
GRAPHS = {
    "full": ({}, None, {"gathers": 16}, {"gathers": 14, "reduce-scatters": 17}),
    "gradients": ({"sharding": "gradients"}, None, {"gathers": 16}, {"reduce-scatters": 17}),
    "none": ({"sharding": "none"}, None, {}, {"all-reduces": 17}),
    "matmuls kept": ({}, "matmuls", {"gathers": 16}, {"gathers": 14, "reduce-scatters": 17}),
    "nothing kept": ({}, "nothing", {"gathers": 16}, {"gathers": 14, "reduce-scatters": 17}),
}


@pytest.mark.parametrize(
    "name", [name if name == "full" else pytest.param(name, marks=pytest.mark.slow) for name in GRAPHS]
)
def test_one_graph_each_way_with_the_collectives_in_it(ranks, tmp_path, name):
    strategy, save, forward, backward = GRAPHS[name]
    seen, result = ranks(graphs, tmp_path, strategy, save)
    check(result, expected("Gpt", tmp_path, {}))
    assert seen[0] == ("forward", forward)
    assert [kind for kind, _ in seen] == ["forward", "backward"]
    # What is kept may be needed, or not: the first matrix of a graph whose input wants no gradient is not.
    found = seen[1][1]
    assert found.keys() == backward.keys()
    assert all(backward[kind] - 1 <= found[kind] <= backward[kind] for kind in found)


def checkpointed(tmp_path):
    register()
    _SEEN.clear()
    callbacks = [Compile(backend="ups_seen"), ActivationCheckpoint(save="nothing")]
    model, lightning = made(tmp_path, name="WideBlocks", callbacks=callbacks)
    lightning.fit(model, loader())
    return [*_SEEN], {"losses": losses_of(model, 5), "weights": weights_of(model)}


@pytest.mark.slow
def test_what_is_recomputed_gathers_once_more_and_not_twice(ranks, tmp_path):
    seen, result = ranks(checkpointed, tmp_path)
    check(result, expected("WideBlocks", tmp_path, {}))
    (whole,) = [found for kind, found in seen if kind == "backward" and found.get("reduce-scatters") == 8]
    assert ("forward", {"gathers": 8}) in seen
    assert 6 <= whole["gathers"] <= 8


def by_inductor(tmp_path):
    model, lightning = made(tmp_path, name="Gpt", callbacks=[])
    reports = []
    model.on_train_end = lambda: reports.append(applied(lightning.strategy).report.parts[PART])
    lightning.fit(model, loader())
    return {"losses": losses_of(model, 5), "weights": weights_of(model)}, reports[0]


@pytest.mark.slow
def test_inductor_gathers_and_reduces_a_block_at_once(ranks, tmp_path):
    result, report = ranks(by_inductor, tmp_path)
    check(result, expected("Gpt", tmp_path, {}))
    assert report["overlap"] == "blocks"
    for graph in report.get("graphs", ()):  # none from a cache
        assert graph["groups"] == 4  # what comes before the blocks, the two, and what comes after
        assert all(count <= 4 for count in graph["after"].values())
        assert graph["before"]["reduce-scatters" if graph["backward"] else "gathers"] > 4


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.one(x) + self.other(torch.relu(x))


class Summed(cases.Case):
    """Biases with equal gradients, in each layer."""

    def build(self):
        self.layers = nn.Sequential(Sum(), Sum())
        self.head = nn.Linear(8, 1)

    def run(self, x):
        return self.head(self.layers(x))


def summed(tmp_path, strategy, callbacks):
    options = {"accumulate": 2, "gradient_clip_val": 0.1, "callbacks": callbacks}
    return on_ranks("Summed", tmp_path, SimpleFSDPStrategy(**strategy), 2, options)


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}], ids=repr)
def test_equal_gradients_are_accumulated_and_clipped_each_by_itself(ranks, tmp_path, strategy):
    right = expected("Summed", tmp_path, {"accumulate": 2, "gradient_clip_val": 0.1})
    check(ranks(summed, tmp_path, strategy, [Compile(backend="aot_eager")]), right)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}], ids=repr)
def test_equal_gradients_by_inductor_with_overlap_and_without(ranks, tmp_path, strategy):
    together, apart = (ranks(summed, tmp_path, {**strategy, "overlap": overlap}, []) for overlap in ("blocks", "none"))
    check(together, expected("Summed", tmp_path, {"accumulate": 2, "gradient_clip_val": 0.1}))
    assert all(torch.equal(weight, apart["weights"][name]) for name, weight in together["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}], ids=repr)
def test_complex_weights_by_inductor(ranks, tmp_path, strategy):
    found = ranks(under, tmp_path, "MixedTypes", SimpleFSDPStrategy(**strategy))
    check(found, expected("MixedTypes", tmp_path, {}))


# Steps


class Writes(cases.Case):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        with torch.no_grad():
            self.head.weight.data.clamp_(-0.1, 0.1)
        return loss


class WritesToShards(cases.Case):
    """Clamps after each step, in a hook or in the step, and says what it reads."""

    def training_step(self, batch, index):
        with shards_of(self), torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, index)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.layers[0].up.weight.mul_(0.9)
        self.layers[1].up.weight.data = self.layers[1].up.weight.data * 0.5


@two_ranks
def test_a_write_that_would_be_lost_is_refused(tmp_path):
    model, lightning = made(tmp_path, name="Writes")
    with pytest.raises(RuntimeError, match=r"^head\.weight was written to within a step"):
        lightning.fit(model, loader())


class Either(nn.Module):
    """One of two layers, as a flag says."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, left):
        return self.left(x) if left else self.right(x)


class ByTurns(cases.Case):
    """Runs one of two equal modules, or of two branches in one; on each device another where ``alike`` is False."""

    where, alike = "modules", True

    def build(self):
        super().build()
        self.one, self.other, self.either = nn.Linear(8, 8), nn.Linear(8, 8), Either()
        if self.where == "nothing repeats":
            del self.layers, self.either
        self.square = nn.Parameter(torch.randn(8, 8))

    def run(self, x):
        rank = dist.get_rank() if dist.is_initialized() and not self.alike else 0
        first = (len(self.losses) + rank) % 2 == 0
        if self.where == "experts":
            return self.head(self.layers[int(first)](x))
        if self.where == "nothing repeats":
            return self.head((self.one if first else self.other)(x))
        if self.where == "modules":
            return super().run((self.one if first else self.other)(x))
        if self.where == "reads":
            return super().run(nn.functional.linear(x, self.one.weight if first else self.square))
        return super().run(self.either(x, first))


def by_turns(path, where, *, alike, steps, every, run=simply_on_ranks, **options):
    CASES[where] = type("ByTurns", (ByTurns,), {"where": where, "alike": alike})
    return run(where, path, {"sigterm_every": every, **options}, 2, {"steps": steps})


@pytest.mark.parametrize(("where", "steps", "every"), [("modules", 1, 4), ("branches", 3, 1), ("reads", 1, 4)])
def test_devices_that_gather_other_parameters_are_told_of(ranks, tmp_path, where, steps, every):
    with pytest.raises(
        AssertionError, match=r"(?s)different parameters, .*different order.*ddp_find_unused_parameters"
    ):
        ranks(partial(by_turns, tmp_path, where, alike=False, steps=steps, every=every))


@pytest.mark.parametrize(
    ("where", "steps", "every"), [("modules", 1, 4), ("modules", 3, 1), ("experts", 1, 4), ("nothing repeats", 1, 4)]
)
def test_devices_that_run_other_modules_under_fsdp2_are_told_of_too(ranks, tmp_path, where, steps, every):
    with pytest.raises(
        AssertionError, match=r"(?s)different parameters, .*different order.*ddp_find_unused_parameters"
    ):
        ranks(partial(by_turns, tmp_path, where, alike=False, steps=steps, every=every, run=on_ranks))


class Aside(cases.Case):
    """One device computes what it looks at alone, in steps and in a longer evaluation."""

    def training_step(self, batch, index):
        if self.global_rank == 0:
            self.head(torch.ones(2, cases.WIDTH)).detach()
        return super().training_step(batch, index)

    def val_dataloader(self):
        return DataLoader(data(), batch_size=4 if self.global_rank else 2)

    def validation_step(self, batch, _):
        self.loss(batch)


def aside(run, path, strategy):
    return run("Aside", path, {"sigterm_every": 1, **strategy}, 2, {"steps": 4})


@pytest.mark.parametrize("strategy", [{"sharding": "none"}, {"replicate_size": 2}], ids=str)
@pytest.mark.parametrize("run", [simply_on_ranks, on_ranks])
def test_a_device_that_holds_all_may_compute_by_itself(ranks, tmp_path, run, strategy):
    check(ranks(partial(aside, run, tmp_path, strategy)), expected("Aside", tmp_path, {"steps": 4}))


@two_ranks
@pytest.mark.parametrize("strategy", [SimpleFSDPStrategy, FSDP2Strategy])
def test_a_run_that_was_refused_is_forgotten_by_the_next(tmp_path, strategy):
    warnings.simplefilter("ignore")
    callbacks = [Compile(backend="aot_eager")] if strategy is SimpleFSDPStrategy else []
    model, batches = type("ByTurns", (ByTurns,), {"alike": False})(), DataLoader(data(), batch_size=8)

    def run():
        return trainer(tmp_path, epochs=1, devices=2, strategy=strategy(), callbacks=callbacks)

    with pytest.raises(RuntimeError, match="Collectives are matched by call order"):
        run().fit(model, batches)
    model.alike = True
    run().fit(model, batches)


@pytest.mark.parametrize("where", ["modules", pytest.param("branches", marks=pytest.mark.slow)])
def test_steps_that_gather_other_parameters_alike_on_all_devices_are_right(ranks, tmp_path, where):
    CASES[where] = type("ByTurns", (ByTurns,), {"where": where})
    for run in (simply_on_ranks, on_ranks):
        result = ranks(partial(by_turns, tmp_path, where, alike=True, steps=5, every=1, run=run))
        check(result, expected(where, tmp_path, {}))


class Listed(cases.Case):
    """Takes weights from a list of them, or each by its name."""

    how = "product"

    def loss(self, x):
        if self.how == "product":
            return super().loss(nn.functional.linear(x, next(self.layers.parameters())[:8]))
        penalty = sum((getattr(m, n) ** 2).sum() for m in self.modules() for n, _ in m.named_parameters(recurse=False))
        if self.how in ("logged", "summed"):
            penalty = sum((p**2).sum() for p in self.parameters())
        loss = super().loss(x) + 0.01 * penalty
        if self.how != "summed":
            self.log("loss", loss, sync_dist=True)
        return loss


def listed(path, how, *, simple=True):
    CASES["Listed"] = type("Listed", (Listed,), {"how": how})
    run = simply_on_ranks if simple else on_ranks
    return run("Listed", path, {} if simple else "auto", 2 if simple else 1, {})


@pytest.mark.parametrize("how", ["product", "logged", "summed"])
def test_what_a_list_of_parameters_gives_a_step_is_named_where_it_fails(ranks, tmp_path, how):
    with pytest.raises(
        AssertionError, match=r"training_step computes with shards.*Read each by name: getattr\(module, name\)"
    ):
        ranks(listed, tmp_path, how)


def test_a_penalty_on_all_weights_by_the_cure_is_that_of_one_device(ranks, tmp_path):
    check(ranks(listed, tmp_path, "named"), listed(tmp_path, "named", simple=False))


@pytest.mark.slow
def test_a_write_to_shards_is_kept(ranks, tmp_path):
    check(ranks(simply, tmp_path, "WritesToShards"), expected("WritesToShards", tmp_path, {}))


# Precision


class MixesTypes(cases.Case):
    """Makes a tensor of its own type: in the step, or in a module."""

    def run(self, x):
        return super().run(nn.functional.linear(x, self.layers[0].up.weight[:8]))


class MixesTypesWithin(cases.Case):
    def build(self):
        super().build()
        self.mixing = Mixing()

    def run(self, x):
        return super().run(self.mixing(x))


class Mixing(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return nn.functional.linear(torch.ones(x.shape), self.weight)


@pytest.mark.parametrize("kind", [MixesTypes, MixesTypesWithin])
def test_two_types_are_told_with_a_cure(ranks, tmp_path, kind):
    with pytest.raises(AssertionError, match=r"(?s)two dtypes: .*x\.to\(self\.weight\.dtype\).*in_float32="):
        ranks(simply, tmp_path, kind.__name__, {"plugins": [BF16Precision(weights="masters")]})


def in_float8(tmp_path, simple, all_gather, recipe):
    from lightning_ups.precision import Float8Precision

    precision = Float8Precision(emulate=True, all_gather=all_gather, recipe=recipe)
    way = simply_on_ranks if simple else on_ranks
    result = way("WideBlocks", tmp_path, {}, 2, {"plugins": [precision]})
    return result["losses"], len(precision.conversion.converted) if precision.conversion else None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_computes_in_the_graph_what_fsdp2_does(ranks, tmp_path, recipe):
    pytest.importorskip("torchao")
    ours, fsdp2 = (
        ranks(in_float8, tmp_path, simple, all_gather, recipe)[0]
        for simple, all_gather in ((True, None), (False, False))
    )
    assert ours == pytest.approx(fsdp2, rel=5e-3)
    plain = ranks(simply, tmp_path, "WideBlocks", {"precision": "bf16-mixed"})["losses"]
    assert ours != pytest.approx(plain, rel=1e-6)


# Checkpoints


def fit_saving(path, kind, *, ckpt_path=None, folder="checkpoints"):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    model = CASES["Fused"]()  # AdamW over shards and scalars
    saver = ModelCheckpoint(path / folder, filename="{epoch}", save_top_k=-1)
    callbacks = [saver, *([Compile(backend="aot_eager")] if kind is SimpleFSDPStrategy else [])]
    lightning = run_of(path, strategy=kind(), callbacks=callbacks)
    lightning.fit(model, loader(), ckpt_path=ckpt_path)
    return torch.stack(model.losses).tolist()


def interchanged(path, saves, loads):
    whole = fit_saving(path, saves)
    saved = path / "checkpoints" / "epoch=1.ckpt"
    return whole, fit_saving(path, loads, ckpt_path=saved, folder="again")


WAYS = {
    "resumed": (SimpleFSDPStrategy, SimpleFSDPStrategy),
    "to fsdp2": (SimpleFSDPStrategy, FSDP2Strategy),
    "from fsdp2": (FSDP2Strategy, SimpleFSDPStrategy),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_those_of_fsdp2(ranks, tmp_path, way):
    whole, resumed = ranks(interchanged, tmp_path, *WAYS[way])
    assert len(resumed) == 2
    if way == "resumed":
        assert resumed == whole[2:]
    else:
        assert resumed == pytest.approx(whole[2:], rel=1e-5)


# Modules put together from parts


def by_tensor_code(described, path):
    right = any_module.train(described, path, strategy="ddp_find_unused_parameters_true", name="ddp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple_fsdp, "Compiler", partial(simple_fsdp.Compiler, backend="aot_eager"))
        ours = any_module.train(described, path, strategy=SimpleFSDPStrategy())
    return any_module.differences(ours, right, 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "packed", "buffers", "tables", "outputs", "weight norm", "extra state"])
def test_parts_are_trained_as_by_ddp(ranks, tmp_path, part):
    assert ranks(by_tensor_code, any_module.plainly((part, "list")), tmp_path) == ""


# Refusals


@two_ranks
@pytest.mark.parametrize(
    ("compile_options", "text"),
    [
        ({"fullgraph": False}, r"Compile\(fullgraph=False\) is given under SimpleFSDPStrategy.*Leave that out"),
        ({"blocks": ["layers.*"]}, r"Compile\(blocks=.*Leave that out"),
        ({"mode": "reduce-overhead", "backend": "inductor"}, "would replay CUDA graphs.*Use mode='default'"),
        (None, "TORCHDYNAMO_DISABLE=1 is set.*Unset it, or use FSDP2Strategy"),
    ],
)
def test_what_would_not_be_one_graph_is_refused(tmp_path, compile_options, text):
    callbacks = [Compile(**{"backend": "aot_eager", **(compile_options or {})})]
    model, lightning = made(tmp_path, callbacks=callbacks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", str(int(compile_options is None)))
        with pytest.raises((ValueError, RuntimeError), match=rf"(?s){text}"):
            lightning.fit(model, loader())


@two_ranks
def test_a_gather_in_float8_is_refused(tmp_path):
    pytest.importorskip("torchao")
    with pytest.raises((ValueError, RuntimeError), match=r"Float8Precision\(all_gather=True\).*Leave all_gather out"):
        in_float8(tmp_path, simple=True, all_gather=True, recipe="tensorwise")


OWN = (Aside, Breaks, Idioms, Inner, MixesTypes, MixesTypesWithin, PastForward, Penalized, Summed, WideBlocks, Writes)
CASES |= {kind.__name__: kind for kind in (*OWN, WritesToShards)}
