"""List and read the presets: configurations that the package ships. Does not import torch."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_ups.config.suggestions import nearest

AUTO = "auto"  # the preset of the device
_AUTO_CHOICES = "cpu, a100 or h100"
_FOLDER = Path(__file__).parent.parent / "presets"


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def text(name: str) -> str:
    """Return the YAML of a preset.

    Raises:
        ValueError: If there is no such preset.
    """
    if name == AUTO:
        raise ValueError(
            f"The preset {AUTO!r} selects {_AUTO_CHOICES}, depending on the device, and has no settings itself."
            " Print one of these, as in: presets h100"
        )
    if name not in names():
        near = nearest(name, [AUTO, *names()], cutoff=0.7)  # less would suggest 'cpu' for 'gpu'
        all_names = f"Use {AUTO!r}, which selects one for the device, or one of: {', '.join(names())}."
        raise ValueError(f"Unknown preset {name!r}. {f'Did you mean {near!r}?' if near else all_names}")
    return (_FOLDER / f"{name}.yaml").read_text()


def comment(name: str) -> str:
    """Return the description of a preset, which is its first line."""
    return text(name).partition("\n")[0].removeprefix("#").strip()


def main(argv: Sequence[str]) -> int:
    """Print one line for each preset, or the YAML of the presets that are named."""
    parser = ArgumentParser(
        prog="python -m lightning_ups presets", description="List the presets: configurations that the package ships."
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="print this preset as YAML")
    if chosen := parser.parse_args(argv).names:
        for name in chosen:
            print(text(name), end="")
        return 0
    width = max(map(len, names()))
    print(f"{AUTO:{width}}  {_AUTO_CHOICES}, depending on the device")
    for name in names():
        print(f"{name:{width}}  {comment(name)}")
    return 0
