"""Sources of tokens: what they hold, how they are cut, and what is said about bad ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx_distributed.data import sources
from rtx_distributed.data.cache import Cache, default_cache_dir, read_checked, write_checked
from rtx_distributed.data.sources import OpenedData, open_dataset
from rtx_distributed.data.texts import _cut, list_folder, list_standard_library
from rtx_distributed.data.tokenfiles import TokenWriter
from rtx_distributed.data.tokens import TokenArray, TokenDataset, count_windows
from rtx_distributed.errors import DataError


@dataclass(frozen=True)
class Settings:
    path: Path | None = None
    field: str = "text"
    tokenizer: Path | None = None
    dtype: str | None = None
    cache_dir: Path | None = None


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    def opener(path: Path | None, *, length: int = 4, held: int = 0, **more: Any) -> OpenedData:
        names = Settings.__dataclass_fields__
        chosen = {name: more.pop(name) for name in list(more) if name in names}
        settings = Settings(path=path, **{"cache_dir": tmp_path / "cache", **chosen})
        return open_dataset(settings, sequence_length=length, eval_samples=held, **more)

    return opener


def _tokens(data: OpenedData) -> list[int]:
    return [int(token) for token in data.train.array.tokens]


def _nanogpt(path: Path, tokens: list[int], dtype: str = "<u2") -> Path:
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def _megatron(prefix: Path, sequences: list[list[int]]) -> Path:
    np.concatenate([np.array(s, dtype="<u2") for s in sequences]).tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(s) for s in sequences], dtype="<i4")
    starts = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * 2)])[:-1].astype("<i8")
    documents = np.arange(len(sequences) + 1, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8])
    head += len(sequences).to_bytes(8, "little") + len(documents).to_bytes(8, "little")
    prefix.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + starts.tobytes() + documents.tobytes()
    )
    return prefix.with_suffix(".bin")


# Windows -------------------------------------------------------------------------------------


def test_windows_overlap_by_one_token(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(12)))
    data = opened(path)
    # 12 tokens: windows 0..4 and 4..8; tokens 9, 10, 11 make no third one.
    assert len(data.train) == 2
    inputs, labels = data.train.batch([1, 0])
    assert inputs.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert labels.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert inputs.dtype == np.int64
    assert labels.dtype == np.int64
    assert data.train.counted_tokens([1, 0]) == 8
    assert any("the last 3 tokens make no whole window" in note for note in data.notes)
    assert data.vocab_size == 256
    with pytest.raises(IndexError):
        data.train.batch([2])


@pytest.mark.parametrize(
    ("tokens", "windows"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)]
)
def test_count_windows(tokens: int, windows: int) -> None:
    assert count_windows(tokens, 4) == windows


def test_the_tail_is_held_out(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(161))  # 40 windows
    assert [len(d) for d in (opened(path, held=9).train, opened(path, held=9).heldout)] == [38, 2]
    data = opened(path, held=1)
    assert (len(data.train), len(data.heldout)) == (39, 1)
    assert data.heldout.first == 39
    assert opened(path, held=0).heldout is None
    path.write_bytes(bytes(77))  # 19 windows
    small = opened(path, held=9)
    assert (len(small.train), small.heldout) == (19, None)
    assert any("no held-out part: 19 windows" in note for note in small.notes)


def test_heldout_from_its_own_path(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(161))
    (tmp_path / "b.txt").write_bytes(bytes(range(30)))
    data = opened(tmp_path / "a.txt", held=5, eval_path=tmp_path / "b.txt")
    assert (len(data.train), len(data.heldout)) == (40, 5)
    assert data.heldout.batch([0])[0].tolist() == [[0, 1, 2, 3]]
    (tmp_path / "b.txt").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"eval\.path.*has 3 tokens.*takes 5"):
        opened(tmp_path / "a.txt", held=5, eval_path=tmp_path / "b.txt")


def test_state_pins_what_ids_mean(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(161))
    one, other = opened(path, held=1).train.state(), opened(path, held=2).train.state()
    assert one["fingerprint"] == other["fingerprint"]
    assert (one["windows"], other["windows"]) == (39, 38)


# Sources -------------------------------------------------------------------------------------


def test_a_text_file_is_mapped_not_copied(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)) * 2)
    data = opened(path)
    assert isinstance(data.train.array.tokens, np.memmap)
    assert Path(data.train.array.tokens.filename) == path
    assert _tokens(data) == list(range(256)) * 2
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_fingerprint_is_of_the_content(opened: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_bytes(b"the same text")
    (tmp_path / "c.txt").write_bytes(b"another text!")
    prints = [
        opened(path).train.fingerprint
        for path in (
            tmp_path / "a" / "a.txt",
            tmp_path / "b" / "b.txt",
            tmp_path / "a",
            tmp_path / "c.txt",
        )
    ]
    assert prints[0] == prints[1] == prints[2]
    assert prints[3] != prints[0]
    assert prints[0].startswith("uint8-")


def test_jsonl_documents_are_concatenated(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n\n{"text": "d\\u00e9", "n": 1}\n')
    data = opened(path, length=2)
    assert bytes(_tokens(data)) == "abcdé".encode()
    assert data.train.array.documents == 2
    path.write_text('{"body": "xyz"}\n')
    assert bytes(_tokens(opened(path, length=2, field="body"))) == b"xyz"


def test_folder_is_sorted_and_hidden_files_left_out(opened: Any, tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    for name, text in {
        "b/1.txt": "3",
        "a.txt": "1",
        "b.jsonl": '{"text": "2"}',
        "c": "4",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "z.png": "no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "up").symlink_to(root)
    data = opened(root, length=1)
    # "b.jsonl" < "b/1.txt", since "." < "/".
    assert bytes(_tokens(data)) == b"1234"
    assert data.train.array.documents == 4
    assert any("1 files that are not text, as `z.png`" in note for note in data.notes)
    assert any("1 links to folders, as `up`" in note for note in data.notes)


def test_r42_listing_order_of_the_system_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in zip("edcba", (7, 6, 5, 4, 2), strict=True):
        (tmp_path / f"{name}.txt").write_text(name * count)
    walk = os.walk
    plain = list_folder(tmp_path)

    def reversed_walk(top: Any, **more: Any) -> Any:
        for root, folders, names in walk(top, **more):
            yield root, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert list_folder(tmp_path) == plain
    assert [file.name for file in plain.files] == ["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]


def test_standard_library_leaves_installed_packages_out(tmp_path: Path) -> None:
    for name in (
        "os.py",
        "json/a.py",
        "json/data.txt",
        "site-packages/x.py",
        "dist-packages/y.py",
        "json/__pycache__/a.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    (tmp_path / "broken.py").symlink_to(tmp_path / "missing.py")
    listing = list_standard_library(tmp_path)
    assert [file.name for file in listing.files] == ["json/a.py", "os.py"]
    assert listing.skipped == ("1 unreadable files",)
    with pytest.raises(DataError, match=r"set `data\.path`"):
        list_standard_library(tmp_path / "none")


def test_default_corpus_is_this_interpreters(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("x = 1\n")
    real = list_standard_library()
    assert any(file.name == "os.py" for file in real.files)
    assert not any("site-packages" in file.name for file in real.files)
    monkeypatch.setattr(
        sources, "list_standard_library", lambda: list_standard_library(tmp_path / "lib")
    )
    data = opened(None)
    assert bytes(_tokens(data)) == b"x = 1\n"
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"standard library of Python {version}" in data.notes[0]


def test_nanogpt_file(opened: Any, tmp_path: Path) -> None:
    path = _nanogpt(tmp_path / "train.bin", [1, 2, 3, 500, 4, 5])
    data = opened(path)
    assert _tokens(data) == [1, 2, 3, 500, 4, 5]
    assert data.vocab_size == 501
    assert any("vocabulary 501" in note for note in data.notes)
    assert opened(path, vocab_size=600).vocab_size == 600
    wide = _nanogpt(tmp_path / "wide.bin", [70_000, 1, 2, 3, 4], "<u4")
    assert _tokens(opened(wide, dtype="uint32")) == [70_000, 1, 2, 3, 4]


def test_megatron_file(opened: Any, tmp_path: Path) -> None:
    path = _megatron(tmp_path / "m", [[1, 2, 3], [4, 5], [6]])
    for given in (path, path.with_suffix(".idx"), tmp_path / "m"):
        data = opened(given)
        assert _tokens(data) == [1, 2, 3, 4, 5, 6]
        assert data.train.array.documents == 3


def test_own_token_file(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.bin"
    with TokenWriter(path, dtype="uint16", vocab_size=1000, tokenizer="abc") as writer:
        writer.write(np.array([5, 6, 999], dtype=np.uint16))
        writer.write(np.array([7, 8, 999], dtype=np.uint16))
        writer.documents = 2
        index = writer.commit()
    assert (index.tokens, index.bytes, index.max_token, index.max_token_at) == (6, 12, 999, 2)
    data = opened(path)
    assert _tokens(data) == [5, 6, 999, 7, 8, 999]
    assert data.vocab_size == 1000
    assert sorted(p.name for p in tmp_path.glob("*own*")) == ["own.bin", "own.idx.json"]


def test_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with TokenWriter(
            tmp_path / "x.bin", dtype="uint8", vocab_size=256, tokenizer="bytes"
        ) as writer:
            writer.write(np.zeros(5, dtype=np.uint8))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


# Tokenizer -----------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    vocabulary = {"a": 0, "b": 1, "é": 2, "\n": 3, "ab": 4}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": None,
                "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b"]},
            }
        )
    )
    return path


def test_tokenizer_file(opened: Any, tmp_path: Path, tokenizer: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "a.txt"
    path.write_text("aba\né")
    data = opened(path, length=2, tokenizer=tokenizer)
    assert _tokens(data) == [4, 0, 3, 2]
    assert data.vocab_size == 5
    assert data.train.array.tokens.dtype == np.uint16


def test_not_utf8_names_line_and_byte(opened: Any, tmp_path: Path, tokenizer: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\nab\na\xffb\n")
    with pytest.raises(DataError, match=r"a\.txt` line 3, byte 7: b'\\xffb") as caught:
        opened(path, tokenizer=tokenizer)
    assert caught.value.exit_code == 2
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]
    # As bytes the same file is fine.
    assert len(_tokens(opened(path))) == 10


def test_missing_package_is_named(
    opened: Any, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(DataError, match=r"pip install 'rtx-distributed\[text\]'"):
        opened(tmp_path / "a.txt", tokenizer=tokenizer)


def test_pieces_never_split_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("rtx_distributed.data.texts._PIECE_BYTES", 7)
    text = "é€😀a\nbb\n" * 5 + "€" * 10
    pieces = list(_cut(io.BytesIO(text.encode()), tmp_path, line=1, offset=0))
    assert "".join(piece.data.decode() for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    offset = 0
    for piece in pieces:
        assert piece.offset == offset
        assert piece.line == 1 + text.encode()[:offset].count(b"\n")
        offset += len(piece.data)


# Bad input -----------------------------------------------------------------------------------


def test_no_such_path(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no such file or folder: .*did you mean .*corpus\.txt"):
        opened(tmp_path / "corpsu.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt` is a link to .*gone`, which is missing"):
        opened(tmp_path / "link.txt")


def test_r43_empty_sources_name_the_file(opened: Any, tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.bin"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"{name}` is empty"):
            opened(tmp_path / name)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl` holds no text"):
        opened(tmp_path / "blank.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder` holds no text or JSONL file \(found nothing\)"):
        opened(tmp_path / "folder")
    (tmp_path / "folder" / "a.txt").touch()
    with pytest.raises(DataError, match="holds no text: 1 files"):
        opened(tmp_path / "folder")


def test_fewer_tokens_than_a_window(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(DataError, match=r"has 4 tokens, and one sample takes 5"):
        opened(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "guess"),
    [
        ("a.txt", b"\x1f\x8b\x08\x00rest", "gzip"),
        ("a.bin", b"\x1f\x8b\x08\x00rest", "gzip"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("a.bin", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("a.txt", b"\n <!DOCTYPE html><html>", "web page"),
        ("a.jsonl", b"PK\x03\x04...........", "zip archive"),
    ],
)
def test_other_formats_are_guessed(
    opened: Any, tmp_path: Path, name: str, content: bytes, guess: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=guess) as caught:
        opened(tmp_path / name)
    assert str(content[:16]) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl:2: not valid JSON"),
        (b'{"body": "a"}', r"a\.jsonl:2: there is no field `text` \(found \[\"body\"\]\)"),
        (b'{"text": 3}', r"a\.jsonl:2: the field `text` is int"),
        (b"[1]", r"a\.jsonl:2: expected a JSON object, found list"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: byte 26 of the file is not UTF-8"),
    ],
)
def test_bad_jsonl_line_is_named(opened: Any, tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "abc"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "a.jsonl")


def test_token_outside_the_vocabulary(opened: Any, tmp_path: Path) -> None:
    path = _nanogpt(tmp_path / "a.bin", [1, 2, 50257, 3, 4])
    with pytest.raises(DataError, match=r"token id 50257 at position 2 .*model's.* 50257 ids"):
        opened(path, vocab_size=50257)
    assert opened(path, vocab_size=50258).vocab_size == 50258
    negative = _nanogpt(tmp_path / "n.bin", [1, 2, 3, -7, 4], "<i4")
    with pytest.raises(DataError, match=r"token id -7 at position 3 .*negative"):
        opened(negative, dtype="int32")


def test_sizes_that_do_not_fit(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(bytes(11))
    with pytest.raises(DataError, match="11 bytes, which is no whole number of uint16"):
        opened(tmp_path / "odd.bin")
    path = _megatron(tmp_path / "m", [[1, 2, 3], [4, 5]])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"says 10 bytes .*has 8 bytes"):
        opened(path)
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="is cut off: 2 sequences and 3 document entries"):
        opened(path)
    index.write_bytes(b"NOTANIDX!" + whole[9:])
    with pytest.raises(DataError, match="not with b'MMIDIDX"):
        opened(path)
    (tmp_path / "a.txt").write_text("abcdefg")
    with pytest.raises(DataError, match=r"`data\.dtype` is for headerless"):
        opened(tmp_path / "a.txt", dtype="uint16")


def test_megatron_offsets_are_checked(opened: Any, tmp_path: Path) -> None:
    path = _megatron(tmp_path / "m", [[1, 2, 3], [4, 5]])
    index = path.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[34 + 8 + 8] = 9  # low byte of the second pointer, which is 6
    index.write_bytes(data)
    with pytest.raises(DataError, match=r"sequence 1 of length 2 .* byte 9, expected 6"):
        opened(path)


def test_own_index_that_disagrees(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.bin"
    with TokenWriter(path, dtype="uint16", vocab_size=10, tokenizer="abc") as writer:
        writer.write(np.arange(6, dtype=np.uint16))
        writer.commit()
    good = path.read_bytes()
    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match=r"6 uint16 tokens, 12 bytes; .* has 10 bytes"):
        opened(path)
    path.write_bytes(good[:-1] + b"\x01")
    with pytest.raises(DataError, match="the file was changed or damaged"):
        opened(path)
    path.write_bytes(good)
    with pytest.raises(DataError, match=r"uint8, but .* holds uint16"):
        opened(path, dtype="uint8")
    beside = tmp_path / "own.idx.json"
    beside.write_text(beside.read_text().replace('"tokens": 6', '"tokens": 7'))
    with pytest.raises(DataError, match="damaged"):
        opened(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    path.chmod(0)
    with pytest.raises(DataError, match=r"cannot read .*Permission denied"):
        opened(path)


def test_special_file(opened: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        opened(tmp_path / "pipe")


# Cache ---------------------------------------------------------------------------------------


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("hello")
    (tmp_path / "corpus" / "b.txt").write_text("world")
    return tmp_path / "corpus"


def test_second_start_reads_nothing_again(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path)
    first = [opened(folder), opened(folder / "a.txt")]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr("rtx_distributed.data.scan._read", refuse)
    monkeypatch.setattr("rtx_distributed.data.sources.read_pieces", refuse)
    second = [opened(folder), opened(folder / "a.txt")]
    assert [d.train.fingerprint for d in first] == [d.train.fingerprint for d in second]
    (folder / "a.txt").write_text("HELLO!")
    with pytest.raises(AssertionError, match="read again"):
        opened(folder)
    with pytest.raises(AssertionError, match="read again"):
        opened(folder / "a.txt")


@pytest.mark.parametrize("damage", ["bin", "json", "gone"])
def test_broken_cache_entries_are_made_anew(opened: Any, tmp_path: Path, damage: str) -> None:
    folder = _folder(tmp_path)
    good = opened(folder).train.fingerprint
    (index,) = (tmp_path / "cache").glob("*.idx.json")
    tokens = index.with_name(index.name.replace(".idx.json", ".bin"))
    if damage == "bin":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif damage == "json":
        index.write_text(index.read_text()[:-20])
    else:
        tokens.unlink()
    again = opened(folder)
    assert again.train.fingerprint == good
    assert bytes(_tokens(again)) == b"helloworld"


def test_what_a_killed_builder_left_is_removed(opened: Any, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    opened(folder)
    (tokens,) = (tmp_path / "cache").glob("*.bin")
    tokens.unlink()
    left = tokens.with_name(f".tmp-{tokens.name}-99999")
    left.write_bytes(b"half")
    opened(folder)
    assert not left.exists()


def test_unwritable_cache_falls_back(opened: Any, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "cache"
    with pytest.raises(DataError, match=r"cannot write to .*set `data\.cache_dir`"):
        opened(folder, cache_dir=nowhere)
    data = opened(folder, cache_dir=nowhere, fallback_cache_dir=tmp_path / "run" / "cache")
    assert bytes(_tokens(data)) == b"helloworld"
    assert any("the index goes to" in note and "run/cache" in note for note in data.notes)
    # A file that needs no index opens without any cache.
    assert bytes(_tokens(opened(folder / "a.txt", cache_dir=nowhere))) == b"hello"


def test_default_cache_dir() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/rtx-distributed")
    assert default_cache_dir({"HOME": "/h"}) == Path("/h/.cache/rtx-distributed")
    assert default_cache_dir({}) is None


def test_checked_records(tmp_path: Path) -> None:
    write_checked(tmp_path / "a.json", {"a": 1})
    record = read_checked(tmp_path / "a.json")
    assert record is not None
    assert record["a"] == 1
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("1", "2", 1))
    assert read_checked(tmp_path / "a.json") is None
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_r06b_waiting_for_the_builder_is_told_and_has_no_limit(opened: Any, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    opened(folder)
    (index,) = (tmp_path / "cache").glob("*.idx.json")
    key = index.name.removesuffix(".idx.json")
    index.unlink()
    cache = Cache.choose(tmp_path / "cache", fallback=None)
    other = cache.locked(key)
    other.__enter__()
    waited: list[float] = []

    def on_wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            other.__exit__(None, None, None)

    assert bytes(_tokens(opened(folder, on_wait=on_wait))) == b"helloworld"
    assert len(waited) == 2
    assert 1.0 <= waited[0] < waited[1]


def _build_in_child(folder: Path, cache: Path, marks: Path, barrier: Any) -> None:
    build = sources._Opener._build

    def counted(self: Any, *args: Any) -> TokenArray:
        with marks.open("a") as file:
            file.write("built\n")
        return build(self, *args)

    sources._Opener._build = counted  # type: ignore[method-assign]
    barrier.wait(30)
    data = open_dataset(Settings(path=folder, cache_dir=cache), sequence_length=4, eval_samples=0)
    assert bytes(_tokens(data)) == b"helloworld"


def test_r06b_processes_build_the_index_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    marks = tmp_path / "marks"
    children = [
        context.Process(target=_build_in_child, args=(folder, tmp_path / "cache", marks, barrier))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert marks.read_text() == "built\n"


def test_dataset_refuses_windows_that_are_not_there() -> None:
    array = TokenArray(np.arange(9, dtype=np.uint8), "x", "f", 256, 8, 8, 1, "bytes")
    with pytest.raises(DataError, match="9 tokens, 2 windows of 4"):
        TokenDataset(array, sequence_length=4, vocab_size=256, first=1, windows=2)
    with pytest.raises(DataError, match="at least 1, got 0"):
        TokenDataset(array, sequence_length=0, vocab_size=256)
