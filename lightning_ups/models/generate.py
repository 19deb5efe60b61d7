"""Sampling from a language model, token by token."""
# ruff: noqa: N803, N806 (shape suffixes are capitals: B batch, T position, V vocabulary)

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()  # not inference_mode: its tensors break a later training step of a sharded model
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Return ``prompt`` followed by ``num_tokens`` sampled tokens.

    There is no cache: the whole context is computed for each token. The global random state does not change.

    Args:
        logits_of: Takes tokens [batch, seq] and returns logits [batch, seq, vocab], as a `GPT` does.
        prompt: Tokens [batch, seq] of any integer dtype, at least one.
        num_tokens: How many tokens to add.
        context: The longest sequence that ``logits_of`` supports; earlier tokens are ignored.
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Sample from this number of the most likely tokens. None: from all.
        seed: For sampling.

    Raises:
        ValueError: If the prompt is empty or has a wrong shape.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"generate was given a prompt of shape {tuple(prompt.shape)}. It is [batch, seq] with at least one token."
            " Use prompt.unsqueeze(0) for a single one."
        )
    random = torch.Generator(prompt.device).manual_seed(seed)
    tokens_BT = prompt.long()
    for _ in range(num_tokens):
        logits_BV = logits_of(tokens_BT[:, -context:])[:, -1].float()
        tokens_BT = torch.cat((tokens_BT, _draw(logits_BV, temperature, top_k, random)), dim=1)
    return tokens_BT


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None:
        least_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=random)
