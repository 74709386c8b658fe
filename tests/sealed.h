// Saved caches that were changed and given the checksum that then belongs to them, as whoever wants to do harm would,
// or a library with other ideas of a right cache. Checksums are computed here from their definition (cache_state.cpp,
// cache_file.cpp).
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <string>
#include <vector>

#include "kivi/cache.h"
#include "ops/checksum.h"

namespace kivi::test {

inline constexpr size_t kStateChecksumAt = 4;  // of the integers
inline constexpr size_t kFileSizeAt = 16, kFileChecksumAt = 24, kFileHeaderBytes = 40;

// Of all integers but itself, and of all tensors.
inline int64_t checksum_of(const KVCache::State& state) {
  const auto& [header, ints, tensors] = state;
  Checksum sum;
  for (size_t i = 0; i < ints.size(); i++) sum.add(i == kStateChecksumAt ? 0 : static_cast<uint64_t>(ints[i]));
  for (const at::Tensor& t : tensors) {
    const at::Tensor whole = t.contiguous();
    sum.add(static_cast<uint64_t>(whole.scalar_type()));
    for (const int64_t size : whole.sizes()) sum.add(static_cast<uint64_t>(size));
    sum.add(whole.const_data_ptr(), whole.nbytes());
  }
  return sum.value();
}

inline KVCache::State sealed(KVCache::State state) {
  const int64_t sum = checksum_of(state);
  std::get<1>(state).at(kStateChecksumAt) = sum;
  return state;
}

// A file: its size, and the checksum of what follows the header, then of the header.
inline std::string sealed(const std::string& file) {
  if (file.size() < kFileHeaderBytes) return file;
  std::vector<char> bytes(file.begin(), file.end());
  const uint64_t size = bytes.size();
  std::memcpy(bytes.data() + kFileSizeAt, &size, sizeof size);
  std::memset(bytes.data() + kFileChecksumAt, 0, sizeof size);
  Checksum sum;
  sum.add(bytes.data() + kFileHeaderBytes, bytes.size() - kFileHeaderBytes);
  sum.add(bytes.data(), kFileHeaderBytes);
  const int64_t value = sum.value();
  std::memcpy(bytes.data() + kFileChecksumAt, &value, sizeof value);
  return {bytes.begin(), bytes.end()};
}

}  // namespace kivi::test
