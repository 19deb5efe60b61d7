import json

import pytest

from tests.token_files import numbered_documents, random_documents, token_folder

pytest.importorskip("tokenizers")


def said(outcome):
    return " ".join(outcome.err.split())


def test_the_page_has_lengths_packing_and_a_row_with_its_boundaries(ups, tmp_path):
    path = token_folder(tmp_path, [[1, 2, 3, 0], [4, 5, 0], [6]])
    outcome = ups("inspect", path, "--seq-len", "5")
    assert outcome.code == 0, said(outcome)
    assert "8 tokens of 3 documents, uint16, vocabulary of 61" in outcome.out
    assert "best_fit  1 row, 100.00% used, no document cut" in outcome.out
    first, second = "document 0, tokens 0 to 3 of 4\nw0 w1 w2 <eos>", "document 1, tokens 0 to 2 of 3\nw3 w4 <eos>"
    assert first in outcome.out
    assert second in outcome.out
    assert "document 2" not in outcome.out, "it has no prediction"


def test_a_row_of_many_documents_is_shortened(ups, tmp_path):
    path = token_folder(tmp_path, [[1, 0]] * 9)
    out = ups("inspect", path, "--seq-len", "9").out
    assert out.count("--- document") == 5
    assert "and 4 documents more: --documents 9" in out
    assert ups("inspect", path, "--seq-len", "9", "--documents", "9").out.count("--- document") == 9
    assert "--documents 0" in said(ups("inspect", path, "--documents", "0"))


def test_cut_documents_are_marked(ups, tmp_path):
    out = ups("inspect", token_folder(tmp_path, [[*range(9), 0]]), "--seq-len", "4").out
    assert "10 tokens of 1 document," in out
    assert "best_fit  3 rows, 75.00% used, documents cut at 2 places" in out
    assert "one document in each row: 100.00% used, and 55.56% of all predictions cut off" in out
    assert "document 0, tokens 0 to 4 of 10; the rest is in another row\n" in out


def test_the_numbers_as_json(ups, tmp_path):
    path = token_folder(tmp_path, numbered_documents(10))
    report = json.loads(ups("inspect", path, "--seq-len", "4", "--json").out)
    assert (report["documents"], report["tokens"], report["length"]["max"]) == (10, 90, 9)
    assert report["histogram"] == {"8": 10}
    assert report["greedy"] == {"rows": 20, "efficiency": 1.0, "cuts": 10}
    assert report["padded"]["efficiency"] == 1.0


def test_what_does_not_exist_is_named(ups, tmp_path):
    path = token_folder(tmp_path / "a", random_documents(5))
    assert "--row 99 does not exist" in said(ups("inspect", path, "--row", "99"))
    assert "--seq-len 0" in said(ups("inspect", path, "--seq-len", "0"))
    assert "tokens.json" in said(ups("inspect", str(tmp_path)))
    assert "no documents" in said(ups("inspect", token_folder(tmp_path / "b", [])))
