"""Documents in parquet, Arrow, JSON Lines and text files, and how their reading is divided into parts."""

import glob
import gzip
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ups.config.suggestions import suggest

_JSON = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
_IN_FOLDERS = (*_TABLES, *_JSON, ".txt", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".txt.gz")  # what is read of a folder
_READ_AHEAD = 2**20


class Span(NamedTuple):
    """A part of a file: bytes, or row groups of a parquet file. ``stop`` of -1: to the end."""

    path: str
    start: int
    stop: int
    num_bytes: int


Part = tuple[Span, ...]


def find_files(sources: Sequence[str]) -> list[str]:
    """Return the files of paths, folders and patterns; those of a folder or pattern are sorted.

    Raises:
        FileNotFoundError: If one gives no file.
    """
    found: list[str] = []
    for source in sources:
        path = Path(source)
        if path.is_file():
            names = [source]
        elif path.is_dir():
            names = sorted(str(each) for each in path.rglob("*") if each.name.endswith(_IN_FOLDERS) and each.is_file())
            names = [name for name in names if Path(name).name not in ("dataset_info.json", "state.json")]
        else:
            names = sorted(name for name in glob.glob(source, recursive=True) if Path(name).is_file())
        if not names:
            what = f"has no {', '.join(_IN_FOLDERS[:6])} file" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"--source {source} {what} (looked up from {Path.cwd()}).")
        found += names
    return list(dict.fromkeys(found))


def parts_of(files: Sequence[str], *, separator: str | None, num_bytes: int) -> Iterator[Part]:
    """Divide ``files`` into parts of about ``num_bytes``; small files share a part.

    Args:
        files: Paths.
        separator: Text between documents of a text file. None: a file is a document.
        num_bytes: The size of a part, if a file can be divided.
    """
    part: list[Span] = []
    for span in (span for file in files for span in _spans(file, separator=separator, num_bytes=num_bytes)):
        if part and sum(each.num_bytes for each in part) + span.num_bytes > num_bytes:
            yield tuple(part)
            part = []
        part.append(span)
    if part:
        yield tuple(part)


def documents_in(part: Part, *, field: str, separator: str | None, chat: bool = False) -> Iterator[Any]:
    """Yield the documents of a part that are not empty: texts, or with ``chat`` lists of messages.

    Raises:
        ValueError: If a record has no such document in ``field``.
    """
    for span in part:
        kind = Path(span.path).suffix
        if kind in _TABLES:
            texts = _in_table(span, field=field, chat=chat)
        elif _is_json(span.path):
            texts = _in_json(span, field=field, chat=chat)
        elif chat:
            raise ValueError(f"{span.path} has no conversations. --chat needs JSON Lines or tables.")
        elif separator is None:
            with _open(span.path) as file:
                texts = iter([_text(file.read())])
        else:
            texts = map(_text, _records(span, separator.encode()))
        yield from (text for text in texts if text)


def _spans(path: str, *, separator: str | None, num_bytes: int) -> Iterator[Span]:
    size = Path(path).stat().st_size
    if path.endswith(".parquet"):
        metadata = _pyarrow("parquet", path).ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            yield Span(path, group, group + 1, size // metadata.num_row_groups)
        return
    between = "\n" if _is_json(path) else separator
    if between is None or path.endswith((".arrow", ".gz")) or _overlaps_itself(between):
        yield Span(path, 0, -1, size)
        return
    for start in range(0, size, num_bytes):
        yield Span(path, start, min(start + num_bytes, size), min(num_bytes, size - start))


def _overlaps_itself(text: str) -> bool:
    """Return whether occurrences of ``text`` can overlap: where one begins then depends on the text before it."""
    return any(text.startswith(text[index:]) for index in range(1, len(text)))


def _records(span: Span, separator: bytes) -> Iterator[bytes]:
    """Yield the records that begin in ``span``: at the start of the file, or behind a separator."""
    with _open(span.path) as file:
        if span.stop < 0:
            yield from file.read().split(separator)
            return
        first = max(span.start - len(separator), 0)
        file.seek(first)
        data = file.read(span.stop - first)
        # The last record ends at the first separator behind which the next span begins.
        after = max(span.stop - len(separator) - first, 0)
        while (end := data.find(separator, after)) < 0 and (more := file.read(_READ_AHEAD)):
            after = max(len(data) - len(separator) + 1, after)
            data += more
    begin = 0
    if span.start:
        begin = data.find(separator)
        if begin < 0 or begin == end:
            return
        begin += len(separator)
    yield from (data[begin:] if end < 0 else data[begin:end]).split(separator)


def _in_json(span: Span, *, field: str, chat: bool) -> Iterator[Any]:
    for line in _records(span, b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            shown = line[:60].decode(errors="replace")
            raise ValueError(
                f"{span.path} has a line that is not JSON: {shown!r}. It needs one object in each."
            ) from None
        if not isinstance(record, dict):
            raise ValueError(f"{span.path} has a line that is a {type(record).__name__}, not an object with {field!r}.")
        text = _field(record, field, path=span.path, chat=chat)
        half = b"\\u" in line and not chat
        yield text.encode(errors="replace").decode() if half else text  # it may have half of a pair


def _in_table(span: Span, *, field: str, chat: bool) -> Iterator[Any]:
    if span.path.endswith(".parquet"):
        file = _pyarrow("parquet", span.path).ParquetFile(span.path)
        _check_field(file.schema_arrow.names, field, path=span.path)
        batches = file.iter_batches(row_groups=[*range(span.start, span.stop)], columns=[field])
    else:
        ipc = _pyarrow("ipc", span.path)
        with open(span.path, "rb") as file:
            is_file = file.read(6) == b"ARROW1"  # Hugging Face datasets write streams
        reader = (ipc.open_file if is_file else ipc.open_stream)(span.path)
        _check_field(reader.schema.names, field, path=span.path)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        for text in batch.column(field).to_pylist():
            yield _field({field: text}, field, path=span.path, chat=chat)


def _field(record: dict[str, Any], field: str, *, path: str, chat: bool) -> Any:
    _check_field([*record], field, path=path)
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, list if chat else str):
        wanted = "messages" if chat else "text"
        cure = "Add --chat for conversations." if isinstance(value, list) else f"Use --field with {wanted}."
        raise ValueError(f"{path} has no {wanted} in {field!r}, but {type(value).__name__}. {cure}")
    return value


def _check_field(names: Sequence[str], field: str, *, path: str) -> None:
    if field not in names:
        raise ValueError(f"{path} has no field {field!r}. {suggest(field, names)} Set it with --field.")


def _is_json(path: str) -> bool:
    return path.removesuffix(".gz").endswith(_JSON)


def _open(path: str) -> Any:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _pyarrow(module: str, path: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise ImportError(
            f"Reading {path} needs pyarrow: pip install pyarrow. Or give JSON Lines or text files."
        ) from None
