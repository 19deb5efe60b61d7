"""Modules as others wrote them, each in a LightningModule that knows nothing of this package.

``FOREIGN[name]()`` returns a LightningModule, seeded, and one batch of four samples; ``BLOCKS[name]`` is what repeats.
"""

import sys
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Lit(LightningModule):
    """Trains a network that returns a loss, or a number for each sample."""

    def __init__(self, net):
        super().__init__()
        self.net, self.losses = net, []

    def training_step(self, batch, _):
        out = self.net(**batch) if isinstance(batch, dict) else self.net(batch)
        loss = out.loss if hasattr(out, "loss") else out.square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Manual(Lit):
    """Steps two optimizers itself."""

    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        halves = ([*self.net[:2].parameters()], [*self.net[2:].parameters()])
        return [torch.optim.AdamW(half, lr=1e-2) for half in halves]


class Late(Lit):
    """Builds its network in ``configure_model``."""

    def __init__(self):
        super().__init__(None)

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = mlps()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 1)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def mlps():
    return nn.Sequential(*(mlp() for _ in range(4)))


def numbers():
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def tokens():
    return torch.arange(32).reshape(4, 8)


def transformers():
    return pytest.importorskip("transformers")


def llama_net(*, tied):
    config = transformers().LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers().LlamaForCausalLM(config)


def language():
    return {"input_ids": tokens(), "labels": tokens()}


def llama():
    return Lit(llama_net(tied=False)), language()


def llama_tied():
    return Lit(llama_net(tied=True)), language()


def bert():
    config = transformers().BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    return Lit(transformers().BertForMaskedLM(config)), language()


def clip():
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers().CLIPConfig(
        text_config={**tower, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    images = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
    batch = {"input_ids": tokens(), "attention_mask": torch.ones(4, 8, dtype=torch.long), "pixel_values": images}
    return Lit(Contrastive(transformers().CLIPModel(config))), batch


class Contrastive(nn.Module):
    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, **batch):
        return self.clip(**batch, return_loss=True)


def sequential():
    return Lit(mlps()), numbers()


def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return Lit(net), torch.linspace(-1, 1, 4 * 4 * 8).reshape(4, 4, 8)


def lstm():
    return Lit(Recurrent()), tokens()


def batch_norm():
    def block():
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(block(), block(), block()), nn.Flatten())
    return Lit(net), torch.linspace(-1, 1, 4 * 8 * 8).reshape(4, 1, 8, 8).sin()


def frozen():
    module, batch = sequential()
    module.net[0].requires_grad_(False)
    module.net[2][0].weight.requires_grad_(False)
    return module, batch


def import_peft():
    """Without Transformer Engine, which it asks for, and which cannot load where torch has another cuDNN loaded."""
    with pytest.MonkeyPatch.context() as patch:
        if "transformer_engine" not in sys.modules:
            patch.setitem(sys.modules, "transformer_engine", None)
        return pytest.importorskip("peft")


def lora():
    peft = import_peft()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Lit(peft.get_peft_model(llama_net(tied=False), config)), language()


def manual():
    return Manual(mlps()), numbers()


def configure_model():
    return Late(), numbers()


def timm_vit():
    timm = pytest.importorskip("timm", reason="timm needs torchvision, whose wheel needs the torch build of a GPU")
    vit = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=4)
    return Lit(vit), torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


def seeded(build):
    def make():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return make


FOREIGN = {
    build.__name__: seeded(build)
    for build in (
        llama,
        llama_tied,
        bert,
        clip,
        sequential,
        transformer_encoder,
        lstm,
        batch_norm,
        frozen,
        lora,
        manual,
        configure_model,
        timm_vit,
    )
}

BLOCKS = {
    "llama": [f"net.model.layers.{i}" for i in range(3)],
    "llama_tied": [f"net.model.layers.{i}" for i in range(3)],
    "bert": [f"net.bert.encoder.layer.{i}" for i in range(2)],
    "clip": [f"net.clip.{tower}_model.encoder.layers.{i}" for tower in ("text", "vision") for i in range(2)],
    "sequential": [f"net.{i}" for i in range(4)],
    "transformer_encoder": [f"net.layers.{i}" for i in range(3)],
    "lstm": ["net"],
    "batch_norm": [f"net.1.{i}" for i in range(3)],
    "frozen": [f"net.{i}" for i in range(4)],
    "lora": [f"net.base_model.model.model.layers.{i}" for i in range(3)],
    "manual": [f"net.{i}" for i in range(4)],
    "configure_model": [f"net.{i}" for i in range(4)],
    "timm_vit": [f"net.blocks.{i}" for i in range(3)],
}
