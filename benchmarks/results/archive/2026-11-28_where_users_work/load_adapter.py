import torch
from peft import PeftModel
from train_lora import CONFIG
from transformers import LlamaForCausalLM

torch.manual_seed(1)
tokens = torch.randint(64, (32, 16))
torch.manual_seed(0)
model = PeftModel.from_pretrained(LlamaForCausalLM(CONFIG), "lora")
with torch.no_grad():
    print(f"loss with the adapter: {model(input_ids=tokens, labels=tokens).loss.item():.3f}")
