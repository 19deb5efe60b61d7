"""Ways to train: averages of weights, finetuning, adapters, several optimizers, closures, teachers."""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from zoo_modules.base import Classifier, HuggingFace, Regressor, Work, images, line, normal, tokens

FAMILY = "ways to train"
EPOCH = 16  # steps, where a callback acts on epochs


def _resnet(tiny: bool, *, classes: int = 100) -> nn.Module:
    import timm

    more = {"layers": (1, 1, 1, 1), "channels": (8, 16, 32, 64)} if tiny else {}
    return timm.create_model("resnet18", num_classes=classes, **more)


def _vit(tiny: bool, *, classes: int) -> nn.Module:
    import timm

    sizes: dict[str, Any] = (
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        if tiny
        else {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 6, "num_heads": 6}
    )
    return timm.models.VisionTransformer(num_classes=classes, **sizes)


def _llama(tiny: bool, *, width: int = 1024, layers: int = 6) -> tuple[nn.Module, Any]:
    import transformers

    width, layers, heads, vocabulary, batch, length = (
        (64, 2, 4, 128, 2, 32) if tiny else (width, layers, width // 64, 32000, 8, 1024)
    )
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width if tiny else 2816,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return transformers.LlamaForCausalLM(config), tokens(batch, length, vocabulary)


@line("ema", FAMILY, "timm", way="EMAWeightAveraging", gate=True)
def ema(tiny: bool) -> Work:
    """A ResNet with Lightning's exponential average of weights, after every step."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    data = images(2, 64, 100) if tiny else images(128, 224, 100)
    return Work(Classifier(_resnet(tiny)), data, callbacks=lambda: [EMAWeightAveraging(decay=0.99)])


@line("ema_llama", FAMILY, "transformers", way="WeightAveraging")
def ema_llama(tiny: bool) -> Work:
    """A Llama with an average after every second step."""
    from lightning.pytorch.callbacks import WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    class Every2(WeightAveraging):
        @override
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 0

    net, data = _llama(tiny)
    return Work(HuggingFace(net), data, callbacks=lambda: [Every2(avg_fn=get_ema_avg_fn(0.99))])


@line("swa", FAMILY, "timm", way="StochasticWeightAveraging", draws=True)
def swa(tiny: bool) -> Work:
    """A ResNet with Lightning's stochastic weight averaging, to its end, where statistics are computed anew."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Decayed(Classifier):
        @override
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]

    def callbacks() -> list[Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)]

    data = images(2, 64, 100) if tiny else images(128, 224, 100)
    epoch, steps = (4, 16) if tiny else (EPOCH, 9 * EPOCH)
    return Work(Decayed(_resnet(tiny)), data, callbacks=callbacks, epoch=epoch, steps=steps)


class Transfer(LightningModule):
    """Has what BackboneFinetuning asks for."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, 100)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        return F.cross_entropy(self.head(self.backbone(pictures)), targets)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-3)


@line("backbone_finetuning", FAMILY, "timm", way="BackboneFinetuning", gate=True)
def backbone_finetuning(tiny: bool) -> Work:
    """A ViT that is frozen in the first epoch and trained from the second on."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    data = images(2, 32, 100) if tiny else images(128, 224, 100)
    module = Transfer(_vit(tiny, classes=0), 32 if tiny else 384)
    return Work(
        module,
        data,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
        epoch=4 if tiny else EPOCH,
    )


@line("lora", FAMILY, "transformers", "peft", way="LoRA", gate=True)
def lora(tiny: bool) -> Work:
    """A Llama with adapters of peft."""
    import peft

    net, data = _llama(tiny, width=1536, layers=4)
    config = peft.LoraConfig(
        r=4 if tiny else 16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return Work(HuggingFace(peft.get_peft_model(net, config), lr=1e-3), data)


@line("frozen_layers", FAMILY, "transformers", way="frozen parts")
def frozen_layers(tiny: bool) -> Work:
    """A BERT that classifies, with frozen embeddings and lower layers."""
    import transformers

    width, layers, heads, wide, vocabulary, batch, length = (
        (64, 2, 4, 128, 128, 2, 32) if tiny else (768, 8, 12, 3072, 30522, 32, 512)
    )
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=wide,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    net: Any = transformers.BertForSequenceClassification(config)
    net.bert.embeddings.requires_grad_(False)
    net.bert.encoder.layer[: layers // 2].requires_grad_(False)
    ids = tokens(batch, length, vocabulary, labels=False, mask=True)

    def make(generator: Generator) -> dict[str, Tensor]:
        return {**ids(generator), "labels": torch.randint(3, (batch,), generator=generator)}

    return Work(HuggingFace(net), make)


class Adversarial(LightningModule):
    """Lightning's example of a GAN: manual optimization, two optimizers, toggled."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module, *, penalty: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator, self.penalty = generator, discriminator, penalty

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        real, latent = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self._generator_loss(latent)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = self._discriminator_loss(real, latent)
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.log_dict({"g_loss": loss.detach(), "d_loss": other.detach()}, prog_bar=True)
        return {"loss": loss.detach() + other.detach()}

    def _generator_loss(self, latent: Tensor) -> Tensor:
        score = self.discriminator(self.generator(latent))
        if self.penalty:
            return -score.mean()
        return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))

    def _discriminator_loss(self, real: Tensor, latent: Tensor) -> Tensor:
        fake = self.generator(latent).detach()
        good, bad = self.discriminator(real), self.discriminator(fake)
        if not self.penalty:
            right = F.binary_cross_entropy_with_logits(good, torch.ones_like(good))
            return (right + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad))) / 2
        between = (0.5 * real + 0.5 * fake.to(real.dtype)).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        return bad.mean() - good.mean() + self.penalty * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        settings: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **settings),
            torch.optim.Adam(self.discriminator.parameters(), **settings),
        ], []


def _perceptrons(pixels: int, latent: int, hidden: int) -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(latent, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden)
    )
    generator.extend([nn.LeakyReLU(0.2), nn.Linear(hidden, pixels), nn.Tanh()])
    discriminator = nn.Sequential(nn.Linear(pixels, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))
    return generator, discriminator


def _convolutions(latent: int, width: int, *, norms: bool) -> tuple[nn.Module, nn.Module]:
    """Return DCGAN's two networks, for images of 64 pixels."""
    up: list[nn.Module] = [nn.Unflatten(1, (latent, 1, 1))]
    widths = [latent, 8 * width, 4 * width, 2 * width, width]
    for before, after, stride in zip(widths[:-1], widths[1:], (1, 2, 2, 2), strict=True):
        up += [nn.ConvTranspose2d(before, after, 4, stride, int(stride > 1), bias=False), nn.BatchNorm2d(after)]
        up += [nn.ReLU(inplace=True)]
    up += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
    down: list[nn.Module] = []
    widths = [3, width, 2 * width, 4 * width, 8 * width]
    for before, after in itertools.pairwise(widths):
        down += [nn.Conv2d(before, after, 4, 2, 1, bias=False)]
        down += [nn.BatchNorm2d(after) if norms else nn.GroupNorm(1, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*up), nn.Sequential(*down, nn.Conv2d(8 * width, 1, 4), nn.Flatten())


@line("gan_small", FAMILY, "torch", way="GAN, two optimizers, manual optimization", gate=True, unused=True)
def gan_small(tiny: bool) -> Work:
    """Lightning's example of a GAN on images of digits; bound by the host."""
    batch, latent, hidden = (8, 8, 16) if tiny else (256, 100, 256)
    return Work(Adversarial(*_perceptrons(784, latent, hidden)), normal((batch, 784), (batch, latent)))


@line("dcgan", FAMILY, "torch", way="GAN, two optimizers, manual optimization", unused=True)
def dcgan(tiny: bool) -> Work:
    """DCGAN."""
    batch, latent, width = (2, 8, 4) if tiny else (256, 100, 128)
    nets = _convolutions(latent, width, norms=True)
    return Work(Adversarial(*nets), normal((batch, 3, 64, 64), (batch, latent)))


@line("wgan_gp", FAMILY, "torch", way="gradient penalty", unused=True)
def wgan_gp(tiny: bool) -> Work:
    """A Wasserstein GAN: its penalty differentiates twice."""
    batch, latent, width = (2, 8, 4) if tiny else (128, 100, 96)
    nets = _convolutions(latent, width, norms=False)
    return Work(Adversarial(*nets, penalty=10.0), normal((batch, 3, 64, 64), (batch, latent)))


@line("lbfgs", FAMILY, "torch", way="LBFGS")
def lbfgs(tiny: bool) -> Work:
    """A regression by LBFGS, whose steps compute the loss several times."""

    class Newton(Regressor):
        @override
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=4)

    batch, width, hidden = (8, 4, 16) if tiny else (16_384, 64, 1024)
    net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    return Work(Newton(net), normal((batch, width), (batch, 1)))


class Both(Optimizer):
    """Wraps two optimizers, as scripts that train with Muon do."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})
        self.param_groups = groups

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


@line("muon", FAMILY, "transformers", way="an optimizer that wraps two", gate=True)
def muon(tiny: bool) -> Work:
    """A Llama whose matrices Muon trains, and the rest AdamW."""

    class Mixed(HuggingFace):
        @override
        def configure_optimizers(self) -> Any:
            matrices = [p for n, p in self.named_parameters() if p.ndim == 2 and "layers" in n]
            rest = [p for n, p in self.named_parameters() if not (p.ndim == 2 and "layers" in n)]
            return Both(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=3e-4))

    net, data = _llama(tiny, width=768, layers=4)
    return Work(Mixed(net), data)


class SAM(Optimizer):
    """Sharpness-aware minimization, as its common implementation has it: the closure runs twice."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, rho: float, lr: float) -> None:
        super().__init__([*parameters], {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.param_groups[0]["rho"] / (torch.stack([p.grad.norm() for p in trained]).norm() + 1e-12)
        moves = [p.grad * scale for p in trained]
        for parameter, move in zip(trained, moves, strict=True):
            parameter.add_(move)
        closure()
        for parameter, move in zip(trained, moves, strict=True):
            parameter.sub_(move)
        self.base.step()
        return loss


@line("sam", FAMILY, "timm", way="an optimizer that calls the closure twice")
def sam(tiny: bool) -> Work:
    """A ViT with sharpness-aware minimization."""

    class Sharp(Classifier):
        @override
        def configure_optimizers(self) -> Any:
            return SAM(self.parameters(), rho=0.05, lr=0.01)

    return Work(Sharp(_vit(tiny, classes=100)), images(2, 32, 100) if tiny else images(64, 224, 100))


@line("accumulation", FAMILY, "transformers", way="gradient accumulation, clipping")
def accumulation(tiny: bool) -> Work:
    """A Llama with four batches for each optimizer step, and clipped gradients."""
    net, data = _llama(tiny, width=768, layers=4)
    return Work(HuggingFace(net), data, trainer={"accumulate_grad_batches": 4, "gradient_clip_val": 1.0})


@line("manual_clipping", FAMILY, "transformers", way="manual optimization, clipping, lr schedule")
def manual_clipping(tiny: bool) -> Work:
    """A Llama under manual optimization, as Lightning's page on it has it."""

    class Manual(HuggingFace):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.automatic_optimization = False

        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            loss = self.net(**batch).loss
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
            return {"loss": loss.detach()}

        @override
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-4, total_steps=100_000)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    net, data = _llama(tiny, width=768, layers=4)
    return Work(Manual(net), data)


def _views(batch: int, size: int) -> Any:
    """Return what makes two views of the same images."""

    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(batch, 3, size, size, generator=generator)
        first = pictures + 0.1 * torch.randn(pictures.shape, generator=generator)
        return first, pictures.flip(3) + 0.1 * torch.randn(pictures.shape, generator=generator)

    return make


def _projector(width: int, hidden: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out)
    )


class BYOL(LightningModule):
    """Two views, a student and a teacher that follows it."""

    def __init__(self, backbone: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.student = nn.Sequential(backbone, _projector(width, hidden, hidden // 4))
        self.predictor = _projector(hidden // 4, hidden, hidden // 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.data = slow.data * 0.99 + fast.data * 0.01
        first, second = batch
        return self._loss(first, second) + self._loss(second, first)

    def _loss(self, seen: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(other)
        return -F.cosine_similarity(self.predictor(self.student(seen)), target, dim=-1).mean()

    @override
    def configure_optimizers(self) -> Any:
        trained = [*self.student.parameters(), *self.predictor.parameters()]
        return torch.optim.SGD(trained, lr=0.06, momentum=0.9)


@line("byol", FAMILY, "timm", way="two views, momentum teacher", gate=True)
def byol(tiny: bool) -> Work:
    """BYOL on a ResNet."""
    width, hidden = (64, 32) if tiny else (512, 1024)
    return Work(BYOL(_resnet(tiny, classes=0), width, hidden), _views(4, 64) if tiny else _views(128, 160))


class DINO(LightningModule):
    """Self-distillation without labels: centered targets, a teacher that follows the student."""

    center: Tensor

    def __init__(self, backbone: nn.Module, width: int, out: int) -> None:
        super().__init__()
        head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))
        self.student = nn.Sequential(backbone, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, out))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        students = [self.student(view) for view in batch]
        with torch.no_grad():
            teachers = [self.teacher(view) for view in batch]
            targets = [((out - self.center) / 0.04).softmax(-1) for out in teachers]
            self.center.mul_(0.9).add_(torch.cat(teachers).mean(0, keepdim=True), alpha=0.1)
        pairs = [(targets[0], students[1]), (targets[1], students[0])]
        return sum((-(t * F.log_softmax(s / 0.1, -1)).sum(-1).mean() for t, s in pairs), self.center.new_zeros(()))

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=5e-4)


@line("dino", FAMILY, "timm", way="two views, momentum teacher")
def dino(tiny: bool) -> Work:
    """DINO on a ViT."""
    width, out, views = (32, 64, _views(2, 32)) if tiny else (384, 8192, _views(64, 224))
    return Work(DINO(_vit(tiny, classes=0), width, out), views)


class BarlowTwins(LightningModule):
    """Two views through one network; the loss is the cross-correlation."""

    def __init__(self, backbone: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(backbone, _projector(width, hidden, hidden))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second = (self.net(view) for view in batch)
        first, second = ((out - out.mean(0)) / (out.std(0) + 1e-5) for out in (first, second))
        correlation = first.T @ second / len(first)
        on = torch.diagonal(correlation).add(-1).square().sum()
        return on + 5e-3 * (correlation.square().sum() - torch.diagonal(correlation).square().sum())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@line("barlow_twins", FAMILY, "timm", way="two views")
def barlow_twins(tiny: bool) -> Work:
    """Barlow Twins on a ResNet: its batch norms run twice in each step."""
    width, hidden = (64, 32) if tiny else (512, 2048)
    return Work(BarlowTwins(_resnet(tiny, classes=0), width, hidden), _views(4, 64) if tiny else _views(128, 160))


class Distillation(LightningModule):
    """A student that learns from a frozen teacher and from labels."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.eval().requires_grad_(False)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        self.teacher.eval()
        with torch.no_grad():
            soft = (self.teacher(pictures) / 2).softmax(-1)
        logits = self.student(pictures)
        distance = F.kl_div(F.log_softmax(logits / 2, -1), soft, reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, targets) + 2 * distance

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


@line("distillation", FAMILY, "timm", way="frozen teacher")
def distillation(tiny: bool) -> Work:
    """A ResNet that learns from a ViT."""
    data = images(2, 32, 100) if tiny else images(128, 224, 100)
    return Work(Distillation(_resnet(tiny), _vit(tiny, classes=100)), data)


class Actions(LightningModule):
    """Q-learning with a target network that follows every step; bound by the host."""

    def __init__(self, states: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(states, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.online.append(nn.Linear(hidden, actions))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        states, actions, rewards, after = batch
        values = self.online(states).gather(1, actions)
        with torch.no_grad():
            wanted = rewards + 0.99 * self.target(after).max(1, keepdim=True).values
        return F.smooth_l1_loss(values, wanted)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.copy_(0.995 * slow.data + 0.005 * fast.data)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.online.parameters(), lr=1e-3)


@line("q_learning", FAMILY, "torch", way="target network")
def q_learning(tiny: bool) -> Work:
    """Q-learning on vectors."""
    batch, states, actions, hidden = (8, 4, 2, 16) if tiny else (256, 16, 6, 256)

    def make(generator: Generator) -> tuple[Tensor, ...]:
        before, after = torch.randn((2, batch, states), generator=generator)
        chosen = torch.randint(actions, (batch, 1), generator=generator)
        return before, chosen, torch.randn(batch, 1, generator=generator), after

    return Work(Actions(states, actions, hidden), make)


class Meta(LightningModule):
    """Model-agnostic meta-learning: the outer step differentiates through an inner one, by ``functional_call``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        inputs, targets, more, wanted = batch
        parameters = dict(self.net.named_parameters())
        loss = F.mse_loss(self.net(inputs), targets)
        slopes = torch.autograd.grad(loss, [*parameters.values()], create_graph=True)
        moved = {name: p - 0.01 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (more,)), wanted)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@line("maml", FAMILY, "torch", way="meta-learning")
def maml(tiny: bool) -> Work:
    """One task with one inner step."""
    batch, hidden = (8, 16) if tiny else (4096, 1024)
    net = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    return Work(Meta(net), normal((batch, 8), (batch, 1), (batch, 8), (batch, 1)))


@line("several_optimizers", FAMILY, "torch", way="two optimizers, schedules, manual optimization", unused=True)
def several_optimizers(tiny: bool) -> Work:
    """Two towers, each with an optimizer and a schedule."""

    class Towers(LightningModule):
        def __init__(self, width: int, hidden: int) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = (
                nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()) for _ in "ab"
            )
            self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in "ab")

        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
            inputs, targets = batch
            total = []
            towers = zip((self.first, self.second), self.heads, self.optimizers(), self.lr_schedulers(), strict=True)
            for tower, head, optimizer, schedule in towers:
                loss = F.mse_loss(head(tower(inputs)), targets)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                schedule.step()
                total.append(loss.detach())
            return {"loss": torch.stack(total).sum()}

        @override
        def configure_optimizers(self) -> Any:
            made = [
                torch.optim.AdamW([*self.first.parameters(), *self.heads[0].parameters()], lr=1e-3),
                torch.optim.SGD([*self.second.parameters(), *self.heads[1].parameters()], lr=1e-2),
            ]
            return made, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999) for optimizer in made]

    batch, width, hidden = (8, 4, 16) if tiny else (16_384, 256, 2048)
    return Work(Towers(width, hidden), normal((batch, width), (batch, 1)))
