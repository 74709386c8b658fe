#!/usr/bin/env python3
"""Would the tests notice a mistake? Makes one small mistake after another in a copy of the sources (a < for a <=, a
dropped check, a wrong stride, a lost lock), builds what has changed and runs the tests of that part until one fails.

    tests/mutants.py                     all of them
    tests/mutants.py csrc/cpu ops/cache  those in files whose names begin so
    tests/mutants.py --list              what would be done

Ends with 1 if a mistake is not noticed that is not listed with the reason (`allowed`), or if one does not apply any
more. Everything happens below build/mutants; results are kept there and used again while neither sources nor tests
change. Barriers and waits of the CUDA kernels: tests/cuda/mutate.py.

The copy is built without AVX-512: vector kernels are one source for all instruction sets, and a third of the time to
compile. Tests run as they do in ctest, but for those that name the instruction sets of the build.
"""
import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from source_copy import copy_sources

ROOT = pathlib.Path(__file__).resolve().parents[1]
TREES = ["CMakeLists.txt", "CMakePresets.json", "cmake", "csrc", "include", "ops", "tests"]
TIMEOUT = 600  # seconds for one run of tests; a mistake may well be an endless loop


WITHOUT_AVX512 = [(b"HWY_DISABLED_TARGETS (", b"HWY_DISABLED_TARGETS (HWY_AVX3 | "), (b"return N_AVX3::attention_vnni", b"return nullptr"),
                  (b"return N_AVX3::attention", b"return nullptr"), (b"N_AVX3::function", b"N_AVX2::function")]


def without_avx512(name, content):
    if name.startswith("csrc/cpu/vector_") and name.endswith(".cpp"):
        for old, new in WITHOUT_AVX512:
            content = content.replace(old, new)
    return content


@dataclasses.dataclass
class Mutant:
    file: str
    old: str  # stands in the file once
    new: str
    tests: str  # names of TESTS, or programs of ops with a filter, in the order to try
    allowed: str = ""  # why no test need notice it


# Programs by short names: (build folder, target, arguments).
PROGRAMS = {
    "unit": ("kernels", "kivi_unit_tests"),
    "cuda": ("kernels", "kivi_cuda_tests"),
    "meta": ("torch", "kivi_meta_meta_test"),
}


def mutants():
    """In the order of the files. `tests`: "program" or "program:filter", tried one after the other."""
    m = Mutant
    unit, cuda = "unit:-*WhatRan*:*/avx512*", "cuda"
    return [
        # ---- the format
        m("include/kivi/format.h", "return round_up(f.residual_length, f.group_size) + f.group_size;",
          "return round_up(f.residual_length, f.group_size);", unit),
        m("csrc/format/group.h", "  if (!is_finite(span)) return r;\n", "", unit),
        m("csrc/format/group.h", "std::min(std::max(0.0f, rounded), top)", "std::max(0.0f, rounded)", unit),
        m("csrc/format/half.h", "(r + 0xFFFu + (r >> 13 & 1u)) >> 13", "(r + 0x1000u) >> 13", unit),
        m("csrc/format/half.h", "(rest == middle && (kept & 1u) != 0)", "rest == middle", unit),
        m("csrc/format/half.h", "if ((u & ~kFloatSign) > kFloatInf) return static_cast<uint16_t>(u >> 16 | 0x40u);\n", "", unit),
        m("csrc/format/keys.h", "if (p.causal && position + 1 < total)", "if (p.causal && position + 2 < total)", unit),
        m("csrc/format/keys.h", "seen.begin = position - p.window + 1;", "seen.begin = position - p.window;", unit),
        m("csrc/format/keys.h", "r.cached < sink_length ? r.cached : sink_length", "sink_length", unit),
        m("csrc/format/keys.h", "return r.cached + r.fresh - r.rows + query;", "return r.cached + query;", unit),
        # ---- scalar kernels and the plan
        m("csrc/cpu/plan.cpp", "- p.window + 1 - p.format.sink_length;", "- p.window + 1;", unit),
        m("csrc/cpu/plan.cpp", "std::max<int64_t>(begin, 0) / kPageTokens", "ceil_div(std::max<int64_t>(begin, 0), kPageTokens)", unit),
        m("csrc/cpu/plan.cpp", "item.num_pages = std::min(run, pages.count - done);", "item.num_pages = run;", unit),
        m("csrc/cpu/plan.cpp", "item.exact_keys = item.split == splits - 1;", "item.exact_keys = true;", unit),
        m("csrc/cpu/plan.cpp", "part[channels] == -kInfinity ? 0.0f : std::exp2(part[channels] - max)", "1.0f", unit),
        m("csrc/cpu/plan.cpp", "const float own = sum * shrink;", "const float own = sum;", unit),
        m("csrc/cpu/plan.cpp", "std::min(kMaxItemRows, rows - first_row)", "std::min(kMaxItemRows, rows)", unit),
        m("csrc/cpu/reference.cpp", "const float new_max = std::max(max, tile_max);", "const float new_max = tile_max;", unit),
        m("csrc/cpu/reference.cpp", "kept[i] = mask != -kInfinity;", "kept[i] = true;", unit),
        m("csrc/cpu/reference.cpp", "(t - p_.format.sink_length) % capacity", "t % capacity", unit),
        m("csrc/cpu/reference.cpp", "if (r.query < ranges_.rows) attend_tile(row, r);", "attend_tile(row, r);", unit,
          "finish_row gives 0 for rows that do not exist; this only saves the work"),
        m("csrc/cpu/reference.cpp", "first_ + slot - query_at", "first_ + slot", unit),
        # ---- vector kernels
        m("csrc/cpu/vector_rows-inl.h", "return !changes_scores && first >= all_begin && first + count <= all_end;",
          "return !changes_scores && first >= all_begin;", unit),
        m("csrc/cpu/vector_rows-inl.h", "x[i] = hn::IfThenZeroElse(hn::Eq(x[i], splat(-kInfinity)), p[i]);", "x[i] = p[i];", unit),
        m("csrc/cpu/vector_rows-inl.h", "if (sign != 0.0f) std::fill(row, row + channels, kQuietNaN);", "(void)sign;", unit),
        m("csrc/cpu/vector_rows-inl.h", "grows |= !hn::AllFalse(DF(), hn::And(saw, hn::Gt(after, before)));", "", unit),
        m("csrc/cpu/vector_rows-inl.h", "const int64_t end = std::min(channels, (g + 1) * group);", "const int64_t end = (g + 1) * group;",
          unit),
        m("csrc/cpu/vector_pages-inl.h", "if constexpr (kExact) z[v] = hn::MulAdd(s[v], splat(middle), z[v]);\n", "(void)middle;\n", unit),
        m("csrc/cpu/vector_pages-inl.h", "kMasked ? hn::IfThenZeroElse(hn::Eq(p[r][v], hn::Zero(DF())), z[v]) : z[v]", "z[v]", unit),
        m("csrc/cpu/vector_pages-inl.h", "hn::And(hn::Gt(x, splat(kTinyBound)), hn::Lt(x, splat(kHugeBound)))",
          "hn::Lt(x, splat(kHugeBound))", unit),
        m("csrc/cpu/vector_pages-inl.h", "least_amplitude = std::min(least_amplitude, int16_amplitude(k.channels, k.bits));",
          "least_amplitude = int16_amplitude(k.channels, k.bits);", unit),
        m("csrc/cpu/vector_pages-inl.h", "v_shape.lines = std::min(lines - line, group_lines);", "v_shape.lines = group_lines;", unit),
        m("csrc/cpu/vector_group-inl.h", "range.probe = hn::MulAdd(x, splat(0.0f), range.probe);\n", "", unit),
        m("csrc/cpu/vector_group-inl.h", "hn::Min(hn::Max(position, splat(0.0f)), levels);\n  return", "hn::Max(position, splat(0.0f));\n  (void)levels;\n  return",
          unit),
        m("csrc/cpu/vector_group-inl.h", "const MF better = hn::And(hn::Lt(other.error, best.error), other.valid);",
          "const MF better = hn::Lt(other.error, best.error);", unit),
        m("csrc/cpu/vector_group-inl.h", "t.error = hn::Add(hn::Add(x.square, of_scale), hn::Mul(number, hn::Mul(offset, offset)));",
          "t.error = hn::Add(x.square, of_scale);", unit),
        m("csrc/cpu/vector_decode-inl.h", "std::min<int64_t>(span * kBits + first * kBits / 32 + i, last)",
          "(span * kBits + first * kBits / 32 + i + 0 * last)", unit),
        m("csrc/cpu/vector_decode-inl.h", "codes.at(std::min<int64_t>(s * kSpan + n * kLanes, last_at(last_codes)))",
          "codes.at(s * kSpan + n * kLanes + 0 * last_codes)", unit),
        m("csrc/cpu/vector_record-inl.h", "clear(r.k_zero + k_bytes, r.v_codes[0]);\n", "", unit),
        m("csrc/cpu/vector_record-inl.h", "fit = encode_keys_of_bits<kType>(one, true) && fit;", "fit = encode_keys_of_bits<kType>(one, true);",
          unit),
        m("csrc/cpu/vector_record-inl.h", "const int64_t last_valid = f.value_head_dim - (num_strips - 1) * kLine;\n",
          "const int64_t last_valid = kLine;\n", unit),
        # ---- CUDA kernels, in the emulator
        m("csrc/cuda/append.cu", "const int64_t in_window = job.known > token ? job.known - token : 0;",
          "const int64_t in_window = 0;", cuda + ":*Append*"),
        m("csrc/cuda/append.cu", "packed = out[at] | packed << code_bit(width, job.first % per_word);",
          "packed = packed << code_bit(width, job.first % per_word);", cuda + ":*Append*"),
        m("csrc/cuda/append.cu", "zero_section_end(job, layout.k_zero, used, alignment);\n", "", cuda + ":*Append*"),
        m("csrc/cuda/attention_merge.cu", "if (states[i].is_empty()) continue;\n", "", cuda + ":*Attention*"),
        m("csrc/cuda/attention_merge.cu", "if (query >= ranges.rows) {", "if (query > ranges.rows) {", cuda + ":*Attention*"),
        m("csrc/cuda/attention_generic.cu", "if (AllSeen || !(w.get(i, r) < 0.0f)) sum[r]", "sum[r]", cuda + ":*Attention*"),
        m("csrc/cuda/attention_generic.cu", "(position - p_.format.sink_length) % capacity", "position % capacity", cuda + ":*Attention*"),
        # ---- operators
        m("ops/checks.h", "TORCH_CHECK_VALUE(t.sym_size(dim) == expected,", "TORCH_CHECK_VALUE(t.sym_size(dim) >= expected,", "errors"),
        m("ops/checks.h", "TORCH_CHECK(t.device() == device,", "TORCH_CHECK(true || t.device() == device,", "errors"),
        m("ops/checks.h", "TORCH_CHECK_VALUE(std::isfinite(value),", "TORCH_CHECK_VALUE(!std::isnan(value),", "errors"),
        m("ops/checks.h", "axis >= -rank && axis < rank", "axis >= -rank && axis <= rank", "errors"),
        m("ops/cache_args.cpp", "TORCH_CHECK_VALUE(o.softcap >= 0,", "TORCH_CHECK_VALUE(true,", "errors"),
        m("ops/cache_args.cpp", "fits = size == 1 || size == target[3 - i];", "fits = size <= target[3 - i];", "errors cases_attention"),
        m("ops/cache_args.cpp", "  check_size(names.v, v, 1, \"head count\", f.num_kv_heads, \"the cache has num_kv_heads\");\n", "", "errors"),
        m("ops/cache_args.cpp", "first == last || first >= end || last <= begin", "first == last || first != begin", "errors"),
        m("ops/lazy_views.cpp", "TORCH_CHECK_VALUE(!is_written,", "TORCH_CHECK_VALUE(true,", "operators"),
        m("ops/quantize_shapes.h", "TORCH_CHECK_VALUE(codes.sym_size(axis) == bytes,", "TORCH_CHECK_VALUE(codes.sym_size(axis) >= bytes,",
          "errors quantize cases_quantize"),
        m("ops/quantize_call.h", "p.scale_strides[i] = call.scale.tensor.stride(i);", "p.scale_strides[i] = call.zero.tensor.stride(i);",
          "quantize cases_quantize"),
        m("ops/quantize_call.h", "p.x_inner_stride = call.x.tensor.stride(2);", "p.x_inner_stride = 1;", "quantize cases_quantize"),
        m("ops/attention_call.cpp", "params.mask_strides[i] = mask.stride(i);", "params.mask_strides[i] = i == 1 ? 0 : mask.stride(i);",
          "attention attention_options cases_attention"),
        m("ops/attention_call.cpp", "p.q_row_stride = call.q.stride(2);", "p.q_row_stride = format.head_dim;", "attention cases_attention"),
        m("ops/attention_call.cpp", "call.slopes.dim() == 2 ? call.slopes.stride(0) : 0", "0", "attention_options cases_attention"),
        m("ops/attention_call.cpp", "static_cast<double>(format.head_dim)", "static_cast<double>(format.value_head_dim)", "attention cases_attention"),
        m("ops/attention_call.cpp", "  p.rows_follow_new = true;\n", "", "attention_options cache_rows"),
        m("ops/attention_call.cpp", "p.window = std::min(options.window, kMaxWindow);", "p.window = options.window;", "attention_options"),
        m("ops/cache_args.h", "TORCH_CHECK_VALUE(count < kMaxTokens - before,", "TORCH_CHECK_VALUE(true,", "errors"),
        m("ops/cache_order.cpp", "      score = at::nan_to_num(score, 0.0);", "", "recipes"),
        m("ops/attention_cpu.cpp", "lengths[b] >= 0 && lengths[b] <= tokens", "lengths[b] <= tokens", "errors"),
        m("ops/meta.cpp", "{batch, q.sym_size(1), q.sym_size(2), format.value_head_dim}", "{batch, q.sym_size(1), q.sym_size(2), format.head_dim}",
          "meta"),
        m("ops/options.cpp", "  check_free(options.v_rotated == defaults.v_rotated, \"v_rotated\");\n", "", "recipes errors"),
        m("ops/cache_cpu.cpp", "    if (m > 0) check_order(b);\n", "", "errors recipes operators"),
        m("ops/cache_cpu.cpp", "for (int64_t t = known; t < token + group; t++) store_window", "for (int64_t t = known; t + 1 < token + group; t++) store_window",
          "cache"),
        m("ops/cache_cpu.cpp", "std::max(r.quantized_before, quantized_count(cache.format, r.after))", "quantized_count(cache.format, r.after)",
          "operators cache cache_rows"),
        m("ops/cache_cpu.cpp", "  std::memset(at(v, n, vb), 0, static_cast<size_t>(length - n) * vb);\n", "", "cache cache_rows"),
        m("ops/cache_cpu.cpp", "if (whole < cache.quantized[b]) {", "if (whole <= cache.quantized[b]) {", "cache cache_rows"),
        m("ops/cache_cpu.cpp", "if (!encode_item(item)) fits.store(false, std::memory_order_relaxed);", "encode_item(item);", "recipes cache errors"),
        m("ops/cache_cpu.cpp", "TORCH_CHECK_VALUE(written.count(s[i]) == 0,", "TORCH_CHECK_VALUE(true,", "errors"),
        # ---- the class
        m("ops/cache_class.cpp", "data[b] >= 0 && data[b] <= tokens, \"lengths[\"", "data[b] <= tokens, \"lengths[\"", "errors cases_cache",
          allowed="the operator checks them again, with the same words"),
        m("ops/cache_class.cpp", " && o.softcap == 0 && o.window == 0;", " && o.softcap == 0;", "attention_options cache cases_attention"),
        m("ops/cache_class.cpp", "  if (!o.is_causal || v.size(2) == 1) return true;\n", "  return true;\n", "cases_attention attention cache"),
        m("ops/cache_class.cpp", "*s.overflow.mutable_data_ptr<int32_t>() = 0", "0", "cache recipes"),
        m("ops/cache_class.cpp", "  TORCH_CHECK_VALUE(q.size(2) == k.size(2), \"q has \"", "  TORCH_CHECK_VALUE(true, \"q has \"", "errors cache"),
        m("ops/cache_class.cpp", "    drop_unused_pages(s, b);\n", "", "cache_rows memory histories"),
        m("ops/cache_class.cpp", "std::max(quantized[b], quantized_count(s.format, lengths[b]))", "quantized_count(s.format, lengths[b])",
          "cache cache_rows histories"),
        m("ops/cache_class.cpp", "  if (storage.started && !has_unordered_rows(storage)) return append_all(current());\n",
          "  if (storage.started) return append_all(current());\n", "allocation"),
        m("ops/cache_class.cpp", "  const Writing writing(*impl_);\n  const Storage& s = impl_->storage;\n  check_tensor(\"k\", k);\n  check_tensor(\"v\", v);\n  if (q)",
          "  const Storage& s = impl_->storage;\n  if (q)", "threads"),
        m("ops/cache_class.cpp", "  check_only_copy();\n", "", "cases_framework"),
        m("ops/cache_storage.cpp", "if (s.page_users[page] - copies > 1) shared.push_back({b, i});", "if (s.page_users[page] - copies > 2) shared.push_back({b, i});",
          "cache_rows"),
        m("ops/cache_storage.cpp", "      drop_page(s, entry);\n", "", "cache_rows memory histories"),
        m("ops/cache_storage.cpp", "std::max(missing, old_pages / 4)", "missing", "memory"),
        m("ops/cache_storage.cpp", "for (int64_t i = s.quantized[b] / kPageTokens; i < std::min", "for (int64_t i = s.quantized[b] / kPageTokens + 1; i < std::min",
          "cache_rows"),
        m("ops/cache_order.cpp", "return score[a] > score[b];", "return score[a] < score[b];", "recipes recipe_reference"),
        m("ops/cache_order.cpp", "score = score * squares;", "{\n      }", "recipes recipe_reference"),
        m("ops/cache_order.cpp", "    s.ordered[b] = 1;\n", "", "recipes histories"),
        # ---- the saved state
        m("ops/cache_state.cpp", "page = std::max(page, std::min(kPageTokens, quantized[b] - i * kPageTokens) / f.group_size);",
          "page = std::min(kPageTokens, quantized[b] - i * kPageTokens) / f.group_size;", "state cache_rows histories"),
        m("ops/cache_state.cpp", "TORCH_CHECK_VALUE(now == ints[kChecksumAt],", "TORCH_CHECK_VALUE(true || now == ints[kChecksumAt],", "state file"),
        m("ops/cache_state.cpp", "page >= 0 && page <= pages,", "page >= 0,", "state"),
        m("ops/cache_state.cpp", "std::min(row.window - i, capacity - slot)", "row.window - i", "state"),
        m("ops/cache_state.cpp", "  TORCH_CHECK_VALUE(!ints.empty() && ints[0] == kStateVersion,", "  TORCH_CHECK_VALUE(!ints.empty() && ints[0] >= 2,", "state"),
        m("ops/cache_file.cpp", "(n == 0 || numel <= most / n)", "true", "file"),
        m("ops/cache_file.cpp", "    TORCH_CHECK_VALUE(left_ == 0,", "    TORCH_CHECK_VALUE(true,", "file"),
        m("ops/cache_file.cpp", "TORCH_CHECK_VALUE(n <= left_ / sizeof(Word) / words,", "TORCH_CHECK_VALUE(true,", "file"),
        m("ops/atomic_file.cpp", "partial_(path_ + \".partial\")", "partial_(path_)", "file"),
        m("ops/atomic_file.cpp", "if (flock(file.number(), LOCK_EX | LOCK_NB) != 0) {", "if (false) {", "file"),
        m("ops/atomic_file.cpp", "  if (file_.is_open()) unlink(partial_.c_str());\n", "", "file"),
        m("ops/atomic_file.cpp", "if (replaces && fchmod(file_.number(), there.st_mode & 07777) != 0)", "if (false)", "file"),
    ]


def program_of(name):
    return PROGRAMS.get(name, ("torch", f"kivi_ops_{'cache_memory' if name == 'memory' else name}_test"))


class Scratch:
    """A copy of the sources, and what is built from it: kernels without torch, and the operators."""

    def __init__(self):
        self.folder = ROOT / "build/mutants"
        self.source = self.folder / "source"
        self.hash = copy_sources(ROOT, TREES, self.source, without_avx512)

    def configure(self, kinds):
        for kind in kinds:
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DKIVI_BUILD_EXAMPLES=OFF", "-DKIVI_BUILD_BENCH=OFF", "-DKIVI_WITH_CUDA=OFF",
                       f"-DKIVI_WITH_TORCH={'ON' if kind == 'torch' else 'OFF'}"]
            run = subprocess.run(["cmake", "-G", "Ninja", "-S", self.source, "-B", self.folder / kind, *options], capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"mutants: cmake failed\n{run.stdout}{run.stderr}")

    def build(self, kind, targets, jobs):
        """None, or what the compiler says."""
        command = ["cmake", "--build", self.folder / kind, "-j", str(jobs), "--target", *targets]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if run.returncode == 0:
            return None
        return (re.search(r"error: ([^\n]+)", run.stdout) or ["", "it does not build"])[1]

    def test(self, name):
        """None if the tests pass, else the first words of what is wrong."""
        program, _, chosen = name.partition(":")
        kind, target = program_of(program)
        environment = dict(os.environ, KIVI_HISTORIES="300")
        command = [self.folder / kind / "bin" / target, "--gtest_fail_fast", "--gtest_brief=1"] + ([f"--gtest_filter={chosen}"] if chosen else [])
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, env=environment)
        except subprocess.TimeoutExpired:
            return f"no end within {TIMEOUT} s"
        if run.returncode == 0:
            return None if re.search(r"\[  PASSED  \] [1-9]", run.stdout) else "no test has run"
        failed = re.search(r"\[  FAILED  \] ([^\s(]+)", run.stdout)
        return failed[1] if failed else f"{target} ends with {run.returncode}"


def attempt(scratch, mutant, jobs):
    """(noticed by, words), or (None, "")."""
    path = scratch.source / mutant.file
    original = path.read_text()
    try:
        path.write_text(original.replace(mutant.old, mutant.new))
        for test in mutant.tests.split():
            kind, target = program_of(test.partition(":")[0])
            # Programs of ops load the library; only the kernels' own tests contain what they test.
            words = scratch.build(kind, ["kivi"] if kind == "torch" and target.startswith("kivi_ops") and
                                  not mutant.file.startswith(("include", "csrc/format", "tests")) else [target], jobs)
            if words:
                return "compiler", words
            words = scratch.test(test)
            if words:
                return test.partition(":")[0], words
        return None, ""
    finally:
        path.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only files whose names begin so")
    parser.add_argument("--list", action="store_true", help="only list the mistakes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    options = parser.parse_args()

    chosen = [m for m in mutants() if not options.files or m.file.startswith(tuple(options.files))]
    stale = [m for m in chosen if (ROOT / m.file).read_text().count(m.old) != 1]
    for m in stale:
        print(f"mutants: {m.file}: what is to be changed is not there once: {m.old!r}")
    if options.list or stale or not chosen:
        for m in chosen if options.list else []:
            print(f"{m.file}: {' '.join(m.old.split())}  ->  {' '.join(m.new.split()) or 'nothing'}  [{m.tests}]")
        print(f"mutants: {len(chosen)} mistakes, {len(stale)} of them to be written anew")
        return 1 if stale or not chosen else 0

    scratch = Scratch()
    store = scratch.folder / "results.json"
    results = {} if options.fresh or not store.exists() else json.loads(store.read_text())
    keys = [hashlib.sha256(f"{scratch.hash} {m.file} {m.old} {m.new} {m.tests}".encode()).hexdigest() for m in chosen]
    if any(key not in results for key in keys):
        tests = sorted({test for m in chosen for test in m.tests.split()})
        targets = {}
        for test in tests:
            kind, target = program_of(test.partition(":")[0])
            targets.setdefault(kind, set()).add(target)
        scratch.configure(targets)
        for kind, names in targets.items():
            print(f"mutants: building {len(names)} programs ({kind})", flush=True)
            words = scratch.build(kind, sorted(names), options.jobs)
            if words:
                sys.exit(f"mutants: the sources do not build as they are: {words}")
        for test in tests:
            start = time.monotonic()
            words = scratch.test(test)
            if words:
                sys.exit(f"mutants: the tests {test} fail as they are: {words}")
            print(f"mutants: tests pass as they are ({time.monotonic() - start:.1f} s): {test}", flush=True)

    survivors, allowed = [], 0
    for i, (m, key) in enumerate(zip(chosen, keys), 1):
        start = time.monotonic()
        if key not in results:
            results[key] = attempt(scratch, m, options.jobs)
            store.write_text(json.dumps(results))
        by, words = results[key]
        if not by and m.allowed:
            allowed += 1
        elif not by:
            survivors.append(m)
        verdict = f"{by}: {words}" if by else f"allowed: {m.allowed}" if m.allowed else "NOT NOTICED"
        change = f"{' '.join(m.old.split())[:70]} -> {' '.join(m.new.split())[:50] or 'nothing'}"
        print(f"[{i}/{len(chosen)}] {time.monotonic() - start:5.1f} s  {m.file}: {change}  {verdict}", flush=True)
    noticed = len(chosen) - len(survivors) - allowed
    print(f"mutants: {noticed} of {len(chosen)} noticed ({100 * noticed / len(chosen):.1f} %), {allowed} allowed")
    for m in survivors:
        print(f"NOT NOTICED: {m.file}: {m.old} -> {m.new}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
