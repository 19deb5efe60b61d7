"""What took effect in a run: written by the steps, stored by the manifest."""

from typing import Any

__all__ = ["Report"]


class Report:
    """Log lines for people and JSON values for programs, by the name of the part that reports them.

    A part may add to them during the run, such as the number of graphs, which is known after the first step.
    """

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Any]] = {}

    def note(self, part: str, line: str, **facts: Any) -> None:
        """Add a ``line`` about ``part``, and ``facts``."""
        self.update(part, **facts)
        self._parts[part]["lines"].append(line)

    def update(self, part: str, **facts: Any) -> None:
        """Add ``facts`` about ``part``, or replace those of the same name."""
        self._parts.setdefault(part, {"lines": []}).update(facts)

    def lines(self) -> list[str]:
        """Return every line, after the name of its part."""
        return [f"{part}: {line}" for part, facts in self._parts.items() for line in facts["lines"]]

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The facts of each part, its lines among them."""
        return {part: {**facts, "lines": [*facts["lines"]]} for part, facts in self._parts.items()}
