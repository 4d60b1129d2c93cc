"""The seam: what the runner asks of the world, and the worlds that answer."""

from fairtrial.backends.base import Backend, Channel, Pending, Reply
from fairtrial.backends.local import Local

__all__ = ["Backend", "Channel", "Local", "Pending", "Reply"]
