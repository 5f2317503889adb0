"""The figures of arXiv 2604.15039 beside ours; the same as ``prfaas reproduce``."""

from __future__ import annotations

import argparse
import sys

from prfaas.cli.reproduce import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
