import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ups.callbacks import Compile
from lightning_ups.strategies import FSDP2Strategy

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Plain(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy=FSDP2Strategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=[Compile(backend="aot_eager"), ModelCheckpoint(dirpath=".", filename="trained")],
    )
    trainer.fit(Plain(), torch.utils.data.DataLoader(torch.randint(64, (8, 16)), batch_size=8))
