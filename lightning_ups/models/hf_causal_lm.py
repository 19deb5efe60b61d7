"""Trains causal language models of Hugging Face's transformers."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import Metric
from typing_extensions import override

from lightning_ups._compat.optional.transformers import imported
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.models.hf_attention import packed_inputs, use_in
from lightning_ups.models.hf_loading import from_config, from_pretrained, has_plain_head, with_adapters
from lightning_ups.models.optimizer import Schedule, ScheduledAdamW
from lightning_ups.order.arguments import check_choice
from lightning_ups.state.checkpoint import MODELS, described
from lightning_ups.transforms.forward import replaced_only_by

_IGNORED = -100
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


class HFCausalLM(ScheduledAdamW):
    """Trains a causal language model of transformers, or adapters for it, to predict the next token.

    A batch is a `PackedBatch`, or a dict as transformers' collators make it: ``input_ids``, and if they are there
    ``labels`` and ``attention_mask``. The loss is the mean cross-entropy of the predicted tokens. Logits are not kept
    in memory if the head is a plain linear layer. Validation logs ``val_loss``, the mean over tokens, and
    ``val_perplexity``.

    The model, ``self.model``, is built in ``configure_model``. A strategy of this package that shards reads the weights
    tensor by tensor into its shards.

    Args:
        pretrained: A folder with a model, or its name on the Hub.
        config: In its place, for random weights: a folder or name, or the content of a ``config.json`` such as
            ``{"model_type": "llama", "hidden_size": 256}``.
        lora: Train adapters alone, with these arguments of PEFT's ``LoraConfig``, such as ``{"r": 8}``. DoRA is
            ``{"r": 8, "use_dora": True}``.
        dtype: Of the weights. ``"auto"``: as in the checkpoint.
        options: Further arguments of ``AutoModelForCausalLM.from_pretrained`` or ``from_config``, such as
            ``{"attn_implementation": "flash_attention_2"}``.
        sample: Log a continuation of ``sample["prompt"]`` at each validation; the rest are arguments of ``generate``.
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
        ValueError: If a choice is unknown, or not exactly one of ``pretrained`` and ``config`` is given.

    Example::

        Trainer(max_steps=500).fit(
            HFCausalLM(pretrained="Qwen/Qwen3-0.6B", lora={"r": 8}), PackedTokens("tokens", seq_len=1024, batch_size=4)
        )
    """

    model: Any

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: str | dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        dtype: Dtype = "float32",
        options: dict[str, Any] | None = None,
        sample: dict[str, Any] | None = None,
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
        if (pretrained is None) == (config is None):
            raise ValueError(
                f"HFCausalLM(pretrained={pretrained!r}, config={config!r}) needs exactly one of the two."
                " Give pretrained for trained weights, or config for random ones."
            )
        check_choice("dtype", dtype, get_args(Dtype), of="HFCausalLM", why="It is the dtype of the weights.")
        self.keep_settings(
            of="HFCausalLM", lr=lr, betas=betas, weight_decay=weight_decay, schedule=schedule,
            warmup_steps=warmup_steps, final_fraction=final_fraction, decay_fraction=decay_fraction, fused=fused,
        )  # fmt: skip
        self.pretrained, self.config, self.lora, self.sample = pretrained, config, lora, sample
        self.options = {"dtype": dtype, **(options or {})}
        self.val_loss, self.test_loss = (_MeanOverTokens() for _ in range(2))

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):  # a second fit continues with the trained weights
            return
        sharded = getattr(self._trainer and self._trainer.strategy, "shards", False)
        with torch.device("meta") if sharded else nullcontext():
            if self.pretrained is not None:
                model = from_pretrained(self.pretrained, self.options).train()
            else:
                assert self.config is not None
                model = from_config(self.config, self.options)
            if "attn_implementation" not in self.options:
                use_in(model)
            self.model = model if self.lora is None else with_adapters(model, self.lora)
        self._plain_head = has_plain_head(model)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[MODELS] = described(self)  # for `export`

    @property
    def _plain(self) -> Any:
        """The model of transformers, which adapters are in."""
        return self.model if self.lora is None else self.model.base_model.model

    @override
    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        tokens, known = getattr(data, "vocab_size", None), self._plain.get_input_embeddings().num_embeddings
        if isinstance(tokens, int) and tokens > known:
            raise ValueError(
                f"{type(data).__name__} has a vocabulary of {tokens} tokens, and the model one of {known}. Larger"
                " tokens have no embedding. Tokenize with the model's own tokenizer."
            )

    @override
    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the logits [batch, seq, vocab]; further inputs are those of the model."""
        return self.model(input_ids=input_ids, **inputs).logits

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Not on the progress bar, for which Lightning waits for the GPU in each step.
        self.log("train_loss", loss, batch_size=1)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val_loss")
        if self.sample is not None and batch_idx == dataloader_idx == 0 and not self.trainer.sanity_checking:
            self._log_sample(**self.sample)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test_loss")

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("val_perplexity", self.val_loss.compute().exp(), prog_bar=True, sync_dist=True)

    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy of the predicted tokens of ``batch``, and what balances experts."""
        return self._loss(*self._inputs(batch))

    def _evaluate(self, batch: Any, name: str) -> None:
        inputs, targets = self._inputs(batch)
        mean = getattr(self, name)
        mean.update(self._loss(inputs, targets, balanced=False), (targets != _IGNORED).sum())
        self.log(name, mean, prog_bar=True)

    def _inputs(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """Return the model's inputs, and the target of each position."""
        if not isinstance(batch, Mapping):
            packed = packed_inputs(self._plain, batch.positions.long(), batch.documents)
            return {"input_ids": batch.tokens.long(), **packed}, batch.targets.long()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if labels is None:
            labels = batch["input_ids"]
            labels = labels if mask is None else labels.masked_fill(mask == 0, _IGNORED)
        return inputs, F.pad(labels[:, 1:], (0, 1), value=_IGNORED)

    def _loss(self, inputs: dict[str, Any], targets: Tensor, *, balanced: bool = True) -> Tensor:
        model, head = self._plain, self._plain.get_output_embeddings()
        # A conversion, or a strategy that splits the head, works in its forward. Compile changes nothing there.
        as_it_was = (
            replaced_only_by(head, "compiler") and type(head) is nn.Linear and not isinstance(head.weight, DTensor)
        )
        if self._plain_head and as_it_was:
            return linear_cross_entropy(model.base_model(**inputs, use_cache=False)[0], head.weight, targets)
        output = model(**inputs, use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED)
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


class _MeanOverTokens(Metric):
    """The mean loss of all predicted tokens of an epoch, on all ranks. torchmetrics' mean would wait for the GPU."""

    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    @override
    def update(self, loss: Tensor, tokens: Tensor) -> None:
        self.total += torch.where(tokens > 0, loss.detach() * tokens, 0.0)  # without tokens it is NaN
        self.tokens += tokens

    @override
    def compute(self) -> Tensor:
        return self.total / self.tokens
