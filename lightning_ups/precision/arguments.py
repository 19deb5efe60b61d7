"""Checking settings of precisions that would have no effect beside others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from lightning_ups.order.arguments import check_choice, check_path, check_some
from lightning_ups.transforms.blocks import as_patterns

__all__ = ["Filter", "check_head", "check_timed", "check_tokens"]

Filter = Literal["all", "auto"]


def check_head(of: str, *, head: bool, include: Sequence[str] | None) -> None:
    """Refuse ``head`` beside ``include``, which names what is converted wherever it is, and an empty ``include``."""
    names = None if include is None else as_patterns(include)
    check_some("include", names, of=of, why="It would convert nothing, since it names what is converted.")
    if head and include is not None:
        raise ValueError(
            f"{of}(include={[*include]!r}, head=True) says twice what is converted: include names all of it."
            " Add the names outside the blocks to include, or leave one of the two out."
        )


def check_tokens(tokens: int | None, *, said: str) -> None:
    """Refuse a number of ``tokens`` that is none, in the words in which it was ``said``."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError(
            f"{said} is not a valid number of rows, which is usually batch size times sequence length."
            " Give a whole number of 1 or more, or leave it out: a step with the first batch shows it."
        )


def check_timed(of: str, *, filter: str, tokens: int | None, table: str | Path | None) -> None:
    """Refuse an unknown ``filter``, a number of ``tokens`` that is none, and what only ``filter="auto"`` looks at."""
    why = "It says whether all layers are converted that can be, or only those that are faster in float8."
    check_choice("filter", filter, get_args(Filter), of=of, why=why)
    check_path("table", table, of=of, why="It is a file of times.")
    check_tokens(tokens, said=f"{of}(tokens={tokens!r})")
    given = {name: value for name, value in (("tokens", tokens), ("table", table)) if value is not None}
    if filter != "auto" and given:
        name, value = next(iter(given.items()))
        shown = str(value) if isinstance(value, Path) else value
        raise ValueError(
            f"{of}(filter={filter!r}, {name}={shown!r}) would not look at {name}, which is for times of products."
            f" Use filter='auto', or leave {name} out."
        )
