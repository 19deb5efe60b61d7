import sys

import torch
from transformers import AutoModelForCausalLM

torch.manual_seed(1)
tokens = torch.randint(64, (32, 16))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(f"loss of {sys.argv[1]}: {model(input_ids=tokens, labels=tokens).loss.item():.3f}")
