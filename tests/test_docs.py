"""Every name, option, command and link in README, docs and docstrings stands for something that exists."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lightning_ups.__main__ import main

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
MODULES = sorted(p for p in (ROOT / "lightning_ups").rglob("*.py"))
ROOMS = ("callbacks", "strategies", "precision", "models", "data")


def blocks(text: str, *languages: str) -> Iterator[str]:
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def shells():
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"lightning_ups.{room}")
        found |= {name: getattr(module, name) for name in module.__all__}
    return found


def resolve(dotted: str):
    """Return what a dotted name stands for: a module, or an attribute of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            thing = getattr(thing, attribute)
        return thing
    raise AssertionError(f"{dotted} cannot be imported")


def arguments(thing) -> set[str]:
    """Return the names of its arguments, with those that it passes on to its base class as ``**``."""
    known: set[str] = set()
    for each in inspect.getmro(thing) if inspect.isclass(thing) else (thing,):
        found = inspect.signature(each).parameters
        known |= {*found}
        if all(argument.kind is not argument.VAR_KEYWORD for argument in found.values()):
            break
    return known


def checked_calls(source: str) -> int:
    """Import what ``source`` imports from this package, and bind each call of it to the signature."""
    tree, names, count = ast.parse(source), {}, 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_ups"):
            names |= {alias.asname or alias.name: resolve(f"{node.module}.{alias.name}") for alias in node.names}
    names = shells() | names  # docstrings leave the imports out
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            known = arguments(names[node.func.id])
            for keyword in node.keywords:
                assert keyword.arg is None or keyword.arg in known, f"{node.func.id}({keyword.arg}=...) in:\n{source}"
            count += 1
    return count


def check_yaml(node) -> None:
    """Compare every class_path of ours, and its init_args, with the class."""
    if isinstance(node, dict):
        path = node.get("class_path")
        if isinstance(path, str) and (path in shells() or path.startswith("lightning_ups.")):
            shell = shells().get(path) or resolve(path)
            known = arguments(shell)
            for name in node.get("init_args") or {}:
                assert name in known, f"{path} has no argument {name!r}, but {sorted(known)}"
        for value in node.values():
            check_yaml(value)
    elif isinstance(node, list):
        for value in node:
            check_yaml(value)


OF_USERS = ("mypackage.", "my.", "mine.")  # modules that pages make up


def check_parses(text: str) -> None:
    """Parse ``text`` as the command line does, with a model and data in place of those that a page makes up."""
    from lightning_ups.cli import UpsCLI

    tree = yaml.safe_load(text)
    made_up = [
        key for key in ("model", "data") if str((tree.get(key) or {}).get("class_path", "")).startswith(OF_USERS)
    ]
    tree = {key: value for key, value in tree.items() if key not in made_up}
    if "tensor_parallel_size" in tree:  # arguments of a strategy
        tree = {"trainer": {"strategy": {"class_path": "FSDP2Strategy", "init_args": tree}}}
    tree.setdefault("model", {"class_path": "tests.cli_toys.Toy"})
    with pytest.raises(SystemExit) as stop:
        UpsCLI(args=["fit", "--config", yaml.safe_dump(tree), "--print_config"])
    assert stop.value.code == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
class TestPage:
    def test_python_blocks_call_what_exists(self, page):
        for block in blocks(page.read_text(), "python"):
            checked_calls(block)

    def test_yaml_blocks_name_what_exists(self, page):
        for block in blocks(page.read_text(), "yaml"):
            check_yaml(yaml.safe_load(block))

    def test_yaml_blocks_can_be_parsed(self, page):
        for block in blocks(page.read_text(), "yaml"):
            check_parses(block)

    def test_dotted_names_can_be_imported(self, page):
        for name in set(re.findall(r"`(lightning_ups(?:\.\w+)+)", page.read_text())):
            resolve(name)

    def test_commands_exist(self, page):
        from lightning_ups.__main__ import TOOLS, TRAINER

        known = {*TRAINER, *(name for name, tool in TOOLS.items() if find_spec(f"lightning_ups.{tool.module}"))}
        for command in re.findall(r"python -m lightning_ups (\w+)", page.read_text()):
            assert command in known, f"python -m lightning_ups {command} in {page.name}"

    def test_links_and_files_exist(self, page):
        text = page.read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in re.findall(r"`((?:docs|examples|benchmarks|tests|lightning_ups)/[\w./-]+\.\w+)`", text):
            assert (ROOT / target).exists(), f"{page.name} names {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_can_be_parsed(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    check_parses(path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings_call_what_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
            for example in re.findall(r"Example::\n\n((?:    .*\n?|\n)+)", doc + "\n"):
                checked_calls(inspect.cleandoc(example))


def test_the_package_cites_no_page():
    """The wheel does not contain docs, so no message may refer to them."""
    assert [str(path) for path in MODULES if re.search(r"\b\w+\.md\b", path.read_text())] == []


def test_the_checks_can_fail():
    with pytest.raises(AssertionError, match="blockz"):
        checked_calls("from lightning_ups.callbacks import Compile\nCompile(blockz=1)")
    with pytest.raises(AssertionError, match="blockz"):
        check_yaml({"callbacks": [{"class_path": "Compile", "init_args": {"blockz": 1}}]})
    with pytest.raises(AttributeError):
        resolve("lightning_ups.callbacks.Nothing")


@pytest.mark.filterwarnings("ignore::UserWarning")  # two batches are fewer than one logs
def test_readmes_python_runs(tmp_path, monkeypatch):
    (code,) = blocks((ROOT / "README.md").read_text(), "python")
    monkeypatch.chdir(tmp_path)
    quiet = "limit_val_batches=1, accelerator='cpu', enable_progress_bar=False, max_steps=2"
    quick = code.replace("max_steps=100", quiet).replace("Compile()", "Compile(backend='aot_eager')")
    assert quick.count(quiet) == quick.count("aot_eager") == 1  # two steps, and not by Inductor: the rest as it stands
    exec(compile(quick, "README.md", "exec"), {})


def test_readmes_yaml_runs(tmp_path, monkeypatch):
    (text,) = blocks((ROOT / "README.md").read_text(), "yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set by the command line, and put back with this
    Path("run.yaml").write_text(text)
    few = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu"]
    assert main(["fit", "--config", "run.yaml", *few]) == 0
    assert [*tmp_path.rglob("*manifest*.json")]
