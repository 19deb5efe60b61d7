"""The configurations that the package ships: listed, and read, without torch."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_ups.config.spelling import suggestion

__all__ = ["AUTO", "comment", "main", "names", "text"]

AUTO = "auto"  # stands for the preset of the device
_OF_DEVICES = "cpu, a100 or h100"
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
            f"{AUTO!r} stands for the preset of the device that a run will use, which is {_OF_DEVICES}."
            " It has no settings of its own. Name one of those."
        )
    if name not in names():
        raise ValueError(
            f"There is no preset {name!r}. Presets are the configurations that the package ships;"
            f" `presets` lists them. {suggestion(name, [AUTO, *names()])}"
        )
    return (_FOLDER / f"{name}.yaml").read_text()


def comment(name: str) -> str:
    """Return what a preset says of itself, in its first line."""
    return text(name).partition("\n")[0].removeprefix("#").strip()


def main(argv: Sequence[str]) -> int:
    """Print one line for each preset, or the YAML of the one that is named."""
    parser = ArgumentParser(
        prog="python -m lightning_ups presets", description="List the configurations that the package ships."
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="print this one, as YAML, instead")
    if asked := parser.parse_args(argv).names:
        for name in asked:
            print(text(name), end="")
        return 0
    width = max(map(len, names()))
    print(f"{AUTO:{width}}  {_OF_DEVICES}, by the device that the run will use")
    for name in names():
        print(f"{name:{width}}  {comment(name)}")
    return 0
