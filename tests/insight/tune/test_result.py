import pytest
import torch

from lightning_ups.insight.tune import Result, failure_of, failure_of_exit


def test_a_result_survives_json_and_keeps_what_differs_from_defaults():
    result = Result(samples_per_s=3.0, losses=[1.0, 2.0])
    assert result.as_dict() == {"samples_per_s": 3.0, "losses": [1.0, 2.0]}
    assert Result.of({**result.as_dict(), "of_a_later_version": 1}) == result


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as found:  # noqa: BLE001
        return found


COMPILER = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})


@pytest.mark.parametrize(
    ("error", "refusal", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "not asked", "out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), None, "out of memory"),
        (raised(ValueError("wrapped"), torch.OutOfMemoryError("x")), None, "out of memory"),
        (raised(ValueError("wrapped"), COMPILER("no such kernel")), None, "compiler error"),
        (ValueError("Compile(blocks=...) matches nothing"), "Compile matches nothing", "refused"),
        (KeyError("the user's"), None, "crash"),
    ],
)
def test_the_kind_of_an_error_is_found(error, refusal, kind):
    found = failure_of(error, refusal=refusal)
    assert found.failure == kind
    assert found.text


@pytest.mark.parametrize(
    ("code", "output", "kind", "part"),
    [
        (-9, "", "out of memory", "signal 9"),
        (-11, "Fatal: segmentation\n", "crash", "signal 11"),
        (1, "a\n\nb\n", "crash", "exit code 1"),
        (1, "torch.OutOfMemoryError: CUDA out of memory", "out of memory", "CUDA"),
    ],
)
def test_a_process_without_a_result_is_described_by_its_exit(code, output, kind, part):
    found = failure_of_exit(code, output)
    assert found.failure == kind
    assert part in found.text
