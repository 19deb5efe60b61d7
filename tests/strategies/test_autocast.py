"""bf16-mixed under sharding computes what stock Lightning's bf16-mixed computes under DDP."""

import warnings
from collections import Counter

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from lightning_ups.transforms.casting.matmuls import matmul_weights
from tests.foreign import Recurrent
from tests.half_lstm import skip_without
from tests.strategies.cases import losses_of, on_ranks
from tests.toys import trainer

STEPS, SAMPLES, LENGTH = 4, 8, 8


class Lit(LightningModule):
    def __init__(self, net, loss=None):
        super().__init__()
        self.net, self.losses, self.compute = net, [], loss

    def training_step(self, batch, _):
        if self.compute is not None:
            loss = self.compute(self.net, batch)
        else:
            loss = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tokens():
    return torch.randint(0, 32, (SAMPLES, LENGTH))


def hugging(model, config, **settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 2
    if config == "GPT2Config":
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        sizes["attn_pdrop"] = 0.0
    elif config == "T5Config":
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        sizes |= {"dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0}
    elif config == "BertConfig":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Lit(getattr(transformers, model)(getattr(transformers, config)(**sizes, **settings))), tokens()


def squared(net, batch):
    return net(batch).square().mean()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Lit(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), squared), torch.randn(SAMPLES, LENGTH, 16)


def convolutions():
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3)]
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(4 * 64, 3))
    return Lit(net, squared), torch.randn(SAMPLES, 1, 8, 8)


class Unrolled(nn.Module):
    """Uses one weight in each time step, and makes float32 tensors of its own."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))
        self.odd = nn.Linear(16, 3)  # its rows do not divide

    def forward(self, x):
        for cell in self.cells:
            state, states = torch.zeros(x.shape[0], 16), []
            for step in x.unbind(1):
                state = cell(step, state)
                states.append(state * self.scale)
            x = torch.stack(states, 1)
        return self.odd(x + torch.linspace(0, 1, 16))


CASES = {
    "llama": lambda: hugging("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=False),
    "llama, tied": lambda: hugging("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True),
    "gpt2": lambda: hugging("GPT2LMHeadModel", "GPT2Config"),
    "t5": lambda: hugging("T5ForConditionalGeneration", "T5Config"),
    "bert": lambda: hugging("BertForMaskedLM", "BertConfig"),
    "encoder": encoder,
    "convolutions": convolutions,
    "lstm": lambda: (Lit(Recurrent(), squared), tokens()),
    "unrolled": lambda: (Lit(Unrolled(), squared), torch.randn(SAMPLES, LENGTH, 16)),
}


def losses(tmp_path, name, strategy, **options):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    module, batch = CASES[name]()
    if isinstance(strategy, dict):
        strategy = FSDP2Strategy(**strategy)
    elif strategy == "simple_fsdp":
        strategy, options["callbacks"] = SimpleFSDPStrategy(), [Compile(backend="aot_eager")]
    elif strategy == "ddp, compiled":
        strategy, module.net = "ddp", torch.compile(module.net, backend="aot_eager")
    run = trainer(tmp_path, epochs=STEPS, strategy=strategy, devices=2, precision="bf16-mixed", **options)
    run.fit(module, DataLoader(batch, batch_size=SAMPLES // 2 // options.get("accumulate_grad_batches", 1)))
    return losses_of(module, STEPS)


def run_losses(tmp_path, name, strategy, options):
    return losses(tmp_path, name, strategy, **options)


@pytest.mark.parametrize("name", CASES)
def test_fsdp2_gives_the_losses_of_stock_ddp(ranks, tmp_path, name):
    if "lstm" in name:
        skip_without()
    ours, stock = (ranks(losses, tmp_path, name, strategy) for strategy in ({}, "ddp"))
    assert ours == pytest.approx(stock, rel=3e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "convolutions"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert", "llama, tied", "t5", "encoder")),
    ],
)
def test_simple_fsdp_gives_the_losses_of_stock_ddp(ranks, tmp_path, name):
    # T5 adds one bias to the scores of every layer, and a graph sums its gradients in another order.
    stock_is = "ddp, compiled" if name == "t5" else "ddp"
    ours, stock = (ranks(losses, tmp_path, name, strategy) for strategy in ("simple_fsdp", stock_is))
    assert ours == pytest.approx(stock, rel=3e-6)


WAYS = {
    "accumulation": ({"sync": "last"}, {"accumulate_grad_batches": 2}),
    "clipping": ({}, {"gradient_clip_val": 0.1}),
    "no sharding": ({"sharding": "none"}, {}),
    "gradients": ({"sharding": "gradients"}, {}),
    "unused": ({"unused_parameters": True}, {}),
    "on the CPU": ({"offload": True}, {}),
    "recomputed": ({}, {"callbacks": [ActivationCheckpoint()]}),
    "compiled": ({}, {"callbacks": [Compile(backend="aot_eager", scope="blocks")]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_sharding_gives_the_losses_of_stock_ddp(ranks, tmp_path, way):
    strategy, options = WAYS[way]
    ours = ranks(run_losses, tmp_path, "llama", strategy, options)
    stock = ranks(run_losses, tmp_path, "llama", "ddp", {k: v for k, v in options.items() if k != "callbacks"})
    assert ours == pytest.approx(stock, rel=3e-6)


# A product that is split over two devices is rounded in two parts.
MESHES = {
    "copies": ({"replicate_size": 2}, None, 2e-6),
    "tensor parallel": ({"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"}, 2, 2e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_four_ranks_give_the_losses_of_stock_ddp(four_ranks, tmp_path, mesh):
    strategy, data_ranks, tolerance = MESHES[mesh]
    options = {"precision": "bf16-mixed", "accumulate": 2}
    ours = four_ranks(on_ranks, "Gpt", tmp_path, strategy, 4, {**options, "data_ranks": data_ranks})
    stock = four_ranks(on_ranks, "Gpt", tmp_path, "ddp", 4, options)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=tolerance)


class Gathered(TorchDispatchMode):
    """Counts all-gathers, reduce-scatters, and the bytes that come of the first."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_"):
            self.seen[name] += 1
            self.seen[f"{name} bytes"] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def communicated(tmp_path, name, options):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    module, batch = CASES[name]()
    multiplied = {f"{owner}.{name}" for owner, name in matmul_weights(module)}
    right = sum(p.nbytes // (2 if name in multiplied else 1) for name, p in module.named_parameters() if p.dim())
    with Gathered() as seen:
        module.on_train_batch_start = lambda *_: seen.seen.clear()
        strategy = FSDP2Strategy(sharding="gradients")
        run = trainer(tmp_path, epochs=1, strategy=strategy, devices=2, **options)
        run.fit(module, DataLoader(batch, batch_size=SAMPLES // 2))
    return dict(seen.seen), right


@pytest.mark.parametrize("name", ["llama", "encoder"])
def test_weights_of_products_are_gathered_in_half_the_bytes_and_in_no_more_collectives(ranks, tmp_path, name):
    (full, _), (pure, _), (ours, right) = (
        ranks(communicated, tmp_path, name, options)
        for options in (
            {"precision": "32-true"},
            {"plugins": [BF16Precision(weights="masters")]},
            {"precision": "bf16-mixed"},
        )
    )
    for kind in ("_allgather_base_", "_reduce_scatter_base_"):
        assert full[kind] == pure[kind] == ours[kind]
    assert ours["_allgather_base_ bytes"] == right < full["_allgather_base_ bytes"]
    assert ours["_reduce_scatter_base_ bytes"] == full["_reduce_scatter_base_ bytes"]


def kept(tmp_path, options):
    warnings.simplefilter("ignore")
    module, batch = CASES["llama"]()
    strategy, reports = FSDP2Strategy(reshard_after_forward="auto"), []
    module.on_train_end = lambda: reports.append(applied(strategy).report.parts["FSDP2Strategy"]["gathered_bytes"])
    run = trainer(tmp_path, epochs=2, strategy=strategy, devices=2, **options)
    run.fit(module, DataLoader(batch, batch_size=SAMPLES // 2))
    blocks = module.net.model.layers
    multiplied = sum(blocks.get_submodule(owner)._parameters[name].numel() for owner, name in matmul_weights(blocks))
    return reports[0], multiplied, sum(p.numel() for p in blocks.parameters())


def test_what_is_kept_gathered_is_counted_in_the_types_that_it_has(ranks, tmp_path):
    taken, multiplied, total = ranks(kept, tmp_path, {"precision": "bf16-mixed"})
    assert taken == 2 * multiplied + 4 * (total - multiplied)
    pure, _, _ = ranks(kept, tmp_path, {"plugins": [BF16Precision(weights="masters")]})
    assert pure == 2 * total


def graphs_of(tmp_path):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    blocks = [nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16)) for _ in range(2)]
    module = Lit(nn.Sequential(*blocks, nn.Linear(16, 6)), squared)  # each rank has an odd number of biases
    strategy, reports = SimpleFSDPStrategy(), []
    module.on_train_end = lambda: reports.append(applied(strategy).report.parts["SimpleFSDPStrategy"]["graphs"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a cached graph is not reported
        run = trainer(tmp_path, epochs=2, strategy=strategy, devices=2, precision="bf16-mixed")
        run.fit(module, DataLoader(torch.randn(SAMPLES, 16), batch_size=SAMPLES // 2))
    return losses_of(module, 2), {graph["backward"]: graph["after"] for graph in reports[0]}


@pytest.mark.slow
def test_a_graph_gathers_both_types_at_once(ranks, tmp_path):
    losses, found = ranks(graphs_of, tmp_path)
    # What lies so that nothing of four bytes may follow, as three biases of two bytes, is gathered by itself.
    assert (found[False]["gathers"], found[True]["gathers"], found[True]["reduce-scatters"]) == (2, 1, 1)
    assert losses[1] < losses[0]
