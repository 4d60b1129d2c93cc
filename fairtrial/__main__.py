"""``python -m fairtrial`` is ``fairtrial``."""

import sys

from fairtrial.cli import main

sys.exit(main())
