#!/usr/bin/env bash
# Compiles and runs the snippets of README.md as they stand, in their order, against the installed package: each ```python block with
# <build>/python, each ```cpp block as the main.cpp of a project whose CMakeLists.txt is the README's ```cmake block. All run in one folder
# in which build/release is the build, so what one snippet saves the next one can load.
#
#   readme_test.sh CMAKE BUILD
set -euo pipefail
cmake="$1" build="$(cd "$2" && pwd)"
source="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
work="$build/readme_test"
rm -rf "$work"
mkdir -p "$work/snippets" "$work/run/build"
ln -s "$build" "$work/run/build/release"
"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log"

# snippets/01.python, 02.cpp, ... and snippets/cmake
awk -v out="$work/snippets" '
  /^```(cpp|python)$/ { file = sprintf("%s/%02d.%s", out, ++count, substr($0, 4)); next }
  /^```cmake$/ { file = out "/cmake"; next }
  /^```$/ { if (file != "") close(file); file = ""; next }
  file != "" { print > file }
' "$source/README.md"

count_cpp=0 count_python=0
for snippet in "$work"/snippets/[0-9]*; do
  name="$(basename "$snippet")"
  echo "---- snippet $name"
  case "$name" in
    *.python)
      count_python=$((count_python + 1))
      (cd "$work/run" && "$build/python" "$snippet")
      ;;
    *.cpp)
      count_cpp=$((count_cpp + 1))
      project="$work/${name%.cpp}"
      mkdir "$project"
      cp "$snippet" "$project/main.cpp"
      cp "$work/snippets/cmake" "$project/CMakeLists.txt"
      "$cmake" -G Ninja -S "$project" -B "$project/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix" \
        -DCMAKE_RUNTIME_OUTPUT_DIRECTORY="$project/bin"
      "$cmake" --build "$project/build"
      program="$(find "$project/bin" -type f)"
      (cd "$work/run" && "$program")
      ;;
  esac
done
((count_cpp > 0 && count_python > 0)) || {
  echo "FAILED: README.md has $count_cpp C++ and $count_python Python snippets; both were expected"
  exit 1
}
echo "$count_cpp C++ and $count_python Python snippets ran"
