"""`python -m benchmarks [NAME ...]` runs all benchmarks, or the named ones, and writes the table."""

import argparse

from . import attention, construction, flow, transport
from .table import write_page
from .timing import read_results, write_results

BENCHMARKS = {
    "attention": attention.run,
    "flow": flow.run,
    "transport": transport.run,
    "construction": construction.run,
}


def main() -> None:
    """Run, print a line a row, and write results and page (with --quick: print only)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written: to see that it runs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}")
    for name in arguments.names or BENCHMARKS:
        print(name, flush=True)
        rows = BENCHMARKS[name](arguments.quick)
        for row in rows:
            print(f"  {row}", flush=True)
        if not arguments.quick:
            write_results(name, rows)
    if not arguments.quick:
        found = {name: read_results(name) for name in BENCHMARKS}
        write_page({name: result for name, result in found.items() if result is not None})


if __name__ == "__main__":
    main()
