"""A log that cannot be written is no reason to end, one that nobody reads none to stand still."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from closeranks.output import Unblocking

PROGRAM = """
from closeranks.output import make_unfailing
make_unfailing()
import sys, structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
for _ in range(2000):
    structlog.get_logger().error("into a full disk", text="x" * 100)
    print("and here", flush=True)
import faulthandler
faulthandler.enable()
raise SystemExit(0 if sys.stderr.lost > 0 else 3)
"""


def test_a_full_disk_under_the_log_ends_nobody() -> None:
    with open("/dev/full", "w") as full:  # every write fails with ENOSPC
        assert subprocess.run([sys.executable, "-c", PROGRAM], stdout=full, stderr=full, check=False).returncode == 0


def test_without_it_the_same_ends() -> None:
    plain = PROGRAM.replace("make_unfailing()\nimport sys", "import sys")
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", plain], stdout=full, stderr=full, check=False).returncode != 0


@pytest.mark.parametrize("make", ["make_unfailing", "make_unblocking"])
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_end_nobody_and_no_file_takes_their_place(make: str, closed: str) -> None:
    program = f"""
import os, sys
from closeranks.output import fill_standard, {make}
fill_standard()
{make}()
assert os.open("/dev/null", os.O_RDONLY) > 2
assert all(os.get_inheritable(number) for number in range(3))
print("to nobody", file=sys.stderr, flush=True)
print("an answer")
"""
    assert subprocess.run(["bash", "-c", f"{sys.executable} -c '{program}' {closed}"], check=False).returncode == 0


class Pipe:
    """A pipe with an `Unblocking` at its end, and a reader that reads when told."""

    def __init__(self, limit: int) -> None:
        self.read_end, write_end = os.pipe()
        self.inner = os.fdopen(write_end, "w")
        self.stream = Unblocking(self.inner, limit)

    def rest(self) -> str:
        """What arrives until the stream is drained."""
        pieces: list[bytes] = []
        reader = threading.Thread(
            target=lambda: pieces.extend(iter(lambda: os.read(self.read_end, 65536), b"")), daemon=True
        )
        reader.start()
        assert self.stream.drain(20)
        self.inner.close()
        reader.join()
        return b"".join(pieces).decode()


@pytest.fixture
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    made = Pipe(getattr(request, "param", 100_000))
    yield made
    made.inner.close()
    os.close(made.read_end)


def complete(text: str, count: int) -> int:
    """Whether the lines `0 …` to `count - 1 …` have come in order, the gaps between them told. How many are missing."""
    expected = missing = 0
    for line in text.splitlines():
        if line.startswith("["):
            lost = int(line.removeprefix("[").removesuffix(" log lines were lost: nobody took them]"))
            expected, missing = expected + lost, missing + lost
        else:
            assert int(line.split()[0]) == expected
            expected += 1
    assert expected == count
    return missing


@pytest.mark.parametrize("pipe", [300_000], indirect=True)  # what waits is more than the pipe itself holds
def test_a_reader_that_stands_still_holds_nobody_and_learns_what_it_missed(pipe: Pipe) -> None:
    for i in range(5000):
        print(i, "x" * 90, file=pipe.stream, flush=True)
    assert not pipe.stream.drain(0.05)
    assert pipe.stream.lost > 2000
    assert complete(pipe.rest(), 5000) == pipe.stream.lost


def test_lines_flow_again_once_half_of_the_queue_is_taken(pipe: Pipe) -> None:
    count, taken = 0, b""
    before = after = 0
    while after > before or not after:
        before = pipe.stream.lost
        pipe.stream.write(f"{count} " + "x" * 90 + "\n")
        count += 1
        after = pipe.stream.lost
        taken += os.read(pipe.read_end, 1000) if after else b""
    text = taken.decode() + pipe.rest()
    assert complete(text, count) == pipe.stream.lost
    assert text.splitlines()[-1].startswith(f"{count - 1} ")


def test_one_text_larger_than_the_queue_is_cut_between_lines(pipe: Pipe) -> None:
    pipe.stream.write("".join(f"{i:09}\n" for i in range(50_000)))
    assert complete(pipe.rest(), 50_000) == pipe.stream.lost > 30_000


def test_a_line_without_an_end_is_passed_on_when_it_is_flushed(pipe: Pipe) -> None:
    pipe.stream.write("a prompt: ")
    pipe.stream.flush()
    assert os.read(pipe.read_end, 100) == b"a prompt: "
    pipe.stream.writelines(["\ud800\n", "b\n"])
    assert pipe.rest() == "\\ud800\nb\n"


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.inner.fileno(), False)
    text = "".join(f"{i}\n" for i in range(14_000))  # more than the pipe holds, less than the queue
    pipe.stream.write(text)
    assert pipe.rest() == text


def test_a_stream_without_a_descriptor_is_refused() -> None:
    with pytest.raises(io.UnsupportedOperation):
        Unblocking(io.StringIO())


LOGS_FOR_EVER = """
import sys, time
from closeranks.output import make_unblocking
make_unblocking()
for i in range(100000):
    print("into a pipe that nobody reads", i, file=sys.stderr, flush=True)
print("done", flush=True)
WAIT
raise SystemExit("last words")
"""


@pytest.mark.parametrize("wait", ["", "import signal; signal.pause()"], ids=["ends by itself", "is told to end"])
def test_a_process_whose_log_nobody_reads_does_its_work_and_ends(wait: str) -> None:
    read_end, write_end = os.pipe()
    program = [sys.executable, "-c", LOGS_FOR_EVER.replace("WAIT", wait)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=write_end)
    os.close(write_end)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        if wait:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == (-signal.SIGTERM if wait else 1)
        process.stdout.close()
    finally:
        process.kill()
        process.wait()
        os.close(read_end)


def test_last_words_arrive() -> None:
    program = "from closeranks.output import make_unblocking; make_unblocking(); 1/0"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_full_disk_is_counted_in_lines() -> None:
    with open("/dev/full", "w") as full:
        stream = Unblocking(full)
        stream.write("a\nb\n")
        assert stream.drain(20)
        assert stream.lost == 2
