import lightning as L
import torch
from blocks import Blocks, Varying

from lightning_ups.callbacks import Compile
from lightning_ups.precision import BF16Precision

options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(
    max_epochs=1, plugins=[BF16Precision()], callbacks=[Compile()], enable_checkpointing=False, **options
)
trainer.fit(Blocks(), Varying())
trainer.save_checkpoint("trained.ckpt")

model = Blocks.load_from_checkpoint("trained.ckpt")
trainer = L.Trainer(plugins=[BF16Precision()], callbacks=[Compile()], **options)
outputs = trainer.predict(model, torch.utils.data.DataLoader([torch.ones(4, 8, 16)], batch_size=None))
model.eval()
compiled = torch.compile(model)
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
    output = compiled(torch.ones(4, 8, 16))
print("by the Trainer", outputs[0].flatten()[:3], "without", output.flatten()[:3])
