"""The rehearsal: the same window on simulated hosts and a virtual clock, once whole, and once for every stop point.

effects     what the runner does to the world, counted; the faults that fit each
watched     backend and store as the runner sees them: one of the faults fires
world       the simulated hosts of one experiment, its trips, and who acts on them
story       one run with one fault (or two), to its end: restored, and restored again
invariants  what must hold after every run
forks       processes that are forked off one another
play        every stop point in turn; each run is forked off the clean one where its fault fires
table       what was found, for a person
"""

from fairtrial.rehearsal.play import Rehearsal, Run, rehearse, replay
from fairtrial.rehearsal.story import ledger
from fairtrial.rehearsal.table import run_text, text

__all__ = ["Rehearsal", "Run", "ledger", "rehearse", "replay", "run_text", "text"]
