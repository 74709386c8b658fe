#!/usr/bin/env python3
"""Which lines of csrc, include and ops did the tests reach? Reads what gcov counted in a build folder and prints, for
each file, the share of its lines and those that nothing has reached. A line of a header or template counts where one
of the objects that hold it has reached it. Ends with 1 below the limit.

    coverage.py BUILD [--limit 95] [--all]     --all: also the files of which every line was reached
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTS = ("csrc/", "include/", "ops/")
LEFT_OUT = {"ops/cuda_registration.cpp"}  # registers the operators for a real device


def lines_of(notes):
    """{file: {line: reached}} of one object, whether or not it ever ran."""
    run = subprocess.run(["gcov", "--json-format", "--stdout", notes], capture_output=True, cwd=notes.parent)
    found = {}
    for text in run.stdout.splitlines():
        if not text.strip():
            continue
        report = json.loads(text)
        for source in report["files"]:
            path = pathlib.Path(report["current_working_directory"], source["file"]).resolve()
            if ROOT not in path.parents:
                continue
            name = str(path.relative_to(ROOT))
            if not name.startswith(PARTS) or name in LEFT_OUT:
                continue
            lines = found.setdefault(name, {})
            for line in source["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, False) or line["count"] > 0
    return found


def ranges(numbers):
    """"3-5, 9" of a sorted list."""
    parts = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--limit", type=float, default=95, help="least share of lines, in percent (%(default)s)")
    parser.add_argument("--all", action="store_true", help="also the files of which every line was reached")
    options = parser.parse_args()
    notes = sorted(options.build.resolve().rglob("*.gcno"))
    # Tests hold lines of the headers too, but nothing is reached there that the library cannot reach.
    objects = [path for path in notes if not path.name.startswith("cmake_pch")]
    if not objects:
        sys.exit(f"coverage: there are no gcov notes in {options.build}; build the preset `coverage`")
    merged = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lines_of, objects):
            for name, lines in found.items():
                into = merged.setdefault(name, {})
                for number, reached in lines.items():
                    into[number] = into.get(number, False) or reached
    total = reached = 0
    for name, lines in sorted(merged.items()):
        missed = sorted(number for number, hit in lines.items() if not hit)
        total += len(lines)
        reached += len(lines) - len(missed)
        if missed or options.all:
            print(f"{100 * (1 - len(missed) / len(lines)):6.1f} % of {len(lines):4}  {name}  {ranges(missed)}")
    share = 100 * reached / total
    print(f"coverage: {share:.2f} % of {total} lines in {len(merged)} files; the limit is {options.limit} %")
    return 0 if share >= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
