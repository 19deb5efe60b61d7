"""Which errors are explained by their own text, and which need their traceback; loads nothing heavy."""

import ast
import builtins
import dis
import linecache
import os
import re
import select
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

__all__ = ["explained", "shortened", "unwrapped"]

_EXPLAINED = (ValueError, TypeError, RuntimeError, ImportError, OSError)
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)  # of another type than expected
_UNREADABLE = (ImportError, FileNotFoundError, ValueError)  # of a checkpoint: no package for such paths, no file
_RAISE = dis.opmap["RAISE_VARARGS"]
_CONSTRUCTS = "instantiate_classes"  # the method of LightningCLI that makes the classes and the Trainer
_OURS = Path(__file__).parents[1]
_REFUSAL = "MisconfigurationException"  # of Lightning: raised for what is asked of it, and not for what went wrong
# Functions of Lightning that raise another error for what is asked of it: a metric for EarlyStopping that nothing logs,
# the best checkpoint where none is kept, a validation after more batches than there are.
_REFUSING = ("_validate_condition_metric", "_parse_ckpt_path", "setup_data")
_SIGTERM = "SIGTERMException"  # of Lightning, which has shut down by then
_SPAWNED = "ProcessRaisedException"  # of torch.multiprocessing: it has an error of another process as text
_FILE_SYSTEMS = {"os", "pathlib", "fsspec"}
_REMOTE = {"fsspec", "s3fs", "gcsfs", "adlfs"}  # which read what is not on this machine
_CONSTRUCTORS = {"lightning_ups", "lightning", "lightning_utilities", "jsonargparse", "contextlib", "functools"}


def explained(run: Callable[[], int], *, debug: bool) -> int:
    """Return what ``run`` returns, or the exit code for its error, which is printed in a few lines where it can be.

    Args:
        run: Is called.
        debug: Show the whole traceback all the same.
    """
    try:
        return _explained(run, debug=debug)
    except BrokenPipeError:
        if not (_is_unread(sys.stdout) or _is_unread(sys.stderr)):
            raise
        return _unread()


def _explained(run: Callable[[], int], *, debug: bool) -> int:
    try:
        code = run()
        print(end="", flush=True)  # here, where it is caught if no one reads it
        return code
    except KeyboardInterrupt:
        return _ended("Interrupted.", signal.SIGINT)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning has shut down, and left by itself
            return _ended("Interrupted.", signal.SIGINT)
        if type(stop).__name__ == _SIGTERM:
            return _ended("Ended by SIGTERM.", signal.SIGTERM)
        if isinstance(stop.__context__, BrokenPipeError) and _package(_frames(stop)[-1][0]) == "rich":
            return _unread()  # rich, which prints the progress bar and tables, takes that for an exit
        raise
    except BrokenPipeError:
        raise  # which is looked at where it may also come of what is printed here
    except Exception as error:  # the one place where all are caught, and none is lost
        message = shortened(error)
        if message is None and not debug and (root := unwrapped(error)) is not error:
            raise root from root.__cause__
        if message is None:
            raise
        if debug:
            traceback.print_exception(error)
        elif (rank := _rank()) != "0":  # the other ranks mostly say the same
            message = f"[rank {rank}] {message.partition(chr(10))[0]}"
        else:
            message += "\n(--debug shows the traceback.)"
        print(message, file=sys.stderr, flush=True)
        return 2


def _ended(said: str, by: signal.Signals) -> int:
    try:
        print(said, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _drop(sys.stderr)
    return 128 + by


def _is_unread(output: IO[str] | None) -> bool:
    """Return whether ``output`` is a pipe whose reader has ended, as ``| head -1`` does."""
    try:
        pipe = select.poll()
        pipe.register(output.fileno() if output else -1, 0)
    except (OSError, ValueError):  # no file of the system's
        return False
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _unread() -> int:
    for output in filter(_is_unread, (sys.stdout, sys.stderr)):
        _drop(output)
    _ended("Stopped: what read the output has ended.", signal.SIGPIPE)
    return 128 + signal.SIGPIPE


def _drop(output: IO[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # what is left of it fails at exit otherwise


def _rank() -> str:
    """Return the number of this process among those that were started: by torchrun, by Lightning, or by srun."""
    return next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")


def shortened(error: BaseException) -> str | None:
    """Return what to print for ``error``, or None if it must keep its traceback.

    Short are errors that lightning_ups raises on purpose: they say what happened, why, and what to do. So are those
    that Lightning raises on purpose while classes are made from the configuration, with no code of the user's between:
    a setting is wrong then, and the traceback would show only Lightning. It is the same with what Lightning calls a
    misconfiguration, such as a test without a ``test_step`` or a metric that EarlyStopping waits for in vain, with a
    folder that Lightning cannot make, with a checkpoint that it cannot find or whose weights are not the model's, and
    with an error of lightning_ups in a process that was spawned, of which the text is all there is.
    """
    root = unwrapped(error)
    if isinstance(text := getattr(root, "lightning_ups_text", None), str):  # of another's, which a callback explained
        return f"error: {text}"
    if type(root).__name__ == _SPAWNED:
        return _told(str(root))
    frames = _frames(root)
    if isinstance(root, OSError) and (folder := _not_made(root, frames)):
        return _text(
            f"The folder {folder!r} cannot be made: {root.strerror}. Lightning writes logs or checkpoints there."
            " Choose a folder that can be written by trainer.default_root_dir, the save_dir of a logger, or the"
            " dirpath of ModelCheckpoint."
        )
    if isinstance(root, _OF_VALUES) and (path := _restored(frames)):
        return _text(
            f"The checkpoint {path} cannot be restored: {type(root).__name__} {str(root)[:100]}."
            " A part of it is missing or damaged. Use an earlier checkpoint, or leave out ckpt_path and call"
            " lightning_ups.state.checkpoint.load_weights in on_fit_start."
        )
    if not frames or not _on_purpose(*frames[-1]):
        return None
    raised_by = _package(frames[-1][0])
    if raised_by == "lightning_ups" and isinstance(root, _EXPLAINED):
        return _text(f"{root}")
    if raised_by == "lightning" and _is_setting(error, frames):
        return _text(f"{_made(frames)} refuses a setting of the configuration. It says: {root}")
    if raised_by == "lightning" and _is_refusal(root, frames):
        return _text(f"Lightning refuses this run. It says: {root}")
    if raised_by in {"lightning", *_REMOTE} and isinstance(root, _UNREADABLE) and _reads_checkpoint(frames):
        return _text(
            f"Lightning cannot read the checkpoint that ckpt_path names. It says: {str(root).rstrip('.')}."
            " Check the path, and that the package for such paths is installed."
        )
    if raised_by == "torch" and (differences := _differences(root, frames)):
        more = f"; and {len(differences) - 1} more" if differences[1:] else ""
        return _text(
            f"The checkpoint does not fit the model: {differences[0]}{more}."
            " Its weights are those of a model with other settings, or of another class."
            " Give the model the settings of the run that saved it, or another --ckpt_path."
        )
    return None


def unwrapped(error: BaseException) -> BaseException:
    """Return the error that was raised first, where the parser of the command line has wrapped it in its own."""
    while (frame := _of_parser(error)) is not None and error.__cause__ is not None:
        # Of a setting of several types the parser has tried each. Its cause is the first, which may be a `str` that
        # nobody meant: what another package raised comes from the class that was being made.
        tried = map(unwrapped, frame.f_locals.get("exceptions", ()))
        error = next((each for each in tried if _of_parser(each) is None), error.__cause__)
    return error


def _of_parser(error: BaseException) -> FrameType | None:
    """Return the frame in which the parser has raised ``error``, or None if it has not."""
    frames = _frames(error)
    return frames[-1][0] if frames and _package(frames[-1][0]) == "jsonargparse" else None


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return frames


def _on_purpose(frame: FrameType, index: int) -> bool:
    # By a `raise` statement, and not by an operation that went wrong: that would be a defect, to be seen whole.
    return frame.f_code.co_code[index] == _RAISE


def _package(frame: FrameType) -> str:
    name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _told(said: str) -> str | None:
    """Return what to print for the traceback of another process, if lightning_ups has raised its error on purpose."""
    # The last frame, the code that it shows, indented, and what was raised, to the end.
    last = r'(?s).*\n  File "(.+?)", line (\d+), in [^\n]*\n(?: {4}[^\n]*\n)*(\S+?): (.*)$'
    if (found := re.match(last, said)) is None:
        return None
    file, line, kind, message = found.groups()
    known = getattr(builtins, kind, None)
    explained = isinstance(known, type) and issubclass(known, _EXPLAINED)
    return _text(message.rstrip()) if explained and _raises(Path(file), int(line)) else None


def _raises(file: Path, line: int) -> bool:
    if not file.is_relative_to(_OURS):
        return False
    tree = ast.parse("".join(linecache.getlines(str(file))))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in statements)


def _is_setting(error: BaseException, frames: list[tuple[FrameType, int]]) -> bool:
    constructing = any(frame.f_code.co_name == _CONSTRUCTS for frame, _ in _frames(error))
    return constructing and _packages(frames) <= _CONSTRUCTORS


def _packages(frames: list[tuple[FrameType, int]]) -> set[str]:
    """Return which packages took part in a run, or in making it, without the command line's own methods around it.

    A subclass of LightningCLI may have any method around the run, which is Lightning's from its own method on, or from
    where that of the user calls the Trainer.
    """
    start = 0
    for index, (frame, _) in enumerate(frames):
        outer = frames[index - 1][0] if index else frame
        if _package(frame) == "lightning" and (
            _is_of(frame, "LightningCLI") or (_is_of(outer, "LightningCLI") and _is_of(frame, "Trainer"))
        ):
            start = index
    return {_package(frame) for frame, _ in frames[start:]}


def _is_of(frame: FrameType, kind: str) -> bool:
    """Return whether ``frame`` is of a method of a class of that name, or of one below it."""
    first = frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
    owner = frame.f_locals.get(first[0]) if first else None
    return any(base.__name__ == kind for base in type(owner).__mro__)


def _not_made(root: OSError, frames: list[tuple[FrameType, int]]) -> str | None:
    """Return the folder that could not be made, if it was Lightning that wanted it."""
    packages = [_package(frame) for frame, _ in frames if _package(frame) not in _FILE_SYSTEMS]
    makes = bool(frames) and frames[-1][0].f_code.co_name in ("makedirs", "mkdir")
    return str(root.filename) if makes and packages[-1:] == ["lightning"] else None


def _restored(frames: list[tuple[FrameType, int]]) -> str | None:
    """Return the checkpoint that Lightning was restoring, if no code of others took part."""
    within = [index for index, (frame, _) in enumerate(frames) if _is_of(frame, "_CheckpointConnector")]
    if not within or not {_package(frame) for frame, _ in frames[within[0] :]} <= {"lightning", "torch"}:
        return None
    return str(frames[within[0]][0].f_locals["self"].trainer.ckpt_path)


def _reads_checkpoint(frames: list[tuple[FrameType, int]]) -> bool:
    """Return whether it was while Lightning looked for a checkpoint, before torch had begun to read it."""
    loads = any(frame.f_code.co_name == "load_checkpoint" for frame, _ in frames)
    return loads and _packages(frames) <= _CONSTRUCTORS | _REMOTE


def _is_refusal(root: BaseException, frames: list[tuple[FrameType, int]]) -> bool:
    refused = type(root).__name__ == _REFUSAL or frames[-1][0].f_code.co_name in _REFUSING
    return refused and _packages(frames) <= {*_CONSTRUCTORS, "torch"}


def _differences(root: BaseException, frames: list[tuple[FrameType, int]]) -> list[str]:
    """Return how the weights of a checkpoint differ from the model's, if it was Lightning that loaded them."""
    said = str(root).splitlines()
    loads = frames[-1][0].f_code.co_name == "load_state_dict" and "Error(s) in loading state_dict" in "".join(said[:1])
    known = _packages(frames) <= {*_CONSTRUCTORS, "torch"}
    return [" ".join(line.split()).rstrip(". ") for line in said[1:]] if loads and known else []


def _made(frames: list[tuple[FrameType, int]]) -> str:
    """Return the class that was being made, as far as can be seen."""
    names = [frame.f_code.co_qualname.rpartition(".") for frame, _ in frames]
    start = max((index for index, name in enumerate(names) if name[2] == _CONSTRUCTS), default=0)
    return next((owner for owner, _, name in names[start:] if name == "__init__"), "Lightning")


def _text(message: str) -> str:
    return "\n".join(map(_wrapped, f"error: {message}".splitlines()))


def _wrapped(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, 100, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
