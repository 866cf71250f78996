"""What the harness tells a specimen's launcher: in its environment, so that the command line stays the engine's."""

import os
from dataclasses import dataclass
from pathlib import Path

PREFIX = "CLOSERANKS_SPECIMEN_"


@dataclass(frozen=True)
class Directions:
    """Name of the specimen, folder for sockets, descriptor for events, process to end with, port (0: any)."""

    name: str
    folder: Path
    event_fd: int
    parent: int
    port: int = 0

    def environment(self) -> dict[str, str]:
        """As variables for the launcher."""
        return {PREFIX + key.upper(): str(value) for key, value in vars(self).items()}

    @classmethod
    def read(cls) -> "Directions":
        """From this process's environment. Raises `KeyError` when it was not started by the harness."""
        value = {key: os.environ[PREFIX + key.upper()] for key in ("name", "folder", "event_fd", "parent", "port")}
        return cls(
            value["name"], Path(value["folder"]), int(value["event_fd"]), int(value["parent"]), int(value["port"])
        )
