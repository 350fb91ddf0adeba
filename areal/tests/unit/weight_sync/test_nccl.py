"""The raw NCCL communicator: types of the calls, errors and time limits, with a library that records calls."""

from __future__ import annotations

import base64
import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch

from areal.inference.http.group import NCCLCarrier
from areal.tests.harness.limits import promptly
from areal.tests.harness.servers.group.nccl_library import ID, IN_PROGRESS, REMOTE_ERROR, Recorded, Stream
from areal.weight_sync import nccl
from areal.weight_sync.nccl import NCCLCommunicator, NCCLError, NCCLLibrary, find_library


def join(library: Recorded, stream: Stream | None = None, seconds: float = 5.0) -> NCCLCommunicator:
    return NCCLCommunicator(NCCLLibrary(loaded=library), ID, 0, 3, stream or Stream(), seconds)


def test_missing_library_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"NCCL was not found \(.*libnone\.so.*\): install PyTorch for CUDA"):
        NCCLLibrary(tmp_path / "libnone.so")


def test_old_library_is_refused() -> None:
    library = Recorded()
    del library.ncclCommInitRankConfig
    with pytest.raises(RuntimeError, match=r"NCCL 2\.14 or newer is needed: .*ncclCommInitRankConfig"):
        NCCLLibrary(loaded=library)


def test_communicator_is_created_without_blocking() -> None:
    library = Recorded(ncclCommInitRankConfig=[IN_PROGRESS], ncclCommGetAsyncError=[IN_PROGRESS, IN_PROGRESS, 0])
    join(library)
    name, _, size, unique_id, rank, config = library.calls[0]
    assert (name, size, bytes(unique_id), rank) == ("ncclCommInitRankConfig", 3, ID, 0)
    made = config._obj
    assert (made.size, made.magic, made.version, made.blocking) == (24, 0xCAFEBEEF, 21400, 0)
    assert len(library.calls) == 4


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.uint8, 1), (torch.int64, 4), (torch.float16, 6), (torch.float32, 7), (torch.bfloat16, 9)],
)
def test_collectives_pass_elements_and_dtype(dtype: torch.dtype, number: int) -> None:
    library = Recorded(ncclBroadcast=[IN_PROGRESS, 0], ncclCommGetAsyncError=[0, IN_PROGRESS, 0])
    communicator = join(library)
    tensor = torch.zeros(5, 2, dtype=dtype)
    communicator.broadcast(tensor, 0, 5.0)
    communicator.all_reduce(tensor, 5.0)
    calls = {name: arguments for name, *arguments in library.calls}
    data = tensor.data_ptr()
    broadcast, reduced = calls["ncclBroadcast"], calls["ncclAllReduce"]
    assert [*broadcast[:5], broadcast[5].value, broadcast[6]] == [data, data, 10, number, 0, 4711, 99]
    assert [*reduced[:5], reduced[5].value, reduced[6]] == [data, data, 10, number, 0, 4711, 99]


def test_call_returns_when_the_stream_is_idle() -> None:
    stream = Stream()
    communicator = join(Recorded(), stream)
    stream.polls = 3
    communicator.broadcast(torch.zeros(1), 0, 5.0)
    assert stream.polls == -1


def test_missing_rank_is_noticed_in_time() -> None:
    library = Recorded(ncclCommGetAsyncError=[IN_PROGRESS])
    with pytest.raises(TimeoutError, match=r"not all of 3 ranks joined within 0\.1 s"):
        join(library, seconds=0.1)
    assert library.names()[-1] == "ncclCommAbort"


def test_hanging_broadcast_is_aborted_in_time() -> None:
    library, stream = Recorded(), Stream()
    communicator = join(library, stream)
    stream.polls = 10**9
    with pytest.raises(TimeoutError, match=r"ncclBroadcast did not end within 0\.1 s"):
        communicator.broadcast(torch.zeros(1), 0, 0.1)
    assert library.names()[-1] == "ncclCommAbort"
    with pytest.raises(NCCLError, match="the communicator was aborted"):
        communicator.broadcast(torch.zeros(1), 0, 0.1)


def test_errors_have_the_words_of_nccl() -> None:
    library = Recorded(ncclBroadcast=[4])
    with pytest.raises(NCCLError, match=r"ncclBroadcast: invalid usage \(ncclResult_t 4\)"):
        join(library).broadcast(torch.zeros(1), 0, 1.0)
    library = Recorded(ncclCommGetAsyncError=[0, REMOTE_ERROR])
    with pytest.raises(NCCLError, match="remote process exited or there was a network error"):
        join(library).broadcast(torch.zeros(1), 0, 1.0)
    assert library.names()[-1] == "ncclCommAbort"


def test_another_thread_ends_a_hanging_broadcast() -> None:
    library, stream = Recorded(), Stream()
    communicator = join(library, stream)
    stream.polls = 10**9
    threading.Timer(0.1, communicator.abort).start()
    with promptly(), pytest.raises(NCCLError, match="the communicator was aborted"):
        communicator.broadcast(torch.zeros(1), 0, 60.0)
    communicator.abort()
    assert library.names().count("ncclCommAbort") == 1


def test_bad_arguments_are_refused() -> None:
    library = NCCLLibrary(loaded=Recorded())
    with pytest.raises(ValueError, match="unique_id has 3 bytes: it must have 128"):
        NCCLCommunicator(library, b"abc", 0, 2, Stream(), 1.0)
    with pytest.raises(ValueError, match=r"rank = 2: it must be in \[0, 2\)"):
        NCCLCommunicator(library, ID, 2, 2, Stream(), 1.0)
    with pytest.raises(ValueError, match=r"dtype torch\.complex64 is not supported by NCCL"):
        join(Recorded()).broadcast(torch.zeros(1, dtype=torch.complex64), 0, 1.0)
    with pytest.raises(ValueError, match="call contiguous"):
        join(Recorded()).broadcast(torch.zeros(2, 3).T, 0, 1.0)


def test_carrier_of_vllm_gives_the_id_in_the_standard_alphabet() -> None:
    carrier = NCCLCarrier("cuda", library=NCCLLibrary(loaded=Recorded()))
    where = carrier.open(3)
    assert list(where) == ["nccl_unique_id_b64"]
    assert len(base64.b64decode(str(where["nccl_unique_id_b64"]), validate=True)) == 128
    with pytest.raises(ValueError, match="device = 'cpu': NCCL needs a GPU"):
        NCCLCarrier("cpu")


@pytest.fixture(scope="module")
def installed() -> NCCLLibrary:
    try:
        return NCCLLibrary()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_installed_library_gives_an_id(installed: NCCLLibrary) -> None:
    one, other = installed.unique_id(), installed.unique_id()
    assert len(one) == len(other) == 128
    assert one != other


def test_types_are_those_of_the_header(installed: NCCLLibrary) -> None:
    header = Path(find_library()).parents[1] / "include" / "nccl.h"
    if not header.exists():
        pytest.skip(f"{header} does not exist")
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    types = {
        "int": ctypes.c_int,
        "size_t": ctypes.c_size_t,
        "ncclComm_t": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
        "cudaStream_t": ctypes.c_void_p,
        "ncclDataType_t": ctypes.c_int,
        "ncclRedOp_t": ctypes.c_int,
        "ncclUniqueId": nccl._UniqueId,
        "int*": ctypes.POINTER(ctypes.c_int),
        "ncclResult_t*": ctypes.POINTER(ctypes.c_int),
        "ncclUniqueId*": ctypes.POINTER(nccl._UniqueId),
        "ncclComm_t*": ctypes.POINTER(ctypes.c_void_p),
        "ncclConfig_t*": ctypes.POINTER(nccl._Config),
    }
    for name, arguments in nccl._FUNCTIONS.items():
        declared = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\)", text)
        assert declared is not None, name
        parts = [re.sub(r"\bconst\b", "", part).strip() for part in declared[1].split(",")]
        # The last word is the argument's name.
        kinds = [re.sub(r"\s*(\*?)\s*\w+$", r"\1", part) for part in parts]
        assert [types[kind] for kind in kinds] == list(arguments), name
    for dtype, number in nccl._DTYPES.items():
        word = {"float8_e4m3fn": "Float8e4m3"}.get(str(dtype)[6:], str(dtype)[6:].capitalize())
        found = re.search(rf"nccl{word}\s*=\s*(\d+)", text)
        assert found is not None, word
        assert int(found[1]) == number
    assert re.search(r"ncclInProgress\s*=\s*7", text)
    assert re.search(r"NCCL_UNIQUE_ID_BYTES\s+128", text)
