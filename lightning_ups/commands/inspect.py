"""``python -m lightning_ups inspect``: what a folder of tokens has, and how well it packs."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from lightning_ups.config.suggestions import parse_options
from lightning_ups.data.chat import marked_text
from lightning_ups.data.packing import Method, Packing, num_cut, pack
from lightning_ups.data.token_folder import TokenFolder

_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_BAR, _SHOWN = 40, 160  # characters


def main(argv: Sequence[str]) -> int:
    """Print the number of documents and tokens, their lengths, how they pack, and the text of one row."""
    asked = parse_options(_parser(), argv)
    if asked.seq_len < 1:
        raise ValueError(f"--seq-len {asked.seq_len} is too short. Give 1 or more.")
    if asked.documents < 1:
        raise ValueError(f"--documents {asked.documents} is too few. Give 1 or more.")
    folder = TokenFolder(asked.folder)
    if not len(folder.lengths):
        raise ValueError(f"{asked.folder} has no documents. Check --source and --field of tokenize.")
    packings = {
        method: pack(folder.starts, folder.lengths, seq_len=asked.seq_len, method=method) for method in get_args(Method)
    }
    report = _report(folder, packings, seq_len=asked.seq_len)
    if asked.json:
        print(json.dumps(report, indent=2))
        return 0
    print(*_lines(folder, report), sep="\n")
    packing = packings[asked.packing]
    if len(packing):
        print(*_sample(folder, packing, asked.row, most=asked.documents), sep="\n")
    return 0


def _report(folder: TokenFolder, packings: dict[Method, Packing], *, seq_len: int) -> dict[str, Any]:
    lengths = folder.lengths
    predictions = np.maximum(lengths - 1, 0)
    padded = np.minimum(predictions, seq_len)
    quantiles = np.quantile(lengths, _QUANTILES).round().astype(int).tolist()
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "dtype": folder.dtype.name,
        "vocab_size": folder.vocab_size,
        "recipe": folder.info["recipe"],
        "length": {
            "min": int(lengths.min()),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
            **{f"p{quantile * 100:.0f}": value for quantile, value in zip(_QUANTILES, quantiles, strict=True)},
        },
        "histogram": {str(2**power): count for power, count in enumerate(_by_power_of_two(lengths)) if count},
        **({"learned": float((folder.tokens >= 0).mean())} if folder.info.get("chat") else {}),
        "seq_len": seq_len,
        # One document in each row, the rest of it cut off.
        "padded": {
            "efficiency": float(padded.mean() / seq_len),
            "kept": float(padded.sum() / max(predictions.sum(), 1)),
        },
        **{
            method: {"rows": len(packing), "efficiency": packing.efficiency, "cuts": num_cut(packing, lengths)}
            for method, packing in packings.items()
        },
    }


def _by_power_of_two(lengths: np.ndarray[Any, Any]) -> list[int]:
    """Return how many lengths are in [1, 2), [2, 4), [4, 8) and so on."""
    return np.bincount(np.floor(np.log2(np.maximum(lengths, 1))).astype(int)).tolist()


def _lines(folder: TokenFolder, report: dict[str, Any]) -> Iterator[str]:
    recipe, length, padded = report["recipe"], report["length"], report["padded"]
    yield (
        f"{folder.path}: {report['tokens']:,} tokens of {_number(report['documents'], 'document')},"
        f" {report['dtype']}, vocabulary of {report['vocab_size']:,}"
    )
    yield f"made of {' '.join(recipe['source'])} with the tokenizer {folder.info['tokenizer_name']}"
    if "learned" in report:
        yield f"conversations: {report['learned']:.2%} of the tokens are of answers, which are shown in [[ ]]"
    yield ""
    yield "tokens in a document: " + ", ".join(f"{name} {value:,.0f}" for name, value in length.items())
    most = max(report["histogram"].values())
    for start, count in report["histogram"].items():
        bar = "#" * -(-count * _BAR // most)
        yield f"  from {int(start):>9,}  {bar:{_BAR}} {count:,}"
    yield ""
    yield f"packed into rows of {report['seq_len']:,} predictions:"
    for method in get_args(Method):
        found = report[method]
        cut = f"documents cut at {_number(found['cuts'], 'place')}" if found["cuts"] else "no document cut"
        yield f"  {method:9} {_number(found['rows'], 'row')}, {found['efficiency']:.2%} used, {cut}"
    lost = f", and {1 - padded['kept']:.2%} of all predictions cut off" if padded["kept"] < 1 else ""
    yield f"  without packing, one document in each row: {padded['efficiency']:.2%} used{lost}"


def _sample(folder: TokenFolder, packing: Packing, row: int, *, most: int) -> Iterator[str]:
    if not -len(packing) <= row < len(packing):
        raise ValueError(f"--row {row} does not exist. There are {len(packing)} rows, counted from 0.")
    tokenizer = folder.tokenizer()
    row %= len(packing)
    inside = slice(packing.rows[row], packing.rows[row + 1])
    yield ""
    yield f"row {row}:"
    parts = [*zip(packing.starts[inside].tolist(), packing.lengths[inside].tolist(), strict=True)]
    for start, length in parts[:most]:
        document = int(np.searchsorted(folder.starts, start, side="right")) - 1
        first = start - int(folder.starts[document])
        tokens = folder.tokens[start : start + length + 1]
        tail = "" if first + length + 1 == folder.lengths[document] else "; the rest is in another row"
        yield f"--- document {document}, tokens {first:,} to {first + length:,} of {folder.lengths[document]:,}{tail}"
        yield _shortened(marked_text(tokenizer, tokens))
    left = len(parts) - most
    yield f"--- and {_number(left, 'document')} more: --documents {len(parts)} shows all" if left > 0 else "---"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN + 20 else f"{text[:_SHOWN]}\n[...]\n{text[-_SHOWN:]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups inspect",
        description="Show the contents of a token folder, and how well its documents fill rows.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder that tokenize wrote")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="predictions in a row (default: 2048)")
    parser.add_argument(
        "--packing",
        choices=get_args(Method),
        default="best_fit",
        help="packing of the row that is shown (default: best_fit)",
    )
    parser.add_argument(
        "--row", type=int, default=0, metavar="N", help="number of the row whose text is shown (default: 0)"
    )
    parser.add_argument(
        "--documents", type=int, default=5, metavar="N", help="documents of that row that are shown (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print only the numbers, as JSON")
    return parser
