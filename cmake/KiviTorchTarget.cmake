# Finds a LibTorch folder, reads its version and makes the target Kivi::torch of it. Used by the build and, installed, by KiviConfig.cmake.
#
# find_package(Torch) is not called: with a CUDA wheel it needs nvcc, and with nvcc 13 and an older CMake its architecture test fails. A
# CPU library needs the headers, libtorch_cpu and libc10 only. The name Kivi::torch cannot clash with targets of find_package(Torch).

# Folder of the LibTorch that the user names by Torch_DIR or CMAKE_PREFIX_PATH (CMake or environment variables), or empty. An entry may be
# a LibTorch folder, torch/share/cmake (torch.utils.cmake_prefix_path), a site-packages folder or a virtual environment.
function(kivi_find_named_torch out)
  set(entries "${Torch_DIR}" "$ENV{Torch_DIR}" ${CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" environment "$ENV{CMAKE_PREFIX_PATH}")
  list(APPEND entries ${environment})
  set(${out} "" PARENT_SCOPE)
  foreach(entry IN LISTS entries)
    if(NOT entry)
      continue()
    endif()
    file(GLOB in_environment "${entry}/lib/python3.*/site-packages/torch")
    foreach(candidate IN ITEMS "${entry}" "${entry}/../.." "${entry}/../../.." "${entry}/torch" ${in_environment})
      kivi_is_torch("${candidate}" is_torch)
      if(is_torch)
        file(REAL_PATH "${candidate}" candidate)
        set(${out} "${candidate}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

# Whether `folder` holds the C++ part of torch.
function(kivi_is_torch folder out)
  if(EXISTS "${folder}/share/cmake/Torch/TorchConfig.cmake" AND EXISTS "${folder}/lib/libtorch_cpu.so"
     AND EXISTS "${folder}/include/ATen/ATen.h")
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Version ("2.11.0") of the torch in `folder`, from its headers.
function(kivi_torch_version folder out)
  set(version)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${folder}/include/${header}")
      foreach(part IN ITEMS MAJOR MINOR PATCH)
        file(STRINGS "${folder}/include/${header}" line REGEX "^#define TORCH_VERSION_${part} +[0-9]+")
        if(line MATCHES " ([0-9]+)$")
          list(APPEND version "${CMAKE_MATCH_1}")
        endif()
      endforeach()
    endif()
    if(version)
      break()
    endif()
  endforeach()
  string(REPLACE ";" "." version "${version}")
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# Makes the imported target Kivi::torch from `folder`.
function(kivi_import_torch folder)
  add_library(Kivi::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(Kivi::torch INTERFACE "${folder}/include" "${folder}/include/torch/csrc/api/include")
  target_link_libraries(Kivi::torch INTERFACE "${folder}/lib/libtorch_cpu.so" "${folder}/lib/libc10.so")
  # Old wheels name the ABI of std::string that they were built with; new ones have one ABI only.
  file(STRINGS "${folder}/share/cmake/Torch/TorchConfig.cmake" abi REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  if(abi MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
    target_compile_definitions(Kivi::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${CMAKE_MATCH_1})
  endif()
endfunction()
