"""What the harness tells a specimen's launcher: in its environment, so that the command line stays the engine's."""

import os
from dataclasses import dataclass
from pathlib import Path

from closeranks.lab.specimens.specs import SPECIMENS, Specimen

PREFIX = "CLOSERANKS_SPECIMEN_"


@dataclass(frozen=True)
class Directions:
    """Name of the specimen, folder for sockets, descriptor for events, and the process to end with.

    `port` is that of the HTTP endpoints (0: any). `healed`: play the engine without the fault.
    """

    name: str
    folder: Path
    event_fd: int
    parent: int
    port: int = 0
    healed: bool = False

    def specimen(self) -> Specimen:
        """What is to be played."""
        specimen = SPECIMENS[self.name]
        return specimen.healed() if self.healed else specimen

    def environment(self) -> dict[str, str]:
        """As variables for the launcher."""
        return {PREFIX + key.upper(): str(value) for key, value in vars(self).items()}

    @classmethod
    def read(cls) -> "Directions":
        """From this process's environment. Raises `KeyError` when it was not started by the harness."""
        keys = ("name", "folder", "event_fd", "parent", "port", "healed")
        value = {key: os.environ[PREFIX + key.upper()] for key in keys}
        event_fd, parent, port = (int(value[key]) for key in ("event_fd", "parent", "port"))
        return cls(value["name"], Path(value["folder"]), event_fd, parent, port, value["healed"] == "True")
