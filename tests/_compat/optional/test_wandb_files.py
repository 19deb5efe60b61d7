import json
import struct

import pytest

from lightning_ups._compat.optional import wandb_files
from lightning_ups._compat.optional.wandb_files import RUN_NAME, read_wandb

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")


def written(path, records, *, block=32768):
    """Write records as W&B does: fragments in blocks, of which none crosses the end of one."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for record in map(bytes, records):
        kind = 1
        while True:
            left = block - len(data) % block
            if left < 7:
                data += bytes(left)
                left = block
            part, record = record[: left - 7], record[left - 7 :]
            # 1: whole, 2: first, 3: middle, 4: last
            data += struct.pack("<IHB", 0, len(part), (2 if kind == 1 else 3) if record else kind) + part
            kind = 4
            if not record:
                break
    path.write_bytes(data)
    return path


def history(**values):
    record = pb.Record()
    for name, value in values.items():
        record.history.item.add(nested_key=name.split("."), value_json=json.dumps(value))
    return record.SerializeToString()


def config(**values):
    record = pb.Record()
    for name, value in values.items():
        record.config.update.add(key=name, value_json=json.dumps(value))
    return record.SerializeToString()


def test_history_and_configuration(tmp_path):
    rows = [{"_step": step, "loss": float("nan") if step == 3 else 1.0 / (step + 1)} for step in range(2000)]
    named = pb.Record(run=pb.RunRecord(display_name="first try"))
    records = [named.SerializeToString(), config(lr=0.1, _wandb={})]
    path = written(tmp_path / "run-a.wandb", [*records, *(history(**row) for row in rows)])
    assert path.stat().st_size > 32768
    found, settings = read_wandb(path)
    assert settings == {"lr": 0.1, RUN_NAME: "first try"}
    assert len(found) == 2000
    assert found[1999] == rows[1999]


def test_records_that_cross_blocks(tmp_path):
    long = {"_step": 1, "text": "x" * 100_000}
    found, _ = read_wandb(written(tmp_path / "run-a.wandb", [history(_step=0), history(**long), history(_step=2)]))
    assert found == [{"_step": 0}, long, {"_step": 2}]


def test_a_run_that_was_killed_keeps_its_whole_rows(tmp_path):
    path = written(tmp_path / "run-a.wandb", [history(_step=0), history(_step=1)])
    path.write_bytes(path.read_bytes()[:-3])
    assert read_wandb(path)[0] == [{"_step": 0}]


def test_what_cannot_be_read_is_said(tmp_path, monkeypatch):
    path = tmp_path / "run-a.wandb"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"run-a.wandb is not a file of W&B"):
        read_wandb(path)
    written(path, [b"\xff\xff\xff"])
    with pytest.raises(ValueError, match=r"run-a.wandb is damaged"):
        read_wandb(path)
    monkeypatch.setattr(wandb_files, "has", lambda module: False)
    with pytest.raises(ValueError, match=r"pip install wandb"):
        read_wandb(path)
