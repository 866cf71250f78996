"""On the path of a served process: each rank's clocks are shifted by hours, differently for each.

A rank decides nothing by a clock, so that nothing may change. (String hashes differ too: PYTHONHASHSEED is not set.)
"""

import sys
import time

if "closeranks.engine.rank" in sys.orig_argv:
    _shift = 3600.0 * (1 + hash(sys.orig_argv[-1]) % 100)  # hash: another one in every process
    _time, _monotonic = time.time, time.monotonic
    time.time = lambda: _time() - _shift
    time.monotonic = lambda: _monotonic() + _shift
