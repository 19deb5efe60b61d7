"""A conversion of another tool's settings: what each key becomes, and what has no counterpart."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_WIDTH = 118
_UNKNOWN = "unknown to this command"


class Conversion:
    """Settings of another tool, of which each key is entered as converted or as having no counterpart.

    Args:
        source: The settings.

    Attributes:
        trainer: The section ``trainer`` of the result.
        sections: Its other sections.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self.trainer: dict[str, Any] = {"accelerator": "gpu"}
        self.sections: dict[str, Any] = {}
        self._left = dict(_leaves(source))
        self._values = dict(self._left)
        self._converted: dict[str, str] = {}
        self._without: dict[str, str] = {}
        self._others: list[Conversion] = []
        self._read: set[str] = set()

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``; ``default`` if it is missing or ``auto``."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None or value == "auto" else value

    def becomes(self, text: str, *keys: str) -> None:
        """Enter what those of ``keys`` that are given become."""
        self._converted |= dict.fromkeys(self._taken(keys), text)

    def has_none(self, text: str, *keys: str) -> None:
        """Enter that those of ``keys`` that are given have no counterpart. A key may be that of a whole section."""
        self._without |= dict.fromkeys(self._taken(keys), text)

    def callback(self, name: str, **settings: Any) -> None:
        """Add a callback to those of the files before."""
        self.trainer.setdefault("callbacks+", []).append(_written(name, settings))

    def strategy(self, name: str, **settings: Any) -> None:
        """Set the strategy."""
        self.trainer["strategy"] = _written(name, settings)

    def precision(self, name: str, **settings: Any) -> None:
        """Set the precision plugin."""
        self.trainer["plugins"] = [_written(name, settings)]

    def add(self, other: "Conversion") -> None:
        """Add the result of another conversion, whose keys follow."""
        self.trainer |= other.trainer
        self.sections |= other.sections
        self._others.append(other)

    def text(self) -> str:
        """Return the YAML, with each key of the source in a comment."""
        lines = [yaml.safe_dump({**self.sections, "trainer": self.trainer}, sort_keys=False).rstrip()]
        for each in (self, *self._others):
            each.has_none(_UNKNOWN, *each._left)
            for title, rows in (("What each key became", each._converted), ("No counterpart", each._without)):
                if rows:
                    lines += ["", f"# {title}:", *each._commented(rows)]
        return "\n".join(lines) + "\n"

    def _taken(self, keys: tuple[str, ...]) -> list[str]:
        found = [given for given in self._left if any(given == key or given.startswith(f"{key}.") for key in keys)]
        for key in found:
            del self._left[key]
        return found

    def _commented(self, rows: Mapping[str, str]) -> Iterator[str]:
        for key, text in rows.items():
            value = self._values[key]
            if value == "auto" and key in self._read:
                text += "; transformers filled auto in, so set it yourself"
            line = f"{key}: {yaml.safe_dump(value, default_flow_style=True, width=999).splitlines()[0]} -> {text}"
            yield from textwrap.wrap(line, _WIDTH, initial_indent="# - ", subsequent_indent="#     ")


def _written(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_path": name, **({"init_args": dict(settings)} if settings else {})}


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
