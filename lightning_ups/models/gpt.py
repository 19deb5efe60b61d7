"""A Llama-shaped GPT: the reference model of this package, as a plain module and as a LightningModule.

Shape suffixes: B batch, T position, D width of the model, H query heads, K heads of keys and values, G query heads
for each of them, E width of a head, V vocabulary.

Every module that holds weights has a ``reset_parameters`` that draws them from torch's global generator, in the order
of ``modules()``, which is the order of construction. So a model that was built on the meta device and given memory is
initialised bit for bit like one that was built in place, by calling ``reset_parameters`` module by module.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.models.adamw import adamw
from lightning_ups.models.generate import generate
from lightning_ups.models.schedule import Schedule, scheduler
from lightning_ups.order.arguments import check_choice, check_finite, check_least

__all__ = ["GPT", "SIZES", "GPTConfig", "GPTModule", "Size"]

Size = Literal["tiny", "150M", "1B", "8B"]
Loss = Literal["logits", "chunked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        dim: Width of the model.
        num_layers: Number of blocks.
        num_heads: Number of query heads; each is ``dim / num_heads`` wide.
        num_kv_heads: Number of heads of keys and values, each shared by ``num_heads / num_kv_heads`` query heads.
        ffn_dim: Width of the SwiGLU feed-forward network.
        vocab_size: Number of tokens.
        max_seq_len: Longest sequence: the length of the table of rotary angles.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        qk_norm: Normalise queries and keys, each head by itself, before they are rotated.
        tie: Let the head use the embedding's weight.
        loss: How the loss is computed from targets: from all ``logits`` at once, or ``chunked``, some rows at a time,
            by `lightning_ups.kernels.linear_cross_entropy`, which never has them all in memory.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If a number is too small, the heads do not divide, or ``loss`` is unknown.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie: bool = False
    loss: Loss = "logits"

    def __post_init__(self) -> None:
        _check_shape("GPTConfig", **asdict(self))
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads} do not fit together."
                " A head has an even width of dim / num_heads, and each head of keys and values serves equally many"
                " query heads."
                " Make dim a multiple of twice num_heads, and num_heads a multiple of num_kv_heads."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def num_groups(self) -> int:
        """Query heads for each head of keys and values."""
        return self.num_heads // self.num_kv_heads

    def flops_per_token(self, seq_len: int) -> int:
        """Return the floating-point operations that training needs for one token of a sequence of ``seq_len``.

        ``6 x (weights in matrix products) + 6 x num_layers x dim x seq_len``. Forward costs 2 operations a weight and
        backward twice that. In attention, the scores and the weighted sum cost ``2 x dim`` each for every position
        that is looked at, which is half of ``seq_len`` on average, since attention is causal; backward costs twice as
        much. The embedding is a look-up and costs nothing; norms, rotation and activations are left out, and so is
        whatever is computed twice.
        """
        projections = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.dim
        weights = self.num_layers * self.dim * (projections + 3 * self.ffn_dim) + self.vocab_size * self.dim
        return 6 * weights + 6 * self.num_layers * self.dim * seq_len


def _check_shape(of: str, **given: Any) -> None:
    """Refuse what is no value of a `GPTConfig`, by the name of the class ``of`` that got it."""
    for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
        if name in given:
            check_least(name, given[name], 1, of=of, why="It is a size of the model.")
    if "rope_theta" in given:
        check_finite("rope_theta", given["rope_theta"], of=of, why="Its powers are the rotary frequencies.", above=0)
    if "norm_eps" in given:
        check_finite("norm_eps", given["norm_eps"], of=of, why="It is added to a mean square.")
    if "loss" in given:
        check_choice("loss", given["loss"], get_args(Loss), of=of, why="It says how the loss is computed.")


SIZES: Mapping[Size, GPTConfig] = MappingProxyType(
    {
        "tiny": GPTConfig(
            dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=384, vocab_size=256, max_seq_len=256
        ),
        "150M": GPTConfig(
            dim=768, num_layers=12, num_heads=12, num_kv_heads=4, ffn_dim=2048, vocab_size=50304, max_seq_len=2048
        ),
        # The shape of Llama 3.2 1B with a head of its own: 1.5 billion weights.
        "1B": GPTConfig(
            dim=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            ffn_dim=8192,
            vocab_size=128256,
            max_seq_len=8192,
            rope_theta=500_000.0,
        ),
        # Llama 3 8B.
        "8B": GPTConfig(
            dim=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            ffn_dim=14336,
            vocab_size=128256,
            max_seq_len=8192,
            rope_theta=500_000.0,
        ),
    }
)


class GPT(nn.Module):
    """A decoder of the Llama family: RMSNorm before each sublayer, rotary positions, grouped-query attention, SwiGLU.

    Its logits are those of transformers' ``LlamaForCausalLM`` with the same weights, or, with ``qk_norm``, of
    ``Qwen3ForCausalLM``; `lightning_ups.models.hf_names` translates the names.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        out_std = (2 * config.num_layers) ** -0.5  # so that the residual sum of all sublayers starts at one
        self.rope = RotaryTable(config.head_dim, config.max_seq_len, theta=config.rope_theta)
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, self.rope, out_std=out_std) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size, draw=not config.tie)
        self.criterion = CrossEntropy()
        self.tie_weights()

    @override
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits [batch, seq, vocab], or, given ``targets``, their mean cross-entropy in float32.

        Args:
            tokens: Integers [batch, seq].
            targets: The token that follows each [batch, seq]; -100 is not counted.
        """
        if tokens.dim() != 2:
            raise ValueError(
                f"Tokens of shape {tuple(tokens.shape)} were given to a GPT."
                " They are [batch, seq]."
                " Use tokens.unsqueeze(0) for a single sequence."
            )
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"A sequence of {tokens.shape[1]} tokens was given to a GPT with"
                f" max_seq_len={self.config.max_seq_len}."
                " The rotary angles are tabulated up to that length."
                " Make the sequences shorter, or build the model with a larger max_seq_len."
            )
        x_BTD = self.embedding(tokens)
        for block in self.layers:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        if targets is None:
            return self.head(x_BTD)
        if self.config.loss == "chunked":
            return linear_cross_entropy(x_BTD, plain_weight(self.head), targets)
        return self.criterion(self.head(x_BTD), targets)

    @property
    def read_past_forward(self) -> Mapping[str, str]:
        """Children whose weight is read where their forward does not run, each with the setting that does it."""
        return {"head": "loss='chunked'"} if self.config.loss == "chunked" else {}

    def init_weights(self) -> None:
        """Initialise every weight and table anew, from torch's global generator, as construction did."""
        for module in self.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make embedding and head one parameter again, if they are to be; ``to_empty`` and its kin part them."""
        if self.config.tie:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, config: GPTConfig, rope: "RotaryTable", *, out_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, rope, out_std=out_std)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config, out_std=out_std)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Attention(nn.Module):
    """Causal grouped-query attention with one product for queries, keys and values.

    The rows of ``qkv`` lie group by group, for each head of keys and values its query heads, its key and its value, so
    that a shard of the rows is whole groups.
    """

    def __init__(self, config: GPTConfig, rope: "RotaryTable", *, out_std: float) -> None:
        super().__init__()
        self.num_groups, self.head_dim = config.num_groups, config.head_dim
        self.rows_together = {"qkv": (config.num_groups + 2) * config.head_dim}  # where devices split the product
        self.rope = rope  # the model's one table; a block takes only its input, so that nothing casts the angles
        self.qkv = Linear(config.dim, config.num_kv_heads * (config.num_groups + 2) * config.head_dim)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.out = Linear(config.dim, config.dim, scale=out_std)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, self.num_groups + 2, self.head_dim))
        q_BTKGE, k_BTK1E, v_BTK1E = qkv.split((self.num_groups, 1, 1), dim=-2)
        q_BTKGE, k_BTK1E = self.rope(self.q_norm(q_BTKGE)), self.rope(self.k_norm(k_BTK1E))
        out_BHTE = attend(*(heads.flatten(2, 3).transpose(1, 2) for heads in (q_BTKGE, k_BTK1E, v_BTK1E)))
        return self.out(out_BHTE.transpose(1, 2).flatten(2))


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
    """Return causal attention; query heads share the heads of keys and values in order."""
    grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
    return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped)


def plain_weight(head: nn.Module) -> Tensor:
    """Return the weight of ``head``, whose forward is going to be passed over."""
    if type(head).forward is not Linear.forward:
        raise ValueError(
            f"The head became a {type(head).__name__}, and loss='chunked' would pass it over."
            " That loss reads the head's weight and multiplies it itself, so what a conversion does in the head's"
            " forward would have no effect."
            " Leave the head out of the conversion, or use loss='logits'."
        )
    if "forward" in head.__dict__:
        raise ValueError(
            "The head's forward was replaced, as in_float32 and callbacks with patterns do, and loss='chunked' would"
            " pass it over."
            " That loss reads the head's weight and multiplies it itself, so the setting would have no effect."
            " Leave the head out of in_float32 and of blocks, or use loss='logits'."
        )
    if isinstance(head.weight, DTensor):
        raise ValueError(
            "The head's weight is split over devices where loss='chunked' reads it: by tensor parallelism, or since the"
            " head is sharded as a block of its own."
            " That loss needs all classes of a row on one device, and passes over the head's forward, which gathers"
            " them."
            " Use loss='logits', or, without tensor parallelism, leave the head out of blocks."
        )
    assert isinstance(head.weight, Tensor)
    return head.weight


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: GPTConfig, *, out_std: float) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_dim)
        self.up = Linear(config.dim, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim, scale=out_std)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class CrossEntropy(nn.CrossEntropyLoss):
    """The mean cross-entropy in float32.

    A module, so that it can be compiled where only blocks are: uncompiled, the logits are in memory several times in
    float32, and read or written a dozen times.
    """

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(input.flatten(0, 1).float(), target.flatten())


class RotaryTable(nn.Module):
    """Rotates each pair (i, i + E/2) of a head's channels by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, *, theta: float) -> None:
        super().__init__()
        self.theta = theta
        shape = (max_seq_len, 1, 1, head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table where its buffers are."""
        positions, _, _, half = self.cos.shape
        # The operations of transformers, in their order, so that logits agree to the last bit.
        frequency = 1.0 / (self.theta ** (torch.arange(half, device=self.cos.device, dtype=torch.float32) / half))
        angle = torch.outer(torch.arange(positions, device=self.cos.device, dtype=torch.float32), frequency)
        self.cos.copy_(angle.cos()[:, None, None])
        self.sin.copy_(angle.sin()[:, None, None])

    @override
    def forward(self, x_BTKGE: Tensor) -> Tensor:
        cos, sin = self.cos[: x_BTKGE.shape[1]], self.sin[: x_BTKGE.shape[1]]
        a, b = x_BTKGE.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTKGE)


class Linear(nn.Linear):
    """A linear map without bias, drawn so that it keeps the variance of its input, times ``scale`` squared.

    With ``draw=False`` the weight is another module's, and nothing is drawn.
    """

    def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0, draw: bool = True) -> None:
        self.std = in_features**-0.5 * scale if draw else None  # before `nn.Linear`, which calls `reset_parameters`
        super().__init__(in_features, out_features, bias=False)

    @override
    def reset_parameters(self) -> None:
        if self.std is not None:
            nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """An embedding with small entries: it is also the head where weights are tied."""

    std = 0.02

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class GPTModule(LightningModule):
    """Trains a `GPT` to predict the next token.

    A batch is a tensor of integer tokens [batch, seq + 1] of any integer type: all but the last are read, all but the
    first are predicted. The model, ``self.model``, is built in ``configure_model``, so that it never needs to exist
    whole.

    Args:
        size: A shape from `SIZES`; the arguments down to ``loss``, where given, change it.
        vocab_size: Number of tokens.
        max_seq_len: Longest sequence.
        qk_norm: Normalise queries and keys.
        tie: Let the head use the embedding's weight.
        rope_theta: Base of the rotary frequencies.
        loss: From all ``logits`` at once, or ``chunked``, without ever having them all in memory.
        lr: The peak learning rate.
        betas: Decay of AdamW's averages.
        weight_decay: Of matrices; vectors do not decay.
        schedule: How the learning rate falls after the warm-up: along a ``cosine`` to the last step; ``wsd``, level and
            then linearly over the last ``decay_fraction``; or not at all, ``constant``.
        warmup_steps: Optimizer steps over which the learning rate rises.
        final_fraction: The last learning rate as a fraction of the peak.
        decay_fraction: The part of the run over which ``wsd`` falls.
        fused: AdamW's step as one kernel. None: yes on CPU and CUDA. Lightning's own ``bf16-mixed`` refuses to clip
            gradients with it.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If a choice is unknown or a number is out of range.

    Example::

        Trainer(max_steps=500).fit(GPTModule(size="tiny"), StdlibText())
    """

    model: GPT

    def __init__(
        self,
        *,
        size: Size = "tiny",
        vocab_size: int | None = None,
        max_seq_len: int | None = None,
        qk_norm: bool | None = None,
        tie: bool | None = None,
        rope_theta: float | None = None,
        loss: Loss | None = None,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        schedule: Schedule = "cosine",
        warmup_steps: int = 100,
        final_fraction: float = 0.1,
        decay_fraction: float = 0.2,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_choice("size", size, tuple(SIZES), of="GPTModule", why="It names a shape of the model.")
        why = "It is how the learning rate falls after the warm-up."
        check_choice("schedule", schedule, get_args(Schedule), of="GPTModule", why=why)
        why = "It counts the steps over which the learning rate rises."
        check_least("warmup_steps", warmup_steps, 0, of="GPTModule", why=why)
        why = "The optimizer or its schedule computes with it."
        for name, value, most in (
            ("lr", lr, None),
            ("weight_decay", weight_decay, None),
            ("final_fraction", final_fraction, 1),
            ("decay_fraction", decay_fraction, 1),
        ):
            check_finite(name, value, of="GPTModule", why=why, most=most)
        given = {
            "vocab_size": vocab_size,
            "max_seq_len": max_seq_len,
            "qk_norm": qk_norm,
            "tie": tie,
            "rope_theta": rope_theta,
            "loss": loss,
        }
        given = {name: value for name, value in given.items() if value is not None}
        _check_shape("GPTModule", **given)
        self.config = replace(SIZES[size], **given)
        self.lr, self.betas, self.weight_decay, self.fused = lr, betas, weight_decay, fused
        self.schedule: Schedule = schedule
        self.warmup_steps, self.final_fraction, self.decay_fraction = warmup_steps, final_fraction, decay_fraction

    @override
    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        tokens = getattr(data, "vocab_size", None)
        if isinstance(tokens, int) and tokens > self.config.vocab_size:
            raise ValueError(
                f"{type(data).__name__} has a vocabulary of {tokens} tokens, and the model one of"
                f" {self.config.vocab_size}."
                " A token beyond the model's has no embedding; on a GPU it ends the process without saying so."
                f" Give GPTModule vocab_size={tokens}."
            )

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "model"):  # a second fit continues with the trained weights
            self.model = GPT(self.config)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, seq, vocab] of ``tokens`` [batch, seq]."""
        return self.model(tokens)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Not on the progress bar: Lightning would wait for the GPU at every step to read it.
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch))

    @override
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a token, of predicting the tokens of ``batch`` [batch, seq + 1]."""
        return self.model(batch[:, :-1].long(), batch[:, 1:].long())

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = adamw(self, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=self.fused)
        steps = scheduler(
            optimizer,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    def generate(self, prompt: Tensor, **options: Any) -> Tensor:
        """Return ``prompt`` [batch, seq] and what the model says next; see `generate` for the options."""
        return generate(self.model, prompt, context=self.config.max_seq_len, **options)
