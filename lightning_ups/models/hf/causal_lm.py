"""Trains causal language models of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_ups._compat.optional.transformers import imported
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.models.hf.attention import packed_inputs, use_in
from lightning_ups.models.hf.loading import has_plain_head
from lightning_ups.models.hf.module import IGNORED, HFModule
from lightning_ups.transforms.forward import replaced_only_by
from lightning_ups.transforms.patching import instead_of


class HFCausalLM(HFModule):
    """Trains a causal language model of transformers, or adapters for it, to predict the next token.

    A batch is a `PackedBatch`, or a dict as transformers' collators make it: ``input_ids``, and if they are there
    ``labels`` and ``attention_mask``. The loss is the mean cross-entropy of the predicted tokens. Logits are not kept
    in memory if the head is a plain linear layer. Validation logs ``val_loss``, the mean over tokens, and
    ``val_perplexity``.

    Args:
        sample: Log a continuation of ``sample["prompt"]`` at each validation; the rest are arguments of ``generate``.
        **more: Those of `HFModule`.

    Raises:
        ValueError: If a choice is unknown, or not exactly one of ``pretrained`` and ``config`` is given.

    Example::

        Trainer(max_steps=500).fit(
            HFCausalLM(pretrained="Qwen/Qwen3-0.6B", lora={"r": 8}), PackedTokens("tokens", seq_len=1024, batch_size=4)
        )
    """

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"
    logs_perplexity = True

    def __init__(self, *, sample: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.sample = sample

    @override
    def prepare(self, model: Any) -> None:
        if "attn_implementation" not in self.options:
            use_in(model)
        self._plain_head = has_plain_head(model)

    @override
    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the logits [batch, seq, vocab]; further inputs are those of the model."""
        return self.model(input_ids=input_ids, **inputs).logits

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        if self.sample is not None and batch_idx == dataloader_idx == 0 and not self.trainer.sanity_checking:
            self._log_sample(**self.sample)

    @override
    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy of the predicted tokens of ``batch``, and what balances experts."""
        return self._loss(*self._inputs(batch))

    @override
    def measure(self, batch: Any) -> dict[str, tuple[Tensor, Any]]:
        inputs, targets = self._inputs(batch)
        return {"loss": (self._loss(inputs, targets, balanced=False), (targets != IGNORED).sum())}

    def _inputs(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """Return the model's inputs, and the target of each position."""
        if not isinstance(batch, Mapping):
            packed = packed_inputs(self.plain_model, batch.positions.long(), batch.documents)
            return {"input_ids": batch.tokens.long(), **packed}, batch.targets.long()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if labels is None:
            labels = batch["input_ids"]
            labels = labels if mask is None else labels.masked_fill(mask == 0, IGNORED)
        return inputs, F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def _loss(self, inputs: dict[str, Any], targets: Tensor, *, balanced: bool = True) -> Tensor:
        model, head = self.plain_model, self.plain_model.get_output_embeddings()
        # A conversion works in its own forward. Compile changes nothing there.
        is_plain = self._plain_head and type(head).forward is nn.Linear.forward and not is_parametrized(head)
        if is_plain and replaced_only_by(head, "compiler"):
            if not isinstance(head.weight, DTensor):
                return linear_cross_entropy(model.base_model(**inputs, use_cache=False)[0], head.weight, targets)

            def forward(hidden: Tensor) -> Tensor:  # where a shard is whole
                if isinstance(head.weight, DTensor):  # a strategy has split the head
                    return nn.Linear.forward(head, hidden)
                return linear_cross_entropy(hidden, head.weight, targets)

            with instead_of(head, "forward", forward):
                output = model(**inputs, use_cache=False)
            if not output.logits.ndim:
                return output.logits
        else:
            output = model(**inputs, use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        balance = getattr(output, "aux_loss", None)  # of a mixture of experts
        if balanced and balance is not None:
            loss = loss + model.config.get_text_config().router_aux_loss_coef * balance
        return loss

    def _log_sample(self, prompt: str, **options: Any) -> None:
        """Log a continuation of ``prompt``, which all ranks compute, with the random state left as it was."""
        tokenizer: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(tokenizer, "encode"):
            tokenizer = imported().AutoTokenizer.from_pretrained(self.pretrained or self.config)
        tokens = torch.tensor([tokenizer.encode(prompt)], device=self.device)
        with torch.random.fork_rng([self.device] if tokens.is_cuda else []):
            torch.manual_seed(0)
            options |= {"attention_mask": torch.ones_like(tokens), "synced_gpus": self.trainer.world_size > 1}
            text = tokenizer.decode(self.model.generate(tokens, **options)[0].tolist())
        rank_zero_info(f"step {self.global_step}: {text}")
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            if hasattr(experiment := getattr(logger, "experiment", None), "add_text"):
                experiment.add_text("sample", text, self.global_step)  # type: ignore[union-attr]
