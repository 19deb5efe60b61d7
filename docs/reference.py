"""The reference: a page for each public class and command, from docstrings, signatures and ``--help``."""

import contextlib
import importlib
import inspect
import io
import os
from functools import cache
from pathlib import Path

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy

from lightning_ups.__main__ import TOOLS, TRAINER, main

ROOMS = ("callbacks", "strategies", "precision", "models", "data")
DOCS = Path(__file__).parent
QUICKSTART, COMMAND_LINE = "start/quickstart", "start/cli"
GUIDES = {  # where the guide is not the page that names a part most often
    "ExactResume": "guides/exact_resume",
    **dict.fromkeys(("HFCausalLM", "HFModule"), "guides/language_models"),
    "FSDP2Strategy": "guides/fsdp2",
    "Float8Precision": "guides/precision",
    "PDETransformer": "guides/pde",
    **dict.fromkeys(("GPT", "GPTConfig", "GPTModule", "LeanProgressBar", "RandomTokens", "StdlibText"), QUICKSTART),
    **dict.fromkeys(("TextSample", "UnigramBaseline"), QUICKSTART),
    **dict.fromkeys(("explain", "init", "presets", "recipes"), COMMAND_LINE),
}
REQUIRED = {  # examples of arguments without a default
    "batch_size": 8,
    "files": "texts.jsonl",
    "folders": "tokens/train",
    "path": "flow.hdf5",
    "seq_len": 2048,
    "sources": "documents/*.jsonl",
    "tasks": ["hellaswag"],
    "tokenizer": "tokenizer.json",
    "vocab_size": 32000,
}


@cache
def pages() -> dict[str, str]:
    """Return the text of each page by its path below ``docs/``."""
    texts = {f"guides/{path.stem}": path.read_text() for path in sorted(DOCS.glob("guides/*.md"))}
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"lightning_ups.{room}")
        for name in module.__all__:
            if inspect.isclass(part := getattr(module, name)):
                found[f"reference/{room}/{name}.md"] = _page_of_class(part, texts)
    for name, tool in TOOLS.items():
        found[f"reference/commands/{name}.md"] = _page_of_command(name, tool.description, texts)
    listed = "\n".join(f"- `{name}`: {what}; all options with `--help`" for name, what in TRAINER.items())
    found["reference/index.md"] = _index(found) + f"\n## Trainer\n{listed}\n"
    return found


def navigation(paths: list[str]) -> list:
    """Return the entries of the reference in the navigation."""
    rooms = {
        room.capitalize(): [path for path in paths if path.startswith(f"reference/{room}/")]
        for room in (*ROOMS, "commands")
    }
    return ["reference/index.md", *({room: [{Path(path).stem: path} for path in own]} for room, own in rooms.items())]


def yaml_of(part: type) -> str | None:
    """Return a configuration that writes out all defaults of a class, or None if YAML cannot name it."""
    arguments = {}
    taken = {}
    for kind in part.__mro__:  # of a base, if the class passes on what it does not take itself
        taken = dict(inspect.signature(kind).parameters) | taken
        if not any(argument.kind is argument.VAR_KEYWORD for argument in inspect.signature(kind).parameters.values()):
            break
    for name, argument in taken.items():
        if argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        value = REQUIRED.get(name) if argument.default is argument.empty else argument.default
        value = list(value) if isinstance(value, tuple) else value
        if value is None or isinstance(value, (bool, int, float, str, list)):
            arguments[name] = value
    entry = {"class_path": part.__name__} | ({"init_args": arguments} if arguments else {})
    places = {
        Callback: {"trainer": {"callbacks": [entry]}},
        Precision: {"trainer": {"plugins": [entry]}},
        Strategy: {"trainer": {"strategy": entry}},
        LightningModule: {"model": entry},
        LightningDataModule: {"data": entry},
    }
    tree = next((tree for kind, tree in places.items() if issubclass(part, kind)), None)
    return tree and yaml.safe_dump(tree, sort_keys=False)


def _guide(name: str, texts: dict[str, str]) -> str:
    """Return a link to the guide that names a part most often."""
    page = GUIDES.get(name) or max(texts, key=lambda page: (page.endswith(f"/{name}"), texts[page].count(name)))
    title = (DOCS / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")
    return f"Guide: [{title}](../../{page}.md)\n"


def _page_of_class(part: type, texts: dict[str, str]) -> str:
    text = f"# {part.__name__}\n\n{_guide(part.__name__, texts)}\n::: {part.__module__}.{part.__qualname__}\n"
    if example := yaml_of(part):
        text += f"\n## In YAML, with all defaults\n\n```yaml\n{example}```\n"
    return text


def _page_of_command(name: str, description: str, texts: dict[str, str]) -> str:
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([name, "--help"])
    text = shown.getvalue().replace("usage: mkdocs", "usage: lightning-ups")
    return f"# {name}\n\n{description[0].upper()}{description[1:]}.\n\n{_guide(name, texts)}\n```text\n{text}```\n"


def _index(found: dict[str, str]) -> str:
    lines = ["# Reference", ""]
    for room in (*ROOMS, "commands"):
        lines += [f"## {room.capitalize()}"]
        for name in [Path(path).stem for path in found if path.startswith(f"reference/{room}/")]:
            lines += [f"- [`{name}`]({room}/{name}.md): {_first_line(room, name)}"]
        lines += [""]
    return "\n".join(lines)


def _first_line(room: str, name: str) -> str:
    if room == "commands":
        return TOOLS[name].description
    return (
        (getattr(importlib.import_module(f"lightning_ups.{room}"), name).__doc__ or "").partition("\n\n")[0].rstrip(".")
    )
