#!/usr/bin/env python3
"""Would the tests notice a lost barrier? Deletes each synchronisation of the CUDA kernels in turn (__syncthreads and
its kin, __syncwarp, cp_async_wait, __threadfence) in a copy of the sources, builds the emulated tests, and runs those
of the kernel, with random orders of warps and then, for what that does not notice, under ThreadSanitizer.

    tests/cuda/mutate.py                        all of csrc/cuda
    tests/cuda/mutate.py csrc/cuda/append.cu    one file; also FILE:LINE
    tests/cuda/mutate.py --list                 what would be deleted

Ends with 1 if a deletion is not noticed and not in ALLOWED below, with 77 where there are no CUDA headers. Everything happens below build/mutate; results are
kept there and used again while no source changes, so that a run that was stopped goes on where it was.
"""
import argparse
import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from source_copy import copy_sources
TREES = ["CMakeLists.txt", "CMakePresets.json", "cmake", "csrc", "include", "tests"]  # what the tests are built from

# What need not be noticed: (file, text of the line, why). The text is the whole line, without space around it; it holds
# for every such line of the file.
ALLOWED = []

# Whose tests a file is covered by, where that is not tests/cuda/<name>_test.cpp: pattern of the file's name, tests.
TESTS = [
    ("attention_tensor*", ["attention_tensor"]),
    ("attention*", ["attention", "attention_bits"]),
    ("storage.h", ["append", "records"]),
    ("sample_kernel.h", ["emulator"]),
]

CALL = re.compile(r"__syncthreads(?P<kind>_count|_or|_and)?\s*\(|__syncwarp\s*\(|__threadfence(_block)?\s*\(|"
                  r"\bcp_async_wait\s*<[^<>]*>\s*\(")


@dataclasses.dataclass
class Mutant:
    file: str  # relative to the root
    line: int
    what: str
    code: str  # the line
    text: str  # of the whole file, mutated

    @property
    def place(self):
        return f"{self.file}:{self.line}"


def without_comments(text):
    """The same text with blanks for comments and strings, so that places stay where they are."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def closing(code, opening):
    depth = 0
    for i in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    raise ValueError("a parenthesis is never closed")


def mutants_of(file):
    """A call goes, what it evaluates stays: __syncthreads_or(x) becomes (x), of the thread alone."""
    text = (ROOT / file).read_text()
    if file == "csrc/cuda/device.h":
        return  # the wrappers themselves
    code = without_comments(text)
    for match in CALL.finditer(code):
        end = closing(code, match.end() - 1)
        own = text[match.end() : end]
        left = {"_count": f"(({own}) ? 1 : 0)", "_or": f"({own})", "_and": f"({own})"}.get(match["kind"], "")
        line = text.count("\n", 0, match.start()) + 1
        yield Mutant(file, line, text[match.start() : end + 1], text.splitlines()[line - 1].strip(),
                     text[: match.start()] + left + text[end + 1 :])


def chosen(arguments):
    """Files, each with the lines that were named, or none for all."""
    if not arguments:
        sources = sorted(p for p in (ROOT / "csrc/cuda").iterdir() if p.suffix in (".cu", ".h"))
        return {str(p.relative_to(ROOT)): set() for p in sources}
    files = {}
    for argument in arguments:
        name, _, line = argument.partition(":")
        path = pathlib.Path(name).resolve()
        if not path.is_file():
            sys.exit(f"mutate: there is no file {name}")
        files.setdefault(str(path.relative_to(ROOT)), set()).update({int(line)} if line else set())
    return files


def test_filter(file):
    """The suites of the test files that cover a source."""
    name = pathlib.Path(file).name
    stems = [pathlib.Path(name).stem] + next((tests for pattern, tests in TESTS if fnmatch.fnmatch(name, pattern)), [])
    suites = set()
    for stem in stems:
        path = ROOT / f"tests/cuda/{stem}_test.cpp"
        if path.exists():
            suites.update(re.findall(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST)\((\w+),", path.read_text(), re.M))
    # Death tests make mistakes on purpose, and cost seconds.
    suites = sorted(suite for suite in suites if not suite.endswith("DeathTest"))
    names = [pattern.replace("@", suite) for suite in suites for pattern in ("@.*", "@/*", "*/@.*")]
    return ":".join(names) if names else "*-*DeathTest*"


class Scratch:
    """A copy of the sources with build folders beside it."""

    def __init__(self, tsan):
        self.folder = ROOT / "build/mutate"
        self.source = self.folder / "source"
        self.kinds = ["release"] + (["tsan"] if tsan else [])
        self.hash = copy_sources(ROOT, TREES, self.source)

    def configure(self):
        # One tensor-core format of each kind, as under sanitizers: a header of theirs is compiled for each of them.
        flags = {"release": ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-DKIVI_TENSOR_FEW_FORMATS"],
                 "tsan": ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g",
                          "-DKIVI_SANITIZE=thread"]}
        for kind in self.kinds:
            command = ["cmake", "-S", self.source, "-B", self.folder / kind, "-G", "Ninja", "-DKIVI_WITH_TORCH=OFF",
                       "-DKIVI_BUILD_BENCH=OFF", "-DKIVI_WERROR=OFF", *flags[kind]]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"mutate: cmake failed\n{run.stdout}{run.stderr}")
            if "kernels are not tested" in run.stdout:
                print(f"mutate: SKIPPED: {re.search('Kivi: (the CUDA kernels are not tested.*)', run.stdout)[1]}")
                sys.exit(77)

    def build(self, kind, jobs):
        command = ["cmake", "--build", self.folder / kind, "--target", "kivi_cuda_tests", "-j", str(jobs)]
        return subprocess.run(command, capture_output=True, text=True)

    def test(self, kind, tests, orders, timeout):
        """None if the tests pass, else what is said first."""
        command = [self.folder / kind / "bin/kivi_cuda_tests", f"--gtest_filter={tests}", "--gtest_fail_fast"]
        environment = dict(os.environ)
        environment.pop("KIVI_CUDA_ORDERS", None)
        if kind == "tsan":
            setarch = shutil.which("setarch")  # randomised addresses are more than older sanitizers can take
            command = ([setarch, "-R"] if setarch else []) + command
        else:
            environment["KIVI_CUDA_ORDERS"] = orders
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout,
                                 env=environment)
        except subprocess.TimeoutExpired:
            return f"no end within {timeout} s"
        if run.returncode:
            return first_words(run.stdout + run.stderr, run.returncode)
        return None if re.search(r"\[  PASSED  \] [1-9]", run.stdout) else "no test has run"


def first_words(output, code):
    for pattern in (r"ThreadSanitizer: ([\w -]+?) \(", r"C\+\+ exception with description \"([^\"]+)",
                    r"\[  FAILED  \] ([^\s(]+)"):
        found = re.search(pattern, output)
        if found:
            return found[1][:100]
    return f"exit code {code}"


def try_mutant(scratch, mutant, options):
    """(noticed by, words), or (None, "")."""
    target = scratch.source / mutant.file
    original = target.read_text()
    try:
        target.write_text(mutant.text)
        for kind in scratch.kinds:
            build = scratch.build(kind, options.jobs)
            if build.returncode:
                return "compiler", (re.search(r"error: ([^\n]+)", build.stdout) or ["", "?"])[1]
            words = scratch.test(kind, test_filter(mutant.file), options.orders, options.timeout)
            if words:
                return {"release": "orders", "tsan": "tsan"}[kind], words
        return None, ""
    finally:
        target.write_text(original)


def check_unmutated(scratch, files, options):
    for kind in scratch.kinds:
        print(f"mutate: building ({kind})", flush=True)
        build = scratch.build(kind, options.jobs)
        if build.returncode:
            sys.exit(f"mutate: the sources do not build as they are\n{build.stdout[-4000:]}")
        for tests in sorted({test_filter(file) for file in files}):
            start = time.monotonic()
            words = scratch.test(kind, tests, options.orders, options.timeout)
            if words:
                sys.exit(f"mutate: the tests {tests} fail as they are: {words}")
            print(f"mutate: {kind}: tests pass as they are ({time.monotonic() - start:.1f} s): {tests}", flush=True)


def allowed(mutant):
    return next((why for file, code, why in ALLOWED if file == mutant.file and code == mutant.code), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:LINE]", help="kernel sources; none: all of csrc/cuda")
    parser.add_argument("--list", action="store_true", help="only list what would be deleted")
    parser.add_argument("--no-tsan", action="store_true", help="without ThreadSanitizer, which alone sees some")
    parser.add_argument("--orders", default="random_warps:5", help="KIVI_CUDA_ORDERS of the first run (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (%(default)s)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one run of the tests (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    options = parser.parse_args()

    files = chosen(options.files)
    mutants = [m for file, lines in files.items() for m in mutants_of(file) if not lines or m.line in lines]
    if options.list or not mutants:
        for mutant in mutants:
            print(f"{mutant.place}: {mutant.what}  [{allowed(mutant) or test_filter(mutant.file)}]")
        print(f"mutate: {len(mutants)} synchronisations in {len(files)} files")
        return 0

    scratch = Scratch(not options.no_tsan)
    store = scratch.folder / "results.json"
    results = {} if options.fresh or not store.exists() else json.loads(store.read_text())

    def key(m):
        return hashlib.sha256(f"{scratch.hash} {options.orders} {scratch.kinds} {m.file} {m.text}".encode()).hexdigest()

    if any(key(m) not in results for m in mutants):
        scratch.configure()
        check_unmutated(scratch, {m.file for m in mutants}, options)

    unnoticed = []
    for i, mutant in enumerate(mutants, 1):
        start = time.monotonic()
        if key(mutant) not in results:
            results[key(mutant)] = try_mutant(scratch, mutant, options)
            store.write_text(json.dumps(results))
        by, words = results[key(mutant)]
        why = allowed(mutant)
        verdict = f"{by}: {words}" if by else f"allowed: {why}" if why else "NOT NOTICED"
        if not by and not why:
            unnoticed.append(mutant)
        seconds = time.monotonic() - start
        print(f"[{i}/{len(mutants)}] {seconds:5.1f} s  {mutant.place}  {mutant.what}  {verdict}", flush=True)

    print(f"mutate: {len(mutants) - len(unnoticed)} of {len(mutants)} noticed or allowed")
    for mutant in unnoticed:
        print(f"NOT NOTICED: {mutant.place}: {mutant.code}")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
