"""The register: each row fits, each patch is in it, and one that does not fit is refused by its name or left out."""

import ast
import warnings
from pathlib import Path

import pytest

import lightning_ups
from lightning_ups._compat.patches import PATCHES, PURPOSES, Patch, PatchError, applied, installed, misfits, why_not

PACKAGE = Path(lightning_ups.__file__).parent
TARGET = f"{__name__}:Owner.method"


class Owner:
    def method(self, x):
        return [x]

    @staticmethod
    def static(x):
        return [x]

    @classmethod
    def of_class(cls, x):
        return [cls, x]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    for name in ("method", "static", "of_class", "gone"):
        reads = ("x",) if name == "method" else ()
        monkeypatch.setitem(PATCHES, f"{__name__}:Owner.{name}", Patch(reads))
    monkeypatch.setitem(PATCHES, f"{__name__}:Owner.slower", Patch(only_speed=True))
    why_not.cache_clear()
    yield
    why_not.cache_clear()


def test_each_attribute_fits_the_installed_versions():
    assert misfits() == {}


def test_each_purpose_names_its_test():
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(PURPOSES) <= 10
    assert [purpose.text for purpose in PURPOSES if f"def {purpose.test}(" not in tests] == []


def doubled(stock):
    return lambda *args, **kwargs: stock(*args, **kwargs) * 2


def tripled(stock):
    return lambda *args, **kwargs: [*stock(*args, **kwargs), 3]


@pytest.mark.parametrize("last", [0, 1])
def test_contexts_end_in_any_order(last):
    stock, owner = Owner.method, Owner()
    contexts = [applied(TARGET, doubled), applied(TARGET, tripled)]
    for context in contexts:
        context.__enter__()
    assert owner.method(1) == [1, 1, 3]
    contexts.pop(1 - last).__exit__(None, None, None)
    assert owner.method(1) == ([1, 3] if last else [1, 1])
    contexts.pop().__exit__(None, None, None)
    assert Owner.method is stock


def test_contexts_share_what_is_replaced_once():
    first, second = applied(TARGET, doubled, once=True), applied(TARGET, doubled, once=True)
    first.__enter__()
    second.__enter__()
    assert Owner().method(1) == [1, 1]
    first.__exit__(None, None, None)
    assert Owner().method(1) == [1, 1]
    second.__exit__(None, None, None)
    assert Owner().method(1) == [1]


def test_kinds_of_methods_stay_what_they_are():
    with applied(f"{__name__}:Owner.static", doubled), applied(f"{__name__}:Owner.of_class", doubled):
        assert Owner.static(1) == Owner().static(1) == [1, 1]
        assert Owner.of_class(1) == Owner().of_class(1) == [Owner, 1] * 2
    assert Owner.static(1) == [1]
    assert Owner.of_class(1) == [Owner, 1]


def test_one_object_may_be_changed_alone():
    one, other = Owner(), Owner()
    with applied(TARGET, doubled, owner=one), applied(TARGET, tripled, owner=one):
        assert one.method(1) == [1, 1, 3]
        assert other.method(1) == [1]
    assert vars(one) == {}
    installed(TARGET, one, doubled)
    assert one.method(1) == [1, 1]


def test_what_another_library_has_replaced_meanwhile_stays(monkeypatch):
    with applied(TARGET, doubled):
        theirs = tripled(Owner.method)
        monkeypatch.setattr(Owner, "method", theirs)
    assert Owner.method is theirs


@pytest.mark.parametrize("name", ["gone", "method"])
def test_a_patch_that_does_not_fit_is_refused_by_name(monkeypatch, name):
    monkeypatch.setattr(Owner, "method", lambda self, other: None)
    target = f"{__name__}:Owner.{name}"
    with pytest.raises(PatchError, match=f"Owner.{name}.*pip install"), applied(target, doubled):
        pass
    with pytest.raises(PatchError, match=f"Owner.{name}"):
        installed(target, Owner(), doubled)


def test_those_that_do_not_fit_are_listed_with_the_reason(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", lambda text, *arguments: None)
    monkeypatch.setitem(PATCHES, "torch:gone", Patch())
    monkeypatch.setitem(PATCHES, "torch:gone_since", Patch(versions="<2.11"))
    monkeypatch.setitem(PATCHES, "no_such_package:gone", Patch())
    why_not.cache_clear()
    assert misfits() == {
        "warnings:showwarning": "showwarning() has no parameter message",
        "torch:gone": "torch.gone does not exist",
    }


def test_one_that_only_saves_time_is_left_out_with_a_line():
    with pytest.warns(UserWarning, match="slower"), applied(f"{__name__}:Owner.slower", doubled):
        assert not hasattr(Owner, "slower")


# What is set in another way, and why.
EXCEPTIONS = {
    "_compat/patches.py: setattr": "the register itself",
    "_compat/lightning/steps.py: step": "public, of one optimizer",
    "_compat/optional/cudnn.py: restype": "public, of one function",
    "_compat/lightning/strategy_names.py: exec_module": "public, of one loader of modules",
    "_compat/torch/fsdp/state.py: hang_hooks": "our own",
    "_compat/torch/fsdp/process_groups.py: _world": "of a process that was forked, for as long as it lives",
    "callbacks/compile.py: on_news": "our own",
    "callbacks/step_graph.py: step": "our own",
    "callbacks/step_guard.py: save_checkpoint": "public, of one strategy",
    "commands/trial.py: step": "schedulers of a trial, in a process that ends with it",
    "commands/machine/packages.py: stdout": "public",
    "commands/machine/packages.py: stderr": "public",
    "config/suggestions.py: error": "public, of one parser",
    "insight/memory/described_run.py: take_over": "our own",
    "insight/memory/cuda.py: mock": "functions of a dry run",
    "insight/throughput/flops.py: scaled_dot_product_attention": "public, while operations are counted",
    "kernels/attention/routing.py: mock": "a public function, in each module that has imported it",
    "optim/offload/source.py: grad": "a tensor",
    "transforms/activation_offload.py: atexit": "public, of one finalizer",
    "transforms/compile/cuda_graphs.py: of": "our own",
    "transforms/context_parallel/attention_calls.py: mock": "a public function, in each module that has imported it",
    "transforms/fsdp/sharding.py: __deepcopy__": "of one module's own class",
    "transforms/patching.py: setattr": "public methods of single objects",
    "transforms/sharding/optimizer_step.py: step": "public, of one optimizer",
}
SETTINGS = {"allow_tf32", "benchmark", "cache_key_tag", "activation_memory_budget"}


def test_nothing_is_replaced_outside_of_the_register():
    found = {
        f"{path.relative_to(PACKAGE)}: {attribute}"
        for path in PACKAGE.rglob("*.py")
        for attribute in _replaced(ast.parse(path.read_text()))
    }
    assert found - EXCEPTIONS.keys() == set(), "enter it in _compat/patches.py, and apply it from there"


def _replaced(tree):
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_ups"))
        for alias in node.names
    }
    for node in ast.walk(tree):  # names for what is imported
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Name, ast.Attribute)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if _root(node.value) in imported:
                imported |= {target.id for target in targets if isinstance(target, ast.Name)}
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "unittest.mock":
            found.append("mock")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root(node.args[0]) in imported:
            found.append("setattr")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [inner for each in targets for inner in (each.elts if isinstance(each, ast.Tuple) else [each])]
            found += [
                each.attr
                for each in targets
                if isinstance(each, ast.Attribute)
                and each.attr not in SETTINGS
                and (_root(each) in imported or (_root(each) != "self" and _is_function(node.value, functions)))
            ]
    return found


def _is_function(value, functions):
    made = isinstance(value, ast.Call) and ast.unparse(value.func) in ("partial", "MethodType")
    return made or isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def _root(node):
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
