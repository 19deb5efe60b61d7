# ruff: noqa: TID251  (what is tested is torch's private state)
import random
import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ups._compat.torch.flags import (
    AttentionState,
    allocator_settings,
    cache_key_tag,
    merge_settings,
    read_attention,
    read_tf32,
    save_tf32,
    write_attention,
    write_tf32,
)

CELLS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
]


def readers():
    """Everything in torch that tells what TF32 is."""
    said = {cell: torch._C._get_fp32_precision_getter(*cell) for cell in CELLS}
    for name, reader in {
        "cublas": torch._C._get_cublas_allow_tf32,
        "cudnn": torch._C._get_cudnn_allow_tf32,
        "precision": torch.get_float32_matmul_precision,
    }.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                said[name] = reader()
            except RuntimeError:
                said[name] = "mixed"
    return said


@pytest.fixture(autouse=True)
def as_it_was():
    restore, attention, before = save_tf32(), read_attention(), readers()
    yield
    restore()
    write_attention(attention)
    assert readers() == before


def set_at_random(rng):
    cells = {
        "fp32_precision": lambda: torch._C._set_fp32_precision_setter(
            *rng.choice(CELLS[:-1]), rng.choice(["none", "ieee", "tf32"])
        ),
        "cublas": lambda: torch._C._set_cublas_allow_tf32(rng.random() < 0.5),
        "cudnn": lambda: torch._C._set_cudnn_allow_tf32(rng.random() < 0.5),
        "precision": lambda: torch.set_float32_matmul_precision(rng.choice(["highest", "high", "medium"])),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells[rng.choice(list(cells))]()


def test_tf32_is_put_back_for_every_reader_whatever_the_user_did_before():
    rng = random.Random(0)
    for _ in range(400):
        for _ in range(rng.randrange(4)):
            set_at_random(rng)
        before, restore, enabled = readers(), save_tf32(), rng.random() < 0.5
        assert readers() == before, "reading changes nothing"
        write_tf32(enabled=enabled)
        assert read_tf32() == (enabled, enabled)
        restore()
        assert readers() == before


def test_an_inherited_precision_is_still_inherited_afterwards():
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    restore = save_tf32()
    write_tf32(enabled=False)
    restore()
    torch.backends.fp32_precision = "ieee"
    try:
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_no_reader_complains_of_mixed_interfaces(precision):
    """fp32_precision alone would leave get_float32_matmul_precision raising, which Inductor and Lightning call."""
    torch.set_float32_matmul_precision(precision)
    for enabled in (True, False, True):
        write_tf32(enabled=enabled)
        assert "mixed" not in readers().values()


def test_attention_comes_back_with_the_place_of_what_was_off():
    torch.backends.cuda.enable_flash_sdp(False)
    before = read_attention()
    assert SDPBackend.FLASH_ATTENTION not in before.enabled
    write_attention(AttentionState(frozenset({SDPBackend.MATH}), (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)))
    assert read_attention().enabled == {SDPBackend.MATH}
    assert read_attention().order[:2] == (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    write_attention(before)
    assert read_attention() == before
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        pass
    assert read_attention() != before, "sdpa_kernel restores exactly by now: use it"


def test_a_tag_joins_the_one_that_the_user_set():
    from torch.compiler import config

    before = config.cache_key_tag
    with cache_key_tag("a"), cache_key_tag("b"):
        assert config.cache_key_tag == (f"{before}+a+b" if before else "a+b")
    assert config.cache_key_tag == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        (
            "expandable_segments:False,roundup_power2_divisions:[256:1,512:2,>:4]",
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True",
        ),
        (
            "roundup_power2_divisions:[256:1,>:4], expandable_segments : False ,backend:native",
            "roundup_power2_divisions:[256:1,>:4],backend:native,expandable_segments:True",
        ),
    ],
)
def test_settings_of_the_environment_are_kept(text, expected):
    assert merge_settings(text, {"expandable_segments": True}) == expected


def test_asking_for_the_allocator_does_not_initialise_cuda():
    if torch.cuda.is_initialized():
        pytest.skip("another test of this process has initialised it")
    assert allocator_settings() is None
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_the_variable_is_the_one_that_torch_reads(monkeypatch):
    code = (
        "import torch; from lightning_ups._compat.torch.flags import *; torch.cuda.init();"
        "print(allocator_settings()['expandable_segments'])"
    )
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"
