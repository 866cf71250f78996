"""Bundles: files, folders and archives, with every limit ending in a note."""

import bz2
import gzip
import io
import lzma
import os
import socket
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from closeranks.evidence import bundle as b
from closeranks.evidence import inputs


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


def tgz(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_a_compressed_tar_is_one_archive() -> None:
    data = b"core"
    for _ in range(b.MAX_NESTING):
        data = tgz(x=data)
    found = b.from_texts([("support.tgz", data)])
    assert [i.open().read() for i in found.items] == [b"core"]
    assert not found.notes
    found = b.from_texts([("support.tgz", tgz(x=data))])
    assert not found.items
    assert any("nested" in n for n in found.notes)


def test_members_beyond_the_limit_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b, "MAX_FILES", 3)
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as z:
        z.mkdir("folder")
        for i in range(8):
            z.writestr(f"{i}.log", "x")
    found = b.from_paths([tmp_path / "many.zip"])
    assert len(found.items) == 3
    assert found.notes == ["many.zip: more than 3 members: 5 were left unread"]


def test_a_pipe_is_read_once_and_whole(tmp_path: Path) -> None:
    text = b"line\n" * 100_000
    os.mkfifo(tmp_path / "pipe")
    for content in (text, gzip.compress(text), b""):
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
        writer.start()
        [item] = b.from_paths([tmp_path / "pipe"]).items
        writer.join()
        assert item.open().read() == item.open().read() == (text if content else b"")


def test_a_pipe_that_nobody_writes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WRITER_S", 0.05)
    monkeypatch.setattr(inputs, "QUIET_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(inputs.Unreadable, match="nobody wrote"):
        b.from_paths([tmp_path / "pipe"])
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(inputs.Unreadable, match="said nothing"):
            b.from_paths([tmp_path / "pipe"])
        os.write(writer, b"begin")
        found = b.from_paths([tmp_path / "pipe"])
    finally:
        os.close(writer)
    assert [i.open().read() for i in found.items] == [b"begin"]
    assert any("said nothing" in n for n in found.notes)


def test_an_anonymous_pipe_by_its_descriptor() -> None:
    """What a shell's `<(command)` names; the command may have ended."""
    for content in (b"line\n", b""):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        [item] = b.from_paths([f"/dev/fd/{reader}"]).items
        os.close(reader)
        assert item.open().read() == content


def test_what_is_no_file_is_refused_by_name_and_passed_over_in_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "a.log").write_text("a")
        found = b.from_paths([tmp_path])
        for path in (tmp_path / "socket", Path("/dev/zero"), Path("/dev/tty")):
            with pytest.raises(inputs.Unreadable, match="no file that can be read"):
                b.from_paths([path])
    assert names(found) == ["a.log"]
    assert sorted(found.notes) == [f"{n}: a pipe, a device or a socket: not read" for n in ("pipe", "socket")]
    with pytest.raises(FileNotFoundError, match="empty path"):
        b.from_paths([""])
    with pytest.raises(FileNotFoundError, match="no such file"):
        b.from_paths([tmp_path / "a.log" / "b"])


def test_files_of_the_kernel_without_a_size_are_read() -> None:
    [item] = b.from_paths(["/proc/self/status"]).items
    assert b"VmPeak" in item.open().read()


def test_names_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"bad\xff.log")).write_text("a")
    (tmp_path / "new\nline\x1b[31m.txt").write_text("b")
    (tmp_path / "größe.log").write_text("c")
    found = b.from_paths([tmp_path])
    assert sorted(names(found)) == ["bad\\xff.log", "größe.log", "new\\nline\\x1b[31m.txt"]
    assert names(b.from_paths([tmp_path / os.fsdecode(b"bad\xff.log")])) == ["bad\\xff.log"]
    assert names(b.from_texts([("\ud800x", "a")])) == ["\\ud800x"]
