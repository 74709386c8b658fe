#!/usr/bin/env bash
# Which lines of csrc, include and ops the tests reach, by gcov: builds the preset `coverage`, runs its tests, and prints a line for each
# file with those that no test reaches. Fails below the limit. The CUDA kernels and operators count as the emulator runs them; only what
# registers them for a real device is left out.
#
#   tests/coverage.sh           builds, runs and prints
#   tests/coverage.sh --report  prints again what was measured
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
limit=95
command -v gcovr >/dev/null || {
  echo "coverage: gcovr is missing. Install it: apt-get install gcovr" >&2
  exit 1
}
if [[ "${1-}" != --report ]]; then
  cmake --preset coverage
  cmake --build --preset coverage
  find build/coverage -name '*.gcda' -delete
  ctest --preset coverage
fi
# Several objects hold a header or a template: a line counts where one of them reached it.
gcovr --root . --object-directory build/coverage --filter csrc/ --filter include/ --filter ops/ \
  --exclude ops/cuda_registration.cpp --exclude-unreachable-branches --txt - --fail-under-line "$limit" \
  --print-summary
