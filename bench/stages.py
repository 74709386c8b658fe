#!/usr/bin/env python3
"""Prints where the cycles of decode attention go: kernel_bench under `perf record`, its stages by function.

usage: bench/stages.py [--build build/release] [--isa avx512_vnni] [--path fast]

Needs perf. The stages are functions of their own (vector_pages-inl.h). Their shares of the samples are multiplied with
the cycles per token and query head that kernel_bench measures in the same run."""
import argparse
import re
import subprocess
import tempfile

STAGES = [  # a part of the function's name, what it is called; the first match counts
    ("bound_queries", "bound of q' in the page"),
    ("prepare_keys", "q' of a record"),
    (r"dot_\w+<\d+, \d+, true", "K dot products"),
    ("softmax", "softmax of a page"),
    ("prepare_weights", "weights"),
    (r"dot_\w+<\d+, \d+, false", "V dot products"),
    ("::(attend_rows|attend_items|page_as|scores|values|update_max|finish|begin|attention)", "the rest"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--isa", default="avx512_vnni")
    parser.add_argument("--path", default="fast", choices=["fast", "exact"])
    args = parser.parse_args()
    name = f"K2V2/tokens:16384/heads:32x8/isa:{args.isa}/path:{args.path}/threads:1"
    with tempfile.TemporaryDirectory() as folder:
        command = ["perf", "record", "-q", "-F", "2000", "-o", f"{folder}/data", f"{args.build}/bin/kernel_bench",
                   f"--benchmark_filter={name}", "--benchmark_min_time=4"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        cycles = float(re.search(r"\bcycles=([0-9.]+)", run.stdout).group(1))
        report = subprocess.run(["perf", "report", "-i", f"{folder}/data", "--stdio", "--no-children", "-F",
                                 "overhead,sym"], capture_output=True, text=True, check=True).stdout
    shares = dict.fromkeys((stage for _, stage in STAGES), 0.0)
    for share, symbol in re.findall(r"^\s*([0-9.]+)%\s+\[\.\] (.*)$", report, re.MULTILINE):
        if not re.search("kivi::cpu::(N_|attention_merge)", symbol) or re.search("encode|decode", symbol):
            continue  # the benchmark itself, and what it prepares
        stage = next((what for part, what in STAGES if re.search(part, symbol)), None)
        if stage:
            shares[stage] += float(share)
    total = sum(shares.values())
    print(f"{name}: {cycles:.1f} cycles per token and query head")
    for stage, share in shares.items():
        print(f"| {stage} | {cycles * share / total:.2f} |")


if __name__ == "__main__":
    main()
