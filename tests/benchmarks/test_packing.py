import pytest

pytest.importorskip("tokenizers")


@pytest.mark.filterwarnings("ignore")
def test_packing_gives_the_loss_of_padding_and_fills_rows(import_benchmark):
    found = import_benchmark("packing").CASES["tiny, 256"]()
    assert found["losses_equal"] is True
    assert found["share_of_real"]["padded"] < found["share_of_real"]["best_fit"] <= 1
    assert found["share_of_real"]["greedy"] > 0.98
    assert found["ratio"]["greedy"] > 0


def test_only_packed_rows_have_several_documents(import_benchmark):
    packing = import_benchmark("packing")
    texts = packing.documents()
    rows = {side: packing.rows_of(texts, side, seq_len=4096)[0] for side in packing.SIDES}
    assert len(rows["greedy"]) <= len(rows["best_fit"]) < len(rows["padded"])
    assert max(len(rows["padded"].pieces(index)[1]) for index in range(len(rows["padded"]))) == 1
