from torch._inductor import cpu_vec_isa  # noqa: TID251

from tests.compiled_afresh import compiled_afresh


def test_no_vectors_are_known_within_alone():
    before = cpu_vec_isa.valid_vec_isa_list()
    with compiled_afresh():
        assert not cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list() == before
    assert bool(cpu_vec_isa.pick_vec_isa()) == bool(before)
