import sys

import pytest
import torch

from lightning_ups._compat.torch.fsdp.hf_init import InitialisingOnMeta
from lightning_ups._compat.torch.fsdp.recording import recording

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_a_model_initialises_itself_on_meta_only_while_asked():
    original = transformers.PreTrainedModel.init_weights
    with recording() as asked:
        llama()
    assert transformers.PreTrainedModel.init_weights is original
    normals = [o for o in asked.operations if "normal_" in str(o.function)]
    assert len(normals) > 8  # every matrix, and not only the embedding's own constructor
    twice = InitialisingOnMeta()
    twice.ensure()
    twice.ensure()
    assert transformers.PreTrainedModel.init_weights is not original
    twice.end()
    twice.end()
    assert transformers.PreTrainedModel.init_weights is original


def test_nothing_is_imported_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    InitialisingOnMeta().ensure()
    assert "transformers.modeling_utils" not in sys.modules
