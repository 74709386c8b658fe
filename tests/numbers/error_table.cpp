// Prints the tables of tests/NUMBERS.md, as Markdown: how far dequantised keys and values are from those that went in,
// and how far attention is from double arithmetic over the same dequantised cache (the kernels' own error) and from
// attention over what was not quantised (what the bits cost). Every instruction set of this CPU takes part, on the same
// cache. The limits in tests/limits.h come from here; the program fails if a figure is beyond one of them, or if two
// instruction sets do not hold or give back the same bits.
//
//   kivi_error_table            all of it, a minute or two
//   kivi_error_table --quick    a little of everything, as ctest runs it
#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "csrc/cpu/kernels.h"
#include "tests/error_statistics.h"
#include "tests/limits.h"
#include "tests/ops/attention_reference.h"
#if defined(KIVI_ERROR_TABLE_CUDA)
#include "tests/numbers/cuda_paths.h"
#endif

namespace kivi::test {
namespace {

constexpr int64_t kSink = 4, kResidual = 32, kGroup = 32;
const std::string kGaussian = "Gaussian", kOutliers = "30x channels", kWide = "30x channels, scores to 40",
                  kCaptured = "captured";

bool g_failed = false;

void fail(const std::string& what) {
  std::printf("\n**FAILED**: %s\n", what.c_str());
  g_failed = true;
}

// ---------------------------------------------------------------------------------------------- data

struct Data {
  std::string name;
  at::Tensor q, k, v;  // [1, Hq, Lq, D], [1, Hkv, T, D], float32; the last query stands at the last key
};

// Four query heads, two kv heads of 128 channels. `outliers`: of every 32 channels of K one is 30 times as large as the
// others and one 5 times, off centre. Queries are then of length 1, so that scores stay of order 1.
Data made_up(const std::string& name, int64_t tokens, int64_t rows, bool outliers, uint64_t seed) {
  const at::Tensor k = outliers ? outlier_keys({1, 2, tokens, 128}, seed) : randn({1, 2, tokens, 128}, seed);
  const at::Tensor q = outliers ? unit_queries({1, 4, rows, 128}, seed + 1) : randn({1, 4, rows, 128}, seed + 1);
  return {name, q, k, randn({1, 2, tokens, 128}, seed + 2)};
}

// Queries so long that the largest score is 40 from 0.
Data with_wide_scores(Data d, const std::string& name) {
  const at::Tensor scores = at::matmul(d.q.unflatten(1, {2, 2}).flatten(2, 3), d.k.transpose(2, 3)) / std::sqrt(128.0);
  d.q = d.q * (40.0 / scores.abs().max().item<double>());
  d.name = name;
  return d;
}

std::string capture_file() {
  const char* const named = std::getenv("KIVI_TEST_CAPTURE");
  return named != nullptr ? named : KIVI_SOURCE_DIR "/../shared/data/smollm2_kv_capture.pt";
}

// Queries, keys and values of a real model, one entry a layer; empty if there is no such file.
std::vector<Data> captured(int64_t rows, size_t layers) {
  std::vector<Data> all;
  std::ifstream in(capture_file(), std::ios::binary);
  if (!in) return all;
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const auto capture = torch::jit::pickle_load(bytes).toGenericDict();
  for (const auto& entry : capture) {
    const std::string key = entry.key().toStringRef(), layer = key.substr(0, key.find('.'));
    if (key != layer + ".q" || all.size() == layers) continue;
    const auto get = [&](const char* what) { return capture.at(layer + what).toTensor().to(at::kFloat); };
    const at::Tensor q = get(".q");
    all.push_back({kCaptured, q.narrow(2, q.size(2) - rows, rows).contiguous(), get(".k"), get(".v")});
  }
  return all;
}

// ---------------------------------------------------------------------------------------------- caches

struct Variant {
  std::string name;
  int64_t bits;  // 0: a recipe
  CacheOptions options(const Data& d) const {
    CacheOptions o = options_of(d.k.size(1), d.k.size(3), kGroup, kResidual, kSink);
    if (bits == 0) {
      o.recipe = name;
    } else {
      o.k_bits = o.v_bits = bits;
    }
    return o;
  }
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const int64_t bits : kAllBits) all.push_back({std::to_string(bits) + (bits == 1 ? " bit" : " bits"), bits});
  for (const char* recipe : {"compact", "balanced", "quality", "near-lossless"}) all.push_back({recipe, 0});
  return all;
}

std::vector<const cpu::Kernels*> instruction_sets() {
  std::vector<const cpu::Kernels*> all;
  for (const cpu::Isa isa :
       {cpu::Isa::kScalar, cpu::Isa::kNeon, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Vnni}) {
    if (const cpu::Kernels* table = cpu::kernels_for(isa)) all.push_back(table);
  }
  return all;
}

Element element_of(at::ScalarType t) {
  return t == at::kFloat ? Element::kFloat32 : t == at::kHalf ? Element::kFloat16 : Element::kBFloat16;
}

const char* name_of(at::ScalarType t) { return t == at::kFloat ? "float32" : t == at::kHalf ? "float16" : "bfloat16"; }

int64_t g_bytes_compared = 0;

// One layer's cache of one row, its records made by every instruction set, and the kernels' parameters for queries over
// it. What is in `type` is as a model of that dtype has it.
class Cache {
 public:
  Cache(const Data& d, const CacheOptions& options, at::ScalarType type)
      : q(d.q.to(type)), k(d.k.to(type).contiguous()), v(d.v.to(type).contiguous()) {
    KVCache cache(options);
    cache.append(k, v, std::nullopt, q);
    format = cache.format();
    layout = record_layout(format);
    if (format.num_key_classes > 0) order_ = cache.key_order().to(at::kShort).contiguous();
    tokens = k.size(2), quantized = quantized_count(format, tokens);
    make_records();
    give_back();
    make_exact();
  }

  // [Lq rows] of the kernels, as double.
  at::Tensor attend(const cpu::Kernels& kernels, bool exact) {
    const at::Tensor out = at::empty({1, q.size(1), q.size(2), v.size(3)}, q.options());
    AttentionParams p = params(exact);
    std::vector<float> lse(static_cast<size_t>(q.size(1) * q.size(2)));
    p.out = out.data_ptr(), p.lse = lse.data();
    int64_t floats = 0;
    std::vector<cpu::AttentionItem> items(static_cast<size_t>(cpu::attention_plan(p, nullptr, &floats)));
    cpu::attention_plan(p, items.data(), &floats);
    std::vector<float> partials(static_cast<size_t>(floats));
    const auto count = static_cast<int64_t>(items.size());
    kernels.attention(p, items.data(), 0, count, partials.data());
    cpu::attention_merge(p, items.data(), 0, count, partials.data());
    return out.to(at::kDouble);
  }

  AttentionParams params(bool exact) const {
    AttentionParams p{};
    p.format = format, p.layout = layout;
    p.batch = 1, p.num_heads = q.size(1), p.q_len = q.size(2);
    p.q = q.const_data_ptr();
    p.q_batch_stride = q.stride(0), p.q_head_stride = q.stride(1), p.q_row_stride = q.stride(2);
    p.q_type = p.cache_type = p.new_type = element_of(q.scalar_type());
    p.pool = pool_.const_data_ptr<uint8_t>();
    p.pool_pages = pool_.size(0), p.page_bytes = pool_.size(1);
    p.k_order = order_.defined() ? order_.const_data_ptr<int16_t>() : nullptr;
    p.block_table = table_.const_data_ptr<int32_t>();
    p.block_table_stride = table_.size(0);
    p.lengths = &tokens, p.quantized_lengths = &quantized;
    p.sink_k = sink_k_.const_data_ptr(), p.sink_v = sink_v_.const_data_ptr();
    p.window_k = window_k_.const_data_ptr(), p.window_v = window_v_.const_data_ptr();
    p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(format.head_dim)));
    p.causal = true;
    p.exact = exact;
    return p;
  }

  // Quantised tokens of what went in, and of what comes out.
  at::Tensor part(const at::Tensor& x) const { return x.narrow(2, kSink, quantized); }

  Format format;
  RecordLayout layout;
  int64_t tokens, quantized;
  at::Tensor q, k, v;         // in the dtype
  at::Tensor k_back, v_back;  // float32: exact tokens as they came, others dequantised

 private:
  const int16_t* order(int64_t head) const {
    return order_.defined() ? order_.const_data_ptr<int16_t>() + head * format.head_dim : nullptr;
  }
  int64_t record_at(int64_t head, int64_t group) const {
    const int64_t in_page = kPageTokens / kGroup, page_size = page_bytes(format).value;
    return group / in_page * page_size + (head * in_page + group % in_page) * layout.bytes;
  }
  template <class T>
  void each_record(T&& body) const {
    for (int64_t head = 0; head < format.num_kv_heads; head++) {
      for (int64_t group = 0; group < quantized / kGroup; group++) body(head, group);
    }
  }

  void make_records() {
    const int64_t pages = ceil_div(quantized, kPageTokens);
    table_ = at::arange(pages, at::kInt);
    for (const cpu::Kernels* kernels : instruction_sets()) {
      const at::Tensor pool = at::zeros({pages, page_bytes(format).value}, at::kByte);
      each_record([&](int64_t head, int64_t group) {
        const auto rows = [&](const at::Tensor& x) {
          return x[0][head].narrow(0, kSink + group * kGroup, kGroup).const_data_ptr();
        };
        const bool fits =
            kernels->encode({&format, &layout, rows(k), rows(v), k.stride(2), v.stride(2), element_of(k.scalar_type()),
                             pool.data_ptr<uint8_t>() + record_at(head, group), order(head)});
        if (!fits) fail("a group does not fit the scales");
      });
      compare(pool_, pool, kernels, "records");
    }
  }

  void give_back() {
    for (const at::ScalarType type : {k.scalar_type(), at::kFloat}) {
      at::Tensor first_k, first_v;
      for (const cpu::Kernels* kernels : instruction_sets()) {
        const at::Tensor out_k = k.to(type, false, true), out_v = v.to(type, false, true);
        each_record([&](int64_t head, int64_t group) {
          const auto rows = [&](const at::Tensor& x) {
            return x[0][head].narrow(0, kSink + group * kGroup, kGroup).data_ptr();
          };
          cpu::DecodeParams p{&format,
                              &layout,
                              pool_.const_data_ptr<uint8_t>() + record_at(head, group),
                              0,
                              kGroup,
                              rows(out_k),
                              rows(out_v),
                              k.stride(2),
                              v.stride(2),
                              element_of(type)};
          p.k_order = order(head);
          kernels->decode(p);
        });
        compare(first_k, out_k, kernels, "keys given back");
        compare(first_v, out_v, kernels, "values given back");
      }
      k_back = first_k, v_back = first_v;
    }
  }

  // `first` is what the first instruction set gave.
  void compare(at::Tensor& first, const at::Tensor& got, const cpu::Kernels* kernels, const char* what) {
    if (!first.defined()) {
      first = got;
      return;
    }
    g_bytes_compared += got.numel() * static_cast<int64_t>(got.element_size());
    if (!same_bits(first, got)) fail(std::string(what) + " of " + kernels->name + " differ from scalar");
  }

  void make_exact() {
    const int64_t capacity = window_capacity(format);
    sink_k_ = k.narrow(2, 0, kSink).contiguous(), sink_v_ = v.narrow(2, 0, kSink).contiguous();
    window_k_ = at::zeros({1, k.size(1), capacity, k.size(3)}, k.options());
    window_v_ = at::zeros({1, v.size(1), capacity, v.size(3)}, v.options());
    for (int64_t t = kSink + quantized; t < tokens; t++) {
      window_k_.select(2, (t - kSink) % capacity).copy_(k.select(2, t));
      window_v_.select(2, (t - kSink) % capacity).copy_(v.select(2, t));
    }
  }

  at::Tensor pool_, table_, order_, sink_k_, sink_v_, window_k_, window_v_;
};

// ---------------------------------------------------------------------------------------------- printing

std::string number(double x) {
  char text[32];
  if (x == 0) return "0";
  if (x >= 0.01 && x < 1000) {
    std::snprintf(text, sizeof text, x < 0.1 ? "%.4f" : "%.3f", x);
    return text;
  }
  std::snprintf(text, sizeof text, "%.1e", x);
  std::string s = text;
  const size_t zero = s.find("e-0");  // e-06 as e-6
  if (zero != std::string::npos) s.erase(zero + 2, 1);
  return s;
}

std::string distribution(const ErrorStatistics& e) {
  return e.empty() ? "-" : number(e.max()) + " / " + number(e.rms()) + " / " + number(e.quantile(0.999));
}

void add_all(ErrorStatistics& to, const at::Tensor& differences) {
  const at::Tensor d = differences.to(at::kDouble).contiguous();
  const double* const p = d.const_data_ptr<double>();
  for (int64_t i = 0; i < d.numel(); i++) to.add(p[i]);
}

// ---------------------------------------------------------------------------------------------- the quantiser

struct QuantiserErrors {
  ErrorStatistics in_scales[2], absolute[2];  // K, V
  double squares[2] = {0, 0};                 // of what went in
  int64_t elements[2] = {0, 0};
};

void measure_quantiser(const Cache& c, int64_t bits, QuantiserErrors& errors) {
  const at::Tensor in[2] = {c.part(c.k).to(at::kFloat), c.part(c.v).to(at::kFloat)};
  const at::Tensor back[2] = {c.part(c.k_back), c.part(c.v_back)};
  for (int i = 0; i < 2; i++) {
    const at::Tensor difference = back[i].to(at::kDouble) - in[i].to(at::kDouble);
    add_all(errors.absolute[i], difference);
    errors.squares[i] += in[i].to(at::kDouble).square().sum().item<double>();
    errors.elements[i] += in[i].numel();
    if (bits == 0) continue;  // groups of a recipe are not all of one width, nor along these axes
    const int64_t axis = i == 0 ? 2 : 3;
    const auto groups = [&](const at::Tensor& x) { return x.unflatten(axis, {x.size(axis) / kGroup, kGroup}); };
    const at::Tensor x = groups(in[i].to(at::kDouble));
    const at::Tensor scale =
        (x.amax(axis + 1, true) - x.amin(axis + 1, true)) / static_cast<double>((int64_t{1} << bits) - 1);
    add_all(errors.in_scales[i], groups(difference) / scale);
  }
}

void print_quantiser(const std::vector<std::vector<Data>>& sets, const std::vector<at::ScalarType>& types) {
  std::printf("\n## The quantiser\n\n");
  std::printf(
      "| data | cache | dtype | K: max / RMS / 99.9 %%, in scales | K: RMS of the error over RMS of K | V: max / RMS / "
      "99.9 %%, "
      "in scales | V: RMS of the error over RMS of V |\n|---|---|---|---|---|---|---|\n");
  for (const std::vector<Data>& set : sets) {
    for (const Variant& variant : variants()) {
      for (const at::ScalarType type : types) {
        if (variant.bits == 0 && type != at::kFloat) continue;
        QuantiserErrors e;
        for (const Data& d : set) measure_quantiser(Cache(d, variant.options(d), type), variant.bits, e);
        std::printf("| %s | %s | %s |", set[0].name.c_str(), variant.name.c_str(), name_of(type));
        for (int i = 0; i < 2; i++) {
          const double rms = std::sqrt(e.squares[i] / static_cast<double>(e.elements[i]));
          std::printf(" %s | %.3g %% |", distribution(e.in_scales[i]).c_str(), 100 * e.absolute[i].rms() / rms);
          if (variant.bits > 0 && !(e.in_scales[i].max() <= limits::kQuantiserInScales)) {
            fail("beyond limits::kQuantiserInScales");
          }
        }
        std::printf("\n");
        std::fprintf(stderr, "\rquantiser: %s, %s, %s          ", set[0].name.c_str(), variant.name.c_str(),
                     name_of(type));
      }
    }
  }
  std::fprintf(stderr, "\n");
}

// ---------------------------------------------------------------------------------------------- attention

// All errors of one row of the tables.
struct AttentionErrors {
  std::map<std::string, ErrorStatistics> own;  // by instruction set
  ErrorStatistics whole;                       // of the best instruction set
  double squares = 0;                          // of the outputs without quantisation
  int64_t outputs = 0;
};

struct References {
  at::Tensor held, unquantised;  // double
};

References references(const Cache& c, const Data& d) {
  const at::Tensor none;
  const auto attend = [&](const at::Tensor& k, const at::Tensor& v) {
    return reference_row(c.q[0], k[0], v[0], none, {}, none).out.unsqueeze(0);
  };
  // Not quantised, and before anything was rounded to the dtype.
  return {attend(c.k_back, c.v_back), reference_row(d.q[0], d.k[0], d.v[0], none, {}, none).out.unsqueeze(0)};
}

// Returns the largest error of any instruction set.
double measure_attention(Cache& c, const References& want, bool exact, AttentionErrors& errors) {
  double most = 0;
  for (const cpu::Kernels* kernels : instruction_sets()) {
    const at::Tensor got = c.attend(*kernels, exact);
    const at::Tensor difference = got - want.held;
    add_all(errors.own[kernels->name], difference);
    const double largest = difference.abs().max().item<double>();
    if (!(largest <= most)) most = largest;
    if (kernels != instruction_sets().back()) continue;
    add_all(errors.whole, got - want.unquantised);
    errors.squares += want.unquantised.square().sum().item<double>();
    errors.outputs += got.numel();
  }
  return most;
}

// Half a unit in the last place of the largest output.
double rounding_of(at::ScalarType type, double largest_output) {
  if (type == at::kFloat) return 0;
  return (type == at::kHalf ? limits::kFloat16Output : limits::kBFloat16Output) *
         std::max(1.0, std::exp2(std::floor(std::log2(largest_output))));
}

double exact_limit(const std::string& data, const Cache& c, const References& want) {
  const double arithmetic = data == kWide       ? limits::kExactWide
                            : data == kCaptured ? limits::kExactScores
                                                : limits::kExact;
  return arithmetic + rounding_of(c.q.scalar_type(), want.held.abs().max().item<double>());
}

// The limit of "fast" for this cache and these queries; values may be larger than 1.
double fast_limit(const Cache& c, const References& want) {
  const Format& f = c.format;
  int64_t least = f.k_bits;  // the class with the largest scales, while the widest one has the largest codes
  for (int64_t i = 0; i < f.num_key_classes; i++) least = std::min(least, f.key_classes[i].bits);
  const at::Tensor k = c.part(c.k).to(at::kFloat).unflatten(2, {c.quantized / kGroup, kGroup});
  const at::Tensor range = (k.amax(3) - k.amin(3)).amax({0, 1, 2}) / (std::exp2(static_cast<double>(least)) - 1);
  const double scaled = (c.q.to(at::kFloat).abs().amax({0, 1, 2}) * range).max().item<double>() /
                        std::sqrt(static_cast<double>(f.head_dim));
  double limit = limits::fast(f.head_dim, f.k_bits, scaled);
  if (f.v_rotated) limit += limits::fast_gathered(rotation_size(f.value_head_dim));
  const double values = std::max(1.0, c.v_back.abs().max().item<double>() / 2);  // limits::fast: values of order 1
  return limit * values + rounding_of(c.q.scalar_type(), want.held.abs().max().item<double>());
}

using Key = std::array<std::string, 3>;  // data, cache, dtype

void print_by_instruction_set(const std::map<Key, AttentionErrors>& all, const std::vector<Key>& keys) {
  std::printf("| data | cache |");
  for (const cpu::Kernels* kernels : instruction_sets()) std::printf(" %s |", kernels->name);
  std::printf(" whole error, max / RMS / 99.9 %% | its RMS over that of the output |\n|---|---|---|---|");
  for (size_t i = 0; i < instruction_sets().size(); i++) std::printf("---|");
  std::printf("\n");
  for (const Key& key : keys) {
    if (key[2] != "float32") continue;
    const AttentionErrors& e = all.at(key);
    std::printf("| %s | %s |", key[0].c_str(), key[1].c_str());
    for (const cpu::Kernels* kernels : instruction_sets()) {
      std::printf(" %s |", distribution(e.own.at(kernels->name)).c_str());
    }
    const double rms = std::sqrt(e.squares / static_cast<double>(e.outputs));
    std::printf(" %s | %.3g %% |\n", distribution(e.whole).c_str(), 100 * e.whole.rms() / rms);
  }
}

void print_attention(const std::vector<std::vector<Data>>& sets, const std::vector<at::ScalarType>& types) {
  std::map<Key, AttentionErrors> all[2];
  std::vector<Key> keys;
  double used[2] = {0, 0};  // of the limits, at most
  for (const std::vector<Data>& set : sets) {
    for (const Variant& variant : variants()) {
      for (const at::ScalarType type : types) {
        const Key key = {set[0].name, variant.name, name_of(type)};
        keys.push_back(key);
        for (const Data& d : set) {
          Cache c(d, variant.options(d), type);
          const References want = references(c, d);
          for (const bool exact : {true, false}) {
            const double most = measure_attention(c, want, exact, all[exact ? 0 : 1][key]);
            const double limit = exact ? exact_limit(key[0], c, want) : fast_limit(c, want);
            if (type == at::kFloat) used[exact ? 0 : 1] = std::max(used[exact ? 0 : 1], most / limit);
            if (!(most <= limit)) {
              fail((exact ? "exact: " : "fast: ") + key[0] + ", " + key[1] + ", " + key[2] + ": " + number(most) +
                   " is beyond the limit " + number(limit));
            }
          }
        }
        std::fprintf(stderr, "\rattention: %s, %s, %s          ", key[0].c_str(), key[1].c_str(), key[2].c_str());
      }
    }
  }
  std::fprintf(stderr, "\n");
  for (const bool exact : {true, false}) {
    std::printf("\n## Attention, `%s`, float32\n\nOf the limits of `tests/limits.h` at most %.0f %% were used.\n\n",
                exact ? "exact" : "fast", 100 * used[exact ? 0 : 1]);
    print_by_instruction_set(all[exact ? 0 : 1], keys);
  }
  std::printf(
      "\n## Attention by dtype\n\nOver all caches above; of the instruction sets the one with the largest "
      "error.\n\n| data | path | dtype | max / RMS / 99.9 %% |\n|---|---|---|---|\n");
  for (const std::vector<Data>& set : sets) {
    for (const bool exact : {true, false}) {
      for (const at::ScalarType type : types) {
        const ErrorStatistics* worst = nullptr;
        std::map<std::string, ErrorStatistics> merged;
        for (const auto& [key, errors] : all[exact ? 0 : 1]) {
          if (key[0] != set[0].name || key[2] != name_of(type)) continue;
          for (const auto& [isa, own] : errors.own) merged[isa].add_all(own);
        }
        for (const auto& [isa, own] : merged) {
          if (worst == nullptr || own.max() > worst->max()) worst = &own;
        }
        std::printf("| %s | %s | %s | %s |\n", set[0].name.c_str(), exact ? "exact" : "fast", name_of(type),
                    distribution(*worst).c_str());
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- CUDA

#if defined(KIVI_ERROR_TABLE_CUDA)
void print_cuda(const std::vector<std::vector<Data>>& sets) {
  std::printf(
      "\n## Attention on CUDA, in the emulator\n\n| data | cache | dtype | generic kernel | tensor cores "
      "|\n|---|---|---|---|---|\n");
  for (const std::vector<Data>& set : sets) {
    for (const Variant& variant : variants()) {
      for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
        ErrorStatistics own[2];
        for (const Data& d : set) {
          const Cache c(d, variant.options(d), type);
          const References want = references(c, d);
          for (const CudaPath path : {CudaPath::kGeneric, CudaPath::kTensorCores}) {
            const std::vector<float> got = run_on_cuda(c.params(path == CudaPath::kGeneric), path);
            if (got.empty()) continue;
            const at::Tensor out = at::tensor(at::ArrayRef<float>(got)).view(want.held.sizes());
            const at::Tensor difference = out.to(at::kDouble) - want.held;
            const bool generic = path == CudaPath::kGeneric;
            add_all(own[generic ? 0 : 1], difference);
            const double limit = generic             ? exact_limit(set[0].name, c, want)
                                 : type == at::kHalf ? limits::kTensorFloat16
                                                     : limits::kTensorBFloat16;
            if (!(difference.abs().max().item<double>() <= limit)) fail("a CUDA path is beyond " + number(limit));
          }
        }
        std::printf("| %s | %s | %s | %s | %s |\n", set[0].name.c_str(), variant.name.c_str(), name_of(type),
                    distribution(own[0]).c_str(), distribution(own[1]).c_str());
        std::fprintf(stderr, "\rCUDA: %s, %s, %s          ", set[0].name.c_str(), variant.name.c_str(), name_of(type));
      }
    }
  }
  std::fprintf(stderr, "\n");
}
#endif

// ----------------------------------------------------------------------------------------------

int run(bool quick) {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const int64_t tokens = quick ? 200 : 1050, rows = quick ? 2 : 48;
  const std::vector<at::ScalarType> types = {at::kFloat, at::kHalf, at::kBFloat16};
  const Data gaussian = made_up(kGaussian, tokens, rows, false, 1);
  const Data outliers = made_up(kOutliers, tokens, rows, true, 11);
  // Values too, which attention would add up to outputs of another order.
  Data outlying_values = outliers;
  outlying_values.v = outliers.v.clone();
  outlying_values.v.narrow(3, 5, 2).mul_(30);
  const std::vector<Data> capture = captured(rows, quick ? 1 : 1000);

  std::vector<std::vector<Data>> to_quantise = {{gaussian}, {outlying_values}};
  std::vector<std::vector<Data>> to_attend = {{gaussian}, {outliers}, {with_wide_scores(outliers, kWide)}};
  if (capture.empty()) {
    std::printf(
        "There is no capture of a real model (`%s`; `KIVI_TEST_CAPTURE` names another): its rows are missing.\n",
        capture_file().c_str());
  } else {
    to_quantise.push_back(capture);
    to_attend.push_back(capture);
  }
  print_quantiser(to_quantise, types);
  print_attention(to_attend, types);
#if defined(KIVI_ERROR_TABLE_CUDA)
  const Data small = made_up(kGaussian, quick ? 200 : 400, 2, false, 21);
  const Data small_outliers = made_up(kOutliers, quick ? 200 : 400, 2, true, 31);
  std::vector<std::vector<Data>> on_cuda = {{small}};
  if (!quick) on_cuda.push_back({small_outliers});
  print_cuda(on_cuda);
#else
  std::printf("\nThis build has no emulator (no CUDA headers): the rows of the CUDA kernels are missing.\n");
#endif
  std::string sets;
  for (const cpu::Kernels* kernels : instruction_sets())
    sets += (sets.empty() ? "" : ", ") + std::string(kernels->name);
  std::printf("\n%s %s: %.0f MB of records and of numbers given back were compared with those of scalar.\n",
              sets.c_str(), g_failed ? "or a limit failed, see above" : "hold and give back the same bits",
              static_cast<double>(g_bytes_compared) / 1e6);
  return g_failed ? 1 : 0;
}

}  // namespace
}  // namespace kivi::test

int main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  if (argc > 2 || (argc == 2 && argument != "--quick")) {
    std::fprintf(stderr, "usage: %s [--quick]\n", argv[0]);
    return 2;
  }
  return kivi::test::run(argument == "--quick");
}
