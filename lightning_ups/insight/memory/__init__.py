"""Accounting for memory, by tensor and by holder."""

from lightning_ups.insight.memory.account import GIB, Kind, Ledger, Moment, Phase, readable
from lightning_ups.insight.memory.compiled import as_compiled
from lightning_ups.insight.memory.cuda import step_as_on_cuda
from lightning_ups.insight.memory.devices import DEVICES, Device, device_of, textbook
from lightning_ups.insight.memory.fake_module import batch_size, fake_batch, resized, sequence_length, twin
from lightning_ups.insight.memory.layout import Layout, Sharding, between, peak_of
from lightning_ups.insight.memory.offloaded import RehearsedMemory
from lightning_ups.insight.memory.owners import holders, is_out_of_memory
from lightning_ups.insight.memory.step import Play, Step, rehearse
from lightning_ups.insight.memory.tensor_parallel import cut_for_one_device

__all__ = [
    "DEVICES",
    "GIB",
    "Device",
    "Kind",
    "Layout",
    "Ledger",
    "Moment",
    "Phase",
    "Play",
    "RehearsedMemory",
    "Sharding",
    "Step",
    "as_compiled",
    "batch_size",
    "between",
    "cut_for_one_device",
    "device_of",
    "fake_batch",
    "holders",
    "is_out_of_memory",
    "peak_of",
    "readable",
    "rehearse",
    "resized",
    "sequence_length",
    "step_as_on_cuda",
    "textbook",
    "twin",
]
