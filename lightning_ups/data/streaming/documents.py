"""Documents of Hugging Face datasets, litdata folders and sequences, read in blocks from any position."""

import glob
from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lightning_ups._compat.optional.packages import require
from lightning_ups._compat.optional.tokenizers import content_hash
from lightning_ups.data.chat import content_of

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_IN_FOLDERS = (*_BUILDERS, ".txt")
_REQUIREMENTS = {"datasets": "datasets>=3", "litdata": "litdata>=0.2.40"}
_SHARDS = 16  # of a source that can be indexed, in each lane: their order is shuffled, too


def open_source(source: Any) -> Any:
    """Open what `StreamedTokens` takes as a source: return a dataset, or a sequence of documents.

    Raises:
        FileNotFoundError: If there is no such source.
        ImportError: If the package that reads it is missing.
    """
    if not isinstance(source, str | Path):
        return source
    name = str(source)
    path = Path(name)
    if (path / "index.json").exists() or (name.endswith("/") and "://" in name):
        return _LitdataFolder(name)
    datasets = _library("datasets", name)
    if (path / "dataset_dict.json").exists():  # of several splits
        path = path / "train"
    if (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    files = _files(name)
    try:
        if files is not None:
            kind = _BUILDERS.get(_suffix(files[0]), "text")
            options = {"sample_by": "document", "encoding_errors": "replace"} if kind == "text" else {}
            return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None, split="train", streaming=True)
    except Exception as error:  # noqa: BLE001  (whatever the network, the Hub or the package raise)
        reason = str(error).strip().partition("\n")[0][:150]
        cure = "" if files else " Without a network, download it before and give the files: DIR/*.parquet."
        raise FileNotFoundError(
            f"StreamedTokens: {name}{'' if files else ' is not a local file, and'} could not be opened"
            f" ({type(error).__name__}: {reason}).{cure}"
        ) from None


class Shards(Protocol):
    """A source in parts, each of which is read in blocks from any position."""

    num_shards: int

    def blocks(self, shard: int, position: Any, size: int) -> Iterator[tuple[list[Any], Any]]:
        """Yield the documents of a shard behind ``position`` (None: its start), about ``size`` at a time.

        Each comes with the position behind it.
        """
        ...


def shards_of(dataset: Any, *, lanes: int, field: str) -> Shards:
    """Divide what `open_source` returned, if possible into as many shards as can be divided among ``lanes``."""
    if hasattr(dataset, "to_iterable_dataset"):  # a Dataset of Hugging Face, which can be indexed
        dataset = dataset.to_iterable_dataset(num_shards=_num_shards(len(dataset), lanes))
    if hasattr(dataset, "load_state_dict") and hasattr(dataset, "num_shards"):
        return _Stream(dataset, field)
    if isinstance(dataset, Sequence) or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return _Indexed(dataset, field, _num_shards(len(dataset), lanes))
    raise TypeError(
        f"StreamedTokens: a source is a path, a Hub name, a dataset of Hugging Face or a sequence of texts, and not"
        f" {type(dataset).__name__}."
    )


class _Stream:
    """A streaming dataset of Hugging Face: its shards are its files."""

    def __init__(self, dataset: Any, field: str) -> None:
        names = dataset.column_names
        self._dataset = dataset.select_columns([field]) if names and field in names else dataset
        self._field, self.num_shards = field, dataset.num_shards

    def blocks(self, shard: int, position: Any, size: int) -> Iterator[tuple[list[Any], Any]]:
        part = self._dataset.shard(self.num_shards, shard)
        if position is not None:
            part.load_state_dict(position)
        for block in part.iter(size):  # unlike iter(part), it does not divide the shard among workers once more
            _check_field(block, self._field)
            yield block[self._field], part.state_dict()


class _Indexed:
    """Documents with numbers: a shard is a range of them."""

    def __init__(self, documents: Sequence[Any], field: str, num_shards: int) -> None:
        self._documents, self._field, self.num_shards = documents, field, num_shards

    def blocks(self, shard: int, position: Any, size: int) -> Iterator[tuple[list[Any], Any]]:
        start, end = (len(self._documents) * each // self.num_shards for each in (shard, shard + 1))
        for first in range(start if position is None else position, end, size):
            behind = min(first + size, end)
            yield [self._content(self._documents[index]) for index in range(first, behind)], behind

    def _content(self, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        _check_field(document, self._field)
        return document[self._field]


class _LitdataFolder(Sequence[Any]):
    """The items of a folder that ``litdata.optimize`` wrote. Each process opens it when it first reads."""

    def __init__(self, path: str) -> None:
        self._path, self._dataset = path, None
        dataset = _library("litdata", path).StreamingDataset(path)
        dataset[0]
        self._length = len(dataset.cache)  # of all ranks; that of the dataset is this rank's

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if self._dataset is None:
            self._dataset = _library("litdata", self._path).StreamingDataset(self._path)
        return self._dataset[index]


class Place(NamedTuple):
    """A position in a `Reader`: the pass, the shard in its order, the source's position there, and what came before.

    Args:
        number: Of the pass through all documents, from 0.
        shard: In the order of this pass.
        position: Where the block of shuffled documents begins in the shard, as the source describes it.
        read: Documents of this pass before the block.
        taken: Documents of the block that were taken.
    """

    number: int = 0
    shard: int = 0
    position: Any = None
    read: int = 0
    taken: int = 0


class Reader:
    """The documents of one source in one lane: all of them in a random order, again and again.

    All lanes together read each document once in a pass. If the number of shards and that of lanes have no common
    factor, each lane reads all documents and takes every n-th.

    Args:
        shards: Pairs of a source and the number of a shard in it.
        lane: Which part of the documents.
        lanes: The number of parts.
        block: Documents that are shuffled together. 0: do not shuffle.
        seed: For the order, together with ``lane``.
        held_out: The share of documents that is left out, by hash.
        invert: Take only those instead.
    """

    def __init__(
        self,
        shards: Sequence[tuple[Shards, int]],
        *,
        lane: int,
        lanes: int,
        block: int,
        seed: tuple[int, ...],
        held_out: float,
        invert: bool = False,
    ) -> None:
        groups = gcd(len(shards), lanes)
        self._shards, self._group = shards[lane % groups :: groups], lane % groups
        self._step, self._offset = lanes // groups, lane // groups
        self._lane, self._block, self._seed = lane, block, seed
        self._held_out, self._invert = held_out, invert

    def documents(self, place: Place) -> Iterator[tuple[Place, Any]]:
        """Yield the documents behind ``place`` without end, each with the place behind it.

        Raises:
            ValueError: If a pass has no document.
        """
        while True:
            found = 0
            for found, behind in enumerate(self.one_pass(place), start=1):  # noqa: B007
                yield behind
            if not found and place == Place(place.number):
                raise ValueError(
                    "StreamedTokens: a source has fewer documents than ranks x workers, or none is for training. Use"
                    " more documents, a smaller num_workers, or a smaller val_fraction."
                )
            place = Place(place.number + 1)

    def one_pass(self, place: Place) -> Iterator[tuple[Place, Any]]:
        """Yield the documents behind ``place`` to the end of its pass, each with the place behind it."""
        for start, documents in self._blocks(place):
            order = range(len(documents))
            if self._block:
                order = np.random.default_rng((*self._seed, self._lane, place.number, start.read)).permutation(order)
            taken = place.taken if start == place._replace(taken=0) else 0
            for index in range(taken, len(documents)):
                yield start._replace(taken=index + 1), documents[order[index]]

    def _blocks(self, place: Place) -> Iterator[tuple[Place, list[Any]]]:
        """Yield blocks of documents of this lane, each with the place where it begins."""
        order = np.arange(len(self._shards))
        if self._block:  # all lanes of a group read its shards in the same order
            np.random.default_rng((*self._seed, place.number, self._group)).shuffle(order)
        start, read, block = place._replace(taken=0), place.read, []
        position = place.position
        for index in range(place.shard, len(order)):
            source, shard = self._shards[order[index]]
            for documents, behind in source.blocks(shard, position, self._block or 256):
                block += filter(self._wanted, documents[(self._offset - read) % self._step :: self._step])
                read += len(documents)
                if len(block) >= self._block:
                    yield start, block
                    start, block = Place(place.number, index, behind, read), []
            position = None
        yield start, block

    def _wanted(self, document: Any) -> bool:
        if document is None or not len(document):
            return False
        if not self._held_out:
            return not self._invert
        if isinstance(document, str):
            content = document.encode()
        else:
            content = content_of(document) if isinstance(document[0], dict) else np.asarray(document, "<i8").tobytes()
        digest = content_hash(content)
        return (int.from_bytes(digest, "little") < np.float64(self._held_out) * 2.0**64) == self._invert


def held_out_documents(shards: Sequence[tuple[Shards, int]], fraction: float) -> Iterator[Any]:
    """Yield the documents that are for validation, in the order of the source."""
    reader = Reader(shards, lane=0, lanes=1, block=0, seed=(), held_out=fraction, invert=True)
    return (document for _, document in reader.one_pass(Place()))


def _files(name: str) -> list[str] | None:
    """Return the files of a path, folder, pattern or address; None for a name on the Hub."""
    if "://" in name:
        return [name]
    path = Path(name)
    if path.is_dir():
        for suffix in _IN_FOLDERS:
            if found := sorted(str(each) for each in path.rglob(f"*{suffix}*") if _suffix(str(each)) == suffix):
                return found
        raise FileNotFoundError(f"StreamedTokens: {name} has no {', '.join(_IN_FOLDERS)} file.")
    if found := sorted(each for each in glob.glob(name, recursive=True) if Path(each).is_file()):
        return found
    if _suffix(name) or name.startswith((".", "/", "~")) or "*" in name or name.count("/") > 1:
        raise FileNotFoundError(f"StreamedTokens: {name} does not exist (looked up from {Path.cwd()}).")
    return None


def _suffix(name: str) -> str:
    path = Path(name)
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def _num_shards(length: int, lanes: int) -> int:
    return max(lanes * min(_SHARDS, length // lanes), 1)


def _check_field(record: Any, field: str) -> None:
    if field not in record:
        raise ValueError(f"StreamedTokens(field={field!r}) is not in a source. Its fields: {', '.join(record)}.")


def _library(package: str, name: str) -> Any:
    return require(package, requirement=_REQUIREMENTS[package], extra="data", feature=f"StreamedTokens of {name}")
