"""What an actor sends: commands to hosts and requests to servers, each written down before it is sent.

No command is sent that the plan does not show. What interrupts closes a request at once; a command that changes a
host is let finish first, and a reply that is not seen is indeterminate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.backends import Channel, Pending, Reply
from fairtrial.client import Call, Endpoint, Exchange
from fairtrial.errors import StepFailed
from fairtrial.guards import NS
from fairtrial.ticks import HoldLost, Interrupted, Ticks, json_line

COMMAND_LIMIT_S = 30.0
SITE_LIMIT_S = 90.0
FENCE_LOST = 75
BODY_LEARNT_B = 65536
"""How much of an error's body the screen of the kept lines learns."""


class Calls(Ticks):
    """An actor that can call hosts and servers."""

    _commands = 0
    _requests = 0

    def call(
        self, host: str, mode: str, payload: Mapping[str, Any], *, limit_s: float = COMMAND_LIMIT_S, quiet: bool = False
    ) -> list[dict[str, Any]]:
        """Call the host program and return its lines. The plan shows this command, or it is not sent.

        Raises ``HoldLost`` when another actor owns the window there, ``StepFailed`` for any other fault or when the
        end was not seen (indeterminate).
        """
        verbs = [verb["verb"] for verb in payload.get("verbs", [])]
        for template in [f"play {verb}" for verb in verbs] if mode == "play" else [mode]:
            self._planned(host, template)
        if quiet:
            reply = self._send(host, mode, payload, limit_s)
        else:
            self._commands += 1
            number = self._commands
            self.record("command", n=number, host=host, mode=mode, verbs=verbs)
            began = self.backend.utc()
            reply = self._send(host, mode, payload, limit_s)
            rows = _rows(reply)
            for row in rows:
                if "environ" in row and "argv" in row:
                    self.secrets.learn(row["environ"], row["argv"])
            argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
            self._keep_command(" ".join([mode, *verbs]), argv, host, began, reply)
            self.record("reply", n=number, exit=reply.exit)
        return self._checked(host, " ".join([mode, *verbs]), reply)

    def play(
        self, host: str, verbs: Sequence[Mapping[str, Any]], *, limit_s: float, quiet: bool = False
    ) -> list[dict[str, Any]]:
        """Play verbs on a host under this actor's term."""
        return self.call(host, "play", {"verbs": list(verbs)}, limit_s=limit_s, quiet=quiet)

    def site(self, host: str, argv: Sequence[str]) -> Reply:
        """Run one of the site's own commands, as the plan shows it; its end is waited for at most 90 s."""
        self._planned(host, "site.close")
        self._commands += 1
        number, began = self._commands, self.backend.utc()
        self.record("command", n=number, host=host, mode="site.close", argv=self.secrets.argv(list(argv)))
        reply = self._await(self.backend.command(host, argv, stdin=b"", mark=None), SITE_LIMIT_S)
        self._keep_command("site.close", argv, host, began, reply)
        self.record("reply", n=number, exit=reply.exit)
        return reply

    def open_channel(self, host: str, mode: str) -> Channel:
        """Start a long-lived program on a host, as the plan shows it."""
        self._planned(host, mode)
        argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
        self._commands += 1
        self.record("command", n=self._commands, host=host, mode=mode, verbs=[])
        channel = self.backend.channel(host, argv)
        self.record("reply", n=self._commands, exit=None)
        return channel

    def fetch(self, host: str, path: str) -> bytes | None:
        """Read a file of a host, as the plan shows; None where there is none."""
        self._planned(host, "get")
        return self.backend.get(host, path)

    def put(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, as the plan shows."""
        self._planned(host, "put")
        self.record("command", n=0, host=host, mode="put", path=path)
        self.backend.put(host, path, content)
        self.record("reply", n=0, exit=0)

    def _planned(self, host: str, template: str) -> None:
        if template not in self.step.commands:
            raise StepFailed(f"{self.step.name}: the plan shows no {template!r} on {host}: it is not sent")

    def _keep_command(self, name: str, argv: Sequence[str], host: str, began_utc_s: float, reply: Reply) -> None:
        self.commands.keep(
            name,
            argv=argv,
            host=host,
            start_utc_s=began_utc_s,
            end_utc_s=self.backend.utc(),
            exit_status=reply.exit,
            stdout=reply.stdout.decode(errors="replace"),
            stderr=reply.stderr.decode(errors="replace"),
        )

    def _checked(self, host: str, what: str, reply: Reply) -> list[dict[str, Any]]:
        rows = _rows(reply)
        if reply.exit is None:
            raise StepFailed(f"{host}: {what}: its end was not seen in time: it may have happened")
        message = next((str(row["message"]) for row in reversed(rows) if row.get("message")), "")
        if reply.exit == FENCE_LOST:
            raise HoldLost(host, message or "another actor owns the window there")
        if reply.exit != 0 or not rows or not rows[-1].get("ok"):
            last = reply.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
            shown = message or self.secrets.clean(last[0]) or f"exit {reply.exit}"
            raise StepFailed(f"{host}: {what}: {shown}")
        return rows

    def _send(self, host: str, mode: str, payload: Mapping[str, Any], limit_s: float) -> Reply:
        """Run the host program to its end; what interrupts is kept until then, and a changing command is let finish."""
        argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
        mark = self.window if mode == "play" else None
        outer, self._in_command = self._in_command, True
        try:
            pending = self.backend.command(host, argv, stdin=json.dumps(payload).encode() + b"\n", mark=mark)
            return self._await(pending, limit_s)
        finally:
            self._in_command = outer

    def _await(self, pending: Pending, limit_s: float) -> Reply:
        deadline = self.now() + int(limit_s * NS)
        while True:
            reply = pending.poll(self.backend.tick_s)
            if reply is not None:
                return reply
            self.tick()
            if self.now() > deadline:
                return pending.abandon()

    def ask(self, call: Call, *, purpose: str, **fields: Any) -> Exchange:
        """Send one request that is written down before it is sent. The guards may close it at any time."""
        if not self.restoring and self.held_ns is not None and self.elapsed_s() > self.bounds.submit_s:
            minutes = self.bounds.submit_s / 60
            raise Interrupted("bound", f"no request is submitted after {minutes:.1f} min of HOLD")
        self._requests += 1
        number = self._requests
        self.record("request", n=number, purpose=purpose, port=call.base.port, **fields)
        self.ours_in_flight += 1
        try:
            exchange = self.wait(call)
        except Interrupted as stop:
            self.record("response", lenient=True, n=number, fault=f"cancelled: {stop.kind}")
            raise
        finally:
            self.ours_in_flight -= 1
        measured = exchange.measured
        self.record(
            "response",
            n=number,
            status=exchange.status,
            fault=exchange.fault,
            ttft_ns=exchange.ttft_ns if measured else None,
        )
        self._raise_interrupt()
        return exchange

    def wait(self, call: Call) -> Exchange:
        """Send one request and wait for it with ticks. What interrupts closes its socket, then raises."""
        request = self.backend.request(call)
        while True:
            exchange = request.poll(self.backend.tick_s)
            self._own(request.local_port)
            if exchange is not None:
                self._learn(exchange)
                return exchange
            try:
                self.tick()
            except Interrupted:
                closing_ns = self.now()
                request.close()
                request.poll(1.0)
                took_ns = self.now() - closing_ns
                self.record("noted", lenient=True, what="closed", reason="trip to closed connection", ns=took_ns)
                raise

    def _learn(self, exchange: Exchange) -> None:
        """Let the screen know what a completion answered, whole or not, so that no kept line holds it."""
        answer = exchange.measured or exchange.answer
        if answer is not None:
            self.screen.learn_text(answer.text)
            self.screen.learn_ids(answer.token_ids or ())
        if exchange.measured is not None:
            self.screen.learn_text(exchange.measured.unread)
        if exchange.fault is not None:
            self.screen.learn_text(exchange.body[:BODY_LEARNT_B].decode(errors="replace"))

    def get(self, base: Endpoint, path: str, *, limit_s: float = 5.0) -> Exchange:
        """GET a path that changes nothing: readiness, version, counters."""
        return self.wait(Call(base=base, path=path, method="GET", limit_s=limit_s))


def _rows(reply: Reply) -> list[dict[str, Any]]:
    return [row for line in reply.stdout.decode(errors="replace").splitlines() if (row := json_line(line)) is not None]
