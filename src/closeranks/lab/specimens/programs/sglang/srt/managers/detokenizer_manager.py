"""The detokenizer process: takes tokens from the entry rank, and passes text on to the frontend."""

import setproctitle
import zmq

from closeranks.lab.specimens.stage import Stage, die_with_parent


class DetokenizerManager:
    def __init__(self, stage: Stage) -> None:
        context = zmq.Context()
        self.recv_from_scheduler = context.socket(zmq.PULL)
        self.recv_from_scheduler.bind(f"ipc://{stage.folder}/detokenizer.ipc")
        self.send_to_tokenizer = context.socket(zmq.PUSH)
        self.send_to_tokenizer.connect(f"ipc://{stage.folder}/tokenizer.ipc")

    def event_loop(self) -> None:
        while True:
            recv_obj = self.recv_from_scheduler.recv_json()
            self.send_to_tokenizer.send_json(recv_obj)


def run_detokenizer_process(stage: Stage, parent: int) -> None:
    """Entry of the process."""
    die_with_parent(parent)
    setproctitle.setproctitle("sglang::detokenizer")
    manager = DetokenizerManager(stage)
    stage.tell("process", None, role="detokenizer")
    manager.event_loop()
