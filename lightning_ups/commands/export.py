"""``python -m lightning_ups export``: one file, or Hugging Face's safetensors, of a checkpoint."""

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ups.commands.exported_tokenizer import write_tokenizer
from lightning_ups.config.suggestions import parse_options
from lightning_ups.models import peft_adapters
from lightning_ups.models.gpt import SIZES, TOKENIZER, GPTConfig
from lightning_ups.models.hf_names import hf_config, to_hf
from lightning_ups.state.checkpoint import (
    MODELS,
    SavedWeights,
    consolidated,
    damage_told,
    damaged,
    resolve,
    rest_of,
    write_safetensors,
)
from lightning_ups.transforms.quoted import first_line

_GPT = "layers.0.attention.qkv.weight"  # names that only one family has
_LLAMA = "model.embed_tokens.weight"
_OF_PEFT = (".base_layer.", ".lora_A.", ".lora_embedding_A.", ".modules_to_save.", "prompt_encoder.")
_PEFT_MODEL = "base_model.model."  # of each name of a PeftModel
_HOW_TO_SAVE_CONFIGS = (
    "Save both in Python: model.config.save_pretrained('configs') and model.peft_config['default']"
    ".save_pretrained('configs'). Then add --config configs/config.json."
)
_SHARD_SIZE = "5GB"
_ForHF = tuple[Mapping[str, Tensor], dict[str, str], dict[str, Any] | None]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint, and say what was written.

    Raises:
        ValueError: If it cannot be exported so.
        FileNotFoundError: If there is no whole checkpoint.
    """
    asked = parse_options(_parser(), argv)
    path = resolve(asked.checkpoint)
    if asked.check:
        return _check(path)
    if asked.output is None:
        raise ValueError(
            "--output is missing: it names a new folder to write to. To verify checksums alone, add --check."
        )
    output = asked.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and is not an empty folder. Name a new one.")
    is_file = asked.format == "torch" and output.suffix == ".ckpt" and not output.exists()
    folder = output.parent if is_file else output
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if asked.format == "torch":
            written = _as_one_file(path, output if is_file else output / "checkpoint.ckpt", asked)
        else:
            written = _as_safetensors(path, output, asked) + _tokenizer(path, output, asked)
    except BaseException:
        with suppress(OSError):  # where something was written
            output.rmdir()
        raise
    for file in written:
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups export", description="Write a checkpoint as one file, or as safetensors."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint folder, or a .ckpt file")
    parser.add_argument("--output", type=Path, help="a folder, new or empty; with --format torch also a new file .ckpt")
    parser.add_argument("--check", action="store_true", help="verify the checksums of all files, and write nothing")
    parser.add_argument(
        "--format",
        choices=("torch", "safetensors"),
        default="safetensors",
        help="torch: one file .ckpt that a single device resumes from; safetensors, the default: the weights",
    )
    parser.add_argument(
        "--names",
        choices=("plain", "hf", "hf-llama"),
        default="plain",
        help="plain, the default: as in the checkpoint; hf: as transformers names them, with a config.json;"
        " hf-llama: the same, for Llama alone",
    )
    parser.add_argument(
        "--adapters",
        choices=("merge", "keep"),
        help="of PEFT, with --names hf. merge: add them to the weights; keep: write them alone, for PeftModel",
    )
    parser.add_argument("--max-shard-size", help=f"of one file of safetensors; default {_SHARD_SIZE}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as saved")
    parser.add_argument(
        "--config",
        type=Path,
        help="a config.json to put beside the weights; with --adapters, an adapter_config.json lies beside it",
    )
    parser.add_argument(
        "--tokenizer",
        help="to put beside the weights, with --names hf: a folder of tokens or of a tokenizer, or a name on the Hub;"
        " default: that of the run, if the checkpoint names it",
    )
    parser.add_argument(
        "--trust", action="store_true", help="build objects of any class, which runs what the checkpoint names"
    )
    return parser


def _check(path: Path) -> int:
    names = damaged(path)
    if names:
        raise ValueError(
            f"{path} is damaged: {', '.join(names)} {'does' if len(names) == 1 else 'do'} not hold what was saved."
            " Resume from an earlier checkpoint, and check the disk."
        )
    files = [path] if path.is_file() else [*path.iterdir()]
    print(f"{path}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB in {len(files)} files, all as saved.")
    return 0


def _as_one_file(path: Path, file: Path, asked: argparse.Namespace) -> list[Path]:
    if path.is_file():
        raise ValueError(f"{path} is one file already. Use it as it is, or choose --format safetensors.")
    options = {
        "names": None if asked.names == "plain" else asked.names,
        "adapters": asked.adapters,
        "dtype": asked.dtype,
        "max-shard-size": asked.max_shard_size,
        "config": asked.config,
        "tokenizer": asked.tokenizer,
    }
    if given := [f"--{name}={value}" for name, value in options.items() if value is not None]:
        raise ValueError(
            f"--format torch takes no {' and '.join(given)}: one file is for resuming, and stays as it was saved."
            " Leave that out, or choose --format safetensors."
        )
    checkpoint, left = consolidated(path, weights_only=not asked.trust)
    torch.save(checkpoint, file)
    if left:
        print(
            "Left out, since their classes are not trusted:"
            f" {', '.join(f'{place} ({name})' for place, name in left.items())}. --trust keeps them."
        )
    return [file]


def _as_safetensors(path: Path, output: Path, asked: argparse.Namespace) -> list[Path]:
    if asked.tokenizer is not None and asked.names == "plain":
        raise ValueError(
            f"--tokenizer {asked.tokenizer} takes --names hf. With --names plain, only weights are written."
        )
    weights: Mapping[str, Tensor] = SavedWeights(path)
    names = {name: name for name in weights}
    limit, config = _bytes(asked.max_shard_size or _SHARD_SIZE), None
    if asked.config is not None and not asked.config.is_file():
        raise ValueError(f"--config {asked.config} is no file. Name a config.json to copy beside the weights.")
    if asked.adapters:
        return _with_adapters(weights, path, output, asked, limit)
    if asked.names != "plain":
        with damage_told(path):
            rest = rest_of(path, weights_only=not asked.trust)[0]
            weights, names, config = _named_for_hf(weights, rest, path, has_config=asked.config is not None)
    if asked.names == "hf-llama":
        _check_is_llama(json.loads(asked.config.read_text()) if asked.config else config or {})
    export = _Export(weights, names, getattr(torch, asked.dtype) if asked.dtype else None)
    written = write_safetensors(output, export, sizes=export.sizes(), max_shard_bytes=limit)
    _let_read(written)
    if asked.config is not None:
        shutil.copyfile(asked.config, output / "config.json")
    elif config is not None:
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    elif asked.names != "plain":
        print("No config.json: this checkpoint does not hold the model's config. Give one with --config.")
    extra = [output / name for name in ("config.json", "model.safetensors.index.json") if (output / name).exists()]
    return written + extra


def _tokenizer(path: Path, output: Path, asked: argparse.Namespace) -> list[Path]:
    """Write the tokenizer if it is known, and return its files."""
    if asked.names == "plain":
        return []
    rest = rest_of(path, weights_only=not asked.trust)[0]
    name = asked.tokenizer or rest.get(TOKENIZER) or rest.get("hyper_parameters", {}).get("pretrained")
    why = "the checkpoint does not name that of its run"
    try:
        if name is not None:
            return write_tokenizer(str(name), output)
    except (OSError, ValueError, ImportError) as error:
        why = f"{name} cannot be read ({first_line(error)})"
    print(f"No tokenizer: {why}. Give --tokenizer in another export, or put its files into {output}.")
    return []


def _check_is_llama(config: Mapping[str, Any]) -> None:
    if (kind := config.get("model_type", "llama")) != "llama":
        raise ValueError(f"--names hf-llama writes Llama, and this is a model of type {kind}. Use --names hf for it.")


def _let_read(files: Sequence[Path]) -> None:
    """Give files the mode that any new one has: safetensors makes them for their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in files:
        file.chmod(0o666 & ~mask)


class _Export(Mapping[str, Tensor]):
    """Weights by the names to write, each read and cast when it is asked for."""

    def __init__(
        self, weights: Mapping[str, Tensor], names: Mapping[str, str], dtype: torch.dtype | None = None
    ) -> None:
        self._weights, self._names, self._dtype = weights, names, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._cast(self._weights[self._names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each, without reading it."""
        like = getattr(self._weights, "like", self._weights.__getitem__)
        return {name: self._cast(like(saved)).nbytes for name, saved in self._names.items()}

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor


def _named_for_hf(weights: Mapping[str, Tensor], rest: Mapping[str, Any], path: Path, *, has_config: bool) -> _ForHF:
    """Return weights, their names there by the names of transformers, and the config, if it is known."""
    if (adapter := _adapter_of(weights)) is not None:
        raise ValueError(
            f"--names hf needs --adapters for a model with adapters of PEFT, such as {adapter}."
            " Add --adapters merge to write the model with the adapters added to its weights,"
            " or --adapters keep to write them alone, for PeftModel.from_pretrained."
        )
    for end in (_GPT, _LLAMA):
        for name in weights:
            if name == end or name.endswith("." + end):
                prefix = name.removesuffix(end)
                if end == _LLAMA:
                    return _stripped(weights, prefix, rest)
                shape = _gpt_config(prefix.removesuffix("."), rest, path)
                state = {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
                renamed = to_hf(state, shape)
                return renamed, {key: key for key in renamed}, hf_config(shape)
    # Some other model of transformers: described in the checkpoint, or the only attribute with weights.
    models = rest.get(MODELS) or ({name.partition(".")[0] for name in weights} if has_config else ())
    if len(models) == 1:
        return _stripped(weights, next(iter(models)) + ".", rest)
    raise ValueError(
        f"--names hf does not know the model in {path}, whose weights are {', '.join(list(weights)[:3])}, ..."
        " It knows GPT of this package, and models of transformers that are an attribute of the LightningModule."
        " If it is the only attribute with weights, add its config.json by --config. Otherwise use --names plain."
    )


def _adapter_of(weights: Iterable[str]) -> str | None:
    return next((name for name in weights if any(part in name for part in _OF_PEFT)), None)


def _with_adapters(
    weights: Mapping[str, Tensor], path: Path, output: Path, asked: argparse.Namespace, limit: int
) -> list[Path]:
    if asked.names == "plain":
        raise ValueError(f"--adapters {asked.adapters} takes --names hf. With --names plain, adapters stay as saved.")
    if (adapter := _adapter_of(weights)) is None:
        raise ValueError(f"--adapters {asked.adapters} has no effect: {path} holds no adapters of PEFT. Leave it out.")
    rest = rest_of(path, weights_only=not asked.trust)[0]
    described = {name + ".": each for name, each in rest.get(MODELS, {}).items() if "adapters" in each}
    prefix = next(filter(adapter.startswith, described), None)
    if asked.config is not None:
        config = json.loads(asked.config.read_text())
        if not (file := asked.config.with_name("adapter_config.json")).is_file():
            raise ValueError(f"--adapters needs {file} beside --config. {_HOW_TO_SAVE_CONFIGS}")
        adapters = {"default": json.loads(file.read_text())}
    elif prefix is not None:
        config, adapters = (json.loads(described[prefix][key]) for key in ("config", "adapters"))
    else:
        raise ValueError(
            f"--adapters needs the configs of the model, which {path} does not hold. {_HOW_TO_SAVE_CONFIGS}"
        )
    if prefix is None:
        head, is_peft_model, _ = adapter.partition(_PEFT_MODEL)
        prefix = head if is_peft_model else adapter.split(".")[0] + "."
    kind = (
        described[prefix]["class"].rpartition(".")[2]
        if prefix in described
        else (config.get("architectures") or [""])[0]
    )
    with damage_told(path):
        inner = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
        inner = {name if name.startswith(_PEFT_MODEL) else _PEFT_MODEL + name: saved for name, saved in inner.items()}
        peft_adapters.write(
            _Export(weights, inner),
            config,
            kind,
            adapters,
            output,
            merge=asked.adapters == "merge",
            dtype=getattr(torch, asked.dtype) if asked.dtype else None,
            shard=limit,
        )
    written = sorted(file for file in output.rglob("*") if file.is_file())
    _let_read([file for file in written if file.suffix == ".safetensors"])
    return written


def _stripped(weights: Mapping[str, Tensor], prefix: str, rest: Mapping[str, Any]) -> _ForHF:
    described = rest.get(MODELS, {}).get(prefix.removesuffix("."))
    config = json.loads(described["config"]) if described else None
    if config is not None and not config.get("architectures"):
        config["architectures"] = [described["class"].rpartition(".")[2]]
    names = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
    if config is not None and config.get("tie_word_embeddings"):
        names.pop("lm_head.weight", None)  # the embedding's, under another name
    return weights, names, config


def _gpt_config(name: str, rest: Mapping[str, Any], path: Path) -> GPTConfig:
    if (described := rest.get(MODELS, {}).get(name)) is not None:
        return GPTConfig(**json.loads(described["config"]))
    hparams = rest.get("hyper_parameters", {})
    if (size := hparams.get("size")) in SIZES:
        given = {field: hparams.get(field) for field in ("vocab_size", "max_seq_len", "qk_norm", "tie", "rope_theta")}
        changed = {field: value for field, value in given.items() if value is not None}
        return GPTConfig(**{field: getattr(SIZES[size], field) for field in GPTConfig.__slots__} | changed)
    raise ValueError(
        f"{path} does not say how many heads its GPT has, which its weights do not show."
        " Save the checkpoint from GPTModule, or by FSDP2Strategy."
    )


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    unit = match.group(2) if match else None
    if match is None or unit not in _UNITS or not float(match.group(1)):
        raise ValueError(f"--max-shard-size {text} is not a size. Write it like 5GB or 500MB.")
    return int(float(match.group(1)) * _UNITS[unit])
