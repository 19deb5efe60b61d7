"""Language: a small transformer reads this file, with recomputed activations. `python examples/language.py`."""

from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups import ActivationCheckpoint, BF16Precision, Compile


class ByteModel(L.LightningModule):
    """Predict the next byte."""

    def __init__(self, dim: int = 64, length: int = 64):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=self.device)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


L.seed_everything(0)
text = torch.tensor(list(Path(__file__).read_bytes()))
callbacks = [Compile(blocks=["layers.layers.*"]), ActivationCheckpoint(blocks=["layers.layers.*"], save="matmuls")]
trainer = L.Trainer(max_steps=200, max_epochs=-1, plugins=[BF16Precision()], callbacks=callbacks)
trainer.fit(ByteModel(), DataLoader(text.unfold(0, 65, 1), batch_size=16, shuffle=True))
print(f"loss: {trainer.callback_metrics['loss']:.3f}, guessing: {torch.tensor(256).log():.3f}")
