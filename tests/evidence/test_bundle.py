"""Bundles: files, folders and archives, with every limit ending in a note."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from closeranks.evidence import bundle as b


def names(found: b.Bundle) -> list[str]:
    return [i.name for i in found.items]


def test_folders_files_and_archives_become_one_flat_list(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.log").write_text("a")
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(b"b"))
    (tmp_path / "c.bz2").write_bytes(bz2.compress(b"c" * 1000))
    (tmp_path / "d.xz").write_bytes(lzma.compress(b"d"))
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        info = tarfile.TarInfo("x/e.log")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"e"))
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as z:
        z.writestr("deep.tar.gz", inner.getvalue())
    found = b.from_paths([tmp_path])
    assert sorted(names(found)) == ["b.log", "c", "d", "f.zip/deep.tar/x/e.log", "sub/a.log"]
    assert {i.name: i.open().read() for i in found.items}["f.zip/deep.tar/x/e.log"] == b"e"
    assert not found.notes


def test_a_missing_path_is_an_error_and_a_damaged_archive_a_note(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        b.from_paths([tmp_path / "nowhere"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"line\n" * 100_000)[:200])
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04 nonsense")
    found = b.from_paths([tmp_path])
    assert any("cut.gz" in n or "cut" in n for n in found.notes)
    assert any("bad.zip" in n for n in found.notes)
    assert all(i.open().read().startswith(b"line") for i in found.items)


def test_a_bomb_costs_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b, "MEMBER_BYTES", 1 << 20)
    monkeypatch.setattr(b, "TOTAL_BYTES", 3 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(20):
            z.writestr(f"{i}.txt", b"\0\n" * (2 << 20))
    found = b.from_paths([tmp_path / "bomb.zip"])
    assert sum(i.size or 0 for i in found.items) <= 3 << 20
    assert any("expands beyond" in n for n in found.notes)


def test_nesting_is_bounded() -> None:
    data = b"core"
    for _ in range(8):
        data = gzip.compress(data)
    found = b.from_texts([("n.gz", data)])
    assert not found.items
    assert any("nested" in n for n in found.notes)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.log").write_text("secret")
    inside = tmp_path / "bundle"
    inside.mkdir()
    (inside / "link.log").symlink_to(tmp_path / "outside.log")
    assert not b.from_paths([inside]).items


def test_too_many_files_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b, "MAX_FILES", 3)
    for i in range(6):
        (tmp_path / f"{i}.log").write_text("x")
    found = b.from_paths([tmp_path])
    assert len(found.items) == 3
    assert any("more than 3 files" in n for n in found.notes)
