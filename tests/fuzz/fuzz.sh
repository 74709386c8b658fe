#!/usr/bin/env bash
# Builds the fuzz targets (preset fuzz: clang++, AddressSanitizer, UndefinedBehaviorSanitizer) and runs each of them, as many at once as there
# are cores.
#
#   tests/fuzz/fuzz.sh [seconds] [target...]   each for so long (3600); targets: format state file operators. Fails if one of them finds a fault.
#   tests/fuzz/fuzz.sh --merge [target...]     minimises what was found, and the committed inputs, into tests/fuzz/corpus
#
# What is found stays in build/fuzz/fuzz/<target> and is where the next run starts; an input that fails is written to
# build/fuzz/fuzz/<target>-faults, the output to build/fuzz/fuzz/<target>.log.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=3600 merge=0
if [[ "${1:-}" == --merge ]]; then
  merge=1
  shift
elif [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  seconds="$1"
  shift
fi
targets=("$@")
((${#targets[@]})) || targets=(format state file operators)

work=build/fuzz/fuzz
cores="$(nproc)"  # before OMP_NUM_THREADS, which it obeys
# An allocation that is too large is an error of torch's, which the library must pass on; one thread, so that an input always runs alike.
export ASAN_OPTIONS="allocator_may_return_null=1:max_allocation_size_mb=2048:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export OMP_NUM_THREADS=1
options=(-timeout=10 -rss_limit_mb=4096)

# Address space randomisation of newer kernels is more than the sanitizers of older compilers can take.
fuzzer() {
  local target="$1" longest=512
  shift
  [[ "$target" != file ]] || longest=4096
  setarch "$(uname -m)" -R "build/fuzz/bin/kivi_fuzz_$target" "${options[@]}" -max_len="$longest" "$@"
}

fuzz() {
  local target="$1" log="$work/$1.log" code=0
  fuzzer "$target" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="$work/$target-faults/" \
    "$work/$target" "tests/fuzz/corpus/$target" >"$log" 2>&1 || code=$?
  if ((code)); then
    echo "fuzz: $target: FAILED (exit code $code); the end of $log:"
    tail -n 60 "$log"
    return 1
  fi
  echo "fuzz: $target: $(grep -E '^stat::number_of_executed_units' "$log" | tr -s ' '), $(grep -E '^#[0-9]+.*cov:' "$log" | tail -n 1)"
}

# Few and small inputs that reach every edge that all of them reach.
minimise() {
  local target="$1" corpus="tests/fuzz/corpus/$1"
  rm -rf "$work/$target-merged"
  mkdir -p "$work/$target-merged"
  fuzzer "$target" -set_cover_merge=1 -use_counters=0 "$work/$target-merged" "$corpus" "$work/$target"
  find "$corpus" -type f -not -name 'fault-*' -delete
  # They are written in the order of what they add: the first ones do most, and are enough for a replay in every build.
  (cd "$work/$target-merged" && ls -tr | head -n 150) | while read -r name; do cp "$work/$target-merged/$name" "$corpus"; done
  echo "fuzz: $target: $(find "$corpus" -type f | wc -l) inputs of $(cat "$corpus"/* | wc -c) bytes in $corpus"
}

cmake --preset fuzz
cmake --build --preset fuzz
failed=0
running=0
for target in "${targets[@]}"; do
  mkdir -p "$work/$target" "$work/$target-faults" "tests/fuzz/corpus/$target"
  if ((merge)); then
    minimise "$target"
    continue
  fi
  if ((running == cores)); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  fuzz "$target" &
  running=$((running + 1))
done
for ((; running > 0; running--)); do wait -n || failed=1; done
exit "$failed"
