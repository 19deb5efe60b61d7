"""What language models print at the end of fit: a generated text, and the loss next to the unigram entropy."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_ups.order import TrainerOnly
from lightning_ups.order.arguments import check_finite, check_least


class TextSample(Callback, TrainerOnly):
    """Print a generated text at the end of fit.

    The LightningModule must have ``generate(tokens, *, num_tokens, temperature, top_k, seed)``, which takes and returns
    tokens [batch, seq]; the datamodule must have ``encode(text)`` and ``decode(tokens)``. Training is not affected:
    sampling uses its own generator. The compiled model is not used, since each new length would be compiled again.

    Args:
        prompt: The beginning of the text.
        num_tokens: The number of tokens to generate.
        temperature: Divides the logits; below 1, likelier tokens are sampled more often.
        top_k: Sample from this many of the likeliest tokens. None: from all.
        seed: The seed for sampling.

    Raises:
        TypeError: When fitting starts, if module or datamodule lack a method.
        ValueError: If a number is out of range; when fitting starts, if the prompt has no tokens.
    """

    def __init__(
        self,
        *,
        prompt: str = "def ",
        num_tokens: int = 400,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        check_least("num_tokens", num_tokens, 0, of="TextSample", why="It counts tokens.")
        why = "It divides the logits; with 0, the most likely token is chosen."
        check_finite("temperature", temperature, of="TextSample", why=why)
        check_least("top_k", top_k, 1, of="TextSample", why="It counts tokens to draw from.", optional=True)
        self.prompt, self.num_tokens = prompt, num_tokens
        self.temperature, self.top_k, self.seed = float(temperature), top_k, int(seed)  # torch takes no long int

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _must_have("TextSample", pl_module, "generate")
        _must_have("TextSample", trainer.datamodule, "encode", "decode")  # type: ignore[attr-defined]
        _encoded(self.prompt, trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data, precision = trainer.datamodule, trainer.precision_plugin  # type: ignore[attr-defined]
        prompt = _encoded(self.prompt, data).to(pl_module.device)[None]
        # Every rank takes part: none can run a sharded model alone.
        with (
            evaluating(pl_module),
            precision.forward_context(),
            torch.compiler.set_stance("force_eager"),
        ):
            tokens = pl_module.generate(  # type: ignore[operator]
                prompt, num_tokens=self.num_tokens, temperature=self.temperature, top_k=self.top_k, seed=self.seed
            )
        if trainer.is_global_zero:
            line, text = "-" * 80, _printable(data.decode(tokens[0].tolist()))
            trainer.print(f"\nA sample, after {self.prompt!r}:\n{line}\n{text}\n{line}")


def _must_have(callback: str, part: object, *names: str) -> None:
    if missing := [name for name in names if not hasattr(part, name)]:
        where = "a run without a datamodule" if part is None else type(part).__name__
        raise TypeError(
            f"{callback} finds no {' and no '.join(missing)} in {where}."
            f" Add what is missing, or take {callback} out of the callbacks."
        )


def _encoded(prompt: str, data: Any) -> Tensor:
    tokens = data.encode(prompt)
    try:
        made = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):  # torch raises these for values that make no tensor
        made = torch.empty(())
    if made.dim() != 1 or (made.numel() and made.is_floating_point()):
        raise TypeError(
            f"{type(data).__name__}.encode returned a {type(tokens).__name__} instead of a list of tokens:"
            f" {str(tokens)[:80]}."
            " TextSample encodes its prompt with it."
            " Let encode return a list of integers."
        )
    if not made.numel():
        raise ValueError(
            f"TextSample(prompt={prompt!r}) encodes to no tokens."
            " The model needs at least one token."
            " Give a text that the datamodule has tokens for."
        )
    return made.long()


def _printable(text: str) -> str:
    """Return ``text`` with control characters replaced, so that any terminal can show it."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode, and each of its parts back into its own mode afterwards."""
    modes = {part: part.training for part in module.modules()}  # a frozen part may be in another mode than the rest
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


class UnigramBaseline(Callback, TrainerOnly):
    """Print the validation loss, the unigram entropy of the training tokens, and their ratio at the end of fit.

    The unigram entropy is the loss of a model that knows only how frequent each token is. A ratio of one means that the
    model learned nothing more. The datamodule must provide it as ``unigram_entropy``, in nats per token.

    Args:
        metric: The name under which the validation loss is logged, in nats per token.

    Raises:
        TypeError: When fitting starts, if the datamodule has no unigram entropy.
    """

    def __init__(self, *, metric: str = "val_loss") -> None:
        self.metric = metric

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _must_have("UnigramBaseline", trainer.datamodule, "unigram_entropy")  # type: ignore[attr-defined]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        entropy = trainer.datamodule.unigram_entropy  # type: ignore[attr-defined]
        loss = trainer.callback_metrics.get(self.metric)
        if not trainer.is_global_zero:
            return
        if loss is None:
            trainer.print(f"\nNo {self.metric} was logged; the unigram entropy is {_both(entropy)}.")
            return
        trainer.print(
            f"\nValidation loss  {_both(loss.item())}"
            f"\nUnigram entropy  {_both(entropy)}"
            f"\nRatio            {loss.item() / entropy:.3f}"
        )


def _both(nats: float) -> str:
    return f"{nats:.3f} nats a token ({nats / math.log(2):.3f} bits)"
