"""Two clusters on this machine, one hybrid model, the same answer.

A PRFAAS cluster prefills long prompts; the hybrid cache crosses a shaped link; a PD cluster
decodes. Every request is compared, logit for logit, with a single process that runs transformers
alone.

    driver --- gateway --- pd-prefill, pd-decode          (PD cluster, loopback)
                  |             ^
                  +--- relay ---+--- prfaas-0 ...         (PRFAAS cluster, behind the link)

Exit status: 0 if every output is identical and nothing leaked, 1 if not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="14 requests instead of 28")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--model", default="pocket", help="pocket, random:FAMILY, or a folder")
    parser.add_argument("--link-mbps", type=float, default=200.0, metavar="MBPS")
    parser.add_argument(
        "--link-change", type=float, metavar="MBPS", help="rate from the middle of the run on"
    )
    parser.add_argument(
        "--prfaas-workers", type=int, choices=(1, 2), help="default: 2 if one is killed, else 1"
    )
    parser.add_argument(
        "--kill",
        choices=[f"{name}@mid-transfer" for name in ("prefill", "local", "decode")],
        help="SIGKILL a worker",
    )
    parser.add_argument(
        "--sabotage", choices=("state", "kv"), help="zero this kind of cache in transit"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--deadline-s", type=float, help="default: 60, more on a slow link")
    parser.add_argument("--plot", default="two_clusters.png", metavar="FILE", help="'' for none")
    args = parser.parse_args(argv)
    if not args.link_mbps > 0 or (args.link_change is not None and not args.link_change > 0):
        parser.error("link rates must be greater than 0 Mbit/s")
    slowest_mbps = min(args.link_mbps, args.link_change or args.link_mbps)
    if args.deadline_s is None:
        args.deadline_s = max(60.0, 1200 / slowest_mbps)  # all documents are 0.1 GB
    if not args.deadline_s > 0:
        parser.error(f"--deadline-s is {args.deadline_s}; it must be greater than 0")
    if args.prfaas_workers is None:
        args.prfaas_workers = 2 if args.kill == "prefill@mid-transfer" else 1
    if args.new_tokens < 1:
        parser.error(f"--new-tokens is {args.new_tokens}; it must be at least 1")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        # Spawned processes import this file again: what they do not need is imported here.
        from cluster.driver import main as drive

        return drive(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
