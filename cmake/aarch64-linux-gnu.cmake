# Builds for 64-bit Arm Linux on a machine of another kind (packages g++-aarch64-linux-gnu and qemu-user) and runs what was built in
# QEMU's user mode. Arm's Highway and GoogleTest lie where .ci/nightly unpacks them, or below a folder of KIVI_ARM64_ROOT that has the
# layout of an Arm system. Used by the preset `arm64`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

if(NOT KIVI_ARM64_ROOT)
  set(cache "$ENV{XDG_CACHE_HOME}")
  if(NOT cache)
    set(cache "$ENV{HOME}/.cache")
  endif()
  set(KIVI_ARM64_ROOT "${cache}/kivi/arm64")
endif()
set(KIVI_ARM64_ROOT "${KIVI_ARM64_ROOT}" CACHE PATH "Folder with usr/include and usr/lib/aarch64-linux-gnu of an Arm system")
if(NOT EXISTS "${KIVI_ARM64_ROOT}/usr/include/hwy/highway.h")
  message(FATAL_ERROR "There is no Highway for arm64 in ${KIVI_ARM64_ROOT}. Run .ci/nightly, which puts it there, or name the root of an "
                      "Arm system with -DKIVI_ARM64_ROOT=<folder>.")
endif()
# The little projects by which CMake tries the compiler read this file too.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KIVI_ARM64_ROOT)

# Programs are this machine's; what is compiled in and linked must not be.
set(CMAKE_FIND_ROOT_PATH "${KIVI_ARM64_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Debian's cross compiler brings the C and C++ libraries in this folder.
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64;-L;/usr/aarch64-linux-gnu")
