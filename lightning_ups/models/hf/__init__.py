"""Modules that train models of Hugging Face's transformers."""

from lightning_ups.models.hf.causal_lm import HFCausalLM
from lightning_ups.models.hf.classifiers import HFImageClassifier, HFSequenceClassifier
from lightning_ups.models.hf.masked_lm import HFMaskedLM
from lightning_ups.models.hf.module import HFModule
from lightning_ups.models.hf.seq2seq import HFSeq2Seq

__all__ = ["HFCausalLM", "HFImageClassifier", "HFMaskedLM", "HFModule", "HFSeq2Seq", "HFSequenceClassifier"]
