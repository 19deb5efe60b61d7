import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from lightning_ups._compat.optional import cudnn

# cuDNN 9 in small: a thin library that finds its part by a bare name.
PART = "int part(void) { return %d; }"
SHIM = """
#include <dlfcn.h>
#include <stddef.h>
size_t cudnnGetVersion(void) {
    void* part = dlopen("libcudnn_graph.so.9", RTLD_NOW);
    return part ? ((int (*)(void))dlsym(part, "part"))() : 0;
}
"""
USER = """
#include <stddef.h>
size_t cudnnGetVersion(void);
int part(void);
size_t version(void) { return cudnnGetVersion(); }
"""

# A process with torch's library, in which another library is loaded as Transformer Engine 2.20 loads its own.
PROCESS = """
import contextlib, ctypes, glob, importlib.util, json, os, sys, types
how = sys.argv[1]
library = ctypes.CDLL("./libtorch.so", mode=ctypes.RTLD_LOCAL)
library.version.restype = ctypes.c_size_t

def runtime():
    found = library.version()
    return found // 10000, found % 10000 // 100, found % 100

bindings = types.SimpleNamespace(is_cuda=True, getRuntimeVersion=runtime, getCompileVersion=lambda: (9, 19, 0))
torch = types.ModuleType("torch")
torch._C = types.SimpleNamespace(_cudnn=bindings)
torch.backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=runtime))
sys.modules["torch"] = torch
spec = importlib.util.spec_from_file_location("cudnn", sys.argv[2])
cudnn = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cudnn)
if how == "asked before":
    runtime()
if how == "pointed there":
    os.environ["CUDNN_HOME"] = os.path.abspath("ours")
error = None
with cudnn.torchs_cudnn_first() if how == "ours" else contextlib.nullcontext():
    home = os.environ.get("CUDNN_HOME") or os.environ["CUDA_HOME"]
    try:
        ctypes.CDLL(glob.glob(home + "/**/libcudnn.so*", recursive=True)[0], mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL("./libengine.so", mode=ctypes.RTLD_GLOBAL)
    except OSError as raised:
        error = str(raised)
print(json.dumps({"error": error, "version": runtime(), "conflict": cudnn.cudnn_conflict()}))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Two releases of cuDNN, torch's library, linked to the first, and one that is linked to whichever it finds."""
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux's loader")
    folder = tmp_path_factory.mktemp("libraries")

    def build(text, file, *options):
        (folder / "text.c").write_text(text)
        command = [compiler, "-shared", "-fPIC", "-o", file, "text.c", "-Wl,-z,lazy,--no-as-needed", *options, "-ldl"]
        subprocess.run(command, cwd=folder, check=True)

    for name, version in (("ours", 91900), ("theirs", 91400)):
        (folder / name).mkdir()
        build(PART % version, f"{name}/libcudnn_graph.so.9", "-Wl,-soname,libcudnn_graph.so.9")
        build(SHIM, f"{name}/libcudnn.so.9", "-Wl,-soname,libcudnn.so.9", "-Wl,--enable-new-dtags,-rpath,$ORIGIN")
    linked = ["-Lours", "-l:libcudnn.so.9"]
    build(USER, "libtorch.so", *linked, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/ours")
    build(USER, "libengine.so", *linked, "-l:libcudnn_graph.so.9")
    (folder / "process.py").write_text(PROCESS)
    return folder


def process(libraries, how):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDNN", "PYTORCH"))}
    environment |= {"LD_LIBRARY_PATH": str(libraries / "theirs"), "CUDA_HOME": str(libraries / "theirs")}
    done = subprocess.run(
        [sys.executable, "process.py", how, cudnn.__file__], cwd=libraries, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_library_takes_torchs_own_cudnn(libraries):
    assert process(libraries, "ours") == {"error": None, "version": [9, 19, 0], "conflict": None}


@pytest.mark.parametrize("how", ["nothing", "asked before", "pointed there"])
def test_less_than_all_parts_of_it_are_not_enough(libraries, how):
    found = process(libraries, how)
    assert found["error"] or "9.14.0" in found["conflict"]
    if found["conflict"]:
        assert found["conflict"].startswith("torch was compiled against cuDNN 9.19.0, and 9.14.0 is loaded, from ")
        assert str(libraries / "theirs") in found["conflict"]


@pytest.fixture
def bindings(monkeypatch):
    made = SimpleNamespace(is_cuda=True, getCompileVersion=lambda: (9, 19, 0), getRuntimeVersion=lambda: (9, 19, 0))
    monkeypatch.setattr("torch._C._cudnn", made, raising=False)
    monkeypatch.setattr(cudnn, "_version_for_all", lambda: None)
    monkeypatch.delenv("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK", raising=False)
    return made


@pytest.mark.parametrize(
    ("runtime", "for_all", "told"),
    [
        ((9, 19, 0), (9, 19, 0), None),
        ((9, 21, 1), (9, 21, 1), None),  # a user's own, newer, for all
        ((9, 14, 0), None, "9.14.0 is loaded"),
        ((9, 19, 0), (9, 21, 1), "9.19.0 and 9.21.1 are loaded"),  # parts of one, functions of the other
    ],
)
def test_what_goes_together(bindings, monkeypatch, runtime, for_all, told):
    bindings.getRuntimeVersion = lambda: runtime
    monkeypatch.setattr(cudnn, "_version_for_all", lambda: for_all)
    found = cudnn.cudnn_conflict()
    assert found is None if told is None else told in found


@pytest.mark.parametrize("before", [None, "/theirs"])
def test_the_environment_is_as_it_was(monkeypatch, tmp_path, before):
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDNN_HOME", before)
    monkeypatch.setattr(cudnn, "_loaded", lambda: [tmp_path / "libcudnn.so.9"])
    (tmp_path / "libcudnn_graph.so.9").write_text("no library")  # torch's own error is not ours to raise
    with suppress(KeyError), cudnn.torchs_cudnn_first():
        assert os.environ["CUDNN_HOME"] == str(tmp_path)
        raise KeyError
    assert os.environ.get("CUDNN_HOME") == before


ENGINE = """
from lightning_ups._compat.optional.te import engine
engine()  # says if another cuDNN is there
import torch
image = torch.randn(1, 3, 8, 8, device="cuda", requires_grad=True)
torch.nn.Conv2d(3, 4, 3).cuda()(image).sum().backward()
assert image.grad.abs().sum() > 0
print(torch.backends.cudnn.version())
"""


@pytest.mark.gpu(capability=(9, 0))
def test_torch_convolves_beside_transformer_engine():
    if find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Jax" not in done.stderr
