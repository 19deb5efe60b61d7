"""The peak FLOP/s of GPUs, by the name that the driver reports.

Dense TFLOP/s from the data sheets, of tensor cores that accumulate in float32, and for ``fp32`` of the other cores.
Consumer cards accumulate in float32 at half their advertised speed. Names match completely: a MIG slice, a laptop or a
capped variant is another GPU.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan
from numbers import Real
from typing import Literal, get_args

Arithmetic = Literal["bf16", "fp8", "tf32", "fp32"]  # fp16 is as fast as bf16 on all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """TFLOP/s of one device; None: the dtype is not supported; NaN: unknown."""

    bf16: float
    fp8: float | None
    tf32: float
    fp32: float

    def of(self, arithmetic: Arithmetic) -> float | None:
        """Return FLOP/s, or None if unsupported or unknown."""
        found: float | None = getattr(self, arithmetic)
        return None if found is None or isnan(found) else found * 1e12


_H100_SXM = Peaks(bf16=989.4, fp8=1978.9, tf32=494.7, fp32=66.9)
_H100_NVL = Peaks(bf16=835.5, fp8=1671.0, tf32=417.5, fp32=60.0)
_A100 = Peaks(bf16=312.0, fp8=None, tf32=156.0, fp32=19.5)

# Patterns of complete names, without "NVIDIA", in lower case.
_KNOWN: tuple[tuple[str, Peaks], ...] = (
    # Data centre
    (r"gb[23]00", Peaks(bf16=2500.0, fp8=5000.0, tf32=1250.0, fp32=80.0)),
    (r"b300( sxm6 ac)?|b200( 180gb hbm3e)?", Peaks(bf16=2250.0, fp8=4500.0, tf32=1125.0, fp32=75.0)),
    (r"b100", Peaks(bf16=1750.0, fp8=3500.0, tf32=875.0, fp32=60.0)),
    (r"gh200( 480gb| 144g hbm3e)?|h200( sxm)?|h100 80gb hbm3|h100 sxm5( 80gb)?|h800( sxm5)?", _H100_SXM),
    (r"h[12]00 nvl", _H100_NVL),
    (r"h100 pcie", Peaks(bf16=756.0, fp8=1513.0, tf32=378.0, fp32=51.2)),
    (r"h20", Peaks(bf16=148.0, fp8=296.0, tf32=74.0, fp32=44.0)),
    (r"a(100|800)[- ](sxm4[- ](40|80)gb|pcie[- ](40|80)gb|80gb pcie|40gb pcie|sxm4)", _A100),
    (r"a30", Peaks(bf16=165.0, fp8=None, tf32=82.0, fp32=10.3)),
    (r"a40", Peaks(bf16=149.7, fp8=None, tf32=74.8, fp32=37.4)),
    (r"a10", Peaks(bf16=125.0, fp8=None, tf32=62.5, fp32=31.2)),
    (r"l40s", Peaks(bf16=362.05, fp8=733.0, tf32=183.0, fp32=91.6)),
    (r"l40", Peaks(bf16=181.05, fp8=362.0, tf32=90.5, fp32=90.5)),
    (r"l4", Peaks(bf16=121.0, fp8=242.0, tf32=60.0, fp32=30.3)),
    # Workstations
    (
        r"rtx pro 6000 blackwell (server|workstation) edition",
        Peaks(bf16=503.8, fp8=1007.6, tf32=251.9, fp32=125.0),
    ),
    (r"rtx 6000 ada generation", Peaks(bf16=364.2, fp8=728.5, tf32=182.1, fp32=91.1)),
    (r"rtx a6000", Peaks(bf16=154.8, fp8=None, tf32=77.4, fp32=38.7)),
    # Consumers
    (r"geforce rtx 5090", Peaks(bf16=209.5, fp8=419.0, tf32=104.8, fp32=104.8)),
    (r"geforce rtx 5080", Peaks(bf16=112.6, fp8=225.1, tf32=56.3, fp32=56.3)),
    (r"geforce rtx 4090", Peaks(bf16=165.2, fp8=330.3, tf32=82.6, fp32=82.6)),
    (r"geforce rtx 4080", Peaks(bf16=97.5, fp8=194.9, tf32=48.7, fp32=48.7)),
    (r"geforce rtx 3090 ti", Peaks(bf16=80.0, fp8=None, tf32=40.0, fp32=40.0)),
    (r"geforce rtx 3090", Peaks(bf16=71.0, fp8=None, tf32=35.6, fp32=35.6)),
    (r"geforce rtx 3080", Peaks(bf16=59.5, fp8=None, tf32=29.8, fp32=29.8)),
)


def peaks_of(name: str) -> Peaks | None:
    """Return the peaks of a device, such as "NVIDIA H100 80GB HBM3", or None if it is unknown."""
    short = re.sub(r"\s+", " ", name.lower()).strip().removeprefix("nvidia ").strip()
    return next((peaks for pattern, peaks in _KNOWN if re.fullmatch(pattern, short)), None)


def _is_peak(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < inf


def given_peaks(tflops: float | Mapping[str, float], *, arithmetic: Arithmetic) -> Peaks:
    """Return peaks given by the user: one figure for ``arithmetic``, or one for each kind.

    Raises:
        ValueError: If a kind is unknown, or a figure is not above zero.
    """
    given: dict[str, float] = dict(tflops) if isinstance(tflops, Mapping) else {arithmetic: tflops}
    if wrong := [name for name, value in given.items() if name not in get_args(Arithmetic) or not _is_peak(value)]:
        raise ValueError(
            f"peak_tflops={tflops!r} has no valid value for {', '.join(map(str, wrong))}."
            f" Use positive TFLOP/s of one device for some of {get_args(Arithmetic)}."
        )
    unknown = float("nan")
    return Peaks(
        bf16=given.get("bf16", unknown),
        fp8=given.get("fp8"),
        tf32=given.get("tf32", unknown),
        fp32=given.get("fp32", unknown),
    )
