"""`closeranks guard`: a streaming proxy that repairs and strips tool-call markup leaked by an OpenAI-compatible server.

`StreamWatch` and `watch_body` are the proxy's core, without input and output; `Guard` is the transport.
"""

from closeranks.gateway.guard.counters import Counters
from closeranks.gateway.guard.proxy import Guard
from closeranks.gateway.guard.server import GuardServer, decoders
from closeranks.gateway.guard.settings import Settings
from closeranks.gateway.guard.watch import StreamWatch

__all__ = ["Counters", "Guard", "GuardServer", "Settings", "StreamWatch", "decoders"]
