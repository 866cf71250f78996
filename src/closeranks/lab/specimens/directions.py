"""What the harness tells a specimen's launcher: in its environment, so that the command line stays the engine's."""

import os
from dataclasses import dataclass
from pathlib import Path

from closeranks.lab.specimens.specs import SPECIMENS, Specimen

PREFIX = "CLOSERANKS_SPECIMEN_"
STRUCK = "struck"
"""File in the specimen's folder that says that its fault has struck once."""


@dataclass(frozen=True)
class Directions:
    """Name of the specimen, folder for sockets, descriptor for events (-1: none), process to end with (0: none).

    `port` is that of the HTTP endpoints (0: any). `once`: when the fault has struck before in this folder, play the
    engine without it. `fabric` is the folder through which a prefill and a decode engine hand over (default: `folder`).
    """

    name: str
    folder: Path
    event_fd: int
    parent: int
    port: int = 0
    once: bool = False
    fabric: str = ""

    def specimen(self) -> Specimen:
        """What is to be played."""
        specimen = SPECIMENS[self.name]
        return specimen.healed() if self.once and (self.folder / STRUCK).exists() else specimen

    def environment(self) -> dict[str, str]:
        """As variables for the launcher."""
        return {PREFIX + key.upper(): str(value) for key, value in vars(self).items()}

    @classmethod
    def read(cls) -> "Directions":
        """From this process's environment. Raises `KeyError` when it was not started by the harness."""
        keys = ("name", "folder", "event_fd", "parent", "port", "once", "fabric")
        value = {key: os.environ[PREFIX + key.upper()] for key in keys}
        event_fd, parent, port = (int(value[key]) for key in ("event_fd", "parent", "port"))
        once = value["once"] == "True"
        return cls(value["name"], Path(value["folder"]), event_fd, parent, port, once, value["fabric"])
