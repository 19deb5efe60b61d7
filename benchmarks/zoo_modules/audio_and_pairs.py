"""Sound, pairs of image and text, and series: transformers and torchaudio."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from typing_extensions import override

from zoo_modules.base import HuggingFace, Work, line, normal


def _speech(tiny: bool) -> dict[str, Any]:
    """Return the sizes of Wav2Vec2 and its kin, without what is dropped at random."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    made: dict[str, Any] = dict(zip(names, (32, 2, 2, 64) if tiny else (1024, 4, 16, 4096), strict=True))
    if tiny:
        convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
        made |= {**convolutions, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    dropouts = ("hidden", "attention", "activation", "feat_proj")
    return made | {f"{name}_dropout": 0.0 for name in dropouts} | {"layerdrop": 0.0, "final_dropout": 0.0}


def _waves(batch: int, length: int, *, letters: int = 0, classes: int = 0) -> Any:
    def make(generator: Generator) -> dict[str, Tensor]:
        made = {"input_values": torch.randn(batch, length, generator=generator)}
        if letters:
            made["labels"] = torch.randint(4, 32, (batch, letters), generator=generator)
        if classes:
            made["labels"] = torch.randint(classes, (batch,), generator=generator)
        return made

    return make


@line("wav2vec2_ctc", "audio", "transformers", gate=True, draws=True)
def wav2vec2_ctc(tiny: bool) -> Work:
    """Wav2Vec2 with CTC: masks drawn by numpy, a convolution with weight norm, a frozen feature encoder."""
    import transformers

    config = transformers.Wav2Vec2Config(vocab_size=32, ctc_loss_reduction="mean", **_speech(tiny))
    net = transformers.Wav2Vec2ForCTC(config)
    net.freeze_feature_encoder()
    return Work(HuggingFace(net), _waves(2, 1600, letters=4) if tiny else _waves(8, 80_000, letters=40))


@line("hubert", "audio", "transformers")
def hubert(tiny: bool) -> Work:
    """HuBERT that classifies, without masks."""
    import transformers

    config = transformers.HubertConfig(num_labels=10, apply_spec_augment=False, **_speech(tiny))
    net = transformers.HubertForSequenceClassification(config)
    return Work(HuggingFace(net), _waves(2, 1600, classes=10) if tiny else _waves(8, 80_000, classes=10))


@line("whisper", "audio", "transformers")
def whisper(tiny: bool) -> Work:
    """Whisper: convolutions, an encoder of spectrograms, a decoder of text."""
    import transformers

    width, layers, heads, wide, frames, text, batch = (
        (32, 1, 2, 64, 20, 8, 2) if tiny else (768, 4, 12, 3072, 1500, 128, 8)
    )
    config = transformers.WhisperConfig(
        vocab_size=128 if tiny else 51865,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=wide,
        decoder_ffn_dim=wide,
        max_source_positions=frames,
        max_target_positions=text,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )

    def make(generator: Generator) -> dict[str, Tensor]:
        spectra = torch.randn(batch, config.num_mel_bins, 2 * frames, generator=generator)
        return {
            "input_features": spectra,
            "labels": torch.randint(4, config.vocab_size, (batch, text), generator=generator),
        }

    return Work(HuggingFace(transformers.WhisperForConditionalGeneration(config)), make)


class Recognizer(LightningModule):
    """A Conformer with CTC, as torchaudio's examples have it; lengths vary within a batch."""

    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        self.net, self.head, self.loss = net, nn.Linear(width, 32), nn.CTCLoss(zero_infinity=True)

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        features, lengths, targets, target_lengths = batch
        out, lengths = self.net(features, lengths)
        chances = F.log_softmax(self.head(out), dim=-1).transpose(0, 1)
        return self.loss(chances, targets, lengths, target_lengths)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


@line("torchaudio_conformer", "audio", "torchaudio")
def torchaudio_conformer(tiny: bool) -> Work:
    """Torchaudio's Conformer."""
    from torchaudio.models import Conformer

    width, heads, wide, layers, batch, frames = (32, 2, 64, 2, 2, 40) if tiny else (512, 8, 2048, 6, 16, 600)
    net = Conformer(width, heads, wide, layers, depthwise_conv_kernel_size=15 if tiny else 31)

    def make(generator: Generator) -> tuple[Tensor, ...]:
        features = torch.randn(batch, frames, width, generator=generator)
        lengths = torch.linspace(frames // 2, frames, batch).long()
        letters = frames // 10
        targets = torch.randint(1, 32, (batch, letters), generator=generator)
        return features, lengths, targets, torch.full((batch,), letters)

    return Work(Recognizer(net, width), make)


class Contrastive(LightningModule):
    """The loss is computed inside the model, over the whole batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(**batch, return_loss=True).loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1)


def _pairs(tiny: bool, *, mask: bool) -> Any:
    batch, length, size, vocabulary = (4, 8, 32, 64) if tiny else (128, 32, 224, 32000)

    def make(generator: Generator) -> dict[str, Tensor]:
        ids = torch.randint(4, vocabulary - 1, (batch, length), generator=generator)
        ids[:, -1] = vocabulary - 1
        made = {"input_ids": ids, "pixel_values": torch.randn(batch, 3, size, size, generator=generator)}
        return made | ({"attention_mask": torch.ones_like(ids)} if mask else {})

    return make


def _towers(tiny: bool) -> tuple[dict[str, int], dict[str, int]]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    tower = dict(zip(names, (32, 64, 2, 2) if tiny else (768, 3072, 4, 12), strict=True))
    length, size, patch, vocabulary = (8, 32, 8, 64) if tiny else (32, 224, 16, 32000)
    text = {"vocab_size": vocabulary, "max_position_embeddings": length, "eos_token_id": vocabulary - 1}
    return {**tower, **text, "pad_token_id": 0, "bos_token_id": 1}, {**tower, "image_size": size, "patch_size": patch}


@line("clip", "image and text", "transformers", gate=True)
def clip(tiny: bool) -> Work:
    """CLIP."""
    import transformers

    text, vision = _towers(tiny)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32 if tiny else 512)
    return Work(Contrastive(transformers.CLIPModel(config)), _pairs(tiny, mask=True))


@line("siglip", "image and text", "transformers")
def siglip(tiny: bool) -> Work:
    """SigLIP: a sigmoid for each pair."""
    import transformers

    text, vision = _towers(tiny)
    config = transformers.SiglipConfig(
        text_config={**text, "projection_size": text["hidden_size"]}, vision_config=vision
    )
    return Work(Contrastive(transformers.SiglipModel(config)), _pairs(tiny, mask=False))


@line("patchtst", "series", "transformers", draws=True)
def patchtst(tiny: bool) -> Work:
    """PatchTST: forecasts of many series."""
    import transformers

    channels, context, horizon, batch = (3, 32, 8, 4) if tiny else (32, 512, 96, 64)
    width, layers, heads = (16, 2, 2) if tiny else (256, 4, 8)
    config = transformers.PatchTSTConfig(
        num_input_channels=channels,
        context_length=context,
        prediction_length=horizon,
        patch_length=8,
        patch_stride=8,
        d_model=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=2 * width,
        loss="mse",
    )
    series = normal((batch, context, channels), (batch, horizon, channels))

    def make(generator: Generator) -> dict[str, Tensor]:
        past, future = series(generator)
        return {"past_values": past, "future_values": future}

    return Work(HuggingFace(transformers.PatchTSTForPrediction(config)), make)
