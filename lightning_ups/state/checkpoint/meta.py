"""Reads what a checkpoint holds besides tensors, without running code that it names."""

import io
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, is_zipfile

import torch
from torch import Tensor

_LARGEST_JSON = 2**28  # bytes


class Everything:
    """Contains every key: anything that is not trusted may be left out."""

    def __contains__(self, key: object) -> bool:
        return True


def dumped(state: Any) -> bytes:
    """Return ``state`` as bytes of ``torch.save``. Later changes of the state do not affect them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def loaded(
    path: Path, *, weights_only: bool = True, needless: Container[str] = (), mmap: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the dict saved at ``path``.

    Args:
        path: A file that ``torch.save`` wrote.
        weights_only: Only build tensors, containers, numbers, strings, and classes trusted by ``torch.serialization``.
            False: build everything, and run code that the file names.
        needless: Top-level keys that may be left out if they hold other classes.
        mmap: Map the tensors instead of reading them.

    Returns:
        The dict, and the class of everything that was left out, by its place.

    Raises:
        ValueError: If the file is not valid, holds no dict, or holds untrusted objects outside of ``needless``.
        OSError: If the user has no permission to read it.
    """
    check_is_file(path)
    if not is_zip(path):
        raise ValueError(
            f"{path} is not a checkpoint. torch.save did not write it, or its end is missing, because the disk was full"
            " or the process died. Give a complete file. Or it is in the format of torch before 1.6: load it and save"
            " it again with torch.save."
        )
    if not weights_only:
        try:
            state = torch.load(path, map_location="cpu", weights_only=False, mmap=mmap)
        except (UnpicklingError, UnicodeDecodeError, EOFError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise  # about classes, or memory
            raise ValueError(damage(path, error)) from error
        return _dict_in(path, state), {}
    with _refusing(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    inert = [(type("Untrusted", (_Untrusted,), {"name": name}), name) for name in names]
    with _refusing(path, untrusted=names), torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    state = _dict_in(path, state)
    with damage_told(path):  # nested too deeply
        left = {place: name for key in state for place, name in _untrusted(state[key], key)}
    needed = {place: name for place, name in left.items() if place.partition(".")[0] not in needless}
    if needed:
        raise ValueError(_refusal(path, needed))
    for key in {place.partition(".")[0] for place in left}:
        state[key] = _pruned(state[key])
    return state, left


def weights(path: Path, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights in ``saved``, the content of ``path``: a state dict, alone or within a checkpoint.

    Raises:
        ValueError: If there are none.
    """
    state = saved.get("state_dict", saved)
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} holds no weights. They are tensors by their names, alone or below 'state_dict', and it has"
            f" {_keys(saved)}. Give a checkpoint of a Trainer, or what torch.save made of a state_dict."
        )
    if not all(isinstance(name, str) for name in state):
        raise ValueError(damage(path, ValueError("its weights have names that are no text")))
    return state


def check_saved(path: Path, saved: Mapping[str, Any], *, keys: Sequence[str] = ("state_dict",)) -> None:
    """Raise ValueError if ``saved``, the content of ``path``, lacks one of the ``keys`` of a Trainer's checkpoint."""
    lacking = [key for key in keys if key not in saved]
    if lacking:
        alone = "state_dict" in lacking and any(isinstance(value, Tensor) for value in saved.values())
        raise ValueError(
            f"{path} is not a checkpoint of a Trainer: it has no {lacking[0]!r}, but {_keys(saved)}."
            f" {'It holds weights alone. ' if alone else ''}What goes on from a checkpoint needs all that a Trainer"
            " saves. To begin with the weights in it, call lightning_ups.state.checkpoint.load_weights in"
            " on_fit_start of your module."
        )


def read_json(path: Path) -> Any:
    """Return the JSON in the file at ``path``, or None if it holds none, or is absurdly large or nested."""
    if not path.is_file() or path.stat().st_size > _LARGEST_JSON:  # reading a pipe would never end
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def is_name_in_folder(name: str) -> bool:
    """Return whether ``name``, read from a folder's file, can only refer to another file in that folder."""
    return name not in ("", "..") and "\0" not in name and Path(name).name == name


def damage(path: Path, error: Exception) -> str:
    """Return the error text for a file at ``path`` that cannot be read because of ``error``."""
    said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")[:200]
    said = (
        said
        if said and isinstance(error, ValueError | UnpicklingError | EOFError | OSError)
        else f"{type(error).__name__} {said}"
    )
    return (
        f"{path} cannot be read: {said}. It is damaged: it does not hold what was written there, as when a disk fails."
        " Use an earlier checkpoint."
    )


def check_is_file(path: Path) -> None:
    """Raise ValueError if ``path`` is not a file: it may be a folder, or a pipe, which would never end."""
    if path.exists() and not path.is_file():
        raise ValueError(damage(path, OSError("it is not a file")))


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Raise one error that names ``path`` if its values have unexpected types."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(damage(path, error)) from error
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise RuntimeError(_shortage(path, error)) from error


@contextmanager
def _refusing(path: Path, *, untrusted: Sequence[str] = ()) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # any error: a damaged pickle calls trusted functions with arbitrary arguments
        if _is_of_memory(error):
            raise RuntimeError(_shortage(path, error)) from error
        if untrusted and isinstance(error, UnpicklingError):  # classes that cannot be skipped
            raise ValueError(_refusal(path, {name: name for name in untrusted})) from error
        raise ValueError(damage(path, error)) from error


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _shortage(path: Path, error: Exception) -> str:
    said = str(error)[-120:]
    return f"{path} asks for more memory than this machine can allocate: {said}. It is too large, or damaged."


def is_zip(path: Path) -> bool:
    """Return whether the file at ``path`` is a zip archive, as written by ``torch.save``.

    Raises:
        PermissionError: If the user has no permission to read it.
    """
    try:
        path.open("rb").close()  # without permission, `is_zipfile` returns False
    except PermissionError as error:
        raise PermissionError(
            f"{path} cannot be read: {error.strerror}. It belongs to another user, or its mode does not allow it."
            " Ask for the right to read it, or copy it as a user who may."
        ) from error
    try:
        return is_zipfile(path)
    except BadZipFile:
        return False


def _dict_in(path: Path, state: Any) -> dict[str, Any]:
    if isinstance(state, dict):
        return state
    raise ValueError(
        f"{path} holds a {type(state).__name__}, and no checkpoint: that is a dict, by the names of its parts."
        " Give a checkpoint of a Trainer, or what torch.save made of a state_dict."
    )


def _keys(saved: Mapping[str, Any]) -> str:
    names = [repr(key) for key in saved]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "") if names else "nothing"


class _Untrusted:
    """A placeholder for an object of an untrusted class; nothing of the class is imported or run."""

    name: str

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Untrusted":  # noqa: ARG004
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _untrusted(value: Any, place: str) -> Iterator[tuple[str, str]]:
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, _Untrusted):
        yield place, kind.name
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _untrusted(key, f"{place} (a key)")
            yield from _untrusted(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for index, inner in enumerate(value):
            yield from _untrusted(inner, f"{place}.{index}")


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if not _is_untrusted(k) and not _is_untrusted(v)}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_pruned(v) for v in value if not _is_untrusted(v))
    return None if _is_untrusted(value) else value


def _is_untrusted(value: Any) -> bool:
    return isinstance(value, _Untrusted) or (isinstance(value, type) and issubclass(value, _Untrusted))


def _refusal(path: Path, left: dict[str, str]) -> str:
    return (
        f"{path} holds objects of classes that are not trusted:"
        f" {', '.join(f'{name} at {place}' if name != place else name for place, name in sorted(left.items())[:5])}."
        " Building them would run code that the file names, so only tensors and plain values are read."
        " Name the classes in torch.serialization.add_safe_globals([...]) or, if you trust the file, tell the strategy:"
        " FSDP2Strategy(weights_only=False)."
    )
