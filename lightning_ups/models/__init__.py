"""Reference models: plain modules, each with a LightningModule that trains it; and one that trains transformers'."""

from lightning_ups.models.gpt import GPT, SIZES, GPTConfig, GPTModule
from lightning_ups.models.hf_causal_lm import HFCausalLM
from lightning_ups.models.pde import PDEModule, PDETransformer

__all__ = ["GPT", "SIZES", "GPTConfig", "GPTModule", "HFCausalLM", "PDEModule", "PDETransformer"]
