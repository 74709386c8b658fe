#!/usr/bin/env bash
# Installs Kivi into a folder of its own and uses it as its users do, with one compiler:
#   1. a CMake project that names nothing of kivi, linked with --as-needed;
#   2. the same source by a plain compiler command: with a kivi header it finds the operators, and without one by dlopen;
#   3. a torch of another minor version is refused with a sentence;
#   4. the examples, built against the installed package and run.
#
#   install_test.sh CMAKE BUILD COMPILER        ends with 77 (skipped) if the compiler is not there
set -euo pipefail
cmake="$1" build="$(cd "$2" && pwd)" compiler="$3"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source="$(cd "$here/../.." && pwd)"

if ! command -v "$compiler" >/dev/null; then
  echo "SKIPPED: $compiler is not installed (apt-get install clang)"
  exit 77
fi

work="$build/install_test/$compiler"
prefix="$work/prefix"
rm -rf "$work"
mkdir -p "$work"
step() { echo "---- $*"; }
fail() {
  echo "FAILED: $*"
  exit 1
}

step "install"
"$cmake" --install "$build" --prefix "$prefix" >"$work/install.log" || { cat "$work/install.log" && exit 1; }
library="$(find "$prefix" -name libkivi.so)"
package="$(dirname "$(find "$prefix" -name KiviConfig.cmake)")"
for header in "$source"/include/kivi/*.h; do
  [[ -f "$prefix/include/kivi/$(basename "$header")" ]] || fail "$(basename "$header") is not installed"
done
torch="$(sed -n 's/^KIVI_TORCH_FOLDER:INTERNAL=//p' "$build/CMakeCache.txt")"
standard="$(sed -n 's/^set(Kivi_CXX_STANDARD "\(.*\)")$/\1/p' "$package/KiviConfig.cmake")"

# Configures and builds a project against the installed package.
build_project() {
  local name="$1" folder="$2"
  shift 2
  "$cmake" -G Ninja -S "$folder" -B "$work/$name" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_PREFIX_PATH="$prefix" "$@"
  "$cmake" --build "$work/$name"
}

step "a CMake project that names nothing of kivi"
build_project consumer "$here"
"$work/consumer/consumer"

step "plain $compiler with a kivi header, linked with --as-needed"
flags=("-std=c++$standard" -O1 -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -I "$prefix/include")
link=("-Wl,--as-needed" "-L$(dirname "$library")" -lkivi "-L$torch/lib" -ltorch_cpu -lc10 "-Wl,-rpath,$(dirname "$library"):$torch/lib")
"$compiler" "${flags[@]}" -DKIVI_CONSUMER_INCLUDES_HEADER "$here/consumer.cpp" -o "$work/plain" "${link[@]}"
"$work/plain"

step "plain $compiler without a kivi header: --as-needed drops the library, dlopen brings it"
"$compiler" "${flags[@]}" "$here/consumer.cpp" -o "$work/dlopen" "${link[@]}" -ldl
"$work/dlopen" >"$work/dropped.log" && fail "the library was expected to be dropped here; this test proves nothing any more"
"$work/dlopen" "$library"

step "another minor version of torch is refused"
other="$work/other_torch"
mkdir -p "$other"/{lib,share/cmake/Torch,include/ATen,include/torch/headeronly}
touch "$other/lib/libtorch_cpu.so" "$other/include/ATen/ATen.h" "$other/share/cmake/Torch/TorchConfig.cmake"
printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' 'MINOR 99' 'PATCH 0' >"$other/include/torch/headeronly/version.h"
if build_project refused "$here" -DTorch_DIR="$other/share/cmake/Torch" >"$work/refused.log" 2>&1; then
  fail "a torch of another version was accepted"
fi
tr -s ' \n' ' ' <"$work/refused.log" | grep -q "was built for torch .*, but torch 2.99.0 was found in" || {
  cat "$work/refused.log"
  fail "the refusal does not say which versions"
}

step "examples/libtorch_app"
build_project libtorch_app "$source/examples/libtorch_app"
"$work/libtorch_app/libtorch_app"

step "examples/torchscript_app: a module authored in C++"
build_project torchscript_app "$source/examples/torchscript_app"
"$work/torchscript_app/torchscript_author" "$work/cpp.pt"
"$work/torchscript_app/torchscript_runner" "$work/cpp.pt" "$work/cpp_part.pt"
"$work/torchscript_app/torchscript_runner" "$work/cpp.pt" "$work/cpp_part.pt" --resume

step "examples/torchscript_app: a module authored in Python"
if "$build/python" -c pass; then
  "$build/python" "$source/examples/torchscript_app/export.py" "$library" "$work/python.pt"
  "$work/torchscript_app/torchscript_runner" "$work/python.pt" "$work/python_part.pt"
  "$work/torchscript_app/torchscript_runner" "$work/python.pt" "$work/python_part.pt" --resume
else
  echo "left out: no Python imports this torch"
fi
echo "all good with $compiler"
