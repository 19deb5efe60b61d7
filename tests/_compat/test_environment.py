import os
import subprocess
import sys

import pytest
import torch

from lightning_ups._compat import environment
from lightning_ups._compat.environment import (
    installed,
    relevant_variables,
    usable_cores,
    versions,
    without_secrets,
    working_tree,
)


def test_versions_are_those_that_the_packages_say_themselves():
    import lightning

    found = versions()
    assert found["lightning"] == lightning.__version__
    assert found["torch"] == torch.__version__  # noqa: TID251
    assert found["python"] == "{}.{}.{}".format(*sys.version_info)
    assert installed("no-such-package") is None


def test_looking_at_packages_imports_none_and_initialises_no_gpu():
    code = (
        "import sys; from lightning_ups._compat.environment import *; versions(); host(); relevant_variables();"
        "import torch; assert not torch.cuda.is_initialized();"
        "print([m for m in ('lightning', 'torchao', 'transformers', 'triton') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("max 100000", 4), ("50000 100000", 1), ("", 4)])
def test_a_containers_quota_counts(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(environment, "_read", lambda path: quota)
    assert usable_cores() == cores


def test_variables_that_matter_are_kept_and_secrets_are_not():
    found = relevant_variables(
        {
            "NCCL_ALGO": "Ring",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCH_COMPILE_CACHE_KEY_TAG": "a",
            "TOKENIZERS_PARALLELISM": "false",
            "LIGHTNING_CLOUD_API_KEY": "s3cret-1",
            "LIGHTNING_AUTH_TOKEN": "s3cret-2",
            "LIGHTNING_USER_ID": "s3cret-3",
            "TORCH_PROXY": "http://me:s3cret-4@proxy:80/x",
            "HF_TOKEN": "s3cret-5",
            "HOME": "s3cret-6",
        }
    )
    assert "s3cret" not in str(found)
    assert found["NCCL_ALGO"] == "Ring"
    assert found["TORCH_COMPILE_CACHE_KEY_TAG"] == "a"
    assert found["TORCH_PROXY"] == "http://proxy:80/x"
    assert {"PYTORCH_ALLOC_CONF", "TOKENIZERS_PARALLELISM"} <= set(found)
    assert not {"HF_TOKEN", "HOME"} & set(found)


def test_secrets_are_hidden_at_any_depth_and_numbers_of_tokens_are_not():
    config = {"logger": [{"init_args": {"api_key": "x", "max_tokens": 5, "token": None}}], "hf_token": "y"}
    assert without_secrets(config) == {
        "logger": [{"init_args": {"api_key": "***", "max_tokens": 5, "token": None}}],
        "hf_token": "***",
    }


def test_graphs_count_whoever_compiles_them():
    before = environment.graphs_made()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    after = environment.graphs_made()
    assert after["graphs"] - before["graphs"] == 1
    assert after["graph_breaks"] == before["graph_breaks"]

    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()  # noqa: TID251
        return x * 2

    torch.compile(breaks, backend="eager")(torch.ones(1))
    assert environment.graphs_made()["graphs"] - after["graphs"] == 2
    assert environment.graphs_made()["graph_breaks"] > after["graph_breaks"]


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_working_tree_of_the_user(tmp_path):
    assert working_tree(tmp_path) is None
    git(tmp_path, "init")
    assert working_tree(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "new").write_text("not tracked")
    clean = working_tree(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert working_tree(tmp_path) == clean | {"dirty": True}


@pytest.mark.gpu
def test_a_real_gpu_answers():
    cudnn = [int(part) for part in versions()["cudnn"].split(".")]
    assert cudnn[0] * 10000 + cudnn[1] * 100 + cudnn[2] == torch.backends.cudnn.version()
    assert environment.gpus()[0]["memory"] > 1 << 30
