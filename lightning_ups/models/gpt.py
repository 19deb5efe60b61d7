"""A GPT with the architecture of Llama, as a plain module and as a LightningModule.

Shape suffixes: B batch, T position, D width of the model, H query heads, K heads of keys and values, G query heads
for each of them, E width of a head, V vocabulary.

Every module with weights has a ``reset_parameters`` that draws them from torch's global generator. After construction
on the meta device, calling it in the order of ``modules()`` gives the same bits as construction in place.
"""
# ruff: noqa: N803, N806 (shape suffixes are capitals)

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_ups.kernels.attention import Documents, attention
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.models.generate import generate
from lightning_ups.models.optimizer import Schedule, ScheduledAdamW
from lightning_ups.order.arguments import check_choice

Size = Literal["tiny", "150M", "1B", "8B", "10B", "70B"]
Loss = Literal["logits", "chunked"]
TOKENIZER = "lightning_ups.tokenizer"  # the key in a checkpoint of the name of the run's tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        dim: Width of the model.
        num_layers: Number of blocks.
        num_heads: Number of query heads, each ``dim / num_heads`` wide.
        num_kv_heads: Number of heads of keys and values, each for ``num_heads / num_kv_heads`` query heads.
        ffn_dim: Width of the SwiGLU feed-forward network.
        vocab_size: Number of tokens.
        max_seq_len: The longest sequence.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        qk_norm: Normalize queries and keys of each head before rotation.
        tie: Share one weight between embedding and head.
        loss: ``logits`` computes all logits at once; ``chunked`` some rows at a time, in less memory, by
            `lightning_ups.kernels.linear_cross_entropy`.

    Raises:
        ValueError: If heads do not divide, or ``loss`` is unknown.
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
        check_choice("loss", self.loss, get_args(Loss), of="GPTConfig", why="It says how the loss is computed.")
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads} do not divide."
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
        """Return the FLOPs that training needs for one token of a sequence of ``seq_len``.

        ``6 x (weights in matrix products) + 6 x num_layers x dim x seq_len``. Forward takes 2 operations per weight,
        and in attention ``4 x dim`` for each visible position, on average ``seq_len / 2``. Backward takes twice as
        much. Norms, rotation, activations and recomputation do not count.
        """
        projections = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.dim
        weights = self.num_layers * self.dim * (projections + 3 * self.ffn_dim) + self.vocab_size * self.dim
        return 6 * weights + 6 * self.num_layers * self.dim * seq_len


_LLAMA_3_8B = GPTConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_dim=14336,
    vocab_size=128256,
    max_seq_len=8192,
    rope_theta=500_000.0,
)
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
        "8B": _LLAMA_3_8B,
        "10B": replace(_LLAMA_3_8B, num_layers=40),
        "70B": replace(_LLAMA_3_8B, dim=8192, num_layers=80, num_heads=64, ffn_dim=28672),  # Llama 3 70B
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
    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """Return the logits [batch, seq, vocab], or, given ``targets``, their mean cross-entropy in float32.

        Args:
            tokens: Integers [batch, seq].
            targets: The next token for each [batch, seq]; -100 is ignored.
            documents: Packed documents: a token sees only its own. Rotation depends on distances alone, so positions
                need not start again with each document.
        """
        if tokens.dim() != 2:
            raise ValueError(
                f"GPT expects tokens [batch, seq], not of shape {tuple(tokens.shape)}."
                " Use tokens.unsqueeze(0) for a single sequence."
            )
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"A sequence of {tokens.shape[1]} tokens is longer than max_seq_len={self.config.max_seq_len}."
                " Use shorter sequences, or a model with a larger max_seq_len."
            )
        x_BTD = self.embedding(tokens)
        packed = () if documents is None else (documents,)
        for block in self.layers:
            x_BTD = block(x_BTD, *packed)
        x_BTD = self.norm(x_BTD)
        if targets is None:
            return self.head(x_BTD)
        if self.config.loss == "chunked":
            return linear_cross_entropy(x_BTD, plain_weight(self.head), targets)
        return self.criterion(self.head(x_BTD), targets)

    @property
    def read_past_forward(self) -> Mapping[str, str]:
        """Children whose weight is used without calling their forward, with the setting that causes it."""
        return {"head": "loss='chunked'"} if self.config.loss == "chunked" else {}

    def init_weights(self) -> None:
        """Initialize all weights and tables, from torch's global generator, as in construction."""
        for module in self.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make embedding and head share a parameter, if configured. Calls such as ``to_empty`` separate them."""
        if self.config.tie:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input."""

    def __init__(self, config: GPTConfig, rope: "RotaryTable", *, out_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, rope, out_std=out_std)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config, out_std=out_std)

    @override
    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        # By name, since tensor parallelism expects one positional input.
        packed = {} if documents is None else {"documents": documents}
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), **packed)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Attention(nn.Module):
    """Causal grouped-query attention with one product for queries, keys and values.

    The rows of ``qkv`` are grouped by heads of keys and values: query heads, key, value. A shard has complete groups.
    """

    def __init__(self, config: GPTConfig, rope: "RotaryTable", *, out_std: float) -> None:
        super().__init__()
        self.num_groups, self.head_dim = config.num_groups, config.head_dim
        self.rows_together = {"qkv": (config.num_groups + 2) * config.head_dim}  # for tensor parallelism
        self.rope = rope  # shared; as an argument of the block it would be cast
        self.qkv = Linear(config.dim, config.num_kv_heads * (config.num_groups + 2) * config.head_dim)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.out = Linear(config.dim, config.dim, scale=out_std)

    @override
    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, self.num_groups + 2, self.head_dim))
        q_BTKGE, k_BTK1E, v_BTK1E = qkv.split((self.num_groups, 1, 1), dim=-2)
        q_BTKGE, k_BTK1E = self.rope(self.q_norm(q_BTKGE)), self.rope(self.k_norm(k_BTK1E))
        if documents is not None:
            heads_BTHE = (heads.flatten(2, 3) for heads in (q_BTKGE, k_BTK1E, v_BTK1E))
            return self.out(attention(*heads_BTHE, documents=documents).flatten(2))
        out_BHTE = attend(*(heads.flatten(2, 3).transpose(1, 2) for heads in (q_BTKGE, k_BTK1E, v_BTK1E)))
        return self.out(out_BHTE.transpose(1, 2).flatten(2))


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
    """Return causal attention."""
    grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
    return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped)


def plain_weight(head: nn.Module) -> Tensor:
    """Return the weight of ``head``, whose forward is not going to be called."""
    converted = type(head).forward is not Linear.forward or "forward" in head.__dict__
    if converted or isinstance(head.weight, DTensor):
        raise ValueError(
            f"loss='chunked' reads the head's weight without its forward, and the head is a {type(head).__name__} that"
            " was converted, computes in float32, or is split over devices. Leave the head out of conversions,"
            " in_float32 and blocks, or use loss='logits'."
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

    It is a module so that it can be compiled with the blocks: eagerly, the logits are in memory several times.
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
    """A linear layer without bias, initialized to multiply the variance of its input by ``scale`` squared.

    With ``draw=False`` the weight belongs to another module and is not initialized.
    """

    def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0, draw: bool = True) -> None:
        self.std = in_features**-0.5 * scale if draw else None  # before `nn.Linear`, which calls `reset_parameters`
        super().__init__(in_features, out_features, bias=False)

    @override
    def reset_parameters(self) -> None:
        if self.std is not None:
            nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """An embedding with small entries, since it may also be the head."""

    std = 0.02

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class GPTModule(ScheduledAdamW):
    """Trains a `GPT` to predict the next token.

    A batch is a tensor of tokens [batch, seq + 1] of any integer dtype, or has the attributes ``tokens``, ``targets``
    and ``documents``, as a `PackedBatch` has. The model, ``self.model``, is built in
    ``configure_model``, so that a strategy can shard it before it takes memory.

    Args:
        size: A shape from `SIZES`, which the arguments down to ``loss`` change.
        vocab_size: Number of tokens.
        max_seq_len: Longest sequence.
        qk_norm: Normalize queries and keys.
        tie: Share one weight between embedding and head.
        rope_theta: Base of the rotary frequencies.
        loss: From all ``logits`` at once, or ``chunked``, in less memory.
        lr: The peak learning rate.
        betas: Decay of AdamW's averages.
        weight_decay: Of matrices; vectors do not decay.
        schedule: How the learning rate decays after the warm-up: ``cosine``; ``wsd``, linearly over the last
            ``decay_fraction`` of the run; or ``constant``, not at all.
        warmup_steps: Optimizer steps over which the learning rate rises.
        final_fraction: The last learning rate as a fraction of the peak.
        decay_fraction: The part of the run over which ``wsd`` decays.
        fused: Use torch's fused AdamW. None: on CPU and CUDA. Lightning's ``bf16-mixed`` cannot clip gradients with it.

    Raises:
        ValueError: If a choice is unknown, or heads do not divide.

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
        self.keep_settings(
            of="GPTModule", lr=lr, betas=betas, weight_decay=weight_decay, schedule=schedule,
            warmup_steps=warmup_steps, final_fraction=final_fraction, decay_fraction=decay_fraction, fused=fused,
        )  # fmt: skip
        given = {
            "vocab_size": vocab_size,
            "max_seq_len": max_seq_len,
            "qk_norm": qk_norm,
            "tie": tie,
            "rope_theta": rope_theta,
            "loss": loss,
        }
        given = {name: value for name, value in given.items() if value is not None}
        self.config = replace(SIZES[size], **given)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data = getattr(self._trainer, "datamodule", None)
        if isinstance(name := getattr(data, "tokenizer", None), str) and name != "bytes":
            checkpoint[TOKENIZER] = name  # for `export`

    @override
    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        tokens = getattr(data, "vocab_size", None)
        if isinstance(tokens, int) and tokens > self.config.vocab_size:
            raise ValueError(
                f"{type(data).__name__} has a vocabulary of {tokens} tokens, and the model one of"
                f" {self.config.vocab_size}. Larger tokens have no embedding. Give GPTModule vocab_size={tokens}."
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
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Not on the progress bar, for which Lightning waits for the GPU in each step.
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=_num_rows(batch))

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=_num_rows(batch))

    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy of the predicted tokens of ``batch``."""
        if not isinstance(batch, Tensor):
            return self.model(batch.tokens.long(), batch.targets.long(), batch.documents)
        return self.model(batch[:, :-1].long(), batch[:, 1:].long())

    def generate(self, prompt: Tensor, **options: Any) -> Tensor:
        """Return ``prompt`` [batch, seq] followed by sampled tokens; see `generate` for the options."""
        return generate(self.model, prompt, context=self.config.max_seq_len, **options)


def _num_rows(batch: Any) -> int:
    return len(batch if isinstance(batch, Tensor) else batch.tokens)
