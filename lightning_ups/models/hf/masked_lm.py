"""Trains masked language models of Hugging Face's transformers."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.optional.transformers import imported
from lightning_ups.models.hf.module import IGNORED, HFModule

_REPLACED, _RANDOM = 0.8, 0.1  # of the chosen tokens; the others stay, as in BERT


class HFMaskedLM(HFModule):
    """Trains a masked language model, such as BERT, or adapters for it, to restore tokens.

    A batch is a `PackedBatch`, or a dict as transformers' collators make it. Without ``labels``, tokens are chosen at
    random: of those, 80 % become the mask token, 10 % another token, and 10 % stay. In validation, the choice is the
    same each time. The loss is the mean over the chosen tokens. Validation logs ``val_loss`` and ``val_perplexity``.

    Args:
        mask_fraction: The share of tokens that are chosen.
        mask_token: The number of the mask token. None: that of the tokenizer of ``pretrained``.
        **more: Those of `HFModule`.
    """

    auto_class = "AutoModelForMaskedLM"
    task_type = None
    logs_perplexity = True

    def __init__(self, *, mask_fraction: float = 0.15, mask_token: int | None = None, **more: Any) -> None:
        super().__init__(**more)
        if not 0 < mask_fraction <= 1 or (mask_token is None and self.pretrained is None):
            raise ValueError(
                f"HFMaskedLM(mask_fraction={mask_fraction}, mask_token={mask_token}) needs a fraction above 0 and at"
                " most 1, and with config the number of the mask token."
            )
        self.mask_fraction, self.mask_token = mask_fraction, mask_token

    @override
    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy of the chosen tokens of ``batch``."""
        return self.model(**self._inputs(batch)).loss

    @override
    def measure(self, batch: Any) -> dict[str, tuple[Tensor, Any]]:
        inputs = self._inputs(batch, seed=0)
        return {"loss": (self.model(**inputs).loss, (inputs["labels"] != IGNORED).sum())}

    def _inputs(self, batch: Any, *, seed: int | None = None) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            real = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
            return {**batch} if "labels" in batch else {**batch, **self._masked(batch["input_ids"], real, seed)}
        ids = batch.documents.ids
        seen = ids[:, None, :, None] == ids[:, None, None, :]
        packed = {"position_ids": batch.positions.long(), "attention_mask": seen}
        return packed | self._masked(batch.tokens.long(), batch.targets != IGNORED, seed)

    def _masked(self, tokens: Tensor, real: Tensor, seed: int | None) -> dict[str, Tensor]:
        random = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        chosen, how = (torch.rand(tokens.shape, device=tokens.device, generator=random) for _ in range(2))
        chosen = real & (chosen < self.mask_fraction)
        vocabulary = self.plain_model.get_input_embeddings().num_embeddings
        others = torch.randint(vocabulary, tokens.shape, device=tokens.device, generator=random)
        inputs = torch.where(chosen & (how < _REPLACED), self._mask_token, tokens)
        inputs = torch.where(chosen & (how >= 1 - _RANDOM), others, inputs)
        return {"input_ids": inputs, "labels": tokens.masked_fill(~chosen, IGNORED)}

    @cached_property
    def _mask_token(self) -> int:
        if self.mask_token is not None:
            return self.mask_token
        return imported().AutoTokenizer.from_pretrained(self.pretrained).mask_token_id
