import io
import threading
import zipfile

import pytest
import torch

from lightning_ups._compat.torch.tensors.tensor_files import around, template

TENSORS = {
    "weight": torch.randn(5, 7),
    "one byte": torch.tensor([True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "bf16": torch.randn(1000, 3).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "transposed": torch.randn(4, 3).T,
    "megabytes": torch.randint(0, 9, (2**21,)),
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def in_memory_order(tensor):
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TENSORS)
def test_with_the_bytes_between_it_is_what_torch_writes_without_a_checksum(name):
    tensor, file = TENSORS[name], io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, file)
    finally:
        torch.serialization.set_crc32_options(before)
    start, end = around(tensor.dtype, tuple(tensor.shape), tensor.stride())
    assert start + in_memory_order(tensor) + end == file.getvalue()


def test_files_of_the_user_keep_their_checksums():
    around(torch.float32, (123, 45), (45, 1))
    assert zipfile.ZipFile(saved(torch.ones(7))).testzip() is None


def test_many_threads_leave_the_setting_alone():
    def ask(number):
        for size in range(50):
            around(torch.float32, (number, size), (size, 1))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1000, 1004)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.serialization.get_crc32_options()


@pytest.mark.parametrize("name", TENSORS)
def test_a_saved_tensor_is_found_without_reading_it(name):
    tensor = TENSORS[name]
    file = saved(tensor)
    found, place = template(file)
    assert (found.shape, found.dtype, found.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert file.getvalue()[place : place + tensor.nbytes] == in_memory_order(tensor)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_is_not_the_bytes_of_one_tensor_is_left_to_torch():
    memory = torch.randn(6, dtype=torch.complex64)
    for other in ([torch.ones(2)] * 2, {"a": 1}, memory.conj(), torch.ones(2).to_sparse(), [memory, torch.ones(3)]):
        assert template(saved(other)) is None


def test_a_part_of_a_larger_storage_begins_where_it_begins():
    whole = torch.arange(10.0)
    file = saved(whole[4:6])
    _, place = template(file)
    assert file.getvalue()[place : place + 8] == whole[4:6].numpy().tobytes()
