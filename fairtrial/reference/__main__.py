"""``python -m fairtrial.reference``: start a server; it serves until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fairtrial.errors import Refused

# One core, so that an arm costs the same whatever else the machine has; read by numpy's BLAS when it is loaded.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 2 for what cannot be started."""
    parser = argparse.ArgumentParser(
        prog="python -m fairtrial.reference",
        description="A small mixture-of-experts transformer behind an OpenAI-compatible API.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True, help="context length in tokens")
    parser.add_argument("--served-model-name", default="reference")
    parser.add_argument("--model-size", choices=("demo", "tiny"), default="demo")
    parser.add_argument(
        "--overlay",
        action="extend",
        nargs="+",
        default=[],
        metavar="TARGET=SOURCE",
        help="mount a file over moe/router.py, moe/dispatch.py or moe/experts.py, or add moe/NAME.py",
    )
    options = parser.parse_args(argv)
    if options.max_model_len < 2:
        parser.error(f"--max-model-len {options.max_model_len}: give at least 2 tokens")
    overlays: dict[str, Path] = {}
    for overlay in options.overlay:
        target, equals, source = overlay.partition("=")
        if not equals or target in overlays:
            parser.error(f"--overlay {overlay}: give each target once, as TARGET=SOURCE")
        overlays[target] = Path(source)
    try:
        from fairtrial.reference.server import serve
    except ModuleNotFoundError as error:
        print(f'{error}: install the extra, pip install "fairtrial[demo]"', file=sys.stderr)
        return 2
    try:
        return serve(
            host=options.host,
            port=options.port,
            max_model_len=options.max_model_len,
            served_model_name=options.served_model_name,
            model_size=options.model_size,
            overlays=overlays,
        )
    except Refused as error:
        print(f"fairtrial.reference: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
