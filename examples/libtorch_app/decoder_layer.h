// A decoder layer in LibTorch (RMSNorm, grouped-query heads, RoPE, attention, MLP) as a template of its cache, so that
// swapping the cache is the one word in angle brackets. FpCache is the plain cache that kivi::KVCache replaces.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>

inline constexpr int64_t kHidden = 1024, kHeads = 16, kKvHeads = 4, kHeadDim = 64;

struct FpCache {  // the usual thing: room for `capacity` tokens in the model's dtype
  torch::Tensor k, v;
  int64_t used = 0;
  explicit FpCache(int64_t capacity) : k(torch::zeros({1, kKvHeads, capacity, kHeadDim})), v(torch::zeros_like(k)) {}
  torch::Tensor forward(const torch::Tensor& q, const torch::Tensor& k_new, const torch::Tensor& v_new) {
    const int64_t t = q.size(2);
    k.narrow(2, used, t).copy_(k_new), v.narrow(2, used, t).copy_(v_new), used += t;
    std::optional<torch::Tensor> mask;  // bottom-right causal; a single token sees everything
    if (t > 1) mask = torch::ones({t, used}, torch::kBool).tril(used - t);
    return at::scaled_dot_product_attention(q, k.narrow(2, 0, used), v.narrow(2, 0, used), mask, 0.0, false, {}, true);
  }
  int64_t length() const { return used; }
  int64_t nbytes() const { return static_cast<int64_t>(k.nbytes() + v.nbytes()); }
};

inline torch::Tensor rms_norm(const torch::Tensor& x) { return x * torch::rsqrt(x.square().mean(-1, true) + 1e-5); }

inline torch::Tensor rope(const torch::Tensor& x, int64_t first) {  // rotates the pairs (i, i + D / 2)
  const auto frequency = torch::pow(10000.0, torch::arange(0, kHeadDim, 2) / -static_cast<double>(kHeadDim));
  const auto angle = torch::outer(torch::arange(first, first + x.size(2)), frequency);
  const auto a = x.narrow(-1, 0, kHeadDim / 2), b = x.narrow(-1, kHeadDim / 2, kHeadDim / 2);
  return torch::cat({a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()}, -1);
}

template <class Cache>
struct DecoderLayer : torch::nn::Module {
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr};
  Cache cache;
  template <class... Args>
  explicit DecoderLayer(const Args&... cache_arguments) : cache(cache_arguments...) {
    torch::manual_seed(0);  // both layers get the same weights
    const auto linear = [this](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    q = linear("q", kHidden, kHeads * kHeadDim), k = linear("k", kHidden, kKvHeads * kHeadDim);
    v = linear("v", kHidden, kKvHeads * kHeadDim), o = linear("o", kHeads * kHeadDim, kHidden);
    gate = linear("gate", kHidden, 2816), up = linear("up", kHidden, 2816), down = linear("down", 2816, kHidden);
  }
  torch::Tensor forward(torch::Tensor x) {  // [1, T, hidden]; prompts, chunks and single tokens alike
    const auto heads = [](const torch::Tensor& t) { return t.unflatten(-1, {-1, kHeadDim}).transpose(1, 2); };
    const int64_t first = cache.length();
    const auto h = rms_norm(x);
    const auto attention = cache.forward(rope(heads(q(h)), first), rope(heads(k(h)), first), heads(v(h)));
    x = x + o(attention.transpose(1, 2).flatten(2));
    const auto m = rms_norm(x);
    return x + down(torch::silu(gate(m)) * up(m));
  }
};
