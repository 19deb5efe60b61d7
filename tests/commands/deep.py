"""A GPT of 16 narrow blocks, and tokens for it, named in YAML."""

import torch
from lightning.pytorch import LightningModule

from lightning_ups.models.gpt import GPT, GPTConfig


class Deep(LightningModule):
    """Sixteen blocks, in one of which a fault is to be found."""

    def __init__(self, num_layers: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(
            GPTConfig(
                dim=32, num_layers=num_layers, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=64, max_seq_len=32
            )
        )

    def training_step(self, batch, _):
        return self.model(batch[:, :-1], batch[:, 1:])

    def validation_step(self, batch, _):
        self.log("val_loss", self.model(batch[:, :-1], batch[:, 1:]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
