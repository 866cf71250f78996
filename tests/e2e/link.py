"""A link between this host's network and a namespace that can lose, delay, or swallow packets, on any kernel with TUN.

    with Link("name") as link:              # 198.51.100.2 here, 198.51.100.1 in the namespace `link.namespace`
        link.set(loss=0.05, delay_s=0.1)

Packets pass through a small process (this file run as a program), which draws from a fixed seed.
"""

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

HERE, THERE = "198.51.100.2", "198.51.100.1"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET = 2048


def possible() -> bool:
    """Whether this process may make one."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()


class Link:
    """The namespace and the link to it, up while the context lasts."""

    def __init__(self, name: str) -> None:
        self.namespace = name
        self.device = f"{name}h"

    def __enter__(self) -> "Link":
        with contextlib.ExitStack() as undo:
            self._ip("netns", "add", self.namespace)
            undo.callback(self._ip, "netns", "del", self.namespace)
            self._process = subprocess.Popen(
                [sys.executable, __file__, self.device, f"{self.namespace}n"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.callback(self._end)
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
            far = f"{self.namespace}n"
            self._ip("link", "set", far, "netns", self.namespace)
            self._ip("addr", "add", HERE, "peer", THERE, "dev", self.device)
            self._ip("link", "set", self.device, "up")
            self._ip("-n", self.namespace, "addr", "add", THERE, "peer", HERE, "dev", far)
            self._ip("-n", self.namespace, "link", "set", far, "up")
            self._ip("-n", self.namespace, "link", "set", "lo", "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the link away, with its devices and the namespace."""
        self._undo.close()

    def set(self, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """From now on; `loss` 1: the link is down."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"loss": loss, "delay_s": delay_s}) + "\n")
        self._process.stdin.flush()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


def carry(names: list[str]) -> None:
    """Make both devices and pass packets between them until standard input closes."""
    ends = []
    for name in names:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        ends.append(end)
    print("ready", flush=True)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    draw = random.Random(1)
    loss, delay, number = 0.0, 0.0, 0
    held: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([*ends, 0], [], [], wait)
        now = time.monotonic()
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            said = json.loads(line)
            loss, delay = said["loss"], said["delay_s"]
        for end in ends:
            with contextlib.suppress(BlockingIOError, OSError):  # the far device is down while it is moved
                while end in ready:
                    packet = os.read(end, PACKET)
                    number += 1
                    if draw.random() >= loss:
                        heapq.heappush(held, (now + delay, number, other[end], packet))
        while held and held[0][0] <= now:
            _, _, target, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):
                os.write(target, packet)


if __name__ == "__main__":
    carry(sys.argv[1:])
