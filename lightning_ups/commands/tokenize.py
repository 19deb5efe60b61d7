"""``python -m lightning_ups tokenize``: files of documents become a folder of tokens to train on."""

import argparse
import hashlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_ups._compat.optional.tokenizers import Array, Encoder, load_encoding
from lightning_ups.commands.tokenizing.sources import Part, documents_in, find_files, parts_of
from lightning_ups.config.suggestions import parse_options

if TYPE_CHECKING:
    from lightning_ups.data.token_folder import TokenWriter

_PART_BYTES = 4 * 2**20  # what a process reads at a time; the bytes of the output do not depend on it
_COMMIT_S = 2.0  # at most so much work is done again after a kill
_LINE_S = 30.0  # between lines of progress without a terminal


def main(argv: Sequence[str]) -> int:
    """Write the folder, or complete it, and print what it has."""
    asked = parse_options(_parser(), argv)
    if asked.workers is not None and asked.workers < 1:
        raise ValueError(f"--workers {asked.workers} is too few. Give 1 or more.")
    separator = None if asked.separator is None else asked.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    files = find_files(asked.source)
    field = asked.field or ("messages" if asked.chat else "text")
    none = "none" if asked.chat else None  # a chat template has all tokens
    encoding = load_encoding(asked.tokenizer, bos=asked.bos or none, eos=asked.eos or none)
    encode: Any = Encoder(encoding)
    if asked.chat:
        from lightning_ups.data.chat import load_chat_encoder

        encode = load_chat_encoder(asked.tokenizer, template=asked.chat)
    parts = [*parts_of(files, separator=separator, num_bytes=_PART_BYTES)]
    recipe = {
        "source": asked.source,
        "files": len(files),
        "content": _digest(files),
        "field": field,
        "separator": separator,
        "tokenizer": encoding.digest,
        "begin": encoding.begin,
        "end": encoding.end,
        "part_bytes": _PART_BYTES,  # `done` counts parts
        **({"chat": encode.tokenizer.get_chat_template()} if asked.chat else {}),
    }
    # These import torch, which takes seconds.
    from lightning_ups._compat.environment import usable_cores
    from lightning_ups.data.token_folder import TokenFolder, TokenWriter

    writer = TokenWriter(asked.output, recipe=recipe, dtype="int32" if asked.chat else encoding.dtype)
    if writer.info is None:
        work = _Work(encode, field=field, separator=separator, chat=bool(asked.chat))
        _write(writer, parts, work, workers=asked.workers or usable_cores())
        if asked.chat:
            encode.tokenizer.save_pretrained(asked.output)  # has the template, for prompts
        writer.finish(
            tokenizer=encoding.tokenizer,
            vocab_size=encoding.vocab_size,
            begin=encoding.begin,
            end=encoding.end,
            tokenizer_name=asked.tokenizer,
            **({"chat": True} if asked.chat else {}),
        )
    info = TokenFolder(asked.output).info
    print(f"{asked.output}: {info['tokens']:,} tokens of {info['documents']:,} documents, {info['dtype']}.")
    print(f"Look at them: python -m lightning_ups inspect {asked.output}")
    return 0


class _Work:
    """Reads and encodes one part, in a process of its own."""

    def __init__(self, encode: Any, *, field: str, separator: str | None, chat: bool) -> None:
        self._encode, self._options = encode, {"field": field, "separator": separator, "chat": chat}

    def __call__(self, part: Part) -> tuple[Array, Array, Array]:
        return self._encode(documents_in(part, **self._options))


_work: list[_Work] = []  # of a worker process, which gets it when it starts


def _begin_work(work: _Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes
    Thread(target=_end_with_parent, daemon=True).start()
    _work.append(work)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_part(part: Part) -> tuple[Array, Array, Array]:
    return _work[0](part)


def _write(writer: "TokenWriter", parts: Sequence[Part], work: _Work, *, workers: int) -> None:
    """Append the parts that are missing, in order, while ``workers`` processes encode the next ones."""
    sizes = [sum(span.num_bytes for span in part) for part in parts]
    committed = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one thread
    try:
        with _progress(sum(sizes), done=sum(sizes[: writer.done]), writer=writer) as advance:
            for encoded in _in_order(parts[writer.done :], work, workers=min(workers, len(parts))):
                size = sizes[writer.done]
                writer.append(*encoded)
                if time.monotonic() - committed > _COMMIT_S:
                    writer.commit()
                    committed = time.monotonic()
                advance(size)
    except BaseException as error:
        if isinstance(error, ValueError) and not writer.done:  # of an option, and another may be right
            writer.discard()
        else:
            writer.commit()
            print(f"{writer.path} is not complete. Run the same command again to continue.", file=sys.stderr)
        raise
    finally:
        writer.close()


def _in_order(parts: Sequence[Part], work: _Work, *, workers: int) -> Iterator[tuple[Array, Array, Array]]:
    if workers <= 1:
        yield from map(work, parts)
        return
    # Spawned: a copy of this process would have the threads of torch.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_work, initargs=(work,))
    running: deque[Future[tuple[Array, Array, Array]]] = deque()
    waiting = iter(parts)
    try:
        while True:
            while len(running) < 3 * workers and (part := next(waiting, None)) is not None:
                running.append(pool.submit(_encode_part, part))
            if not running:
                return
            yield _result(running.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(future: "Future[tuple[Array, Array, Array]]") -> tuple[Array, Array, Array]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "A process that encodes documents ended, perhaps for lack of memory. Use fewer --workers."
        ) from None
    except (ValueError, ImportError, OSError) as error:  # raised here, so that it is printed without a traceback
        raise type(error)(str(error)) from None


@contextmanager
def _progress(total: int, *, done: int, writer: "TokenWriter") -> Iterator[Any]:
    """Show the progress on stderr: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.percentage:.0f} %  {task.description}"), TimeRemainingColumn())
    began, before, lined = time.monotonic(), writer.num_tokens, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)
        finished = done

        def advance(size: int) -> None:
            nonlocal finished, lined
            finished += size
            now = time.monotonic()
            speed = (writer.num_tokens - before) / max(now - began, 1e-9)
            text = f"{writer.num_tokens:,} tokens, {speed:,.0f} per second"
            bar.update(task, completed=finished, description=text)
            if not console.is_terminal and now - lined > _LINE_S:
                lined = now
                print(f"{finished / max(total, 1):.0%}: {text}", file=sys.stderr, flush=True)

        yield advance


def _digest(files: Sequence[str]) -> str:
    """Return a number that changes with the names, sizes and times of the files."""
    listed = "\n".join(f"{name} {(stat := Path(name).stat()).st_size} {stat.st_mtime_ns}" for name in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups tokenize",
        description="Tokenize documents into memory-mapped files. Run the same command again to continue after an"
        " interruption.",
    )
    parser.add_argument(
        "--source",
        metavar="PATH",
        nargs="+",
        required=True,
        help="files, folders or patterns: .parquet, .arrow (also a folder of datasets' save_to_disk), .jsonl, .txt or"
        " any other text file; JSON Lines and text may be compressed (.gz)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        required=True,
        help="a tokenizer.json, a folder that contains one, a name on the Hugging Face Hub, or `bytes`",
    )
    parser.add_argument("--output", metavar="FOLDER", required=True, help="the folder to write")
    parser.add_argument(
        "--field", help="field with the text, in tables and JSON Lines (default: text, or messages with --chat)"
    )
    parser.add_argument(
        "--chat",
        metavar="TEMPLATE",
        nargs="?",
        const=True,
        help="documents are lists of messages, and only answers are learned. TEMPLATE is the file of a Jinja template"
        " (default: the tokenizer's own)",
    )
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help=r"text between the documents of a text file, such as '\n' (default: each file is one document)",
    )
    parser.add_argument(
        "--bos", metavar="TOKEN", help="token that begins each document, or none (default: what the tokenizer adds)"
    )
    parser.add_argument(
        "--eos", metavar="TOKEN", help="token that ends each document, or none (default: the tokenizer's end of text)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    return parser
