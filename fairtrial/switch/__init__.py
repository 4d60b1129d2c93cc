"""The host program: what fairtrial runs on a host, with the standard library alone (Linux, Python >= 3.10).

``bundle()`` gives it as one zip. Every call is ``python -S -E host.pyz MODE --state DIR --window ID [--term N]``, with
one JSON object as the first line of standard input. Results are JSON lines; the last is ``{"ok": true|false, ...}``.
Exit 0 done, 1 failed, 2 usage, 75 the fence is lost: the actor's own file is not there, and nothing was changed.

    look      read-only: host, memory, ports, marked processes, every file of the state folder
    inspect   read-only: one process's full identity and tree
    hold      take the HOLD (term 0), then write one renewal for each line ``renew``; ends with its input
    renew     the same renewals for a term that was taken
    play      a list of verbs, or a step of restore.json: take lease record end start prove policy
              install ask arm off; verbs that change something run under the lock, while the own file is there
    read      one sample of everything the guards watch, at each cadence
    switch    the dead-man's switch: plays restore.end, restore.start, restore.prove when the lease has run out

Files of the state folder: ``lock``, ``hold.json`` -> ``term-1.json`` -> ... (the newest names who may act), ``lease``,
``start.json`` (what was started, what is being ended), ``restore.json``, ``switch.json`` (armed), ``ask.json``,
``beat``, ``switch.log``, ``host.pyz``, ``last.json``. After a window the lock and ``last.json`` stay.

Two locks: ``lock`` serialises the verbs that change the host (at most 90 s each); a flock on ``lease`` makes renewals,
takeovers, records and the release exclude each other. Only ``lock`` then ``lease``, never the other way round.
"""

from __future__ import annotations

MAIN = b"import sys\n\nfrom switch.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"


def bundle() -> bytes:
    """Return the host program as the bytes of a zip: the same bytes for the same sources, on any machine.

    Write them to a file named ``host.pyz``: a step on a host is recognised by that name.
    """
    import io
    import zipfile
    from pathlib import Path

    folder = Path(__file__).parent
    members = {"__main__.py": MAIN, "switch/__init__.py": b""}
    for source in folder.glob("*.py"):
        if source.name != "__init__.py":
            members[f"switch/{source.name}"] = source.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, members[name], zipfile.ZIP_STORED)
    return buffer.getvalue()
