import os
import sys
from functools import cache

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache

from lightning_ups._compat.torch.tensors import attention as compat
from tests.kernels.attention.cases import CASES, expected, gradients, worst


def test_operators_of_this_build_by_part():
    forward, backward = (compat.attention_operators(part) for part in ("forward", "backward"))
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in forward
    assert torch.ops.aten._scaled_dot_product_cudnn_attention_backward in backward
    for operator in forward + backward:
        names = {argument.name for argument in operator.default._schema.arguments}
        assert {"query", "key", "value", "is_causal"} <= names


@pytest.mark.skipif(bool(RequirementCache(compat._FA4)), reason="it is installed")
def test_a_missing_package_is_said_without_importing_it():
    assert compat.missing_package("fa4") == "flash-attn-4>=4.0.0b1 is not installed"
    with pytest.raises(ModuleNotFoundError, match="pip install 'flash-attn-4"):
        compat.load_fa4(feature="This")


@pytest.mark.parametrize("error", ["RuntimeError('No CTK installed.')", "ImportError('No CTK installed')"])
def test_a_package_that_cannot_be_loaded_is_said_once_and_kept_out(monkeypatch, tmp_path, error):
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    for part in (folder.parent, folder):
        (part / "__init__.py").touch()
    (folder / "interface.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "_FA4", "torch>=2.0")  # something that is installed
    monkeypatch.setattr(compat, "_broken_fa4", cache(compat._broken_fa4.__wrapped__))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(UserWarning, match=r"cannot be loaded: No CTK installed\. .*'auto' goes without.*Reinst"):
        assert compat.missing_package("fa4").endswith("cannot be loaded: No CTK installed")
    assert compat.missing_package("fa4") is not None  # without another warning, which would be an error
    with pytest.raises(ImportError, match=r"This found .* could not load .*No CTK installed\. .*Reinstall"):
        compat.load_fa4(feature="This")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_fa3_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(compat, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"python setup\.py install"):
        compat.load_fa3(feature="This")


GPU = pytest.mark.gpu(capability=(8, 0))


@GPU
@pytest.mark.parametrize("case", [case for case in CASES if not case.plain and not case.softcap], ids=lambda c: c.name)
def test_on_a_gpu_flash_attention_2_takes_windows_and_documents(case):
    def packed(q, k, v, *, causal, window, documents, softcap, scale):
        return compat.flash2_packed(
            q,
            k,
            v,
            cu_seqlens=None if documents is None else documents.cu_seqlens,
            max_seqlen=q.shape[1] if documents is None else documents.max_seqlen,
            causal=causal,
            window=window,
            scale=scale or q.shape[-1] ** -0.5,
        )

    tensors, options = case.tensors(torch.bfloat16, "cuda"), case.options("cuda")
    assert worst(gradients(packed, tensors, options), expected(tensors, options)) < 1.5e-2


@GPU
def test_on_a_gpu_torch_says_why_it_refuses():
    reason = compat.torch_refuses(
        "flash", dtype=torch.bfloat16, heads=(4, 2), head_dims=(512, 512), causal=True, trains=True
    )
    assert "256" in (reason or "")
    assert not compat.torch_refuses(
        "flash", dtype=torch.bfloat16, heads=(4, 2), head_dims=(128, 128), causal=True, trains=True
    )


COMPILED = ("causal", "window", "documents_and_window", "everything")  # flex compiles for seconds each


@GPU
@pytest.mark.parametrize(
    ("backend", "case"),
    [(backend, case) for backend in ("cudnn", "flash", "efficient") for case in CASES]
    + [("flex", case) for case in CASES if case.name in COMPILED],
    ids=lambda value: getattr(value, "name", value),
)
def test_on_a_gpu_each_backend_is_the_reference_or_refuses(backend, case):
    from lightning_ups.kernels.attention import attention
    from lightning_ups.kernels.attention.support import kind_of, refusal

    tensors, options = case.tensors(torch.bfloat16, "cuda"), case.options("cuda")
    flags = {name: options[name] is not None for name in ("window", "documents")} | {"softcap": bool(case.softcap)}
    kind = kind_of(*(tensor.requires_grad_() for tensor in tensors), causal=case.causal, **flags)
    if refused := refusal(backend, kind):
        with pytest.raises(ValueError, match="cannot be used here"):
            attention(*tensors, **options, backend=backend)
        pytest.skip(refused[0])
    found = gradients(attention, tensors, {**options, "backend": backend})
    assert worst(found, expected(tensors, options)) < 1.5e-2


def test_what_torch_logs_by_itself_is_read():
    line = "[W1121 17:51:07.2 sdp_utils.cpp:180] Warning: Flash attention requires it. (function check_head_dim)\n"
    with compat._written_to_stderr() as written:
        os.write(2, line.encode())
    assert [match["text"] for match in compat._LOGGED.finditer(written[0])] == ["Flash attention requires it."]
