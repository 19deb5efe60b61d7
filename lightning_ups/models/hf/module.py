"""What the modules that train a model of Hugging Face's transformers share."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_ups.models.hf.four_bit import in_four_bits
from lightning_ups.models.hf.loading import from_config, from_pretrained, with_adapters
from lightning_ups.models.optimizer import Schedule, ScheduledAdamW
from lightning_ups.order.arguments import check_choice
from lightning_ups.state.checkpoint import MODELS, described

IGNORED = -100
_STARTS = (True, False, "gaussian", "orthogonal")  # of adapters that do not depend on the weights below
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


class HFModule(ScheduledAdamW):
    """Trains a model of transformers, or adapters for it. Use one of the classes that derive from it.

    The model, ``self.model``, is built in ``configure_model``. A strategy of this package that shards reads the weights
    tensor by tensor into its shards.

    Args:
        pretrained: A folder with a model, or its name on the Hub.
        config: In its place, for random weights: a folder or name, or the content of a ``config.json`` such as
            ``{"model_type": "llama", "hidden_size": 256}``.
        lora: Train adapters alone, with these arguments of PEFT's ``LoraConfig``, such as ``{"r": 8}``. DoRA is
            ``{"r": 8, "use_dora": True}``.
        four_bit: Keep the frozen weights of hidden linear layers in 4 bits (QLoRA). Needs ``lora`` and bitsandbytes.
        dtype: Of the weights. ``"auto"``: as in the checkpoint.
        options: Further arguments of ``from_pretrained`` or ``from_config`` of the model's class, such as
            ``{"attn_implementation": "flash_attention_2"}``.
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
    """

    model: Any
    reads_outside = True  # FSDP2 need not warn: a loss reads the head, and below adapters more
    auto_class: ClassVar[str]  # of transformers, which builds the model
    task_type: ClassVar[str | None]  # of PEFT
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # of validation and test, the means that `measure` returns
    logs_perplexity: ClassVar[bool] = False  # in validation: the loss is a mean over tokens
    val_loss: "MeanOverAll"

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: str | dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        four_bit: bool = False,
        dtype: Dtype = "float32",
        options: dict[str, Any] | None = None,
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
        name = type(self).__name__
        if (pretrained is None) == (config is None):
            raise ValueError(
                f"{name}(pretrained={pretrained!r}, config={config!r}) needs exactly one of the two."
                " Give pretrained for trained weights, or config for random ones."
            )
        check_choice("dtype", dtype, get_args(Dtype), of=name, why="It is the dtype of the weights.")
        self.keep_settings(
            of=name, lr=lr, betas=betas, weight_decay=weight_decay, schedule=schedule, warmup_steps=warmup_steps,
            final_fraction=final_fraction, decay_fraction=decay_fraction, fused=fused,
        )  # fmt: skip
        if four_bit and (lora is None or lora.get("use_dora") or lora.get("init_lora_weights", True) not in _STARTS):
            raise ValueError(
                f"{name}(four_bit=True, lora={lora}) needs adapters that do not read the weights below, as frozen ones"
                " of 4 bits. Use lora={'r': 16, 'target_modules': 'all-linear'}, without use_dora."
            )
        self.pretrained, self.config, self.lora, self.four_bit = pretrained, config, lora, four_bit
        self.options = {"dtype": dtype, **(options or {})}
        for stage in ("val", "test"):
            for metric in self.metrics:
                setattr(self, f"{stage}_{metric}", MeanOverAll())

    def config_options(self) -> dict[str, Any]:
        """Return what is changed in the config of the model."""
        return {}

    def prepare(self, model: Any) -> None:
        """Change the model of transformers, before adapters are added."""

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):  # a second fit continues with the trained weights
            return
        strategy = self._trainer and self._trainer.strategy
        sharded = getattr(strategy, "shards", False)
        if sharded and self.four_bit:
            raise ValueError(
                f"{type(self).__name__}(four_bit=True) cannot be sharded: {type(strategy).__name__} casts and gathers"
                " weights as floating-point numbers. Each GPU needs all 4-bit weights: use strategy='ddp'."
            )
        with torch.device("meta") if sharded else nullcontext():
            device = getattr(strategy, "root_device", torch.device("cpu"))
            model = in_four_bits(self._build, device=device) if self.four_bit else self._build()
            self.prepare(model)
            self.model = model if self.lora is None else with_adapters(model, self.lora, task=self.task_type)

    def _build(self) -> Any:
        changed, which = self.config_options(), {"auto": self.auto_class, "of": type(self).__name__}
        if self.pretrained is not None:
            return from_pretrained(self.pretrained, self.options | changed, **which).train()
        assert self.config is not None
        return from_config(self.config, self.options, changed=changed, **which)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[MODELS] = described(self)  # for `export`

    @property
    def plain_model(self) -> Any:
        """The model of transformers, which adapters are in."""
        return self.model if self.lora is None else self.model.base_model.model

    @override
    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        tokens = getattr(data, "vocab_size", None)
        if isinstance(tokens, int) and tokens > (known := self.plain_model.get_input_embeddings().num_embeddings):
            raise ValueError(
                f"{type(data).__name__} has a vocabulary of {tokens} tokens, and the model one of {known}. Larger"
                " tokens have no embedding. Tokenize with the model's own tokenizer."
            )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Not on the progress bar, for which Lightning waits for the GPU in each step.
        self.log("train_loss", loss, batch_size=1)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test")

    @override
    def on_validation_epoch_end(self) -> None:
        if self.logs_perplexity:
            self.log("val_perplexity", self.val_loss.compute().exp(), prog_bar=True, sync_dist=True)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of ``batch`` to train with: that of the model."""
        return self.model(**batch).loss

    def measure(self, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        """Return each of ``metrics`` for a batch of validation: its mean, and over how many it is one."""
        raise NotImplementedError

    def _evaluate(self, batch: Any, stage: str) -> None:
        for name, (mean, count) in self.measure(batch).items():
            metric = getattr(self, f"{stage}_{name}")
            metric.update(mean, torch.as_tensor(count, device=mean.device))
            self.log(f"{stage}_{name}", metric, prog_bar=True)


class MeanOverAll(Metric):
    """The mean over all tokens or samples of an epoch, on all ranks. torchmetrics' mean would wait for the GPU."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    @override
    def update(self, mean: Tensor, count: Tensor) -> None:
        # Not in place: after `validate` they are inference tensors.
        self.total = self.total + torch.where(count > 0, mean.detach() * count, 0.0)  # of none it is NaN
        self.count = self.count + count

    @override
    def compute(self) -> Tensor:
        return self.total / self.count
