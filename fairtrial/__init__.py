"""fairtrial: matched windows for self-hosted LLM servers.

One window takes production's hosts under a HOLD, measures each arm fresh, reads the result by a rule that
was fixed before, and brings production back. ``ARCHITECTURE.md`` names the parts.
"""

__version__ = "0.1.0"
