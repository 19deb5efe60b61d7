from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list  # noqa: TID251

from tests.compiled_afresh import compiled_afresh


def test_no_vectors_are_known_within_alone():
    with compiled_afresh():
        assert not pick_vec_isa()
    assert valid_vec_isa_list.cache_info().currsize == 0
