"""Reference models: plain modules, each with a LightningModule that trains it; and some that train transformers'."""

from lightning_ups.models.gpt import GPT, SIZES, GPTConfig, GPTModule
from lightning_ups.models.hf import (
    HFCausalLM,
    HFImageClassifier,
    HFMaskedLM,
    HFModule,
    HFSeq2Seq,
    HFSequenceClassifier,
)
from lightning_ups.models.pde import PDEModule, PDETransformer

__all__ = [
    "GPT",
    "SIZES",
    "GPTConfig",
    "GPTModule",
    "HFCausalLM",
    "HFImageClassifier",
    "HFMaskedLM",
    "HFModule",
    "HFSeq2Seq",
    "HFSequenceClassifier",
    "PDEModule",
    "PDETransformer",
]
