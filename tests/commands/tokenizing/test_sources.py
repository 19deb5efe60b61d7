import gzip
import json
import random
import sys

import pytest

from lightning_ups.commands.tokenizing.sources import documents_in, find_files, parts_of
from tests.token_files import jsonl


def read(*files, separator=None, field="text", num_bytes=2**22):
    parts = parts_of([*map(str, files)], separator=separator, num_bytes=num_bytes)
    return [text for part in parts for text in documents_in(part, field=field, separator=separator)]


def texts(count=200):
    source = random.Random(0)
    return ["".join(source.choices("ab é\t中\n", k=source.randint(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 50, 10**6])
def test_json_lines_are_the_same_however_they_are_divided(tmp_path, num_bytes):
    path = jsonl(tmp_path / "a.jsonl", texts())
    assert read(path, num_bytes=num_bytes) == texts()


@pytest.mark.parametrize("num_bytes", [1, 3, 10, 10**6])
@pytest.mark.parametrize("separator", ["\n", "<|end|>", "\n\n", "aa"])
@pytest.mark.parametrize("last", ["", "last"])
def test_documents_between_separators(tmp_path, num_bytes, separator, last):
    content = separator.join([*texts(), last])
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    expected = [text for text in content.split(separator) if text]
    assert read(path, separator=separator, num_bytes=num_bytes) == expected


def test_a_text_file_is_a_document_and_small_files_share_a_part(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.py").write_text(f"# {number}")
    files = find_files([str(tmp_path / "*.py")])
    assert read(*files) == [f"# {number}" for number in range(5)]
    assert len([*parts_of(files, separator=None, num_bytes=6)]) == 3


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts())))
    assert read(path) == texts()


def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == ["a?b", "😀"]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_tables_are_read(tmp_path, kind):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    table, path = pyarrow.table({"text": [*texts(), None, ""], "other": [1] * 202}), tmp_path / "a.arrow"
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        parquet.write_table(table, path, row_group_size=17)
        assert len([*parts_of([str(path)], separator=None, num_bytes=10)]) == 12
    else:
        make = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=17)
    assert read(path) == texts()
    with pytest.raises(ValueError, match=r"no field 'txt'\. Did you mean 'text'"):
        read(path, field="txt")
    with pytest.raises(ValueError, match="has no text in 'other', but int"):
        read(path, field="other")


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ImportError, match="pip install pyarrow"):
        read(tmp_path / "a.parquet")


def test_wrong_records_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    for content, message in (
        ('{"body": "a"}', "no field 'text'. Use one of: body"),
        ('{"text": 3}', "but int"),
        ("{text", "not JSON"),
        ("[1]", "that is a list"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read(path)


def test_folders_are_searched_and_missing_files_are_named(tmp_path):
    (tmp_path / "inner").mkdir()
    names = [jsonl(tmp_path / "inner" / "b.jsonl", ["b"]), jsonl(tmp_path / "a.jsonl", ["a"])]
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "README.md").write_text("not data")
    assert find_files([str(tmp_path)]) == sorted(names)
    assert find_files([names[0], str(tmp_path)]) == names
    for missing in (tmp_path / "c.jsonl", tmp_path / "*.txt"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            find_files([str(missing)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no \.parquet"):
        find_files([str(tmp_path / "empty")])
