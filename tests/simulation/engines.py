"""An engine under its supervisor: one life after another."""

from typing import Any

from closeranks.engine.leader.events import Config
from tests.simulation.life import Life


class Engine:
    """An engine under a supervisor: killed whole, replaced under the next epoch."""

    def __init__(self, network: Any, name: str, role: str, num_pages: int, **config: Any) -> None:
        self.network, self.world = network, network.world
        self.name, self.role = name, role
        self.num_pages = num_pages
        self.options = config
        self.odd = self.unlike = self.broken = False
        """Other weights from the next epoch on; in its last rank only; a rank that cannot load."""
        self.writer: Any = None
        """Step log of the next life."""
        self.faults: list[str] = []
        self.patience = 7.0
        """Seconds after which a rank that hangs must have been noticed."""
        self.late: dict[str, tuple[str, Any]] = {}
        """Kind of message -> the last one of a peer, which may come to the next life, too."""
        self.epoch = 0
        """Counts all lives."""
        self.origin = self.world.random.getrandbits(62) + 1
        self.forgotten = 0
        """Lives before the run folder was lost: epochs are counted from there."""
        self.life: Life
        self.start()

    def config(self, epoch: int, instance: int) -> Config:
        return Config(
            engine=self.role if self.network.namesakes else self.name,
            role=self.role,
            epoch=epoch,
            instance=instance,
            origin=self.origin,
            ended_epoch=epoch - 1,
            **self.options,
        )

    def start(self) -> None:
        self.epoch += 1
        if self.epoch > 1 and self.network.restless:
            self.broken = self.broken or self.world.random.random() < 0.04
            self.unlike = self.unlike or self.world.random.random() < 0.04
            if self.world.random.random() < 0.2:  # its run folder is lost, and the number of its last epoch with it
                self.forgotten, self.origin = self.epoch - 1, self.world.random.getrandbits(62) + 1
        instance = self.world.random.getrandbits(62) + 1
        self.life = Life(self, self.epoch - self.forgotten, instance)
        self.network.lives[instance] = self.life
        self.network.identities[self.life.identity] = self.life
        for link, message in self.late.values() if self.network.restless else ():
            self.world.after(self.world.random.random() * 0.5, self.life.hear_peer, link, message)
        self.late.clear()

    def kill(self) -> None:
        """End every process of the engine; the next epoch starts when all are reaped."""
        if self.life.alive:
            self.life.alive = False
            self.world.after(0.1 + self.world.random.random() ** 2, self.start)
