"""Runs the benchmarks, prints the README's table and the rows with targets, and draws the plot. Standard library only.

    ./run bench                  builds, then: report.py --bin build/release/bin --out build/bench-results
    ./run bench --quick          few shapes, seconds: only checks results (in quick/ below --out)
    ./run bench --filter REGEX   only benchmarks whose name matches
    ./run bench --no-run         tables and plot of the last run

The programs check their results; a wrong one makes the exit code 1, whatever its speed.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

from results import PROGRAMS, Results
from targets import Row, cache_rows, kernel_rows

CONTEXTS = (64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768)
BASELINES = ("matmul_f32", "sdpa_f32", "sdpa_bf16")
NO_MATCH = 2  # exit code of a program in which no benchmark has such a name


def run_programs(args: argparse.Namespace) -> List[str]:
    """What failed."""
    failed = []
    for program in PROGRAMS:
        output = args.out / f"{program}.json"
        output.unlink(missing_ok=True)
        path = args.bin / program
        if not path.exists():
            if program == "cache_bench":
                print("report: no cache_bench: this build has no torch; its rows are left out", flush=True)
            else:
                failed.append(f"{path} does not exist: build it first")
            continue
        command = [str(path), f"--benchmark_out={output}", "--benchmark_out_format=json"]
        command += ["--quick"] if args.quick else []
        command += [f"--benchmark_filter={args.filter}"] if args.filter else []
        command += args.options
        print(f"==== {program}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code == NO_MATCH and args.filter:
            output.unlink(missing_ok=True)
        elif code != 0:
            failed.append(f"{program} ended with exit code {code}")
    return failed


# ---- tables

def figure(value: Optional[float], digits: int = 2) -> str:
    """`digits` after the point; negative: that many significant ones with an exponent."""
    if value is None:
        return ""
    return f"{value:.{-digits - 1}e}" if digits < 0 else f"{value:.{digits}f}"


def milliseconds(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.3g} ms"


def table(header: List[str], rows: List[List[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def speed_table(r: Results) -> str:
    rows = []
    for name, what in (("K2V2, `fast`", "K2V2/fast"), ("K2V2, `exact`", "K2V2/exact"), ("K4V4, `fast`", "K4V4/fast"),
                       ("K8V8, `fast`", "K8V8/fast"), ("two fp32 matmuls per kv head", "matmul_f32"),
                       ("`scaled_dot_product_attention`, fp32", "sdpa_f32"),
                       ("`scaled_dot_product_attention`, bf16", "sdpa_bf16")):
        times = [r.decode(what, 16384, threads, "min_ms") for threads in (1, 2)]
        megabytes = next((m for m in (r.decode(what, 16384, t, "MB") for t in (1, 2)) if m is not None), None)
        if any(t is not None for t in times):
            rows.append([name, figure(megabytes, 1) + " MB"] + [milliseconds(t) for t in times])
    return table(["", "bytes of the cache", "1 thread", "2 threads"], rows) if rows else ""


def context_table(r: Results, threads: int) -> str:
    rows = []
    for tokens in CONTEXTS:
        ours = "K2V2/fast" if tokens > 256 else "all_exact/fast"
        values = [r.decode(what, tokens, threads, "min_ms") for what in (ours,) + BASELINES]
        if all(v is None for v in values):
            continue
        floor = r.decode(ours, tokens, threads, "x_floor")
        rows.append([str(tokens)] + [milliseconds(v) for v in values] + [figure(floor, 1)])
    header = [f"tokens, {threads} thread{'s' * (threads > 1)}", "K2V2 fast", "two matmuls", "SDPA fp32", "SDPA bf16",
              "K2V2: times the floor"]
    return table(header, rows) if rows else ""


def isa_table(r: Results) -> str:
    """Cycles per token and head at 16k, one thread."""
    isas = r.isas()
    rows = []
    for bits in ("K1V1", "K2V2", "K3V3", "K4V2", "K4V4", "K8V8"):
        cells = [figure(r.kernel(isa, "cycles", f"{bits}/tokens:16384/heads:32x8", path), 1)
                 for isa in isas for path in ("fast", "exact")]
        if any(cells):
            rows.append([bits] + cells)
    header = ["cycles per token and head"] + [f"{isa} {path}" for isa in isas for path in ("fast", "exact")]
    return table(header, rows) if rows else ""


def target_table(r: Results, rows: List[Row], columns: List[str], title: str) -> str:
    lines = []
    for row in rows:
        cells = []
        for column in columns:
            value = row.value(r, column)
            missed = value is not None and row.missed(column, value)
            cells.append(figure(value, row.digits) + (" (missed)" if missed else ""))
        if any(cells):
            lines.append([row.text] + cells + [row.target()])
    names = [f"{c} thread{'s' * (c != '1')}" if c.isdigit() else c for c in columns]
    return table([title] + names + ["target"], lines) if lines else ""


def machine_line(r: Results) -> str:
    return (f"{r.machine('cpu')}, {r.machine('usable_cores')} cores, {r.machine('clock_ghz')} GHz, {r.machine('isa')}; "
            f"read bandwidth {r.machine('read_gbs_1')} GB/s with 1 thread, {r.machine('read_gbs_2')} with 2")


def report(r: Results) -> str:
    parts = [
        ("Decode attention, one query token, 32 query and 8 kv heads of 128 channels, 16384 tokens, cold caches, least "
         "of many calls, through KVCache", speed_table(r)),
        ("The same by context length", context_table(r, 1)),
        ("", context_table(r, 2)),
        ("Kernels alone, 16384 tokens, 1 thread", isa_table(r)),
        ("Kernels: rows with targets (base: K2V2, 16384 tokens, 32 query and 8 kv heads of 128 channels, groups of 32)",
         target_table(r, kernel_rows(), r.isas(), "kernels")),
        ("Through torch: rows with targets", target_table(r, cache_rows(), ["1", "2"], "KVCache and operators")),
    ]
    text = f"{machine_line(r)}\n"
    for title, body in parts:
        if body:
            text += (f"\n{title}:\n" if title else "") + f"\n{body}"
    return text


# ---- plot

def draw(r: Results, out: Path) -> None:
    script = Path(__file__).resolve().parent / "decode.gp"
    points = 0
    for threads in (1, 2):
        lines = ["# tokens, milliseconds: Kivi K2V2 fast, two fp32 matmuls, SDPA fp32, SDPA bf16, floor"]
        for tokens in CONTEXTS:
            ours = "K2V2/fast" if tokens > 256 else "all_exact/fast"
            values = [r.decode(what, tokens, threads, "min_ms") for what in (ours,) + BASELINES]
            over = r.decode(ours, tokens, threads, "x_floor")
            values.append(values[0] / over if values[0] is not None and over else None)
            points += sum(v is not None for v in values)
            lines.append(" ".join([str(tokens)] + ["nan" if v is None else f"{v:.6g}" for v in values]))
        (out / f"decode_{threads}.dat").write_text("\n".join(lines) + "\n")
    if points == 0:
        print("report: no decode rows of cache_bench in this run: nothing to plot")
        return
    if shutil.which("gnuplot") is None:
        print("report: NOT DRAWN: gnuplot is missing (Debian, Ubuntu: apt-get install gnuplot-nox); its data is in "
              f"{out}/decode_1.dat and decode_2.dat")
        return
    title = ("One decode step of one layer, 32 query and 8 kv heads of 128 channels: "
             f"{r.machine('cpu')}, {r.machine('isa')}")
    quoted = title.replace("_", "\\\\_").replace('"', "")
    done = subprocess.run(["gnuplot", "-e", f"title = \"{quoted}\"", str(script)], cwd=out, check=False)
    if done.returncode != 0:
        print(f"report: gnuplot ended with exit code {done.returncode}: no plot")
    else:
        print(f"report: {out}/decode.png and decode.svg")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where the programs are")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON, tables and plot")
    parser.add_argument("--quick", action="store_true", help="few shapes: does it run, are the results right?")
    parser.add_argument("--filter", help="only benchmarks whose name matches this regular expression")
    parser.add_argument("--no-run", action="store_true", help="take what the last run left")
    parser.add_argument("options", nargs="*", help="passed on to the programs, after --: -- --benchmark_min_time=1")
    args = parser.parse_args()
    # Quick results do not take the place of the real ones.
    args.bin, args.out = args.bin.resolve(), args.out.resolve() / ("quick" if args.quick else "")
    args.out.mkdir(parents=True, exist_ok=True)

    failed = [] if args.no_run else run_programs(args)
    results = Results(args.out)
    if not any(results.count(program) for program in PROGRAMS):
        failed.append("there is no result")
    failed += results.errors()
    text = report(results)
    if not args.quick:
        (args.out / "report.md").write_text(text)
        print("\n" + text)
        draw(results, args.out)
    for program in PROGRAMS:
        if results.count(program):
            print(f"report: {program}: {results.count(program)} results in {args.out}/{program}.json")
    for message in failed:
        print(f"report: FAILED: {message}")
    if not failed:
        print("report: all results were checked and are right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
