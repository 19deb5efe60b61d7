"""Modules as users write them, each with what FSDP2 finds hard, and their training on one device or on ranks."""

import inspect
import warnings
from functools import partial, wraps
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.foreign import import_peft
from tests.toys import trainer

SAMPLES, WIDTH = 16, 8


class Case(LightningModule):
    """Regression of the input's sum; subclasses build and run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.losses = []
        self.build()

    def build(self):
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, x):
        return (self.run(x).squeeze(-1) - x.sum(-1)).square().mean()

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, _):
        return self.run(batch)

    def configure_optimizers(self):
        # Not Adam, which does not notice when all gradients are scaled.
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tied(Case):
    def build(self):
        super().build()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.project.weight
        self.layers[1].up.weight = self.layers[0].up.weight  # two blocks share one

    def run(self, x):
        return super().run(self.back(self.project(x)))


class Frozen(Case):
    def build(self):
        super().build()
        self.layers[0].requires_grad_(False)
        self.head.weight.requires_grad_(False)


class LoRA(Case):
    def build(self):
        peft = import_peft()
        super().build()
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, lora_alpha=1, target_modules=["up", "down"], init_lora_weights="gaussian"), self.layers
        )


class Scalar(Case):
    def build(self):
        super().build()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers[0].gain = nn.Parameter(torch.tensor(0.3))
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))  # read by the step, of no called module

    def run(self, x):
        return super().run(self.scale * x + self.layers[0].gain * self.bias)


class Fused(Scalar):
    """One kernel for all parameters, sharded and whole."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3, fused=True)


class ReadOutside(Case):
    """Weights read where their own module does not run: before, after, and of a block."""

    def build(self):
        super().build()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)

    def run(self, x):
        x = F.linear(x, self.embed.weight)  # earlier in forward, so later in backward, than the call
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.linear(x, self.layers[0].up.weight[:WIDTH]))


class Recurrent(Case):
    def build(self):
        super().build()
        self.lstm, self.gru = nn.LSTM(1, 6, batch_first=True), nn.GRU(6, WIDTH, batch_first=True)

    def run(self, x):
        return super().run(self.gru(self.lstm(x.unsqueeze(-1))[0])[0][:, -1])


class NestedRecurrent(Case):
    def build(self):
        self.model = nn.ModuleDict({"encoder": _Encoder()})
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x):
        return self.head(self.model["encoder"](x))


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(-1))[0][:, -1]


class Mixed(nn.Module):
    """Trainable parameters of two real types, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, dtype=torch.float64)
        self.still = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        x = (torch.fft.fft(x) * self.phase).real
        return self.still(self.down(torch.tanh(self.up(x)).double())).float()


class MixedTypes(Case):
    def build(self):
        self.layers = nn.ModuleList(Mixed() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)


class Manual(Case):
    """Two optimizers, each stepped inside the step, and a parameter that the step itself reads."""

    automatic_optimization = False

    def build(self):
        super().build()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch, _):
        first, second = self.optimizers()
        for optimizer in (first, second):
            loss = self.loss(batch * self.gain)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        rest = [self.gain, *self.head.parameters()]
        return torch.optim.SGD(self.layers.parameters(), lr=0.02), torch.optim.SGD(rest, lr=0.02)


class Configured(Case):
    """Builds itself where Lightning says that large models should."""

    def build(self):
        pass

    def configure_model(self):
        if not hasattr(self, "head"):
            torch.manual_seed(0)
            Case.build(self)


class Meta(Configured):
    """The same under the meta device, with initialisations that no ``reset_parameters`` does."""

    def configure_model(self):
        if hasattr(self, "head"):
            return
        torch.manual_seed(0)  # Lightning seeds anew where there are several processes
        with torch.device("meta" if self.trainer.world_size > 1 else "cpu"):
            Case.build(self)
            self.embed = nn.Embedding(3, WIDTH)
            self.gain = nn.Parameter(torch.randn(WIDTH))
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
            self.layers[1].up.weight = self.layers[0].up.weight
            self.apply(self.init)
            nn.init.trunc_normal_(self.layers[0].down.weight, std=0.2)

    def init(self, module):
        if isinstance(module, nn.Linear):
            module.bias.data.normal_(0, 0.1)

    def run(self, x):
        return super().run(self.scale * x * self.gain + self.shift + self.embed.weight[0])


class ChannelsLast(Case):
    def build(self):
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
        self.layers.to(memory_format=torch.channels_last)

    def run(self, x):
        return self.layers(x.view(-1, 1, 2, WIDTH // 2)).flatten(1).sum(-1)


class Normed(Case):
    def build(self):
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)


class Gpt(Case):
    """Our GPT on tokens made of the samples."""

    norms, tie = False, True

    def build(self):
        from lightning_ups.models.gpt import GPT, GPTConfig

        self.model = GPT(
            GPTConfig(
                dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=32, vocab_size=32, max_seq_len=WIDTH,
                tie=self.tie, qk_norm=self.norms,
            )
        )  # fmt: skip

    def loss(self, x):
        tokens = (x * 8).long() % 32
        return self.model(tokens, tokens.roll(-1, 1))


class GptNormed(Gpt):
    norms, tie = True, False


class Llama(Case):
    def build(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=32, max_position_embeddings=WIDTH,
            )
        )  # fmt: skip

    def loss(self, x):
        tokens = (x * 8).long() % 32
        return self.model(tokens, labels=tokens, use_cache=False).loss


class Bert(Case):
    def build(self):
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(
            BertConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
                max_position_embeddings=WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def loss(self, x):
        tokens = (x * 8).long() % 32
        return self.model(tokens, labels=tokens).loss


class Clip(Case):
    """A scalar that scales logits, and two towers; its loss is computed here, since its own is of one rank's batch."""

    def build(self):
        from transformers import CLIPConfig, CLIPModel

        tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = CLIPModel(
            CLIPConfig(
                text_config={**tower, "vocab_size": 32, "max_position_embeddings": WIDTH, "eos_token_id": 31},
                vision_config={**tower, "image_size": 8, "patch_size": 4},
                projection_dim=8,
            )
        )

    def loss(self, x):
        tokens = (x * 8).long() % 32
        images = x.view(-1, 1, 1, WIDTH).expand(-1, 3, WIDTH, WIDTH)
        out = self.model(input_ids=tokens, pixel_values=images)
        return (out.logits_per_image.diagonal() - 1).square().mean()


def decoder_of_transformers(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=32)).double()


CASES = {
    case.__name__: case
    for case in (
        Case,
        Tied,
        Frozen,
        LoRA,
        Scalar,
        Fused,
        ReadOutside,
        Recurrent,
        NestedRecurrent,
        MixedTypes,
        Manual,
        Configured,
        Meta,
        ChannelsLast,
        Normed,
        Gpt,
        GptNormed,
        Llama,
        Bert,
        Clip,
    )
}
NAMES = tuple(CASES)  # tests may add others for themselves


def data():
    torch.manual_seed(1)
    return torch.randn(SAMPLES, WIDTH)


def train(name, tmp_path, *, strategy="auto", ranks=1, steps=5, accumulate=1, data_ranks=None, prepare=None, **options):
    """Train a case so that every optimizer step sees all samples; return losses, weights and report."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    model = CASES[name]()
    if prepare is not None:
        prepare(model)
    lightning = trainer(
        tmp_path, epochs=steps, strategy=strategy, devices=ranks, **options, accumulate_grad_batches=accumulate
    )
    size = SAMPLES // (data_ranks or ranks) // accumulate
    lightning.fit(model, DataLoader(data(), batch_size=size))
    return model, lightning, {"losses": losses_of(model, steps), "weights": weights_of(model)}


def losses_of(model, steps):
    losses = torch.stack(model.losses).view(steps, -1).mean(1)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


def weights_of(model):
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_ranks(name, tmp_path, strategy, size, options):
    from lightning_ups.strategies import FSDP2Strategy
    from lightning_ups.transforms.sharding.sharded_before import recall

    made = FSDP2Strategy(**strategy) if isinstance(strategy, dict) else strategy
    model, _, result = train(name, tmp_path, strategy=made, ranks=size, **options)
    done = recall(model)
    return result | {"share": done and done.share_of_blocks}


def simply_on_ranks(name, tmp_path, strategy, size, options):
    """The same under SimpleFSDPStrategy, compiled as AOTAutograd traces it and run without a compiler."""
    from lightning_ups.callbacks import Compile
    from lightning_ups.strategies import SimpleFSDPStrategy

    callbacks = [Compile(backend="aot_eager"), *options.get("callbacks", ())]
    return on_ranks(name, tmp_path, SimpleFSDPStrategy(**strategy), size, {**options, "callbacks": callbacks})


def two_ranks(function):
    """Make a test of ``function`` that runs it, with its assertions, on two ranks."""

    @wraps(function)
    def test(ranks, **arguments):
        ranks(partial(_called, function.__module__, function.__name__), *arguments.values())

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = inspect.signature(function).parameters.values()
    test.__signature__ = inspect.Signature([inspect.Parameter("ranks", kind), *own])
    return test


def _called(module, name, *arguments):
    getattr(import_module(module), name).__wrapped__(*arguments)
