"""Images and videos: timm, torchvision, segmentation_models_pytorch, diffusers, and vision models of transformers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from typing_extensions import override

from zoo_modules.base import Classifier, HuggingFace, Work, images, line, normal


def _timm(tiny: bool, name: str, *, batch: int, small: Mapping[str, Any], size: int = 224) -> Work:
    """Build a classifier of timm; ``small`` are its arguments at the tiny size."""
    import timm

    net = timm.create_model(name, num_classes=10 if tiny else 1000, **(small if tiny else {}))
    data = images(2, small.get("img_size", 64), 10) if tiny else images(batch, size, 1000)
    return Work(Classifier(net), data)


@line("timm_resnet50", "convolutional", "timm")
def timm_resnet50(tiny: bool) -> Work:
    """ResNet-50."""
    return _timm(tiny, "resnet50", batch=128, small={"layers": (1, 1, 1, 1), "channels": (8, 16, 32, 64)})


@line("timm_convnext", "convolutional", "timm", gate=True)
def timm_convnext(tiny: bool) -> Work:
    """ConvNeXt-T: depthwise convolutions, layer norms over channels."""
    return _timm(tiny, "convnext_tiny", batch=128, small={"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)})


@line("timm_efficientnet", "convolutional", "timm")
def timm_efficientnet(tiny: bool) -> Work:
    """EfficientNet-B0: depthwise convolutions, squeeze and excitation."""
    return _timm(tiny, "test_efficientnet" if tiny else "efficientnet_b0", batch=128, small={})


@line("timm_regnet", "convolutional", "timm")
def timm_regnet(tiny: bool) -> Work:
    """RegNetY-3.2GF: grouped convolutions."""
    name = "regnety_002" if tiny else "regnety_032"
    return _timm(tiny, name, batch=128, small={})


@line("timm_mobilenetv3", "convolutional", "timm")
def timm_mobilenetv3(tiny: bool) -> Work:
    """MobileNetV3: many small kernels."""
    name = "mobilenetv3_small_050" if tiny else "mobilenetv3_large_100"
    return _timm(tiny, name, batch=128, small={})


_SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "patch_size": 8}


@line("timm_vit", "vision transformer", "timm", gate=True)
def timm_vit(tiny: bool) -> Work:
    """ViT-S/16."""
    return _timm(tiny, "vit_small_patch16_224", batch=128, small=_SMALL)


@line("timm_deit3", "vision transformer", "timm", draws=True)
def timm_deit3(tiny: bool) -> Work:
    """DeiT III with layer scale and random depth."""
    import timm

    more = {"drop_path_rate": 0.1, "num_classes": 10 if tiny else 1000, **(_SMALL if tiny else {})}
    net = timm.create_model("deit3_small_patch16_224", **more)
    return Work(Classifier(net), images(2, 32, 10) if tiny else images(128, 224, 1000))


@line("timm_swin", "vision transformer", "timm")
def timm_swin(tiny: bool) -> Work:
    """Swin-T: shifted windows, biases of relative positions."""
    small = {"depths": (1, 2), "embed_dim": 16, "num_heads": (2, 4), "img_size": 64, "window_size": 4}
    return _timm(tiny, "swin_tiny_patch4_window7_224", batch=64, small=small)


@line("timm_coatnet", "vision transformer", "timm")
def timm_coatnet(tiny: bool) -> Work:
    """CoAtNet: convolutions, then attention."""
    small = {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (16, 32, 64, 64)}
    return _timm(tiny, "coatnet_0_rw_224", batch=64, small=small)


@line("timm_pvt", "vision transformer", "timm")
def timm_pvt(tiny: bool) -> Work:
    """PVT v2: attention over reduced keys."""
    small = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (1, 2, 4, 8)}
    return _timm(tiny, "pvt_v2_b1", batch=64, small=small)


@line("timm_mixer", "vision transformer", "timm")
def timm_mixer(tiny: bool) -> Work:
    """MLP-Mixer."""
    import timm

    sizes = {"num_blocks": 2, "embed_dim": 32, "img_size": 32, "patch_size": 8, "num_classes": 10} if tiny else {}
    net = timm.models.MlpMixer(**sizes) if tiny else timm.create_model("mixer_b16_224")
    return Work(Classifier(net), images(2, 32, 10) if tiny else images(128, 224, 1000))


class Recipe(Classifier):
    """A classifier trained with torchvision's reference settings: momentum, label smoothing, one cycle."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@line("torchvision_resnet", "convolutional", "torchvision", way="lr schedule, momentum")
def torchvision_resnet(tiny: bool) -> Work:
    """Torchvision's ResNet with its reference settings."""
    from torchvision.models import resnet18, resnet50

    net = resnet18(num_classes=10) if tiny else resnet50(num_classes=1000)
    return Work(Recipe(net), images(2, 64, 10) if tiny else images(128, 224, 1000))


@line("torchvision_densenet", "convolutional", "torchvision")
def torchvision_densenet(tiny: bool) -> Work:
    """DenseNet: every layer reads all that came before."""
    from torchvision.models import DenseNet

    net = DenseNet(8, (2, 2, 2, 2), 16, num_classes=10) if tiny else DenseNet(32, (6, 12, 24, 16), 64)
    return Work(Classifier(net), images(2, 64, 10) if tiny else images(64, 224, 1000))


@line("torchvision_swin_v2", "vision transformer", "torchvision", draws=True)
def torchvision_swin_v2(tiny: bool) -> Work:
    """Swin v2 with random depth: cosine attention, positions by a network."""
    from torchvision.models import swin_v2_t
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    net = swin_v2_t()
    if tiny:
        sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": [4, 4]}
        net = SwinTransformer(num_classes=10, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **sizes)
    return Work(Classifier(net), images(2, 32, 10) if tiny else images(64, 224, 1000))


@line("torchvision_video", "convolutional", "torchvision")
def torchvision_video(tiny: bool) -> Work:
    """Videos: ResNet-18 with 3-D convolutions."""
    from torchvision.models.video import r3d_18

    batch, frames, size, classes = (1, 4, 32, 10) if tiny else (16, 16, 112, 400)

    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        videos = torch.randn(batch, 3, frames, size, size, generator=generator)
        return videos, torch.randint(classes, (batch,), generator=generator)

    return Work(Classifier(r3d_18(num_classes=classes)), make)


class Segmentation(LightningModule):
    """As torchvision's reference: a main and an auxiliary head."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        out = self.net(pictures)
        losses = {name: F.cross_entropy(logits, targets, ignore_index=255) for name, logits in out.items()}
        return losses["out"] + 0.5 * losses["aux"]

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _masks(batch: int, size: int, classes: int) -> Any:
    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(batch, 3, size, size, generator=generator)
        return pictures, torch.randint(classes, (batch, size, size), generator=generator)

    return make


@line("torchvision_deeplab", "segmentation and detection", "torchvision", draws=True)
def torchvision_deeplab(tiny: bool) -> Work:
    """DeepLabV3 on a ResNet-50, with its dropout."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large, deeplabv3_resnet50

    build = deeplabv3_mobilenet_v3_large if tiny else deeplabv3_resnet50
    net = build(weights=None, weights_backbone=None, num_classes=21, aux_loss=True)
    return Work(Segmentation(net), _masks(2, 64, 21) if tiny else _masks(16, 320, 21))


class Detection(LightningModule):
    """As torchvision's tutorial: the model returns its losses by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: tuple[list[Tensor], list[dict[str, Tensor]]], batch_idx: int) -> Tensor:
        pictures, targets = batch
        losses = self.net(pictures, targets)
        self.log_dict({name: loss.detach() for name, loss in losses.items()})
        return sum(losses.values(), torch.zeros((), device=self.device))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.002, momentum=0.9)


def _boxes(batch: int, size: int, classes: int) -> Any:
    def make(generator: Generator) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        pictures, targets = [], []
        for number in range(batch):
            count = 1 + (number * 3) % 7
            corner = torch.rand(count, 2, generator=generator) * size * 0.5
            extent = size * (0.1 + 0.35 * torch.rand(count, 2, generator=generator))
            labels = torch.randint(1, classes, (count,), generator=generator)
            targets.append({"boxes": torch.cat([corner, corner + extent], 1), "labels": labels})
            pictures.append(torch.rand(3, size, size, generator=generator))
        return pictures, targets

    return make


@line("torchvision_faster_rcnn", "segmentation and detection", "torchvision", draws=True, unused=True)
def torchvision_faster_rcnn(tiny: bool) -> Work:
    """Faster R-CNN: lists of images, numbers of boxes that vary, losses by name."""
    from torchvision.models.detection import FasterRCNN, fasterrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    size = 64 if tiny else 512
    sizes = {"min_size": size, "max_size": size, "num_classes": 5 if tiny else 91}
    if tiny:
        net = FasterRCNN(resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5), **sizes)
    else:
        net = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, **sizes)
    return Work(Detection(net), _boxes(2 if tiny else 8, size, sizes["num_classes"]))


@line("torchvision_retinanet", "segmentation and detection", "torchvision")
def torchvision_retinanet(tiny: bool) -> Work:
    """RetinaNet: focal loss over anchors."""
    from torchvision.models.detection import RetinaNet, retinanet_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    size = 64 if tiny else 512
    sizes = {"min_size": size, "max_size": size, "num_classes": 5 if tiny else 91}
    if tiny:
        net = RetinaNet(resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5), **sizes)
    else:
        net = retinanet_resnet50_fpn(weights=None, weights_backbone=None, **sizes)
    return Work(Detection(net), _boxes(2 if tiny else 8, size, sizes["num_classes"]))


class Dice(LightningModule):
    """As the example of segmentation_models_pytorch has it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        import segmentation_models_pytorch as smp

        self.net, self.loss_fn = net, smp.losses.DiceLoss("multiclass", from_logits=True)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        return self.loss_fn(self.net(pictures), targets)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@line("smp_unet", "segmentation and detection", "segmentation_models_pytorch", "timm", way="lr schedule")
def smp_unet(tiny: bool) -> Work:
    """U-Net on a ResNet-34."""
    import segmentation_models_pytorch as smp

    net = smp.Unet("resnet18" if tiny else "resnet34", encoder_weights=None, classes=8)
    return Work(Dice(net), _masks(2, 64, 8) if tiny else _masks(32, 256, 8))


@line("segformer", "segmentation and detection", "transformers", draws=True)
def segformer(tiny: bool) -> Work:
    """SegFormer with its dropout."""
    import transformers

    batch, size, more = (2, 64, {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64]}) if tiny else (8, 384, {})
    config = transformers.SegformerConfig(num_labels=10, **more)
    masks = _masks(batch, size, 10)

    def make(generator: Generator) -> dict[str, Tensor]:
        pictures, targets = masks(generator)
        return {"pixel_values": pictures, "labels": targets}

    return Work(HuggingFace(transformers.SegformerForSemanticSegmentation(config)), make)


def _vision(tiny: bool) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    return dict(zip(names, (32, 2, 2, 64, 32, 8) if tiny else (768, 6, 12, 3072, 224, 16), strict=True))


@line("vit_mae", "vision transformer", "transformers", draws=True)
def vit_mae(tiny: bool) -> Work:
    """A masked autoencoder, which draws its mask."""
    import transformers

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    small = {f"decoder_{name}": value for name, value in zip(names, (32, 1, 2, 64), strict=True)} if tiny else {}
    config = transformers.ViTMAEConfig(**_vision(tiny), **small)
    batch, size = (2, 32) if tiny else (64, 224)

    def make(generator: Generator) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator)}

    return Work(HuggingFace(transformers.ViTMAEForPreTraining(config)), make)


@line("dinov2", "vision transformer", "transformers")
def dinov2(tiny: bool) -> Work:
    """DINOv2 with a classifier: layer scale, interpolated positions."""
    import transformers

    sizes = {name: value for name, value in _vision(tiny).items() if name != "intermediate_size"}
    net = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(num_labels=10, **sizes))
    batch, size = (2, 32) if tiny else (64, 224)

    def make(generator: Generator) -> dict[str, Tensor]:
        pictures = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(10, (batch,), generator=generator)}

    return Work(HuggingFace(net), make)


class Diffusion(LightningModule):
    """Denoising as the training examples of diffusers have it; noise and times are in the batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        from diffusers import DDPMScheduler

        self.net, self.scheduler = net, DDPMScheduler(num_train_timesteps=1000)

    @override
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        noisy = self.scheduler.add_noise(batch["clean"], batch["noise"], batch["timesteps"])
        predicted = self.net(noisy, timestep=batch["timesteps"], **batch["more"]).sample
        return F.mse_loss(predicted[:, : noisy.shape[1]].float(), batch["noise"].float())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=1e-2)


def _noise(shape: tuple[int, ...], **more: Any) -> Any:
    def make(generator: Generator) -> dict[str, Any]:
        clean, noise = torch.randn((2, *shape), generator=generator)
        times = torch.randint(1000, shape[:1], generator=generator)
        made = {name: value(generator) for name, value in more.items()}
        return {"clean": clean, "noise": noise, "timesteps": times, "more": made}

    return make


@line("diffusers_unet", "diffusion", "diffusers")
def diffusers_unet(tiny: bool) -> Work:
    """The U-Net of unconditional image generation, with attention."""
    from diffusers import UNet2DModel

    batch, size, channels = (2, 16, (32, 32)) if tiny else (32, 64, (128, 256, 384))
    net = UNet2DModel(
        sample_size=size,
        layers_per_block=1 if tiny else 2,
        block_out_channels=channels,
        down_block_types=("DownBlock2D",) * (len(channels) - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (len(channels) - 1),
    )
    return Work(Diffusion(net), _noise((batch, 3, size, size)))


@line("diffusers_text_unet", "diffusion", "diffusers", way="gradient clipping")
def diffusers_text_unet(tiny: bool) -> Work:
    """The U-Net of Stable Diffusion, smaller: cross-attention to a text."""
    from diffusers import UNet2DConditionModel

    batch, size, channels, text = (2, 8, (32, 32), 16) if tiny else (16, 32, (192, 384, 576), 768)
    net = UNet2DConditionModel(
        sample_size=size,
        layers_per_block=1,
        block_out_channels=channels,
        down_block_types=("CrossAttnDownBlock2D",) * (len(channels) - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (len(channels) - 1),
        cross_attention_dim=text,
        attention_head_dim=8,
    )
    words = {"encoder_hidden_states": lambda generator: torch.randn(batch, 77, text, generator=generator)}
    data = _noise((batch, 4, size, size), **words)
    return Work(Diffusion(net), data, trainer={"gradient_clip_val": 1.0})


@line("diffusers_dit", "diffusion", "diffusers", gate=True, draws=True)
def diffusers_dit(tiny: bool) -> Work:
    """DiT: a transformer with adaptive norms, which drops labels at random."""
    from diffusers import DiTTransformer2DModel

    batch, size, heads, width, layers = (2, 8, 2, 16, 2) if tiny else (32, 32, 16, 64, 5)
    net = DiTTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width,
        in_channels=4,
        out_channels=8,
        num_layers=layers,
        sample_size=size,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=1000,
        upcast_attention=False,
    )
    labels = {"class_labels": lambda generator: torch.randint(1000, (batch,), generator=generator)}
    return Work(Diffusion(net), _noise((batch, 4, size, size), **labels))


class FlowMatching(LightningModule):
    """Flow matching as the training script of Stable Diffusion 3 has it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        clean, noise, times, text, pooled = batch
        sigma = times.sigmoid().view(-1, 1, 1, 1)
        noisy = (1 - sigma) * clean + sigma * noise
        out = self.net(
            hidden_states=noisy,
            timestep=1000 * sigma.flatten(),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return F.mse_loss(out.float(), (noise - clean).float())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=1e-4)


@line("diffusers_sd3", "diffusion", "diffusers", unused=True)
def diffusers_sd3(tiny: bool) -> Work:
    """The transformer of Stable Diffusion 3, smaller: image and text attend jointly."""
    from diffusers import SD3Transformer2DModel

    batch, size, layers, heads, width, text = (2, 8, 2, 2, 16, 32) if tiny else (16, 32, 6, 16, 64, 1024)
    net = SD3Transformer2DModel(
        sample_size=size,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=width,
        num_attention_heads=heads,
        joint_attention_dim=text,
        caption_projection_dim=heads * width,
        pooled_projection_dim=text,
        pos_embed_max_size=size,
    )
    latents = (batch, 4, size, size)
    return Work(FlowMatching(net), normal(latents, latents, (batch,), (batch, 77, text), (batch, text)))


class Autoencoder(LightningModule):
    """A variational autoencoder; the noise of the sample is drawn by the library."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        posterior: Any = self.net.encode(batch[0]).latent_dist
        out = self.net.decode(posterior.sample()).sample
        return F.mse_loss(out, batch[0]) + 1e-6 * posterior.kl().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@line("diffusers_vae", "diffusion", "diffusers", way="methods other than forward", draws=True)
def diffusers_vae(tiny: bool) -> Work:
    """AutoencoderKL, called by ``encode`` and ``decode``."""
    from diffusers import AutoencoderKL

    batch, size, channels = (2, 32, (32, 32)) if tiny else (16, 128, (64, 128, 256))
    blocks = len(channels)
    net = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=4,
        sample_size=size,
    )
    return Work(Autoencoder(net), normal((batch, 3, size, size)))
