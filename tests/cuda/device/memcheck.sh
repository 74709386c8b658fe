#!/usr/bin/env bash
# The tests on a device under each tool of compute-sanitizer. Usage: tests/cuda/device/memcheck.sh [build folder] [gtest filter]
set -euo pipefail
build="${1:-build/release}"
filter="${2:-*}"
command -v compute-sanitizer >/dev/null || { echo "memcheck.sh: compute-sanitizer is not on PATH (it comes with the CUDA toolkit)" >&2; exit 77; }
for tool in memcheck racecheck synccheck initcheck; do
  echo "==== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/bin/kivi_cuda_device_tests" --gtest_brief=1 --gtest_filter="$filter"
done
