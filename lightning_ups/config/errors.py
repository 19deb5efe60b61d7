"""Decide which errors are printed in a few lines and which keep their traceback. Imports nothing heavy."""

import dis
import os
import re
import select
import signal
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO, Any

from lightning_ups.config.suggestions import nearest

_DELIBERATE = (ValueError, TypeError, RuntimeError, ImportError, OSError)
_RAISE = dis.opmap["RAISE_VARARGS"]
# Packages whose frames are not the user's code.
_LIBRARIES = {"lightning_ups", "lightning", "lightning_utilities", "jsonargparse", "torch", "contextlib", "functools"}
_FILE_SYSTEMS = {"os", "pathlib", "fsspec", "s3fs", "gcsfs", "adlfs"}
_STDLIB = sysconfig.get_path("stdlib")
_SIGPIPE = 13  # `signal` has no such name on Windows
_RESTORES = "_CheckpointConnector"  # Lightning's class that restores a checkpoint
# Lightning raises this for a wrong setting; some of its functions raise other types for one.
_REFUSAL = "MisconfigurationException"
_REFUSING = ("_validate_condition_metric", "_parse_ckpt_path", "setup_data", "_determine_lr_attr_name")
_CONSTRUCTS = ("instantiate_classes", "_set_seed")  # methods of LightningCLI that precede the run
Frames = list[tuple[FrameType, int]]


def report_errors(run: Callable[[], int], *, debug: bool) -> int:
    """Return the exit code of `run`; print a short text for its error if there is one, to `debug` a traceback too."""
    try:
        return _report_errors(run, debug=debug)
    except BrokenPipeError:
        closed = [output for output in (sys.stdout, sys.stderr) if _has_no_reader(output)]
        if not closed:
            raise
        for output in closed:  # or Python fails when it flushes them at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return 128 + _SIGPIPE


def _report_errors(run: Callable[[], int], *, debug: bool) -> int:
    try:
        code = run()
        print(end="", flush=True)  # so that a closed pipe fails here
        return code
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _signaled("Interrupted.", signal.SIGINT)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning has shut down
            return _signaled("Interrupted.", signal.SIGINT)
        if type(stop).__name__ == "SIGTERMException":
            return _signaled("Terminated by SIGTERM.", signal.SIGTERM)
        if isinstance(stop.__context__, BrokenPipeError):  # rich has replaced stdout, and exits
            return 128 + _SIGPIPE
        if not isinstance(stop.code, str) and (text := constructor_error(stop)):  # or it would end without a word
            print(text, file=sys.stderr, flush=True)
        raise
    except Exception as error:
        text, code = short_text(error), 2
        if text is None and not debug:
            text, code = constructor_error(error), 1
        if text is None and not debug and (root := unwrapped(error)) is not error:
            raise root from root.__cause__
        if text is None:
            raise
        if debug:
            traceback.print_exception(error)
        elif (rank := _rank()) != "0":
            text = f"[rank {rank}] {text if code == 1 else text.partition(chr(10))[0]}"
        else:
            text += "\n(--debug shows the traceback.)"
        print(text, file=sys.stderr, flush=True)
        return code


def _signaled(text: str, by: signal.Signals) -> int:
    print(text, file=sys.stderr, flush=True)
    return 128 + by


def _has_no_reader(output: IO[str]) -> bool:
    """Return whether `output` is a pipe whose reader has ended, as in ``| head -1``."""
    try:
        pipe = select.poll()
        pipe.register(output.fileno(), 0)
    except (OSError, ValueError):  # not a file
        return False
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _rank() -> str:
    return next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")


def short_text(error: BaseException) -> str | None:
    """Return what to print for `error`, or None if the user needs its traceback.

    Short are errors that this package raises on purpose, and what Lightning refuses or cannot restore or write, if no
    code of the user runs in between.
    """
    root = unwrapped(error)
    if isinstance(text := getattr(root, "lightning_ups_text", None), str):  # set by a callback that explains an error
        return _wrapped(text)
    frames = _frames(root)
    if not frames:
        return None
    is_raised = frames[-1][0].f_code.co_code[frames[-1][1]] == _RAISE  # by a raise statement: not a defect
    source = _package(frames[-1][0])
    if source == "lightning_ups" and is_raised and isinstance(root, _DELIBERATE):
        return _wrapped(f"{_place_of_setting(str(root), _frames(error))}{root}")
    # A subclass of LightningCLI may override any of its methods.
    packages = {_package(frame) for frame, _ in frames if not _is_method_of(frame, "LightningCLI")}
    if not packages <= {*_LIBRARIES, *_FILE_SYSTEMS}:
        return None
    restoring = next((frame.f_locals["self"] for frame, _ in frames if _is_method_of(frame, _RESTORES)), None)
    if restoring and restoring.trainer.ckpt_path:
        return _wrapped(_unrestored(root, path=restoring.trainer.ckpt_path))
    if isinstance(root, OSError) and root.filename and source in _FILE_SYSTEMS:
        return _wrapped(
            f"{root.filename}: {root.strerror}. Choose a writable folder: trainer.default_root_dir, save_dir of a"
            " logger, dirpath of ModelCheckpoint, or --output of export."
        )
    is_refusal = type(root).__name__ == _REFUSAL or frames[-1][0].f_code.co_name in _REFUSING
    constructs = any(frame.f_code.co_name in _CONSTRUCTS for frame, _ in _frames(error))
    if source == "lightning" and is_raised and (is_refusal or constructs):
        place, hint = _metric_meant(frames[-1][0], [frame for frame, _ in _frames(error)])
        return _wrapped(f"{place}{_constructed(frames) if constructs else 'Lightning'}: {root}{hint}")
    return None


def constructor_error(error: BaseException) -> str | None:
    """Return where the class is configured, the error and the user's frames, if a class could not be made or imported.

    None for any other error.
    """
    root = unwrapped(error)
    frames = _frames(root)
    start = max((index for index, (frame, _) in enumerate(frames) if _made(frame)), default=None)
    if start is None:
        return None
    name, settings = _made(frames[start][0]) or ("", {})
    before = [frame for frame, _ in [*([] if root is error else _frames(error)), *frames[: start + 1]]]
    lines = [_wrapped(f"{_place_of(before, name, settings)}{name}: {_named(root)}"), *_frames_of_user(root, start)]
    while (root := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        if below := _frames_of_user(root):
            lines += [f"caused by {_named(root)}", *below]
    return "\n".join(lines)


def _made(frame: FrameType) -> tuple[str, dict[str, Any]] | None:
    """Return name and settings of the class that `frame` makes or imports for the parser."""
    names, package = frame.f_locals, _package(frame)
    if package in ("jsonargparse", "lightning") and isinstance(names.get("class_type"), type):
        return names["class_type"].__name__, names.get("kwargs", {})
    if package == "lightning" and "args_class" in names:  # an optimizer or a scheduler
        return names["args_class"].__name__, dict(names["kwargs"].items())
    imports = {"lightning_ups": "find_class", "jsonargparse": "import_object"}
    return (names["name"], {}) if imports.get(package) == frame.f_code.co_name else None


def _place_of(frames: list[FrameType], name: str, settings: dict[str, Any]) -> str:
    """Return file and line where the class `name` is configured, with ": ", or "" if they are unknown."""
    layers = _layers_of(frames)
    groups = [each.f_locals["group"].dest for each in frames if each.f_code.co_name == "group_instantiate_class"]
    group = tuple(groups[-1].split(".")) if groups else ()  # of a dataclass, or of a class that the program fixes
    outer = [each.f_locals["val_class"].__name__ for each in reversed(frames) if "val_class" in each.f_locals]
    for kind in dict.fromkeys([name, *outer]):
        found = [(layer, *spec) for layer in reversed(layers) for spec in _named_in(layer.tree, kind)]
        found.sort(key=lambda spec: any(str(settings.get(key)) != str(value) for key, value in spec[2].items()))
        for layer, keys, _ in found:
            keys = keys if kind == name else (*keys[:-1], "init_args", *group)
            return f"{layer.place(*keys)}: "
    return next((f"{layer.place(*group)}: " for layer in reversed(layers) if group in layer.lines), "")


def _metric_meant(frame: FrameType, frames: list[FrameType]) -> tuple[str, str]:
    """Return where a callback whose ``monitor`` is not logged is configured, and the name that was probably meant."""
    callback = frame.f_locals.get("self")
    monitor = getattr(callback, "monitor", None)
    logged = frame.f_locals.get("monitor_candidates", frame.f_locals.get("logs"))  # of ModelCheckpoint, EarlyStopping
    if not isinstance(monitor, str) or not isinstance(logged, dict) or monitor in logged:
        return "", ""
    near = nearest(monitor, logged)
    hint = f" Did you mean {near!r}?" if near else ""
    return _place_of(frames, type(callback).__name__, {"monitor": monitor}), hint


def _place_of_setting(text: str, frames: Frames) -> str:
    """Return file and line of the setting that `text` begins with, with ": ", or "" if no layer gives one."""
    match = re.match(r"(?:trainer\.)?\w+", text)
    *outer, name = match[0].split(".") if match else [""]
    if not outer and name != "ckpt_path":
        return ""
    for layer in reversed(_layers_of([frame for frame, _ in frames])):
        tree = layer.tree.get("trainer") if outer else layer.tree
        if isinstance(tree, dict) and name in tree:
            return f"{layer.place(*outer, name)}: "
    return ""


def _layers_of(frames: list[FrameType]) -> Sequence[Any]:
    """Return the layers of settings of the command line that is running, as far as they are read."""
    for frame in frames:
        if _is_method_of(frame, "UpsCLI") and (request := getattr(frame.f_locals["self"], "request", None)):
            return request.given
        if frame.f_code.co_name == "read_command_line":
            return frame.f_locals.get("files", ())
    return ()


def _named_in(tree: Any, kind: str, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the keys of each value of `tree` that names the class `kind`, and the settings next to it."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    settings = tree.get("init_args") if isinstance(tree, dict) else None
    for key, value in inner:
        if isinstance(value, str) and kind in (value, value.rpartition(".")[2]):
            yield (*keys, key), settings if key == "class_path" and isinstance(settings, dict) else {}
        yield from _named_in(value, kind, (*keys, key))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _frames_of_user(error: BaseException, start: int = -1) -> list[str]:
    """Return the text of the frames of the user's code, after the frame `start`."""
    described = traceback.TracebackException.from_exception(error)
    pairs = [*zip(described.stack, _frames(error), strict=False)][start + 1 :]
    described.stack[:] = [summary for summary, (frame, _) in pairs if _is_of_user(frame)]
    lines = described.stack.format()
    if isinstance(error, SyntaxError):
        lines += [*described.format_exception_only()][:-1]
    return "".join(lines).splitlines()


def _is_of_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    is_installed = file.startswith(("<", _STDLIB)) or "site-packages" in file or "dist-packages" in file
    return not is_installed and _package(frame) not in _LIBRARIES


def broken_package(traceback_text: str) -> str | None:
    """Return the installed package whose code failed, of the traceback of an import; torch only calls what failed."""
    names = map(_package_of, reversed(re.findall(r'File "([^"]+)"', traceback_text)))
    return next((name for name in names if name not in (None, "torch", "lightning_ups")), None)


def _package_of(file: str) -> str | None:
    """Return the package that `file` is in, installed or as its source; None for the standard library and scripts."""
    if installed := re.search(r"(?:site|dist)-packages[/\\](\w+)", file):
        return installed[1]
    folder, name = os.path.dirname(file), None
    while not file.startswith(_STDLIB) and os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, name = os.path.split(folder)
    return name


def cure_of_broken(package: str) -> str:
    """Return what to do about an installed package that does not load."""
    return f"install a version of {package} that fits this torch, or, if nothing needs it: pip uninstall {package}"


def _unrestored(root: BaseException, *, path: object) -> str:
    lines = [" ".join(line.split()).rstrip(". ") for line in str(root).splitlines()]
    if lines and "Error(s) in loading state_dict" in lines[0]:
        more = f"; and {len(lines) - 2} more" if lines[2:] else ""
        return (
            f"The checkpoint {path} does not fit the model: {lines[1]}{more}. Use the settings of the model that saved"
            " it, or another --ckpt_path."
        )
    return f"The checkpoint {path} cannot be restored: {type(root).__name__}: {str(root)[:200]}"


def unwrapped(error: BaseException) -> BaseException:
    """Return the error that a class raised while the parser made it, without the parser's error around it."""
    while (frame := _parser_frame(error)) is not None and error.__cause__ is not None:
        # The parser tries each type of a union, and the cause is the first failure. Any error that the parser did not
        # raise itself comes from the class that was made.
        tried = map(unwrapped, frame.f_locals.get("exceptions", ()))
        error = next((each for each in tried if _parser_frame(each) is None), error.__cause__)
    return error


def _parser_frame(error: BaseException) -> FrameType | None:
    frames = _frames(error)
    return frames[-1][0] if frames and _package(frames[-1][0]) == "jsonargparse" else None


def _frames(error: BaseException) -> Frames:
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append((step.tb_frame, step.tb_lasti))
        step = step.tb_next
    return frames


def _package(frame: FrameType) -> str:
    name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _is_method_of(frame: FrameType, kind: str) -> bool:
    """Return whether `frame` runs a method of an instance of the class `kind`, or of a subclass."""
    first = frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
    owner = frame.f_locals.get(first[0]) if first else None
    return any(base.__name__ == kind for base in type(owner).__mro__)


def _constructed(frames: Frames) -> str:
    """Return the class whose constructor raised, as far as it is known."""
    names = [frame.f_code.co_qualname.rpartition(".") for frame, _ in frames]
    start = max((index for index, name in enumerate(names) if name[2] in _CONSTRUCTS), default=0)
    return next((owner for owner, _, name in names[start:] if name == "__init__"), "Lightning")


def _wrapped(message: str) -> str:
    return "\n".join(map(_wrapped_line, f"error: {message}".splitlines()))


def _wrapped_line(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, 100, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
