"""The detokenizer process: waits for tokens on a socket for as long as the engine lives."""

import setproctitle
import zmq

from closeranks.lab.specimens.stage import Stage, die_with_parent


class DetokenizerManager:
    def __init__(self, stage: Stage) -> None:
        self.recv_from_scheduler = zmq.Context().socket(zmq.PULL)
        self.recv_from_scheduler.bind(f"ipc://{stage.folder}/detokenizer.ipc")

    def event_loop(self) -> None:
        while True:
            self.recv_from_scheduler.recv_json()


def run_detokenizer_process(stage: Stage, parent: int) -> None:
    """Entry of the process."""
    die_with_parent(parent)
    setproctitle.setproctitle("sglang::detokenizer")
    manager = DetokenizerManager(stage)
    stage.tell("process", None, role="detokenizer")
    manager.event_loop()
