"""What may be imported, what it loads, and what it costs, each seen in a fresh process."""

import ast
import importlib
import pkgutil
import statistics
import subprocess
import sys
import time
import types

import pytest

import lightning_ups

OPTIONAL = ("torchao", "transformer_engine", "flash_attn", "triton", "transformers", "bitsandbytes")
MODULES = sorted(module.name for module in pkgutil.walk_packages(lightning_ups.__path__, "lightning_ups."))
ROOMS = ("callbacks", "strategies", "precision", "order", "models", "data")

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {optional}:
            asked.append(name)
            raise ModuleNotFoundError(name)

asked = []
sys.meta_path.insert(0, Blocked())
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("order", [1, -1], ids=["alphabetical", "backwards"])
def test_every_module_can_be_imported_without_the_optional_packages_and_without_cuda(order):
    imports = "\n".join(f"import {name}" for name in MODULES[::order] if name != "lightning_ups.__main__")
    last = "import torch; assert not torch.cuda.is_initialized(); print('fine')"
    # What Lightning or torch ask for by themselves is theirs: they are loaded before the packages are blocked.
    first = "import lightning.pytorch, torch._dynamo, torch.distributed.tensor.parallel"
    assert run(f"{first}\n{BLOCKED.format(optional=OPTIONAL)}\n{imports}\n{last}").strip() == "fine"


@pytest.mark.parametrize("first", ["lightning_ups", "lightning.pytorch"])
def test_the_shells_are_there_in_either_order_of_imports(first):
    code = f"import {first}\nimport lightning_ups, lightning.pytorch\nfrom lightning_ups.callbacks import Compile"
    run(code)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_what_it_says(room):
    module = importlib.import_module(f"lightning_ups.{room}")
    assert module.__all__
    for name in module.__all__:
        thing = getattr(module, name)
        assert thing.__doc__ or not isinstance(thing, (type, types.FunctionType)), name


@pytest.mark.parametrize("name", [m for m in MODULES if m != "lightning_ups.__main__"])
def test_every_module_states_its_public_names(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as source:
        tree = ast.parse(source.read())
    names = {
        t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    has_code = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)
    assert "__all__" in names or not has_code


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
