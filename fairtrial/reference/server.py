"""Puts model, engine and HTTP together and serves until a signal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from fairtrial.errors import Refused
from fairtrial.reference.api import Arguments, application
from fairtrial.reference.engine import Engine
from fairtrial.reference.model import Model
from fairtrial.reference.mount import Mounted, mount
from fairtrial.reference.shape import BLOCK, SHAPES


def load(*, model_size: str, max_model_len: int, overlays: Mapping[str, Path]) -> tuple[Model, Mounted]:
    """Return a model of a size with its mixture of experts; raises ``Refused`` as ``mount`` does."""
    shape = SHAPES[model_size]
    mounted = mount(overlays)
    mixture = mounted.mixture(rows=max(max_model_len, BLOCK), experts=shape.experts)
    return Model(shape, mixture), mounted


class _Server(uvicorn.Server):
    """Ends within a chunk: open streams are cut, as those of an engine that is told to stop."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.close()
        super().handle_exit(sig, frame)


def serve(
    *,
    host: str,
    port: int,
    max_model_len: int,
    served_model_name: str,
    model_size: str,
    overlays: Mapping[str, Path],
) -> int:
    """Serve until SIGTERM or SIGINT; ``/health`` answers 200 once the model is loaded.

    Raises ``Refused`` for overlays that do not load and for an address that cannot be listened on.
    """
    model, mounted = load(model_size=model_size, max_model_len=max_model_len, overlays=overlays)
    engine = Engine(model)
    arguments = Arguments(
        host=host,
        port=port,
        max_model_len=max_model_len,
        served_model_name=served_model_name,
        model_size=model_size,
        overlays={target: str(path) for target, path in overlays.items()},
    )
    config = uvicorn.Config(
        application(engine, mounted, arguments),
        host=host,
        port=port,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    try:
        _Server(config, engine).run()
    except SystemExit:
        # What uvicorn makes of an address that it cannot bind, after it said why.
        raise Refused(f"cannot listen on {host}:{port}; choose another --port, or end what listens there") from None
    return 0
