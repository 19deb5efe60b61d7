import sysconfig

import pytest
import torch

from lightning_ups._compat.torch import probes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_bfloat16_runs_on_any_processor():
    probes.bfloat16_matmul(CPU)
    assert isinstance(probes.cpu_computes_bfloat16(), bool)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("flags : fpu avx512_bf16 sse", True), ("flags\t\t: fpu avx2", False), ("Features : fp bf16", True), ("", False)],
)
def test_bfloat16_is_read_from_the_processors_features(monkeypatch, flags, expected):
    monkeypatch.setattr(probes.Path, "read_text", lambda *_, **__: f"processor : 0\n{flags}\n")
    assert probes.cpu_computes_bfloat16() is expected


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"Python's headers are missing|no C\+\+ compiler 'no-such-compiler'"):
        probes.compile_cpp()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'note: in file' >&2\necho 'fatal error: omp.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(probes, "_require_headers", lambda: None)
    with pytest.raises(RuntimeError, match=r"fatal error: omp\.h"):
        probes.compile_cpp()


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(RuntimeError, match="Python's headers are missing"):
        probes.compile_cpp()


def test_what_a_cpu_cannot_do_raises():
    with pytest.raises((RuntimeError, ValueError)):
        probes.cuda_graph(CPU)
    with pytest.raises((RuntimeError, ValueError)):
        probes.mxfp8_matmul(CPU)


@pytest.mark.gpu(capability=(9, 0))
def test_a_hopper_gpu_can():
    probes.bfloat16_matmul(CUDA)
    probes.cuda_graph(CUDA)
    probes.pinned_copy(CUDA)
    probes.float8_matmul(CUDA, rowwise=False)
    probes.float8_matmul(CUDA, rowwise=True)
    probes.triton_kernel(CUDA)
