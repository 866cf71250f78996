"""A stand-in engine of two processes whose hand-overs can be made to fail at once: python -m tests.watch.refusing.

    --port N --disaggregation-mode ROLE --folder DIR

Every 0.3 s a request comes to it. With a file `cut` in its folder its hand-over fails, with `storm` three are given up
by their clients, else it is served. Keeps connections alive, as the engines' servers do.
"""

import argparse
import json
import multiprocessing
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import setproctitle


def rank() -> None:
    """The loop of one rank: it turns, as an idle one does."""
    setproctitle.setproctitle("sglang::scheduler_TP0")
    while True:
        time.sleep(0.05)


class Engine:
    """What it counts, and what a request comes to."""

    def __init__(self, role: str, folder: Path) -> None:
        self.role, self.folder, self.began = role, folder, time.monotonic()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def request(self) -> bool:
        """One request; whether a token came."""
        cut, storm = ((self.folder / name).exists() for name in ("cut", "storm"))
        with self._lock:
            if storm:
                self.counts.update({"num_aborted_requests_total": 3, "num_transfer_failed_reqs_total": 3})
            elif cut:
                self.counts.update({"num_transfer_failed_reqs_total": 1, "num_requests_total": 1})
                room = self.counts["num_requests_total"]
                print(f"[{time.strftime('%F %T')} TP0] {self.role.title()} transfer failed for request rank=0 "
                      f"decode_req.req.rid='{room}' decode_req.req.bootstrap_room={room} with exception "
                      f"KVTransferError(bootstrap_room={room}): NIXL_ERR_REMOTE_DISCONNECT", flush=True)  # fmt: skip
            else:
                self.counts.update({"generation_tokens_total": 1, "num_requests_total": 1})
        return not cut

    def traffic(self) -> None:
        """Requests without end."""
        while True:
            time.sleep(0.3)
            self.request()

    def page(self) -> str:
        counts = {"num_running_reqs": 0, "generation_tokens_total": 0, **self.counts}
        lines = [f'sglang:{name}{{engine_type="{self.role}"}} {n}' for name, n in counts.items()]
        lines.append(f'sglang:scheduler_stage_seconds_total{{tp_rank="0"}} {time.monotonic() - self.began:.3f}')
        return "\n".join(lines) + "\n"


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of an engine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _say(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._say(200, engine.page())
            elif self.path == "/v1/loads":
                load: dict[str, Any] = {"timestamp": time.time(), "num_running_reqs": 0, "num_waiting_reqs": 0}
                self._say(200, json.dumps({"timestamp": time.time(), "loads": [load]}))
            else:
                self._say(200, "{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/generate":
                self._say(200, "{}")
            elif engine.request():
                self._say(200, json.dumps({"text": "9", "meta_info": {"completion_tokens": 1}}))
            else:
                self._say(500, json.dumps({"error": {"message": "Decode transfer failed for request rank=0"}}))

        def log_message(self, *args: object) -> None:
            """Access lines are not what this log is for."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-mode", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    engine = Engine(args.disaggregation_mode, args.folder)
    multiprocessing.get_context("fork").Process(target=rank, daemon=True).start()
    threading.Thread(target=engine.traffic, daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", args.port), handler(engine))
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
