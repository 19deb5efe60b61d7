"""What may be imported, what it loads, and what it costs, each seen in a fresh process."""

import ast
import copy
import importlib
import pickle
import pkgutil
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import lightning_ups

OPTIONAL = ("torchao", "transformer_engine", "flash_attn", "triton", "transformers", "bitsandbytes")
MODULES = sorted(module.name for module in pkgutil.walk_packages(lightning_ups.__path__, "lightning_ups."))
PACKAGE = Path(lightning_ups.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ROOMS = ("callbacks", "strategies", "precision", "order", "models", "data")

BLOCKED = """
import importlib, os, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {optional}:
            raise ModuleNotFoundError(name)
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout


# In one process for both orders, which forks, having no threads, when it has imported what is not ours.
EITHER_ORDER = """
import gc; gc.disable()
import lightning.pytorch, torch, torch._dynamo, torch.distributed.tensor.parallel

def switches():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kernels = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    return kernels, cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision(), gc.isenabled()

before = switches()
sys.meta_path.insert(0, Blocked())  # what Lightning or torch ask for by themselves is theirs
child = os.fork()
for name in {modules} if child else {modules}[::-1]:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
assert switches() == before, "importing sets nothing"
os.write(1, b"forwards\\n" if child else b"backwards\\n")  # at once, since both write to one pipe
if child:
    assert os.waitpid(child, 0)[1] == 0
gc.freeze()  # nothing of it is to be looked through at the end
"""


def test_every_module_can_be_imported_in_either_order_without_the_optional_packages_and_without_cuda():
    modules = [name for name in MODULES if name != "lightning_ups.__main__"]
    said = run(BLOCKED.format(optional=OPTIONAL) + EITHER_ORDER.format(modules=modules))
    assert sorted(said.split()) == ["backwards", "forwards"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_what_it_says(room):
    module = importlib.import_module(f"lightning_ups.{room}")
    assert module.__all__
    for name in module.__all__:
        thing = getattr(module, name)
        assert thing.__doc__ or not isinstance(thing, (type, types.FunctionType)), name


def plugins():
    for room in ("callbacks", "precision", "strategies"):
        module = importlib.import_module(f"lightning_ups.{room}")
        yield from (thing for name in module.__all__ if isinstance(thing := getattr(module, name), type))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plugin", [*plugins()])
def test_a_plugin_can_be_sent_to_a_process_and_copied(plugin):
    """As Trainers that spawn their processes do, and sweeps that keep one list of callbacks for many runs."""
    try:
        made = plugin()
    except (TypeError, ModuleNotFoundError):
        pytest.skip("cannot be made without arguments, or here")
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(twin) is plugin
        assert vars(twin).keys() == vars(made).keys()


@pytest.mark.parametrize("path", FILES, ids=FILES)
def test_the_face_of_a_room_states_its_names_and_files_within_do_not(path):
    tree = ast.parse((PACKAGE / path).read_text())
    names = {
        t.id for each in tree.body if isinstance(each, ast.Assign) for t in each.targets if isinstance(t, ast.Name)
    }
    is_face = path.endswith("__init__.py") and any(isinstance(each, ast.ImportFrom) for each in tree.body)
    assert ("__all__" in names) == is_face


def test_every_plugin_can_be_imported_from_the_package_itself():
    asked = (
        "import sys, lightning_ups; print('torch' in sys.modules); from lightning_ups import Compile; print(Compile)"
    )
    assert run(asked).split() == ["False", "<class", "'lightning_ups.callbacks.compile.Compile'>"]
    assert {thing.__name__ for thing in plugins()} == {*lightning_ups.__all__}
    assert [name for name in dir(lightning_ups) if not name.startswith("__")] == sorted(lightning_ups.__all__)
    assert all(getattr(lightning_ups, thing.__name__) is thing for thing in plugins())
    with pytest.raises(AttributeError, match="module 'lightning_ups' has no attribute 'Compil'"):
        lightning_ups.Compil  # noqa: B018


@pytest.mark.slow
def test_importing_the_package_costs_next_to_nothing():
    plain, ours = [], []
    for _ in range(3):  # in turns, since the machine may be busy with something else
        plain.append(seconds("import lightning"))
        ours.append(seconds("import lightning, lightning_ups"))
    assert statistics.median(ours) <= 1.2 * statistics.median(plain)


def seconds(code):
    start = time.perf_counter()
    run(code)
    return time.perf_counter() - start
