"""Small operations that show whether this torch supports something on this device; each raises if not."""

import importlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch


def bfloat16_matmul(device: torch.device) -> None:
    """Multiply two matrices of bfloat16."""
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    assert (ones @ ones)[0, 0].item() == 16


def cpu_computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively; otherwise torch converts to float32 and back."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = re.search(r"^(flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return found is not None and bool({"avx512_bf16", "amx_bf16", "bf16"} & {*found.group(2).split()})


def float8_matmul(device: torch.device, *, rowwise: bool) -> None:
    """Multiply two float8 matrices, with one scale for each, or one for each row and column."""
    a = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    b = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn).t()
    shapes = ((32, 1), (1, 32)) if rowwise else ((), ())
    scales = [torch.ones(shape, device=device) for shape in shapes]
    product: Any = torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    assert product[0, 0].item() == 32


def mxfp8_matmul(device: torch.device) -> None:
    """Multiply two float8 matrices with one scale, a power of two, for every 32 values."""
    a, b = (torch.ones(128, 128, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    # All scales are one, so their order does not matter.
    scale = torch.ones(128 * 4, device=device).to(torch.float8_e8m0fnu)
    product: Any = torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    assert product[0, 0].item() == 128


def cuda_graph(device: torch.device) -> None:
    """Capture a graph and replay it."""
    with torch.cuda.device(device):
        x = torch.ones(8, device=device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.clone()  # warm up, as required for capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        x.fill_(2)
        graph.replay()
        assert y[0].item() == 3


def pinned_copy(device: torch.device) -> None:
    """Copy from pinned host memory to the device."""
    host = torch.ones(1024, pin_memory=True)
    assert host.to(device, non_blocking=True).sum().item() == 1024


def triton_kernel(device: torch.device) -> None:
    """Compile and run a Triton kernel, which also needs a C compiler and Python's headers."""
    _require_headers()
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    @triton.jit
    def increment(pointer, BLOCK: tl.constexpr):  # type: ignore[valid-type]  # noqa: ANN001, ANN202, N803
        places = pointer + tl.arange(0, BLOCK)
        tl.store(places, tl.load(places) + 1)

    x = torch.ones(64, device=device)
    increment[(1,)](x, BLOCK=64)
    assert x.sum().item() == 128


def compile_cpp() -> None:
    """Compile and link code with what Inductor's C++ needs: OpenMP and Python's headers."""
    _require_headers()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"there is no C++ compiler {compiler!r} on the PATH")
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
        command = [compiler, "-std=c++17", "-fopenmp", "-fPIC", "-shared", f"-I{include}", str(source)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder, "probe.so"))], capture_output=True, text=True, check=False
        )
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise RuntimeError(f"{compiler} fails: {first}")


def _require_headers() -> None:
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise RuntimeError(f"Python's headers are missing ({include}/Python.h)")
