"""`closeranks keygen FILE`: the CURVE keypair that engines and gateways on several hosts share."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

HELP = "make the key file that engines and gateways on several hosts share"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="file to write (0600); copy it to every host, give it as --curve-key-file"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import zmq.auth

    target: Path = args.file
    if target.exists():
        print(f"closeranks keygen: {target} exists already; it is left as it is", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
            _, secret = zmq.auth.create_certificates(folder, "closeranks")
            os.chmod(secret, 0o600)
            os.rename(secret, target)
    except OSError as error:
        print(f"closeranks keygen: {target}: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps({"schema": 1, "file": str(target)}) if args.json else f"wrote {target}: keep it secret")
    return 0
