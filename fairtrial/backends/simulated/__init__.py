"""Backend ``simulated``: hosts, their clock, disks, links and servers as values, on which the host program itself runs.

clock     virtual time; whatever waits is a fiber, and only one runs at a time
kernel    a host: processes, files, locks, ports, memory
posix     what a program on such a host finds under ``os``, ``time``, ``fcntl``, ``socket`` and the like
program   the host program, loaded over ``posix``
server    what a simulated model server answers
commands  the few plain programs of such a host
backend   the hosts behind the seam ``Backend``
control   the control host: a store in memory, and who acts
"""

from fairtrial.backends.simulated.backend import Simulated
from fairtrial.backends.simulated.clock import Clock
from fairtrial.backends.simulated.control import Memory, SimulatedControl
from fairtrial.backends.simulated.kernel import Host, Killed, Process

__all__ = ["Clock", "Host", "Killed", "Memory", "Process", "Simulated", "SimulatedControl"]
