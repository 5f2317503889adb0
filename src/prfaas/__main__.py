"""``python -m prfaas`` is the command ``prfaas``."""

from __future__ import annotations

import sys

from prfaas.cli import main

if __name__ == "__main__":
    sys.exit(main())
