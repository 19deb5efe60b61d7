"""Blocks of models that others wrote: where they are, how many, and how much of the weights they hold."""

import copy
import re
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule

from lightning_ups.transforms.blocks import find_blocks
from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.recompute.wrapping import recompute
from tests.architectures import rebuild, recorded
from tests.transforms.fsdp.test_sharding import sharded_model

# The share of all weights that blocks hold, and that the largest block holds, in per cent; where the blocks are, with
# "*" for each number, and how many of them are there.
TIMM = {
    "convnext_tiny": (92, 17, {"stages.*.blocks.*": 18}),
    "swin_tiny_patch4_window7_224": (92, 25, {"layers.*.blocks.*": 12}),
    "maxvit_tiny_tf_224": (97, 29, {"stages.*.blocks.*": 11}),
    "coatnet_0_224": (94, 28, {"stages.*.blocks.*": 12}),
    "mvitv2_tiny": (97, 29, {"stages.*.blocks.*": 10}),
    "davit_tiny": (92, 25, {"stages.*.blocks.*.*": 12}),
    "focalnet_tiny_srf": (92, 25, {"layers.*.blocks.*": 12}),
    "pvt_v2_b2": (90, 13, {"stages.*.blocks.*": 16}),
    "caformer_s18": (81, 12, {"stages.*.blocks.*": 18}),
    "regnety_016": (92, 19, {"s*.b*": 27}),
    "efficientnet_b0": (68, 14, {"blocks.*.*": 16}),
    "mobilenetv3_large_100": (51, 15, {"blocks.*.*": 15}),
    "resnet50": (92, 24, {"layer*.*": 16}),
    "resnetv2_50": (92, 24, {"stages.*.blocks.*": 16}),
    "densenet121": (87, 7, {"features.denseblock*.denselayer*": 58, "features.transition*": 3}),
    "dm_nfnet_f0": (89, 12, {"stages.*.*": 12}),
    "repvgg_a2": (95, 19, {"stages.*.*": 21}),
    "levit_256": (95, 14, {"stem.conv*": 4, "stages.*.blocks.*": 12, "stages.*.downsample": 2}),
    "edgenext_small": (90, 20, {"stages.*.blocks.*": 18}),
    "efficientformer_l1": (83, 22, {"stages.*.blocks.*": 15}),
    "hiera_tiny_224": (96, 25, {"blocks.*": 12}),
    "vit_base_patch16_224": (98, 8, {"blocks.*": 12}),
    "mixer_b16_224": (98, 8, {"blocks.*": 12}),
    "twins_svt_small": (98, 13, {"patch_embeds.*": 4, "blocks.*.*": 18, "pos_block.*": 4}),
}
TRANSFORMERS = {
    "Llama": (98, 3, {"layers.*": 32}),
    "GPT2": (68, 6, {"h.*": 12}),
    "Bert": (78, 6, {"encoder.layer.*": 12}),
    "T5": (73, 7, {"encoder.block.*": 6, "decoder.block.*": 6}),
    "Bart": (87, 4, {"encoder.layers.*": 12, "decoder.layers.*": 12}),
    "CLIP": (81, 5, {"text_model.encoder.layers.*": 12, "vision_model.encoder.layers.*": 12}),
    "Llava": (98, 3, {"vision_tower.encoder.layers.*": 24, "language_model.layers.*": 32}),
    "Whisper": (44, 6, {"encoder.layers.*": 4, "decoder.layers.*": 4}),
    "Wav2Vec2": (95, 8, {"feature_extractor.conv_layers.*": 6, "encoder.layers.*": 12}),
    "Mamba": (76, 2, {"layers.*": 32}),
    "Jamba": (99, 6, {"layers.*": 32}),
    "Qwen3Moe": (98, 4, {"layers.*": 24}),
    "DeepseekV3": (100, 2, {"layers.*": 61}),
    "SwitchTransformers": (92, 9, {"encoder.block.*": 12, "decoder.block.*": 12}),
    "ViT": (98, 8, {"layers.*": 12}),
    "Swin": (94, 26, {"encoder.layers.*.blocks.*": 12}),
    "ConvNext": (94, 17, {"encoder.stages.*.layers.*": 18}),
    "Segformer": (85, 24, {"stages.*.blocks.*": 8}),
    "ResNet": (100, 26, {"encoder.stages.*.layers.*": 16}),
    "RegNet": (100, 18, {"encoder.stages.*.layers.*": 22}),
}


def numel(module):
    return sum(p.numel() for p in module.parameters())


def table_row(model):
    holder = nn.Module()
    holder.net = model
    blocks = find_blocks(holder)
    places = {}
    for name in blocks:
        place = re.sub(r"\d+(?=\.|$)", "*", name.removeprefix("net."))
        places[place] = places.get(place, 0) + 1
    sizes, total = [*map(numel, blocks.values())], numel(model)
    return round(100 * sum(sizes) / total), round(100 * max(sizes) / total), places


@pytest.mark.parametrize("name", TIMM)
def test_blocks_of_timm(name):
    assert table_row(rebuild(name)) == TIMM[name]


@pytest.mark.parametrize("name", TIMM)
def test_the_recorded_trees_are_those_of_timm(name):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    if timm.__version__ != recorded()["timm"]:
        pytest.skip(f"recorded from timm {recorded()['timm']}")
    with torch.device("meta"):
        assert table_row(timm.create_model(name)) == TIMM[name]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_blocks_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config)
    assert table_row(model) == TRANSFORMERS[name]


# What uses the blocks


@cache
def stages():
    """Return a small ConvNeXt, of which one stage of four holds most weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[3, 3, 6, 3], image_size=64, num_labels=4)
    return transformers.ConvNextForImageClassification(config)


class Logits(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images):
        return self.net(images).logits


def images():
    return torch.linspace(-1, 1, 16 * 3 * 64 * 64).reshape(16, 3, 64, 64)


def peak_bytes(model):
    model(images()).sum().backward()  # the first step is measured by recompute itself
    model.zero_grad()
    with MemTracker() as tracker:
        model(images()).sum().backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_recomputing_the_blocks_of_a_model_with_stages_saves_most_memory():
    model = Logits(stages())
    without = peak_bytes(model)
    with recompute(find_blocks(model).values(), save="nothing"):
        assert peak_bytes(model) < 0.45 * without


def test_equal_blocks_of_a_stage_share_a_compilation():
    model, compiler = Logits(stages()), Compiler(backend="aot_eager")
    with compiled(find_blocks(model), compiler) as run:
        model(images()).sum().backward()
    assert sorted(len(group.blocks) for group in run.groups) == [3, 3, 3, 6]
    assert {group.facts["graphs"] for group in run.groups} == {1}


def largest_group():
    model = copy.deepcopy(stages())
    total = numel(model)
    sharded_model(model)
    gathered = []
    for module in reversed([*model.modules()]):  # inner ones first
        if isinstance(module, FSDPModule):
            gathered.append({*module.parameters()}.difference(*gathered))  # pyright: ignore[reportAttributeAccessIssue]
    return max(sum(p.numel() for p in group) for group in gathered) / total


def test_fsdp2_gathers_a_small_part_of_a_model_with_stages_at_once(ranks):
    assert ranks(largest_group) < 0.25
