"""``migrate``: convert settings of DeepSpeed, Accelerate or FSDP to a configuration of this package."""

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_ups.commands.starting import accelerate, deepspeed
from lightning_ups.commands.starting.conversion import Conversion
from lightning_ups.config.suggestions import parse_options, suggest_file

_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "fp16", "bf16")
_OF_ACCELERATE = ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")
_ENDINGS = (".json", ".yaml", ".yml")


def main(argv: Sequence[str]) -> int:
    """Print the YAML."""
    parser = ArgumentParser(
        prog="python -m lightning_ups migrate",
        description="Convert settings of DeepSpeed (JSON), Accelerate (YAML) or FSDP (the fsdp_config of transformers)"
        " to YAML for `fit`. Comments say what each key became, and which keys have no counterpart.",
        epilog="Example: python -m lightning_ups migrate ds_config.json > converted.yaml, and then python -m"
        " lightning_ups fit --config run.yaml --config converted.yaml. run.yaml contains your model and data.",
    )
    parser.add_argument("file", metavar="FILE", help="file with the settings to convert")
    path = Path(parse_options(parser, argv).file)
    name, converted = _converted(path)
    print(f"# {path.name}, of {name}, for `fit --config run.yaml --config THIS`, where run.yaml has model and data.")
    print(converted.text(), end="")
    return 0


def _converted(path: Path) -> tuple[str, Conversion]:
    source = _read(path)
    if any(key in source for key in _OF_ACCELERATE):
        inner = accelerate.deepspeed_of(source)
        if file := source.get("deepspeed_config", {}).get("deepspeed_config_file"):
            inner = {**_read(path.parent / file), **inner}
        is_deepspeed = source.get("distributed_type") == "DEEPSPEED"
        return "Accelerate", accelerate.convert(source, inner=deepspeed.convert(inner) if is_deepspeed else None)
    if any(key in source for key in _OF_DEEPSPEED):
        return "DeepSpeed", deepspeed.convert(source)
    if accelerate.is_fsdp_config(source):
        return "FSDP", accelerate.convert_fsdp(source)
    raise ValueError(
        f"{path} has no key of DeepSpeed, Accelerate or FSDP, such as {_OF_DEEPSPEED[0]}, {_OF_ACCELERATE[0]} or"
        " fsdp_transformer_layer_cls_to_wrap. Give the file that the other tool was started with."
    )


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. {suggest_file(path, endings=_ENDINGS)}")
    text = path.read_text(encoding="utf-8")
    try:
        # 1e9 is a number in JSON, and text in YAML.
        found = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is neither JSON nor YAML: {str(error).partition(chr(10))[0]}.") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} has no keys. Give the settings of DeepSpeed, Accelerate or FSDP.")
    return found
