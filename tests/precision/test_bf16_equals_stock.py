"""By default `BF16Precision` trains exactly as Lightning's ``"bf16-mixed"``: equal losses and weights, bit for bit."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_ups.precision import BF16Precision
from tests.foreign import FOREIGN, Lit, mlps, numbers
from tests.half_lstm import skip_without
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Batches(torch.utils.data.Dataset):
    """The same batch again and again, as samples."""

    def __init__(self, batch, count):
        self.batch, self.count = batch, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.batch


def losses_and_weights(make, tmp_path, options, **more):
    module, batch = make()
    torch.manual_seed(1)
    loader = DataLoader(Batches(batch, more.pop("steps", 5)), batch_size=None)
    trainer(tmp_path, **{"epochs": 1, **more}, **options).fit(module, loader)
    return torch.stack(module.losses), copy.deepcopy(module.state_dict())


def assert_equal_to_stock(make, tmp_path, **more):
    callbacks = more.pop("callbacks", list)
    losses, weights = losses_and_weights(
        make, tmp_path, {"precision": "bf16-mixed"}, callbacks=callbacks(), **dict(more)
    )
    ours, our_weights = losses_and_weights(
        make, tmp_path, {"plugins": [BF16Precision()]}, callbacks=callbacks(), **dict(more)
    )
    assert losses.isfinite().all()
    assert torch.equal(ours, losses)
    assert our_weights.keys() == weights.keys()
    assert all(torch.equal(our_weights[name], weight) for name, weight in weights.items())
    return changed_names(make, our_weights)


def changed_names(make, weights):
    before = make()[0].state_dict()
    return {name for name, weight in weights.items() if name in before and not torch.equal(weight, before[name])}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_modules(tmp_path, name):
    if "lstm" in name:
        skip_without()
    assert_equal_to_stock(FOREIGN[name], tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ],
    ids=str,
)
def test_clipping_and_accumulation(tmp_path, options):
    assert_equal_to_stock(FOREIGN["llama_tied"], tmp_path, steps=6, **options)


def encoder_decoder():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    ids = torch.arange(32).reshape(4, 8)
    return Lit(transformers.T5ForConditionalGeneration(config)), {"input_ids": ids, "labels": ids}


def mixture():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    ids = torch.arange(32).reshape(4, 8)
    return Lit(transformers.MixtralForCausalLM(config)), {"input_ids": ids, "labels": ids}


class Mixed(nn.Module):
    """Makes float32 tensors in its forward, and multiplies by raw parameters."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.experts, self.scale = nn.Parameter(torch.randn(4, 16, 16) / 4), nn.Parameter(torch.ones(16))

    def forward(self, ids):
        positions = torch.linspace(0, 1, ids.shape[1], device=ids.device)[:, None]
        x = self.norm(self.embedding(ids) + positions) * self.scale
        x = torch.einsum("bsd,edf->besf", x, self.experts).softmax(1).sum(1) + torch.ones(16)
        return torch.fft.rfft(x.float(), dim=1).abs()


def mixed():
    torch.manual_seed(0)
    return Lit(Mixed()), torch.arange(32).reshape(4, 8)


def demo_transformer():
    from lightning.pytorch.demos import Transformer

    class Language(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = Transformer(vocab_size=32, ninp=16, nhead=2, nhid=32, nlayers=2), []

        def training_step(self, batch, _):
            output = self.model(batch, batch)
            loss = nn.functional.nll_loss(output, batch.view(-1))
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Language(), torch.arange(32).reshape(4, 8)


@pytest.mark.parametrize("make", [encoder_decoder, mixture, mixed, demo_transformer])
def test_modules_that_mix_dtypes(tmp_path, make):
    assert_equal_to_stock(make, tmp_path)


class Evaluated(Lit):
    def validation_step(self, batch, _):
        self.losses.append(self.net(batch).square().mean().detach())


def evaluated():
    torch.manual_seed(0)
    return Evaluated(mlps()), numbers()


class Shadow(Callback):
    """Keeps a target network as users do, and swaps it in for validation through ``.data``."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if not hasattr(self, "shadow"):
            self.shadow = [p.detach().clone() for p in pl_module.parameters()]
        average = get_ema_avg_fn(0.9)
        self.shadow = [
            average(mine, p.detach(), 1) for mine, p in zip(self.shadow, pl_module.parameters(), strict=True)
        ]
        for p in pl_module.parameters():
            p.data.clamp_(-0.3, 0.3)
        if trainer.global_step == 3:
            pl_module.load_state_dict(pl_module.state_dict())
            for p, mine in zip(pl_module.parameters(), self.shadow, strict=True):
                p.data = mine.clone()


WAYS = {
    "EMA": lambda: [EMAWeightAveraging(decay=0.9)],
    "SWA": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
    "pruning": lambda: [ModelPruning("l1_unstructured", amount=0.3)],
    "own averages": lambda: [Shadow()],
}


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_that_write_weights(tmp_path, way):
    assert_equal_to_stock(evaluated, tmp_path, callbacks=WAYS[way], epochs=3)


class Backbone(Lit):
    def __init__(self):
        super().__init__(nn.ModuleDict())
        self.backbone, self.head = mlps(), nn.Linear(8, 1)

    def training_step(self, batch, _):
        loss = self.head(self.backbone(batch)).square().mean()
        self.losses.append(loss.detach())
        return loss


def backbone():
    torch.manual_seed(0)
    return Backbone(), numbers()


def test_an_unfrozen_backbone_trains(tmp_path):
    changed = assert_equal_to_stock(
        backbone, tmp_path, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)], epochs=3
    )
    assert any(name.startswith("backbone") for name in changed)


class Searching(Lit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Both(torch.optim.Optimizer):
    """Steps two optimizers, one for matrices and one for the rest."""

    def __init__(self, parameters):
        parameters = [*parameters]
        self.matrices = torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.1, momentum=0.9)
        self.rest = torch.optim.AdamW([p for p in parameters if p.ndim < 2], lr=1e-2)
        super().__init__(parameters, {})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.matrices.step()
        self.rest.step()
        return loss


class Wrapping(Lit):
    def configure_optimizers(self):
        return Both(self.parameters())


@pytest.mark.parametrize("kind", [Searching, Wrapping])
def test_optimizers_of_other_kinds(tmp_path, kind):
    def make():
        torch.manual_seed(0)
        return kind(mlps()), numbers()

    assert assert_equal_to_stock(make, tmp_path)


class Target(Lit):
    """Two optimizers, manual steps, and a momentum encoder that is updated at every step."""

    def __init__(self):
        super().__init__(mlps())
        self.automatic_optimization = False
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, _):
        for optimizer in self.optimizers():
            loss = (self.net(batch) - self.target(batch + 0.1)).square().mean() + self.net(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
                    mine.data.lerp_(theirs.data, 0.01)
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.net[:2].parameters(), 1e-2), torch.optim.SGD(self.net[2:].parameters(), 0.1)]


def test_momentum_encoders_under_manual_optimization(tmp_path):
    def make():
        torch.manual_seed(0)
        return Target(), numbers()

    assert any(name.startswith("target") for name in assert_equal_to_stock(make, tmp_path))
