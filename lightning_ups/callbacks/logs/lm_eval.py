"""Log the results of tasks of lm-evaluation-harness."""

import importlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_ups._compat.optional.packages import require
from lightning_ups.callbacks.logs.language_model import evaluating
from lightning_ups.order import TrainerOnly
from lightning_ups.order.arguments import check_least


class LMEval(Callback, TrainerOnly):
    """Evaluate a causal language model of transformers by tasks of lm-evaluation-harness, in validation.

    The model is ``self.model`` of the LightningModule, as of `HFCausalLM`. Rank 0 evaluates it, and the others wait.
    Results are logged as ``TASK/METRIC``, such as ``hellaswag/acc_norm``. Training is not affected: random states are
    restored.

    Args:
        tasks: Names of tasks, or configurations of own ones.
        tokenizer: A folder with the tokenizer, or its name on the Hub. None: that of ``pretrained`` of the module.
        every: Validations between two evaluations.
        limit: Samples of each task. None: all.
        batch_size: Of the evaluation.
        options: Further arguments of ``lm_eval.simple_evaluate``, such as ``{"num_fewshot": 5}``.

    Raises:
        ValueError: If a number is out of range; when fitting starts, under a strategy that shards the model.
        ModuleNotFoundError: When fitting starts, if lm_eval is missing.
    """

    def __init__(
        self,
        tasks: list[str | dict[str, Any]],
        *,
        tokenizer: str | None = None,
        every: int = 1,
        limit: int | None = None,
        batch_size: int = 8,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_least("every", every, 1, of="LMEval", why="It counts validations.")
        check_least("batch_size", batch_size, 1, of="LMEval", why="It counts samples.")
        check_least("limit", limit, 1, of="LMEval", why="It counts samples.", optional=True)
        self.tasks, self.tokenizer, self.every = [*tasks], tokenizer, every
        self.limit, self.batch_size, self.options = limit, batch_size, options or {}
        self._validations = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require("lm_eval", requirement="lm_eval>=0.4.5", extra="eval", feature="LMEval")
        if getattr(trainer.strategy, "shards", False):
            raise ValueError(
                f"LMEval cannot evaluate a model that {type(trainer.strategy).__name__} shards: rank 0 runs it alone."
                " Use strategy='ddp', or evaluate the exported model by the command lm_eval."
            )

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every:
            return
        found = self._evaluated(trainer, pl_module) if trainer.is_global_zero else {}
        for name, value in trainer.strategy.broadcast(found).items():
            pl_module.log(name, value, rank_zero_only=True)

    def _evaluated(self, trainer: Trainer, module: Any) -> dict[str, float]:
        library, models = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.models.huggingface")
        name = self.tokenizer or module.hparams.get("pretrained") or module.hparams.get("config")
        tokenizer: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)
        with (
            isolate_rng(),
            evaluating(module),
            trainer.precision_plugin.forward_context(),
            torch.compiler.set_stance("force_eager"),
        ):
            model = models.HFLM(pretrained=module.model, tokenizer=tokenizer, batch_size=self.batch_size)
            # Figures of errors are drawn 100000 times for each metric otherwise.
            options = {"tasks": self.tasks, "limit": self.limit, "bootstrap_iters": 0, "log_samples": False}
            results = library.simple_evaluate(model=model, **options | self.options)["results"]
        return {
            f"{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in metric and "," in metric
        }
