"""Damaged and hostile files: thousands of mutations of a small file's header end in a clean error or a sane checkpoint.

Every mutation is opened as a user would (`npglm.load`); an error must be an NpglmError of one short line. The process cannot
allocate more than MEMORY_BYTES meanwhile, so no count in a file decides how much memory it takes.
"""

import itertools
import random
import re
import resource
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from synth import ARCH, Shape, write_model

import npglm
from npglm.checkpoint import MAX_HEADER_BYTES, read_gguf
from npglm.errors import NpglmError

TINY = Shape(
    vocab=270, hidden=32, n_layers=2, n_dense=1, full=(True, False), n_heads=2, nope=32, rope=8, v_dim=16, q_rank=64,
    kv_rank=96, indexer_heads=3, indexer_dim=24, ffn=128, n_experts=4, n_chosen=2, expert_ffn=160,
)  # fmt: skip
MEMORY_BYTES = 1 << 30
EDGES = [0, 1, 2, 7, 8, 9, 31, 0x7F, 0xFF, 0xFFFF, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EDGES_64 = [*EDGES, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    used = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    old = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, old[1]))  # mapped files do not count
    yield
    resource.setrlimit(resource.RLIMIT_DATA, old)


def test_the_memory_is_bounded():
    with pytest.raises(MemoryError):
        bytes(2 * MEMORY_BYTES)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The file's bytes and the length of its header."""
    metadata = {"x.array": [[1, 2], [3, 4]], "x.f64": (1.5, V.FLOAT64)}
    path = write_model(tmp_path_factory.mktemp("fuzz") / "m.gguf", shape=TINY, metadata=metadata, tile_bytes=1 << 12)
    return path.read_bytes(), read_gguf(path).data_offset


@pytest.fixture
def attempt(tmp_path):
    """Open bytes as a file, stretched to `size` with a hole: the error's text, or None if it opens."""
    path = tmp_path / "m.gguf"
    path.touch()

    def attempt(data: bytes, size: int | None = None) -> str | None:
        with open(path, "r+b") as file:  # in place: giving blocks back and taking new ones is what takes time
            file.write(data)
            file.truncate(len(data) if size is None else size)
        try:
            checkpoint = npglm.load(path)
        except NpglmError as error:
            text = str(error)
            assert text.startswith(("m.gguf: ", f"{path}: "))
            assert text.isprintable()
            assert len(text) < 400
            return text
        assert_sane(checkpoint)
        return None

    return attempt


def assert_sane(checkpoint) -> None:
    """What opens can be run: sizes agree with tensors that lie inside the file, numbers are usable."""
    c = checkpoint.config
    assert all(type(size) is int and size >= 1 for size in c.axes.values())
    assert 0 <= c.rms_eps <= 1
    assert 1 <= c.rope_theta <= 1e12
    assert 0 < c.expert_scale <= 1e6
    assert c.n_chosen <= c.n_experts
    assert len(checkpoint.weights.layers) == c.n_layers == len(c.full)
    assert c.full[0]
    for tensor in checkpoint.tensors.values():
        assert tensor.data.shape[0] == tensor.n_rows >= 1
    assert checkpoint.weights.token_embd.rows(0, 1).shape == (1, c.hidden)
    assert checkpoint.weights.layers[-1].attn_norm.decode().shape == (c.hidden,)


def test_the_unchanged_file_opens(original, attempt):
    assert attempt(original[0]) is None


def test_truncation_at_every_place_of_the_header(original, attempt):
    data, header = original
    interesting = {
        m.start() + d for m in re.finditer(rb"glm-dsa|general|tokenizer|blk|weight", data[:header]) for d in (-8, -1, 0)
    }
    places = sorted(
        {*range(40), *range(40, header, 53), *interesting, header - 1, header, header + 1, len(data) - 1} - {-8, -1}
    )
    assert len(places) > 300
    for place in places:
        assert attempt(data[:place]) is not None


def test_flipped_bits(original, attempt):
    data, header = original
    rng = random.Random(1)
    opened = 0
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        opened += attempt(damaged) is None
    assert 100 < opened < 3900  # flips inside a token's text do no harm


def test_random_bytes_written_over_the_header(original, attempt):
    data, header = original
    rng = random.Random(2)
    for _ in range(1000):
        damaged = bytearray(data)
        start = rng.randrange(header)
        n = rng.choice((1, 2, 4, 8, 32, 512))
        damaged[start : start + n] = rng.choice((rng.randbytes(n), bytes(n), b"\xff" * n))
        attempt(damaged)


def test_pieces_cut_out_doubled_and_swapped(original, attempt):
    data, header = original
    rng = random.Random(3)
    for _ in range(500):
        a, b, c = sorted(rng.randrange(header) for _ in range(3))
        b, c = min(b, a + rng.choice((1, 8, 200))), min(c, b + rng.choice((1, 8, 200)))
        b, c = max(a, b), max(b, c)
        damaged = rng.choice(
            (
                data[:a] + data[b:],
                data[:b] + data[a:],
                data[:a] + data[b:c] + data[a:b] + data[c:],
                data[:a] + bytes(8) + data[a:],
            )
        )
        attempt(damaged)


# --- every field of the header set to every edge ----------------------------------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFFFFFF)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value & (1 << 64) - 1)


def after(data: bytes, name: bytes) -> int:
    """Where the field after the string `name` begins."""
    at = data.index(u64(len(name)) + name)
    return at + 8 + len(name)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "keys")])
def test_counts_of_the_file(original, attempt, at, what):
    data, _ = original
    for value in EDGES_64:
        if value != struct.unpack_from("<Q", data, at)[0]:
            message = attempt(patched(data, at, u64(value)))
            assert message is not None
            if value > 1 << 20:
                assert message == f"m.gguf: truncated or damaged: claims {value} {what} in {len(data)} bytes"


def test_metadata_types(original, attempt):
    data, _ = original
    for name, value in itertools.product((b"general.name", b"tokenizer.ggml.tokens", b"x.f64", b"x.array"), EDGES):
        message = attempt(patched(data, after(data, name), u32(value)))
        if value > 12:
            assert message == f"m.gguf: key {name.decode()}: metadata type {value} does not exist"


def test_array_types_and_counts(original, attempt):
    data, _ = original
    for name in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"x.array", b"glm-dsa.attention.indexer.types"):
        at = after(data, name) + 4
        for value in EDGES:
            message = attempt(patched(data, at, u32(value)))
            assert value <= 12 or f"metadata type {value} does not exist" in message
        for value in EDGES_64:
            if value != struct.unpack_from("<Q", data, at + 4)[0]:
                message = attempt(patched(data, at + 4, u64(value)))
                assert value <= 1 << 20 or f"claims {value} entries" in message


def test_string_lengths(original, attempt):
    data, _ = original
    for name, value in itertools.product((b"general.name", b"tokenizer.ggml.model"), EDGES_64):
        message = attempt(patched(data, after(data, name) + 4, u64(value)))
        assert value <= 1 << 20 or f"key {name.decode()} needs {value} bytes" in message
    first_token = after(data, b"tokenizer.ggml.tokens") + 4 + 4 + 8
    for value in EDGES_64:
        message = attempt(patched(data, first_token, u64(value)))
        assert value <= 1 << 20 or "a string of key tokenizer.ggml.tokens runs past the end" in message


TENSOR = b"blk.1.ffn_gate_exps.weight"  # [4, 160, 32] Q8_0


def test_the_tensor_table(original, attempt):
    data, _ = original
    at = after(data, TENSOR)
    n_dims, type_at, offset_at = at, at + 4 + 24, at + 4 + 24 + 4
    name = TENSOR.decode()
    for value in EDGES:
        if value != 3:
            message = attempt(patched(data, n_dims, u32(value)))
            assert message is not None
            assert 1 <= value <= 4 or message == f"m.gguf: tensor {name}: {value} dimensions, expected 1 to 4"
        if value != T.Q8_0:
            message = attempt(patched(data, type_at, u32(value)))
            assert value in set(T) or message == f"m.gguf: tensor {name}: type id {value} does not exist"
    for value, dim in itertools.product(EDGES_64, range(3)):
        assert attempt(patched(data, at + 4 + 8 * dim, u64(value))) is not None
    size = 4 * 160 * 34
    for value in EDGES_64:
        message = attempt(patched(data, offset_at, u64(value)))
        if value % 32:
            assert "is not a multiple of the alignment 32" in message
        elif value + size > len(data):
            assert f"tensor {name} ends " in message
            assert message.endswith("bytes past the end of the file")


def test_every_type_id_around_the_known_ones(original, attempt):
    data, _ = original
    type_at = after(data, TENSOR) + 4 + 24
    for value in range(64):
        message = attempt(patched(data, type_at, u32(value)))
        assert (message is None) == (value == T.Q8_0) or value in set(T)


# --- counts that a large file could really hold -----------------------------------------------------------------------------


def header(*pairs: bytes, n_tensors: int = 0) -> bytes:
    return b"GGUF" + u32(3) + u64(n_tensors) + u64(len(pairs)) + b"".join(pairs)


def key(name: str, kind: int, payload: bytes) -> bytes:
    return u64(len(name)) + name.encode() + u32(kind) + payload


BIG = 1 << 36  # a sparse file of 64 GiB: every count below fits into it


@pytest.mark.parametrize("kind", [V.UINT8, V.BOOL, V.UINT32, V.FLOAT64, V.STRING, V.ARRAY])
def test_arrays_of_a_billion_entries(attempt, kind):
    message = attempt(header(key("x", V.ARRAY, u32(kind) + u64(1 << 30))), BIG)
    assert message.startswith("m.gguf: truncated or damaged: key x claims 1073741824 entries, ")


def test_a_string_of_many_gigabytes(attempt):
    assert "key x needs 34359738368 bytes" in attempt(header(key("x", V.STRING, u64(1 << 35))), BIG)
    assert "a key needs 34359738368 bytes" in attempt(header(u64(1 << 35)), BIG)


def test_keys_and_tensors_without_end(attempt):
    """Zeros: empty keys, empty tensor names."""
    assert (
        attempt(header()[:16] + u64(1 << 30), BIG) == "m.gguf: truncated or damaged: claims 1073741824 keys in 67108864 bytes"
    )
    assert attempt(header()[:16] + u64(1 << 20), BIG) == "m.gguf: key  occurs twice"
    assert "claims 1073741824 tensors" in attempt(header(n_tensors=1 << 30), BIG)
    assert attempt(header(n_tensors=1 << 20), BIG) == "m.gguf: tensor : 0 dimensions, expected 1 to 4"


@pytest.mark.parametrize("depth", [1, 2, 4, 5, 6, 1000, 100_000])
def test_nested_arrays(attempt, depth):
    nested = u32(V.ARRAY) + u64(1)
    message = attempt(header(key("x", V.ARRAY, nested * depth + u32(V.UINT8) + u64(0))))
    if depth < 4:
        assert message == "m.gguf: no tensors; a vocabulary alone cannot be run"
    else:
        assert message == "m.gguf: key x: arrays nested deeper than 4"


def test_wide_nested_arrays(attempt):
    """Many arrays of nothing, and many arrays that are said to hold as many strings each."""
    inner = u32(V.UINT8) + u64(0)
    n = 100_000
    assert "no tensors" in attempt(header(key("x", V.ARRAY, u32(V.ARRAY) + u64(n) + inner * n)))
    inner = u32(V.STRING) + u64(n)
    assert "a string of key x runs past the end" in attempt(header(key("x", V.ARRAY, u32(V.ARRAY) + u64(n) + inner * n)))


def test_names_that_would_break_a_terminal(attempt):
    name = "\x1b[31m\n\r\u202eabc" + "y" * 500
    message = attempt(header(key(name, V.UINT8, b"\0"), key(name, V.UINT8, b"\0")))
    assert message.startswith("m.gguf: key ?[31m???abcyyy")


def test_a_header_larger_than_the_limit(attempt):
    for n_bytes, message in ((MAX_HEADER_BYTES - 100, "no tensors"), (MAX_HEADER_BYTES, f"claims {MAX_HEADER_BYTES} entries")):
        blob = u32(V.UINT8) + u64(n_bytes)
        assert message in attempt(header(key("x", V.ARRAY, blob)), 2 * MAX_HEADER_BYTES)
    assert MAX_HEADER_BYTES > 6 * 9.4e6  # GLM-5.2's header


# --- hostile values, by key -------------------------------------------------------------------------------------------------


def test_metadata_numbers(original, attempt):
    data, _ = original
    names = sorted(set(re.findall(rb"glm-dsa\.[a-z_.]+", data)) - {b"glm-dsa.attention.indexer.types"})
    assert len(names) > 25
    floats = [struct.pack("<f", f) for f in (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 3e38)]
    opened = {}
    for name in names:
        at = after(data, name)
        for value in (*map(u32, EDGES), *floats):
            opened[name, value] = attempt(patched(data, at + 4, value)) is None
    assert sum(opened.values()) < len(opened) / 4
    assert not any(ok for (name, value), ok in opened.items() if name.endswith(b"embedding_length") and value != u32(32))
    assert f"{ARCH}.block_count".encode() in names
