"""Tell whether a higher value of a metric is better."""

import re
from collections.abc import Iterable

from lightning_ups.insight.compare.reading import RunLog

_HIGHER = {
    *("acc", "accuracy", "top", "hit", "hits", "auc", "auroc", "auprc", "ap", "map", "mrr", "ndcg", "f1", "fbeta"),
    *("precision", "recall", "sensitivity", "specificity", "iou", "miou", "jaccard", "dice", "kappa", "mcc", "r2"),
    *("rouge", "rougel", "bleu", "sacrebleu", "meteor", "chrf"),  # codespell:ignore rouge
    *("psnr", "ssim", "reward", "persecond"),
}
_LOWER = {
    *("loss", "losses", "error", "err", "perplexity", "ppl", "nll", "bce", "ce", "xent", "logloss"),
    *("mse", "rmse", "mae", "mape", "brier", "ece"),  # codespell:ignore mape
    *("wer", "cer", "ter", "fid", "lpips", "bpb", "bpc", "memory", "ms"),
}
_PHRASES = (  # of several words, with one word that says the same
    (re.compile(r"/dataloader_idx_\d+$"), ""),
    (re.compile(r"_per_(s|sec|second)\b"), "_persecond"),
    (re.compile(r"cross_?entropy|(neg|negative)_log_likelihood", re.IGNORECASE), "nll"),
    (re.compile(r"(^|[/_ .])1 ?- ?"), "_neg_"),
)


def is_higher_better(name: str, runs: Iterable[RunLog]) -> bool:
    """Return whether a higher value of the metric is better.

    The callbacks that monitor it say so by their ``mode``, and well-known names by themselves.

    Raises:
        ValueError: If neither says it, or they contradict each other.
    """
    found = {mode == "max" for run in runs for mode in _modes(name, run)} | _by_name(name)
    if len(found) != 1:
        why = "The runs and its name do not tell" if not found else "The runs and its name contradict each other about"
        raise ValueError(f"{why} whether a higher {name} is better. Add --higher-is-better or --lower-is-better.")
    return found.pop()


def _modes(name: str, run: RunLog) -> Iterable[str]:
    keys = (key.removesuffix("monitor") for key, value in run.settings.items() if value == name)
    modes = (run.settings.get(f"{key}mode") for key in keys)
    return [mode for mode in modes if mode in ("min", "max")]


def _by_name(name: str) -> set[bool]:
    for phrase, word in _PHRASES:
        name = phrase.sub(word, name)
    words = {word.lower() for part in re.split(r"[^A-Za-z0-9]+", name) for word in (part, *_parts(part))}
    words |= {word.rstrip("0123456789") for word in words}
    if words & {"neg", "negative", "minus"}:
        return set()
    if words & {"error", "err"} or any(word.endswith("loss") for word in words):  # top1_error, dice_loss, testloss
        return {False}
    return ({True} if words & _HIGHER else set()) | ({False} if words & _LOWER else set())


def _parts(word: str) -> list[str]:
    """Return the parts of a name such as BinaryF1Score."""
    return re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", word)
