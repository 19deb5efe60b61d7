import pytest

from lightning_ups.insight.compare.direction import is_higher_better
from tests.insight.compare.synthetic import run

HIGHER = [
    *(
        "val_acc",
        "val/accuracy",
        "acc1",
        "top5",
        "valAcc",
        "test_AUROC",
        "roc_auc",
        "f1",
        "val_f1_score",
        "BinaryF1Score",
    ),
    *(
        "MulticlassAccuracy",
        "mAP",
        "map_50",
        "precision@10",
        "hits@1",
        "acc_1",
        "val-recall",
        "miou",
        "mean_iou",
        "dice",
        "psnr",
        "ssim",
    ),
    *("bleu", "rougeL", "rouge1", "r2", "R2Score", "mcc", "throughput/tokens_per_s", "val_acc/dataloader_idx_0"),
]
LOWER = [
    *(
        "val_loss",
        "train_loss_step",
        "valLoss",
        "testloss",
        "error",
        "val_err",
        "MeanSquaredError",
        "perplexity",
        "ppl",
        "mse",
    ),
    *("rmse", "val/mae", "nll", "wer", "fid", "lpips", "dice_loss", "top1_error", "memory/allocated_gib", "bce"),
    *("neg_log_likelihood", "no_object_loss", "throughput/data_ms", "train_cross_entropy", "loss/dataloader_idx_0"),
]
UNKNOWN = [
    "score",
    "val_quality",
    "lr",
    "neg_mse",
    "negative_accuracy",
    "acc_mse",
    "accumulated",
    "entropy",
    "1-auc",
    "val/1-ssim",
    "val_1-acc",
]


@pytest.mark.parametrize("name", HIGHER)
def test_names_of_which_more_is_better(name):
    assert is_higher_better(name, [run()]) is True


@pytest.mark.parametrize("name", LOWER)
def test_names_of_which_less_is_better(name):
    assert is_higher_better(name, [run()]) is False


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_names_are_not_guessed(name):
    with pytest.raises(ValueError, match=f"whether a higher {name} is better. Add --higher-is-better or --lower-is"):
        is_higher_better(name, [run()])


def monitored(mode, *, name="score", prefix="config/trainer/callbacks/0/init_args/"):
    return run(settings={f"{prefix}monitor": name, f"{prefix}mode": mode})


def test_the_mode_of_the_callback_that_monitors_it_decides():
    assert is_higher_better("score", [run(), monitored("max")]) is True
    assert is_higher_better("score", [monitored("min", prefix="early_stopping/"), run()]) is False
    with pytest.raises(ValueError, match="a higher val_loss"):
        is_higher_better("val_loss", [monitored("max", name="val_loss")])  # it contradicts the name
    with pytest.raises(ValueError, match="a higher score"):
        is_higher_better("score", [monitored("max"), monitored("min")])
    with pytest.raises(ValueError, match="a higher score"):
        is_higher_better("score", [monitored("max", name="other"), monitored("auto")])
