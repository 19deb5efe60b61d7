"""Manifests of runs: written atomically, flattened, compared."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ABSENT = "(absent)"
# They differ between all runs.
_OF_THE_MOMENT = ("run/started", "run/duration_s")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest in a file.

    Raises:
        ValueError: If the file is not a manifest.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest: {error}. Give a file that RunManifest wrote.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} is not a manifest, but a {type(content).__name__}. Give a file that RunManifest wrote."
        )
    return content


def write(manifest: Mapping[str, Any], path: Path) -> None:
    """Write ``manifest`` to ``path`` atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(manifest, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def reserve(folder: Path, *, name: str = "manifest", ending: str = ".json") -> Path:
    """Create a new file in ``folder`` and return its path: NAME.json, NAME-2.json, and so on."""
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
    """Flatten nested ``values`` to names with slashes. A list of plain values stays one value."""
    return dict(_leaves(values, prefix))


def difference(
    a: Mapping[str, Any] | str | os.PathLike[str], b: Mapping[str, Any] | str | os.PathLike[str]
) -> dict[str, tuple[Any, Any]]:
    """Return the names with different values in two manifests, or their files, with both values.

    A missing name has the value ``ABSENT``. Start and duration of the runs are ignored.
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
