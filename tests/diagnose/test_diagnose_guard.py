"""A reader that fails costs what it would have read, as the notes say. Numbers of every kind make none fail."""

import json
import math
import pickle
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.diagnose import collect as collecting
from closeranks.diagnose import rules
from closeranks.diagnose.collect import NOT_READ, collect
from closeranks.diagnose.facts import Event, Metric, Src
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.lines import parse
from closeranks.diagnose.readers import document_readers, line_readers
from closeranks.diagnose.readers.flight_recorder import FlightRecorder
from closeranks.diagnose.readers.prometheus import Prometheus
from closeranks.diagnose.report import json_report
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import Finding
from closeranks.evidence.bundle import from_texts
from tests.diagnose.corpus import own, public, threads

OOM = "[88.2] Out of memory: Killed process 4418 (sglang::schedul) total-vm:6kB\n"
SAMPLE = 'sglang:num_running_reqs{{tp_rank="0"}} {}\n'
CASES = [*public(), *own(), *threads()]


class Faulty:
    NAME = "faulty"
    ABOUT = "raises"
    TOKENS = ("Killed process",)
    open = False

    def __init__(self, where: str) -> None:
        self.where = where

    def line(self, line):
        yield Event(src=line.src, kind="before")
        if self.where == "line":
            raise RuntimeError("secret text of the evidence")

    def end(self):
        if self.where == "end":
            raise KeyError("secret text of the evidence")
        return ()

    def document(self, found, src):
        raise OverflowError("secret text of the evidence")


@pytest.mark.parametrize(("where", "kind"), [("line", "RuntimeError"), ("end", "KeyError")])
def test_a_line_reader_that_fails_costs_itself(where: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "line_readers", lambda: [Faulty(where), *line_readers()])
    found = collect(from_texts([("a.log", OOM * 3), ("b.log", OOM)]))
    kills = [f.src.file for f in found.facts if isinstance(f, Event) and f.kind == "oom_kill"]
    assert kills == ["a.log"] * 3 + ["b.log"]
    assert [n for n in found.notes if NOT_READ in n] == [
        f"{name}: {NOT_READ} as faulty ({kind})" for name in ("a.log", "b.log")
    ]


def test_a_document_reader_that_fails_costs_that_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "document_readers", lambda: [Faulty("document")])
    found = collect(from_texts([("a.txt", '{"a": 1}\n' + OOM), ("nccl_trace_rank_0", pickle.dumps({"entries": []}))]))
    assert [f.kind for f in found.facts if isinstance(f, Event)] == ["oom_kill"]
    assert f"a.txt: {NOT_READ} as faulty (OverflowError)" in found.notes
    assert f"nccl_trace_rank_0: {NOT_READ} as faulty (OverflowError)" in found.notes


def test_a_file_that_cannot_be_read_at_all_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = collecting._one
    monkeypatch.setattr(collecting, "_one", lambda item, *rest: one(item, *rest) if item.name == "b.log" else 1 / 0)
    found = collect(from_texts([("a.log", OOM), ("b.log", OOM)]))
    assert [f.src.file for f in found.facts] == ["b.log"]
    assert found.notes == [f"a.log: {NOT_READ} (ZeroDivisionError)"]


NUMBER = st.text("0123456789+-.eEnaifNIF_", max_size=30) | st.floats().map(repr) | st.integers().map(str)


@settings(max_examples=300, deadline=None)
@given(NUMBER)
def test_a_sample_is_a_finite_number_or_nothing(text: str) -> None:
    found = list(Prometheus().line(parse(SAMPLE.format(text).rstrip("\n"), Src("m", 1))))
    assert all(isinstance(f, Metric) and math.isfinite(f.value) for f in found)
    if re.fullmatch(r"-?\d{1,15}(\.\d{1,10})?", text):
        assert [f.value for f in found] == [float(text)]


@pytest.mark.parametrize("cut", ["1.23456e", "--e", "e", "+", ".", "1e+", "1.2.3", "1e999", "NaN", "+Inf"])
def test_a_scrape_cut_in_a_number_loses_that_sample(cut: str) -> None:
    text = SAMPLE.format(3) + SAMPLE.format(cut).replace("running", "queue") + OOM
    found = collect(from_texts([("m.txt", text)]))
    assert [f.name for f in found.facts if isinstance(f, Metric)] == ["sglang:num_running_reqs"]
    assert not found.notes


ODD = ["9" * 30, "9" * 400, "1.2.3", "-1", "1e999", "--e", "0", "", "NaN", "٣", "0x7f", "1" + "0" * 4000]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(CASES), seed=st.integers(0, 10**9))
def test_odd_numbers_make_no_reader_fail(case, seed: int) -> None:
    rng = random.Random(seed)

    def odd(text: str) -> str:
        return re.sub(r"\d+(?:\.\d+)?", lambda m: rng.choice(ODD) if rng.random() < 0.2 else m[0], text)

    verdict = diagnose_texts([(name, odd(text)) for name, text in case[1]])
    assert not [n for n in verdict.notes if NOT_READ in n]
    json.loads(json_report.render(verdict))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "0", "[0, 1]", "x", "9" * 30]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["ranks", "rank", "name", "frames", "0"]), x),
    max_leaves=8,
)
KEYS = """entries pg_config pg_status version comm_lib_version profiling_name collective_seq_id state process_group
input_sizes output_sizes communicators nccl_version ranks loads timestamp tp_size model_path thread_name frames pid
collective_counts missing_ranks_count schema exit_codes reason engine fault detected patched_areas installs""".split()  # noqa: SIM905


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), max_size=3))
)
def test_documents_with_values_of_any_kind_make_no_reader_fail(found: dict[str, object]) -> None:
    for reader in document_readers():
        for value in (found, [found]):
            list(reader.document(value, Src("x.json", 1)) or ())


def test_numbers_of_json_that_no_engine_counts_to() -> None:
    text = '{"loads": [{"dp_rank": 0, "num_running_reqs": %s, "timestamp": 1e999}], "timestamp": NaN}'
    for number in ("9" * 30, "9" * 4299, "9" * 5000, "-" + "9" * 40, "1e400"):
        verdict = diagnose_texts([("loads.json", text % number)])
        assert not [n for n in verdict.notes if NOT_READ in n]
        json.loads(json_report.render(verdict))


def test_a_hostile_recorder_dump_is_read_in_bounded_time() -> None:
    sizes: object = [1, 2]
    for _ in range(18):
        sizes = [sizes, sizes]
    entry = {"profiling_name": sizes, "collective_seq_id": 10**3000, "state": sizes, "input_sizes": [[sizes]] * 9}
    dump = {"version": "2.10", "entries": [entry], "pg_config": {"0": {"ranks": sizes, "desc": 1.5}}}
    facts = list(FlightRecorder().document(dump, Src("nccl_trace_rank_0", 1)) or ())
    assert all(len(f.says()) < 200 for f in facts)


def test_a_rule_that_fails_costs_what_it_would_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(collect(from_texts([("dmesg.txt", OOM)])).facts, ["dmesg.txt"], [])
    before = rules.apply(scene)
    assert before
    assert not scene.notes

    def faulty(scene: Scene) -> Iterator[Finding]:
        yield before[0]
        raise ZeroDivisionError("words of the evidence")

    more = (rules.Rule("faulty", 1, (), "", faulty), *rules.rules())
    monkeypatch.setattr(rules, "rules", lambda: more)
    assert rules.apply(scene) == before
    assert scene.notes == [f"rule faulty {rules.FAILED} (ZeroDivisionError): what it looks for is not judged"]
