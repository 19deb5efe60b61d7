"""Manifests of runs as data: written whole or not at all, flattened, compared."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ABSENT", "difference", "flattened", "read", "reserve", "write"]

ABSENT = "(absent)"
# They differ between any two runs and explain nothing.
_OF_THE_MOMENT = ("run/started", "run/duration_s")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest in the file ``path``.

    Raises:
        ValueError: If it is none.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no manifest: {error}. Give a file that RunManifest wrote.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no manifest: it holds no names. Give a file that RunManifest wrote.")
    return content


def write(manifest: Mapping[str, Any], path: Path) -> None:
    """Write ``manifest`` to ``path``, so that a reader at any time finds a whole one: the old or the new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(manifest, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def reserve(folder: Path, *, name: str = "manifest", ending: str = ".json") -> Path:
    """Return a path in ``folder`` that no earlier run and no other process has: NAME.json, NAME-2.json, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / (f"{name}{ending}" if number == 1 else f"{name}-{number}{ending}")
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path


def flattened(values: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return nested ``values`` as one level of names with slashes; a list of plain values stays one value."""
    return dict(_leaves(values, prefix))


def difference(
    a: Mapping[str, Any] | str | os.PathLike[str], b: Mapping[str, Any] | str | os.PathLike[str]
) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two manifests, or the files of two: each name with both values.

    A name that one of them lacks has the value ``ABSENT`` there. When the runs started and how long they took is left
    out, since it always differs.
    """
    one, other = (flattened(m if isinstance(m, Mapping) else read(m)) for m in (a, b))
    names = dict.fromkeys([*one, *other])
    pairs = {name: (one.get(name, ABSENT), other.get(name, ABSENT)) for name in names if name not in _OF_THE_MOMENT}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        children: Iterator[tuple[str, Any]] = ((str(key), value) for key, value in values.items())
    elif _is_nested(values):
        children = ((str(index), value) for index, value in enumerate(values))
    else:
        yield name, list(values) if isinstance(values, tuple) else values
        return
    empty = True
    for key, value in children:
        empty = False
        yield from _leaves(value, f"{name}/{key}" if name else key)
    if empty and name:
        yield name, values


def _is_nested(values: Any) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return any(isinstance(value, (Mapping, list, tuple)) for value in values)
