"""Sampling from a language model, token by token."""
# ruff: noqa: N803, N806 (shape suffixes are capitals: B batch, T position, V vocabulary)

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_ups.order.arguments import check_kind, check_least, check_seed

__all__ = ["generate"]


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

    The whole context is computed anew for every token: right for a sample at the end of a run, not for serving.
    The draws come from a generator of their own, so that training after it goes on as if nothing had been drawn.

    Args:
        logits_of: Takes tokens [batch, seq] and returns logits [batch, seq, vocab]; a `GPT`, for one.
        prompt: Tokens [batch, seq] of any integer type, at least one.
        num_tokens: How many tokens to add.
        context: The longest sequence that ``logits_of`` takes; what lies further back is forgotten.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw from so many of the likeliest tokens only, one at least. None: from all.
        seed: Of the draws.

    Raises:
        TypeError: If a number is none.
        ValueError: If the prompt is empty or has other axes, the temperature is negative, or a number is too small.
    """
    if prompt.dim() != 2:
        raise ValueError(
            f"generate was given a prompt of shape {tuple(prompt.shape)}."
            " It is [batch, seq]: as many prompts as are to be continued, of equal length."
            " Use prompt.unsqueeze(0) for a single one."
        )
    check_kind("temperature", temperature, float, of="generate", why="It divides the logits.")
    check_seed(seed, of="generate", why="It is that of the draws.")
    for name, value, least, why in (
        ("num_tokens", num_tokens, 0, "It counts tokens to add."),
        ("context", context, 1, "It counts tokens to look back at."),
        ("top_k", top_k, 1, "It counts tokens to draw from."),
    ):
        check_least(name, value, least, of="generate", why=why, optional=name == "top_k")
    if prompt.shape[1] == 0 or not temperature >= 0:
        raise ValueError(
            f"generate was given a prompt of {prompt.shape[1]} tokens and temperature={temperature}."
            " The first token is drawn from what follows the prompt, and a temperature divides the logits."
            " Give at least one token, and a temperature of 0 (no randomness) or more."
        )
    random = torch.Generator(prompt.device).manual_seed(int(seed))
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
