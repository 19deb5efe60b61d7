"""Reference models: plain modules, each with a LightningModule that trains it."""

from lightning_ups.models.gpt import GPT, SIZES, GPTConfig, GPTModule
from lightning_ups.models.pde import PDEModule, PDETransformer

__all__ = ["GPT", "SIZES", "GPTConfig", "GPTModule", "PDEModule", "PDETransformer"]
