// The notebook's cells in their order, then its exercises 1 and 2. K and V are random, with four outlier channels in K.
#include <kivi/kivi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "notebook.h"

namespace {

constexpr int64_t kTokens = 1024, kHeadDim = 128, kGroup = 32;

// The notebook's `quantize_grouped`, cell by cell, from plain PyTorch operators: what fake_quantize must equal to the
// bit.
torch::Tensor quantize_grouped(const torch::Tensor& x, int64_t axis, int64_t bits) {
  const double levels = static_cast<double>((int64_t{1} << bits) - 1);
  const auto groups = x.transpose(0, axis).contiguous().unflatten(0, {-1, kGroup});
  const auto low = groups.amin(1, true), high = groups.amax(1, true);
  auto scale = (high - low) / levels;
  scale = torch::where(scale == 0, torch::ones_like(scale), scale);
  const auto q = torch::round((groups - low) / scale).clamp(0, levels);
  return (low + q * scale).flatten(0, 1).transpose(0, axis);
}

// Bytes that quantize() returned: codes, scale and zero.
double quantized_bytes(const torch::Tensor& x, int64_t axis, int64_t bits) {
  const auto [codes, scale, zero] = kivi::quantize(x, axis, bits, kGroup);
  return static_cast<double>(codes.nbytes() + scale.nbytes() + zero.nbytes());
}

struct Data {
  torch::Tensor k, v, q;
};

Data make_data() {
  Data data;
  torch::manual_seed(0);
  data.k = torch::randn({kTokens, kHeadDim}) * 0.5;
  data.v = torch::randn({kTokens, kHeadDim}) * 0.5;
  for (const int64_t channel : {3, 17, 40, 88}) data.k.select(1, channel).mul_(5.0);
  torch::manual_seed(1);
  data.q = torch::randn({1, kTokens, kHeadDim});
  return data;
}

// The same attention by a KVCache: fp16 in and out, as a model would use it; nothing exact but what does not fill a
// group.
struct CacheResult {
  double error = 0, bytes = 0;
};
CacheResult by_cache(const Data& data, const torch::Tensor& expected, int64_t bits) {
  kivi::CacheOptions options;
  options.num_kv_heads = 1, options.head_dim = kHeadDim, options.group_size = kGroup, options.sink_length = 0;
  options.residual_length = bits == 16 ? kTokens : 0;  // 16: everything stays in fp16
  if (bits != 16) options.k_bits = options.v_bits = bits;
  kivi::KVCache cache(options);
  const auto fp16 = [](const torch::Tensor& x) { return x.view({1, 1, kTokens, kHeadDim}).to(torch::kHalf); };
  cache.append(fp16(data.k), fp16(data.v));
  kivi::AttentionOptions everything;
  everything.is_causal = false;
  const auto output = cache.attend(fp16(data.q), everything).view({1, kTokens, kHeadDim}).to(torch::kFloat);
  return {relative_error(expected, output), static_cast<double>(cache.nbytes())};
}

void notebook_checks(const Data& data, Checks& check) {
  const auto k_max = data.k.abs().max().item<double>(), v_max = data.v.abs().max().item<double>();
  const auto k_err = (data.k - kivi::fake_quantize(data.k, 0, 2, kGroup)).abs().max().item<double>();
  const auto v_err = (data.v - kivi::fake_quantize(data.v, 1, 2, kGroup)).abs().max().item<double>();
  std::printf("\nReconstruction at 2 bits, K per channel, V per token, groups of %lld\n",
              static_cast<long long>(kGroup));
  std::printf("  K max abs err = %.4f (Python %.4f), values up to %.3f\n", k_err, check.reference("k_err_2bit"), k_max);
  std::printf("  V max abs err = %.4f (Python %.4f), values up to %.3f\n", v_err, check.reference("v_err_2bit"), v_max);
  check.same_as_reference("k_max", k_max), check.same_as_reference("v_max", v_max);
  check.same_as_reference("k_err_2bit", k_err), check.same_as_reference("v_err_2bit", v_err);
  check("K: 2-bit error below 0.35 of the maximum", k_err < 0.35 * k_max, format("%.3f", k_err / k_max));
  check("V: 2-bit error below 0.35 of the maximum", v_err < 0.35 * v_max, format("%.3f", v_err / v_max));
}

// fake_quantize against the notebook's function: here as PyTorch operators, and by fingerprint what Python computed.
void bit_equality(const Data& data, bool same_input, Checks& check) {
  bool operators = true, python = true, two_calls = true;
  for (const int64_t bits : {8, 4, 3, 2, 1}) {
    for (const bool is_k : {true, false}) {
      const auto& x = is_k ? data.k : data.v;
      const int64_t axis = is_k ? 0 : 1;
      const auto fake = kivi::fake_quantize(x, axis, bits, kGroup);
      const auto [codes, scale, zero] = kivi::quantize(x, axis, bits, kGroup);
      operators &= torch::equal(fake, quantize_grouped(x, axis, bits));
      two_calls &= torch::equal(fake, kivi::dequantize(codes, scale, zero, axis, bits, kGroup, x.size(axis)));
      python &= check.same_fingerprint(format("%s_hat_%lldbit", is_k ? "K" : "V", static_cast<long long>(bits)), fake);
    }
  }
  check("fake_quantize equals the notebook's quantize_grouped to the bit, 1 to 8 bits, K and V", operators);
  check("fake_quantize equals dequantize(quantize()) to the bit", two_calls);
  if (same_input) {
    check("K, V, Q and all results of fake_quantize equal Python's to the bit", python);
  } else {
    std::puts(
        "  not compared bit by bit with Python: torch::randn differs in its last bits between this machine and that of "
        "the");
    std::puts("  reference (rerun reference.py here and give --reference)");
  }
}

void sweep(const Data& data, const torch::Tensor& expected, Checks& check, Cliff& cliff) {
  std::puts("\nAttention output against bits (relative error; compression against fp16)");
  std::puts("  bits | fake_quantize  Python     KVCache fp16 | quantize(): K bytes  K+V ratio | KVCache: bytes  ratio");
  std::map<int64_t, double> errors;
  const double fp16_bytes = 2.0 * static_cast<double>(data.k.numel());
  double op_ratio = 0, cache_ratio = 0;
  for (const int64_t bits : {16, 8, 4, 3, 2, 1}) {
    const auto cache = by_cache(data, expected, bits);
    if (bits == 16) {  // the notebook counts fp16 as exact
      std::printf("  %4d | %12.4f%% %9.4f%% %12.4f%% | %19.0f %9.2fx | %14.0f %5.2fx\n", 16, 0.0, 0.0,
                  1e2 * cache.error, fp16_bytes, 1.0, cache.bytes, 2 * fp16_bytes / cache.bytes);
      cliff.fp16 = cache.error;
      check("KVCache that quantises nothing differs by fp16 rounding alone", cache.error < 2e-3);
      continue;
    }
    const auto k_hat = kivi::fake_quantize(data.k, 0, bits, kGroup),
               v_hat = kivi::fake_quantize(data.v, 1, bits, kGroup);
    errors[bits] = relative_error(expected, attention(data.q, k_hat, v_hat));
    const auto name = format("attn_err_%lldbit", static_cast<long long>(bits));
    check.same_as_reference(name, errors[bits]);
    const double k_bytes = quantized_bytes(data.k, 0, bits), v_bytes = quantized_bytes(data.v, 1, bits);
    if (bits == 2) op_ratio = 2 * fp16_bytes / (k_bytes + v_bytes), cache_ratio = 2 * fp16_bytes / cache.bytes;
    std::printf("  %4lld | %12.4f%% %9.4f%% %12.4f%% | %19.0f %9.2fx | %14.0f %5.2fx\n", static_cast<long long>(bits),
                1e2 * errors[bits], 1e2 * check.reference(name), 1e2 * cache.error, k_bytes,
                2 * fp16_bytes / (k_bytes + v_bytes), cache.bytes, 2 * fp16_bytes / cache.bytes);
    cliff.both.emplace_back(bits, errors[bits]);
    // fp16 scales and inputs move the error a little; a wrong code, scale or order would move it far.
    if (std::abs(cache.error - errors[bits]) > 0.02 * errors[bits] + 2e-3) {
      check("KVCache errs like fake_quantize", false, format("%.4f and %.4f", cache.error, errors[bits]));
    }
  }
  check("4-bit attention error below 10 %", errors[4] < 0.10, format("%.3f%%", 1e2 * errors[4]));
  check("2-bit attention error between 0.15 and 1.0", 0.15 < errors[2] && errors[2] < 1.0, format("%.3f", errors[2]));
  check("4-bit error below 2-bit error", errors[4] < errors[2]);
  check("compression at least 4x: bytes that quantize() returned (fp32 scale and zero)", op_ratio >= 4.0,
        format("%.2fx", op_ratio));
  check("compression at least 4x: nbytes() of the KVCache (fp16 scale and zero)", cache_ratio >= 4.0,
        format("%.2fx", cache_ratio));
  const double formula = 16.0 / (2.0 + 2 * 16.0 / kGroup);
  check.same_as_reference("compression_2bit", formula);
  std::printf("  the notebook's formula (fp16 scale and zero): %.2fx (Python %.2fx)\n", formula,
              check.reference("compression_2bit"));
}

void exercise_1(const Data& data, const torch::Tensor& expected, Checks& check, Cliff& cliff) {
  std::puts("\nExercise 1: quality against compression, each side alone (relative error; Python's number in brackets)");
  std::puts("  bits | bits with fp16 scale, zero  against fp16 |        K alone              V alone          K and V");
  for (const int64_t bits : {8, 4, 3, 2, 1}) {
    const auto k_hat = kivi::fake_quantize(data.k, 0, bits, kGroup),
               v_hat = kivi::fake_quantize(data.v, 1, bits, kGroup);
    const double k_error = relative_error(expected, attention(data.q, k_hat, data.v));
    const double v_error = relative_error(expected, attention(data.q, data.k, v_hat));
    const double both = relative_error(expected, attention(data.q, k_hat, v_hat));
    cliff.keys.emplace_back(bits, k_error), cliff.values.emplace_back(bits, v_error);
    const auto k_name = format("k_only_err_%lldbit", static_cast<long long>(bits));
    const auto v_name = format("v_only_err_%lldbit", static_cast<long long>(bits));
    const double stored = static_cast<double>(bits) + 2 * 16.0 / kGroup;
    check.same_as_reference(k_name, k_error), check.same_as_reference(v_name, v_error);
    std::printf("  %4lld | %26.2f %12.2fx | %8.3f%% [%8.3f%%] %8.3f%% [%8.3f%%] %8.3f%%\n",
                static_cast<long long>(bits), stored, 16.0 / stored, 1e2 * k_error, 1e2 * check.reference(k_name),
                1e2 * v_error, 1e2 * check.reference(v_name), 1e2 * both);
  }
  std::puts("  The cliff lies below 4 bits; 1 bit destroys either side.");
}

void exercise_2(const Data& data, const torch::Tensor& expected, Checks& check) {
  std::puts(
      "\nExercise 2: the K channels of largest magnitude stay in fp16, the rest and V at 2 bits (Python's number in "
      "brackets)");
  std::puts("  fp16 channels       | bits of K |     K alone              K and V");
  const auto k_hat = kivi::fake_quantize(data.k, 0, 2, kGroup), v_hat = kivi::fake_quantize(data.v, 1, 2, kGroup);
  const auto order = data.k.abs().amax(0).argsort(0, /*descending=*/true);
  double none = 0, last = 0;
  const auto row = [&](const char* title, int64_t count, const std::string& k_name, const std::string& name) {
    auto mixed = k_hat.clone();
    const auto kept = order.slice(0, 0, count);
    mixed.index_copy_(1, kept, data.k.index_select(1, kept).to(torch::kHalf).to(torch::kFloat));
    const double k_error = relative_error(expected, attention(data.q, mixed, data.v));
    const double both = relative_error(expected, attention(data.q, mixed, v_hat));
    const double n = static_cast<double>(count), d = static_cast<double>(kHeadDim);
    std::printf("  %-19s | %9.2f | %8.3f%% [%8.3f%%] %8.3f%% [%8.3f%%]\n", title, (16 * n + 3 * (d - n)) / d,
                1e2 * k_error, 1e2 * check.reference(k_name), 1e2 * both, 1e2 * check.reference(name));
    check.same_as_reference(k_name, k_error), check.same_as_reference(name, both);
    (count == 0 ? none : last) = k_error;
  };
  row("none", 0, "k_only_err_2bit", "attn_err_2bit");
  row("top 1 % (2 of 128)", static_cast<int64_t>(std::ceil(0.01 * kHeadDim)), "top1pct_k_only_err", "top1pct_err");
  row("all 4 outliers", 4, "top4_k_only_err", "top4_err");
  check("exact outlier channels lower the error of 2-bit keys", last < none);
}

}  // namespace

void run_synthetic(Checks& check, Cliff& cliff) {
  const auto data = make_data();
  const auto expected = attention(data.q, data.k, data.v);
  const bool same_input =
      check.same_fingerprint("K", data.k) && check.same_fingerprint("V", data.v) && check.same_fingerprint("Q", data.q);
  check.set_tolerance(same_input ? 1e-5 : 1e-3);
  notebook_checks(data, check);
  bit_equality(data, same_input, check);
  sweep(data, expected, check, cliff);
  exercise_1(data, expected, check, cliff);
  exercise_2(data, expected, check);
}
