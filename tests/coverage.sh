#!/usr/bin/env bash
# Which lines of csrc, include and ops the tests reach, by gcov: builds the preset `coverage`, runs all tests but those of the installed
# package, and prints for each file the lines that no test reaches. Fails below 95 %. The CUDA kernels and operators count as the emulator runs
# them; only what registers them for a real device is left out.
#
#   tests/coverage.sh           builds, runs and prints
#   tests/coverage.py build/coverage   prints again what was measured
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cmake --preset coverage
cmake --build --preset coverage
find build/coverage -name '*.gcda' -delete
ctest --preset coverage
tests/coverage.py build/coverage
