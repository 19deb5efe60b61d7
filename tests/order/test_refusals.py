import dataclasses

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, ModelPruning
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

from lightning_ups.callbacks import (
    ActivationCheckpoint,
    ActivationOffload,
    Compile,
    ExactResume,
    RunManifest,
    StepGraph,
    StepGuard,
    TokenThroughput,
)
from lightning_ups.models import GPT, GPTConfig
from lightning_ups.order import REFUSALS, Declaration, Placement, Run, Stage, check, refusals
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision
from tests.toys import Net, loader, trainer

SINGLE = Placement(name="SingleDeviceStrategy", shards=False, ours=False, on_one_device=True)
FSDP1 = Placement(name="FSDPStrategy", shards=True, ours=False)
FSDP2 = Placement(name="FSDP2Strategy", shards=True, ours=True)
DDP = Placement(name="DDPStrategy", shards=False, ours=False)
SIMPLE = Placement(name="SimpleFSDPStrategy", shards=True, ours=True, whole_graph=True)


def run(**changes):
    asked = Run(
        module=Net(),
        strategy=SINGLE,
        precision=Precision(),
        callbacks=(),
        accelerator="cpu",
        num_devices=2,
        num_nodes=1,
    )
    return dataclasses.replace(asked, **changes)


class Whole(Declaration):
    stage = Stage.COMPILE
    compiles_whole = True

    def change(self, module, context):
        raise NotImplementedError


class Owner(Declaration):
    stage = Stage.OPTIMIZERS
    owns_optimizer_state = True

    def wrap(self, optimizer, context):
        raise NotImplementedError


class SecondOwner(Owner):
    pass


class Budget(Whole):
    stage = Stage.RECOMPUTE
    compiles_whole = False
    needs_compile = True


class FullyShardedDataParallel(torch.nn.Module):
    """Stands for torch's, which needs a process group to be made."""


def holding(module):
    net = Net()
    net.inner = module
    return net


def gpt(**settings):
    config = GPTConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=32, vocab_size=32, max_seq_len=8)
    return holding(GPT(dataclasses.replace(config, **settings)))


SPLIT = dataclasses.replace(FSDP2, settings={"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"})


class MyCompile(Compile):
    pass


class Drawing(TensorBoardLogger):
    """Stands for TensorBoardLogger(log_graph=True), whose package may not be here."""

    def __init__(self):
        self._log_graph = True


def exemplified():
    net = Net()
    net.example_input_array = torch.ones(2, 8)
    return net


def captured(**changes):
    """A run with StepGraph, on one GPU."""
    callbacks = (StepGraph(), *changes.pop("callbacks", ()))
    return run(**{"accelerator": "cuda", "num_devices": 1, **changes, "callbacks": callbacks})


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ReadsStep(Net):
    def training_step(self, batch, batch_idx):
        return self.global_step


class ReadsLoader(Net):
    def training_step(self, dataloader_iter):
        return None


class Hooked(Callback):
    def on_after_backward(self, trainer, pl_module):
        return None


REFUSED = {
    "anomalies in a graph": (
        run(strategy=SIMPLE, detects_anomalies=True),
        "detect_anomaly=True is given with SimpleFSDPStrategy.*with FSDP2Strategy",
    ),
    "a graph drawn by one device": (
        run(strategy=FSDP2, module=exemplified(), loggers=(Drawing(),)),
        r"Drawing\(log_graph=True\) is given with FSDP2Strategy.*Leave log_graph out",
    ),
    "two of a class": (
        run(callbacks=(Compile(), Compile())),
        "Two callbacks of one class are given: Compile. .*Keep one",
    ),
    "a second one": (
        run(callbacks=(TokenThroughput(), TokenThroughput())),
        "Two callbacks of one class are given: TokenThroughput. .*Keep one of them",
    ),
    "one, and one derived from it": (
        run(callbacks=(Compile(), MyCompile())),
        "Two callbacks of one class are given: Compile. .*Keep one",
    ),
    "averages of masters": (
        run(callbacks=(EMAWeightAveraging(),), precision=BF16Precision(weights="masters")),
        r"EMAWeightAveraging is given with BF16Precision\(weights='masters'\). .*Use weights='autocast'",
    ),
    "masters put back": (
        run(callbacks=(ModelPruning("l1_unstructured"),), precision=BF16Precision(weights="masters")),
        r"ModelPruning is given with BF16Precision\(weights='masters'\). .*Use weights='autocast'",
    ),
    "pruned shards": (
        run(strategy=FSDP2, callbacks=(ModelPruning("l1_unstructured"),)),
        "ModelPruning is given with FSDP2Strategy.*Prune before fit, or use strategy='ddp'",
    ),
    "a batch size sought by processes": (
        run(strategy=FSDP2, callbacks=(BatchSizeFinder(),), num_devices=1),
        "BatchSizeFinder is given with FSDP2Strategy.*Use strategy='auto' on one device",
    ),
    "the same, by replicas": (
        run(strategy=DDP, callbacks=(BatchSizeFinder(),), training=False),
        "BatchSizeFinder is given with DDPStrategy",
    ),
    "two owners": (run(callbacks=(Owner(), SecondOwner())), "Owner and SecondOwner would both keep .*Keep one of them"),
    "fp16": (
        run(strategy=FSDP2, precision=MixedPrecision("16-mixed", "cpu")),
        "precision='16-mixed' is given with FSDP2Strategy.*Use precision='bf16-mixed'",
    ),
    "devices that are no mesh": (
        run(
            strategy=dataclasses.replace(FSDP2, settings={"tensor_parallel_size": 3, "replicate_size": 1}), num_nodes=4
        ),
        r"FSDP2Strategy\(tensor_parallel_size=3, replicate_size=1\) is given for a run on 8 devices.*product divides",
    ),
    "devices that do not divide for sequences": (
        run(strategy=dataclasses.replace(FSDP2, settings={"context_parallel_size": 3, "replicate_size": 1})),
        r"FSDP2Strategy\(context_parallel_size=3, replicate_size=1\) is given for a run on 2 devices.*product divides",
    ),
    "devices that do not divide for stages": (
        run(
            strategy=dataclasses.replace(
                FSDP2, settings={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "replicate_size": 1}
            )
        ),
        r"\(tensor_parallel_size=2, pipeline_parallel_size=2, replicate_size=1\) is given for a run on 2 devices",
    ),
    "averages of a model in stages": (
        run(
            strategy=dataclasses.replace(FSDP2, settings={"pipeline_parallel_size": 2}),
            callbacks=(EMAWeightAveraging(),),
        ),
        r"EMAWeightAveraging is given with FSDP2Strategy\(pipeline_parallel_size=2\).*each device has only some",
    ),
    "groups that are not of one size": (
        run(
            strategy=dataclasses.replace(FSDP2, settings={"reshard_after_forward": 4, "replicate_size": 2}),
            num_devices=12,
        ),
        r"\(reshard_after_forward=4\) is given where parameters are sharded over 6\..*Use a number that divides it",
    ),
    "no policy": (
        run(strategy=FSDP2, precision=HalfPrecision("16-true")),
        "HalfPrecision, precision='16-true', has no meaning under FSDP2Strategy.*Use one of .*bf16-mixed",
    ),
    "bf16-true": (
        run(strategy=FSDP2, precision=HalfPrecision("bf16-true")),
        r"precision='bf16-true' has no meaning under FSDP2Strategy.*plugins=\[BF16WeightsPrecision\(\)\]",
    ),
    "whole": (
        run(strategy=FSDP2, callbacks=(Whole(),)),
        "Whole would compile whole models under FSDP2.*scope='blocks'",
    ),
    "CUDA graphs": (
        run(strategy=FSDP2, callbacks=(Compile(mode="reduce-overhead"),)),
        "Compile would replay CUDA graphs under FSDP2Strategy.*max-autotune-no-cudagraphs",
    ),
    "activations out of one graph": (
        run(callbacks=(Whole(), ActivationOffload())),
        "Whole makes one graph of whole models .*, and ActivationOffload is given.*Use Compile",
    ),
    "activations out of a strategy's graph": (
        run(strategy=SIMPLE, callbacks=(ActivationOffload(),)),
        "SimpleFSDPStrategy makes one graph of whole models",
    ),
    "recomputed without random numbers": (
        run(callbacks=(Compile(backend="eager"), ActivationCheckpoint())),
        r"Compile\(backend='eager'\) is given with ActivationCheckpoint.*Use backend='aot_eager' or the default",
    ),
    "a budget where no graph is split": (
        run(callbacks=(Compile(backend="eager"), ActivationCheckpoint(memory_budget=0.5))),
        r"Compile\(backend='eager'\) is given with ActivationCheckpoint\(memory.*Use the default backend or 'aot_e",
    ),
    "budget": (run(callbacks=(Budget(),)), r"Budget\(memory_budget=...\) needs compiled code.*Add Compile"),
    "Transformer Engine, delayed": (
        run(precision=TEPrecision(recipe="delayed"), callbacks=(Compile(),)),
        r"TEPrecision\(recipe='delayed'\) is given with Compile.*Use recipe='current'",
    ),
    "Transformer Engine in one graph": (
        run(precision=TEPrecision(), callbacks=(Compile(backend="eager", fullgraph=True),)),
        r"TEPrecision is given with Compile\(fullgraph=True\).*Leave fullgraph out",
    ),
    "Transformer Engine, recomputed and compiled": (
        run(precision=TEPrecision(), callbacks=(Compile(), ActivationCheckpoint())),
        "TEPrecision is given with ActivationCheckpoint and Compile.*Leave one of the two callbacks out",
    ),
    "compiled twice": (
        run(compiled_by_user=True, callbacks=(Compile(on_failure="raise"),)),
        r"torch.compile\(Net\) was given to the Trainer, and Compile\(\) as well.*Pass the module as it is",
    ),
    "compiled whole": (
        run(strategy=FSDP2, compiled_by_user=True),
        r"torch.compile\(Net\) was given to FSDP2Strategy.*with the callback Compile\(\)",
    ),
    "compiled in part": (
        run(strategy=FSDP2, module=holding(torch.compile(torch.nn.Linear(2, 2), backend="eager"))),
        r"inner was returned by torch.compile.*with the callback Compile\(blocks",
    ),
    "breaks allowed": (
        run(strategy=SIMPLE, callbacks=(Compile(fullgraph=False),)),
        r"Compile\(fullgraph=False\) is given under SimpleFSDPStrategy.*in one graph.*or use FSDP2Strategy",
    ),
    "blocks of a whole graph": (
        run(strategy=SIMPLE, callbacks=(Compile(blocks=["layers.*"]),)),
        r"Compile\(blocks=\['layers.\*'\]\) is given under SimpleFSDPStrategy.*Leave that out",
    ),
    "gathered in float8 in a graph": (
        run(strategy=SIMPLE, precision=Float8Precision(all_gather=True, emulate=True)),
        r"Float8Precision\(all_gather=True\) is given under SimpleFSDPStrategy.*Leave all_gather out",
    ),
    "gathered in float8 where nothing is gathered": (
        run(precision=Float8Precision(all_gather=True, emulate=True)),
        r"Float8Precision\(all_gather=True\) is given under SingleDeviceStrategy.*Leave all_gather out",
    ),
    "wrapped": (
        run(strategy=FSDP2, module=holding(FullyShardedDataParallel())),
        "inner is already wrapped for data parallelism.*let the strategy shard it",
    ),
    "a captured step of two devices": (captured(num_devices=2), "StepGraph is given for a run on 2 devices.*devices=1"),
    "a captured step without a GPU": (
        captured(accelerator="cpu"),
        "StepGraph needs CUDA graphs, and this run is on cpu",
    ),
    "a captured step of a strategy for many": (captured(strategy=DDP), "StepGraph is given with DDPStrategy"),
    "a captured step that is optimized manually": (captured(module=Manual()), "Manual optimizes manually"),
    "a captured step with masters": (
        captured(precision=BF16Precision(weights="masters")),
        "StepGraph is given with BF16Precision",
    ),
    "a graph in a graph": (captured(callbacks=(Compile(mode="auto"),)), "Compile, which may replay CUDA graphs itself"),
    "a captured step, compiled by the user": (captured(compiled_by_user=True), "and torch.compile.Net. to the Trainer"),
    "a captured step that the host guards": (captured(callbacks=(StepGuard(),)), "StepGraph is given with StepGuard"),
    "anomalies in a captured step": (captured(detects_anomalies=True), "StepGraph is given with detect_anomaly=True"),
    "a hook in a captured step": (
        captured(callbacks=(Hooked(),)),
        "Hooked.on_after_backward is called inside the step",
    ),
    "a captured step that reads its number": (captured(module=ReadsStep()), "ReadsStep reads global_step"),
    "a captured step that reads a loader": (
        captured(module=ReadsLoader()),
        "training_step of ReadsLoader takes dataloader_iter",
    ),
    "a weight that is split and read past its forward": (
        run(strategy=SPLIT, module=gpt(loss="chunked")),
        "FSDP2Strategy splits inner.head, and GPT with loss='chunked' reads its weight .*at its default",
    ),
}


@pytest.mark.parametrize(("asked", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_with_what_why_and_cure(asked, text):
    assert len(refusals(asked)) == 1
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        check(asked)


ALLOWED = {
    "fp16 under a stock strategy": run(strategy=FSDP1, precision=MixedPrecision("16-mixed", "cpu")),
    "bf16 under ours": run(strategy=FSDP2, precision=MixedPrecision("bf16-mixed", "cpu")),
    "whole on one device": run(callbacks=(Whole(), ActivationCheckpoint())),
    "a budget with a compiler": run(callbacks=(Budget(), Compile())),
    "CUDA graphs on one device": run(callbacks=(Compile(mode="reduce-overhead"),)),
    "whole where the strategy wants it so": run(strategy=SIMPLE, callbacks=(Compile(scope="model"),)),
    "a graph as the strategy wants it": run(strategy=SIMPLE, callbacks=(Compile(), ActivationCheckpoint())),
    "no Compile where the strategy compiles": run(strategy=SIMPLE),
    "float8 in a graph": run(strategy=SIMPLE, precision=Float8Precision(emulate=True)),
    "activations of blocks, on one device": run(callbacks=(Compile(scope="auto"), ActivationOffload())),
    "activations of blocks": run(callbacks=(Compile(scope="blocks"), ActivationOffload())),
    "devices that are a mesh": run(
        strategy=dataclasses.replace(
            FSDP2, settings={"tensor_parallel_size": 2, "replicate_size": 2, "reshard_after_forward": 2}
        ),
        num_devices=8,
    ),
    "gathered in float8": run(strategy=FSDP2, precision=Float8Precision(all_gather=True, emulate=True)),
    "gathered in float8 outside fit": run(precision=Float8Precision(all_gather=True, emulate=True), training=False),
    "pruned whole weights": run(callbacks=(ModelPruning("l1_unstructured"),)),
    "a batch size sought on one device": run(callbacks=(BatchSizeFinder(),), num_devices=1),
    "a captured step": captured(callbacks=(Compile(mode="default"),), precision=BF16Precision()),
    "a captured step outside of fit": captured(accelerator="cpu", training=False),
    "one owner": run(callbacks=(Owner(),)),
    "a weight that is read past its forward, whole": run(strategy=FSDP2, module=gpt(loss="chunked")),
    "a budget, by inductor": run(callbacks=(Compile(), ActivationCheckpoint(memory_budget=0.5))),
    "a budget, where a graph is split by cost": run(
        callbacks=(Compile(backend="aot_eager"), ActivationCheckpoint(memory_budget=0.5))
    ),
    "a plan that does not fit, which is told by itself": run(strategy=SPLIT),
}


@pytest.mark.parametrize("asked", ALLOWED.values(), ids=ALLOWED)
def test_not_refused(asked):
    assert refusals(asked) == []


def test_compilation_switched_off_is_refused_where_it_is_needed(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert refusals(run(strategy=FSDP2)) == []
    (refusal,) = refusals(run(strategy=SIMPLE))
    assert "TORCH_COMPILE_DISABLE=1 is set, and SimpleFSDPStrategy is given." in refusal.text(run(strategy=SIMPLE))


def sharded_then_stock():
    from torch.distributed.device_mesh import init_device_mesh

    from lightning_ups.transforms.fsdp.sharding import ShardOptions, shard

    model = Net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    shard(model, blocks={}, roots=[*model.layers, model.head], mesh=mesh, options=ShardOptions())
    return [
        refusal.text(run(module=model, strategy=s))
        for s in (SINGLE, FSDP2)
        for refusal in refusals(run(module=model, strategy=s))
    ]


def test_a_sharded_module_is_refused_by_a_strategy_that_does_not_shard(ranks):
    (text,) = ranks(sharded_then_stock)
    assert "Net was sharded by an earlier run, and SingleDeviceStrategy does not shard." in text
    assert text.endswith("Keep the strategy of the earlier run, or build the module anew and load a checkpoint.")


def test_every_row_is_tested():
    seen = {id(refusal) for asked, _ in REFUSED.values() for refusal in refusals(asked)}
    # The row of the sharded module is tested on two ranks, and that of the switch of torch by the switch.
    assert len(seen) == len(REFUSALS) - 2


def test_a_module_compiled_by_the_user_is_seen(tmp_path):
    model = torch.compile(Net(), backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile\(Net\) was given to the Trainer"):
        trainer(tmp_path, callbacks=[Compile(backend="eager", on_failure="raise")]).fit(model, loader())
    trainer(tmp_path, callbacks=[Compile(backend="eager")]).fit(model, loader())
    assert model.seen == [False] * 3


@pytest.mark.parametrize("kind", [TokenThroughput, StepGuard, StepGraph, ExactResume, RunManifest])
def test_a_second_of_these_is_refused_before_anything_is_done(tmp_path, kind):
    with pytest.raises(ValueError, match=f"Two callbacks of one class are given: {kind.__name__}. .*Keep one of them"):
        trainer(tmp_path, callbacks=[kind(), kind()]).fit(Net(), loader())
