"""Headers of GGUF files: what is read, and that a damaged file is one error."""

import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import GGUFFile, gguf_of, parsing_once, read_gguf
from tests.gguf_writer import gguf_bytes, string, value, write_gguf

METADATA = {
    "general.architecture": "llama",
    "small": np.int8(-3),
    "large": np.uint64(2**63 + 1),
    "eps": 1e-5,
    "exact": np.float64(0.1),
    "flag": np.bool_(True),
    "tokens": ["a", "", "½"],
    "scores": np.array([0.5, -1e9], np.float32),
    "types": np.array([1, 3, 6], np.int32),
    "flags": np.array([True, False]),
}
TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(3, dtype=np.float16),
    "brain": np.ones((2, 3, 1, 5), ml_dtypes.bfloat16),
    "codes": ("Q4_1", (3, 64), bytes(range(120))),
}


def spoilt(tmp_path, content: bytes) -> str:
    """The one line that a file of these bytes gives."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < len(str(path)) + 300
    return message


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 1])
def test_values_and_tensors_are_read_as_they_were_written(tmp_path, alignment, version):
    metadata = METADATA | {"general.alignment": alignment}
    path = write_gguf(tmp_path / "a.gguf", metadata, TENSORS, alignment=alignment, version=version)
    found, content = read_gguf(path), path.read_bytes()
    assert list(found.metadata) == list(metadata)
    for key, wanted in metadata.items():
        np.testing.assert_array_equal(found.metadata[key], wanted)
        assert isinstance(found.metadata[key], (int, float, bool, str, list, np.ndarray))
        assert not isinstance(found.metadata[key], np.generic)
    assert found.metadata["types"].dtype == np.int32 and found.metadata["flags"].dtype == np.bool_
    for name, info in found.tensors.items():
        wanted = TENSORS[name]
        shape, data = (wanted.shape, wanted.tobytes()) if isinstance(wanted, np.ndarray) else wanted[1:]
        assert (info.shape, info.path) == (shape, path)
        assert content[info.offset :][: info.num_bytes] == data
    assert found.tensors["codes"].row_bytes == 40 and found.tensors["codes"].type.name == "Q4_1"


def test_a_header_is_parsed_again_when_its_file_has_changed_and_outside_the_context(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"x": 1})
    with parsing_once():
        first = read_gguf(path)
        assert read_gguf(path) is first
        write_gguf(path, {"x": 2, "y": 3})
        assert read_gguf(path).metadata == {"x": 2, "y": 3}
    assert read_gguf(path) is not read_gguf(path)


def test_float32_is_the_shortest_decimal(tmp_path):
    for number in (1e-5, 1e-6, 0.1, 1e6, 500_000.0, 3.4028235e38):
        assert read_gguf(write_gguf(tmp_path / "a.gguf", {"x": number})).metadata["x"] == number


def test_file_cut_off_anywhere_is_one_error(tmp_path):
    content = gguf_bytes(METADATA, {"a": ("F32", (8, 2), bytes(64)), "b": ("Q8_0", (3, 32), bytes(102))})
    assert read_gguf(write_gguf(tmp_path / "b.gguf", METADATA)).metadata.keys() == METADATA.keys()
    for length in range(len(content)):
        assert "truncated" in (message := spoilt(tmp_path, content[:length])) or length < 4, message


def test_any_byte_may_be_damaged(tmp_path):
    """A changed byte gives another value or one error, never another exception, much memory or much time."""
    content = gguf_bytes(METADATA, {"a": ("F32", (8, 2), bytes(64))})
    path = tmp_path / "a.gguf"
    tracemalloc.start()
    for index in range(len(content) - 64):
        for byte in (9, 255):
            path.write_bytes(content[:index] + bytes([byte]) + content[index + 1 :])
            try:
                assert isinstance(read_gguf(path), GGUFFile)
            except LoadError as error:
                assert "\n" not in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


HEAD = b"GGUF" + struct.pack("<I", 3)
HUGE = 2**40


@pytest.mark.parametrize(
    "content, said",
    {
        "empty": (b"", "not a GGUF file"),
        "magic": (b"GGML" + bytes(100), "not a GGUF file"),
        "version": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version is 4; supported: 2, 3"),
        "tensors": (HEAD + struct.pack("<QQ", HUGE, 0), "truncated or damaged"),
        "keys": (HEAD + struct.pack("<QQ", 0, HUGE), "truncated or damaged"),
        "length of a key": (HEAD + struct.pack("<QQQ", 0, 1, HUGE) + bytes(99), "needs 1,099,511,627,776 bytes"),
        "length of a string": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<IQ", 8, HUGE), "needs"),
        "strings": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, HUGE), "needs"),
        "numbers": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<IIQ", 9, 12, 2**63), "needs"),
        "nested": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "arrays of arrays"),
        "items": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<IIQ", 9, 77, 1), "unknown type 77"),
        "value": (HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<I", 13), "unknown value type 13"),
        "not UTF-8": (HEAD + struct.pack("<QQ", 0, 1) + string(b"\xff") + value(1), "not UTF-8"),
        "zero alignment": (gguf_bytes({"general.alignment": 0}), "general.alignment is 0"),
        "text as alignment": (gguf_bytes({"general.alignment": "32"}), "general.alignment is '32'"),
        "no dimensions": (gguf_bytes({}, {"t": ("F32", (), bytes(4))}), "0 dimensions"),
        "five dimensions": (gguf_bytes({}, {"t": ("F32", (1,) * 5, bytes(4))}), "5 dimensions; supported: 1 to 4"),
        "huge shape": (gguf_bytes({}, {"t": ("F32", (2**62, 2**62), bytes(4))}), "truncated or damaged"),
        "broken block": (gguf_bytes({}, {"t": ("Q4_0", (4, 48), bytes(999))}), "rows of Q4_0 are multiples of 32"),
        "known type": (gguf_bytes({}, {"t": (16, (1, 256), bytes(66))}), "type IQ2_XXS; supported: F32, F16, Q4_0"),
        "unknown type": (gguf_bytes({}, {"t": (99, (1, 256), bytes(66))}), "type number 99; supported: F32"),
    }.values(),
)
def test_damaged_header_is_one_error(tmp_path, content, said):
    assert said in spoilt(tmp_path, content)


def test_missing_file_folder_and_fifo_are_errors(tmp_path):
    os.mkfifo(tmp_path / "fifo.gguf")
    for name in ("absent.gguf", "fifo.gguf", "."):
        with pytest.raises(ValueError, match=r"absent\.gguf|fifo\.gguf|must be a plain file"):
            read_gguf(tmp_path / name)


def write_split(folder, num_parts: int = 3):
    folder.mkdir(exist_ok=True)
    names = list(TENSORS)
    for index in range(num_parts):
        split = {"split.no": np.uint16(index), "split.count": np.uint16(num_parts)}
        split["split.tensors.count"] = np.int32(len(names))
        part = {name: TENSORS[name] for name in names[index::num_parts]}
        path = folder / f"model-{index + 1:05}-of-{num_parts:05}.gguf"
        write_gguf(path, (METADATA if index == 0 else {}) | split, part)
    return sorted(folder.iterdir())


def test_any_part_of_a_split_model_opens_all(tmp_path):
    paths = write_split(tmp_path / "split")
    for path in paths:
        found = read_gguf(path)
        assert found.path == paths[0] and found.tensors.keys() == TENSORS.keys()
        assert found.metadata.keys() > METADATA.keys()
        assert {info.path for info in found.tensors.values()} == set(paths)
    assert gguf_of(tmp_path / "split") == paths[0]


def test_split_model_with_a_wrong_or_missing_part_is_refused(tmp_path):
    def refusal(spoil) -> str:
        paths = write_split(tmp_path / "split")
        spoil(paths)
        with pytest.raises(LoadError) as caught:
            read_gguf(paths[0])
        return str(caught.value)

    split = {"split.no": np.uint16(1), "split.count": np.uint16(3), "split.tensors.count": np.int32(4)}
    assert "missing: model-00002-of-00003.gguf" in refusal(lambda paths: paths[1].unlink())
    assert "split.tensors.count is 4, the parts have 3 tensors" in refusal(lambda paths: write_gguf(paths[1], split))
    for count, shown in ((3, "3"), ([1, 3], r"array\(\[1, 3\]"), (["x"], r"\['x'\]"), ("x" * 99, "'x{39}")):
        renamed = write_gguf(tmp_path / "renamed.gguf", split | {"split.count": count})
        with pytest.raises(
            LoadError, match=rf"split\.count is {shown}.{{0,20}}, must be the number of parts in the name"
        ):
            read_gguf(renamed)


def test_model_is_a_file_or_the_only_one_in_a_folder(tmp_path):
    assert gguf_of(tmp_path) is None and gguf_of(tmp_path / "absent") is None
    assert gguf_of(tmp_path / "absent.gguf") == tmp_path / "absent.gguf"
    one = write_gguf(tmp_path / "one.gguf", METADATA)
    assert gguf_of(tmp_path) == gguf_of(one) == one
    write_gguf(tmp_path / "two.gguf", METADATA)
    with pytest.raises(LoadError, match=r"has 2 GGUF models, give one of them: one\.gguf, two\.gguf"):
        gguf_of(tmp_path)
    (tmp_path / "two.gguf").rename(tmp_path / "two-mmproj-F16.gguf")
    assert gguf_of(tmp_path) == one
    one.unlink()
    assert gguf_of(tmp_path) == tmp_path / "two-mmproj-F16.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert gguf_of(tmp_path) is None and gguf_of(one) == one
