import lightning as L
import torch
from peft import LoraConfig, get_peft_model
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


class Tuned(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


if __name__ == "__main__":
    torch.manual_seed(1)
    tokens = torch.randint(64, (32, 16))
    trainer = L.Trainer(
        strategy=FSDP2Strategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        callbacks=[Compile(backend="aot_eager")],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    model = Tuned()
    trainer.fit(model, torch.utils.data.DataLoader(tokens, batch_size=8))
    trainer.save_checkpoint("trained.ckpt")
    with torch.no_grad():
        print(f"loss of the trained model: {model.model(input_ids=tokens, labels=tokens).loss.item():.3f}")
