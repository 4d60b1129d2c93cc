"""The timed request, its prompts, and what to ask a server for."""

from fairtrial.client import rows
from fairtrial.client.answers import Counters, completion, counters, probe_quality
from fairtrial.client.prompts import prompt_lines, salt, sized_dice, token_ids
from fairtrial.client.request import Call, Endpoint, Exchange, Request

__all__ = [
    "Call",
    "Counters",
    "Endpoint",
    "Exchange",
    "Request",
    "completion",
    "counters",
    "probe_quality",
    "prompt_lines",
    "rows",
    "salt",
    "sized_dice",
    "token_ids",
]
