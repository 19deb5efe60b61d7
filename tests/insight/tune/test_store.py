import json
import time

import pytest
import torch
from torch import nn

from lightning_ups._compat.environment import versions
from lightning_ups.insight.tune import Result, Store, default_folder, digest, digest_of_files, shape_of


def test_results_are_found_again_and_an_interrupted_line_is_skipped(tmp_path):
    store = Store(tmp_path / "new")
    store.add("a", Result(samples_per_s=1.0), about={"words": ["x"]})
    with store.path.open("a") as file:
        file.write('{"key": "b", "resu')
    again = Store(tmp_path / "new")
    assert again.find("a") == Result(samples_per_s=1.0)
    assert again.find("b") is None
    again.add("c", Result(failure="refused", text="t"), about={})
    assert Store(tmp_path / "new").find("c") == Result(failure="refused", text="t")


@pytest.mark.parametrize("failure", ["out of memory", "crash", "hang", "compiler error"])
def test_a_failure_is_kept_for_a_search_that_is_continued_and_tried_again_later(tmp_path, monkeypatch, failure):
    store = Store(tmp_path)
    store.add("a", Result(failure=failure), about={})
    assert store.find("a") == Store(tmp_path).find("a") == Result(failure=failure)
    tomorrow = time.time() + 25 * 3600
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: tomorrow)
        assert Store(tmp_path).find("a") is None
    store.path.write_text(json.dumps({"key": "a", "limit": 9, "result": {"failure": failure}}) + "\n")  # of 0.1
    assert Store(tmp_path).find("a") is None


def test_a_fresh_store_ignores_what_the_file_has_and_adds_to_it(tmp_path):
    Store(tmp_path).add("a", Result(samples_per_s=1.0), about={})
    fresh = Store(tmp_path, is_fresh=True)
    assert fresh.find("a") is None
    fresh.add("a", Result(samples_per_s=2.0), about={})
    assert fresh.find("a") == Store(tmp_path).find("a") == Result(samples_per_s=2.0)


def test_the_shape_of_a_module_depends_on_names_sizes_and_dtypes():
    with torch.device("meta"):
        modules = [nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3, dtype=torch.bfloat16)]
    modules.append(nn.LazyLinear(2))
    assert len({shape_of(module) for module in modules}) == 4


def test_digests_depend_on_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    before = digest_of_files([tmp_path / "a", tmp_path / "absent"])
    (tmp_path / "a").write_text("2")
    assert digest_of_files([tmp_path / "a"]) != before
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lightning_ups" / "trials"
    assert versions()["torch"].startswith("2.")
