// How fast keys and values become records and come back, and the dense quantise and dequantise, for every instruction
// set, on one thread, without torch; beside a copy of the same keys and values and a fill of the same output in the
// same run. 4096 tokens of 8 kv heads, 128 channels, G = 32.
//
// Inputs and outputs are cold (kColdBytes pass between two uses). Counters: min_ms, median_ms; MB read and written, and
// GB_s; x_copy: min_ms over that of the copy; percent_of_fill: the speed of writing the output over that of the fill;
// max_error: of what comes back, in steps of its group (0.5 is rounding). Results must equal the scalar kernel's to the
// bit and come back within rounding; else the benchmark and the program fail.
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "format/codes.h"
#include "format/half.h"
#include "harness.h"

namespace {

using namespace kivi;
using namespace kivi::bench;
using cpu::Kernels;

constexpr int64_t kHeads = 8, kDim = 128, kGroup = 32;
int64_t tokens() { return quick ? 256 : 4096; }
int64_t elements() { return tokens() * kHeads * kDim; }
const char* type_name(Element e) { return e == Element::kFloat32 ? "f32" : e == Element::kFloat16 ? "f16" : "bf16"; }

// Baselines by type, in seconds; 0: not measured (filtered out).
double copy_seconds[3], fill_seconds[3];

// Keys and values of one type, [head][token][channel], as often as it takes to be cold, and as much memory to write to.
struct Inputs {
  explicit Inputs(Element t) : type(t) {
    const int64_t bytes = elements() * element_bytes(t), sets = quick ? 1 : kColdBytes / (2 * bytes) + 1;
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int64_t s = 0; s < sets; s++) {
      k.emplace_back(bytes), v.emplace_back(bytes);
      k_out.emplace_back(bytes), v_out.emplace_back(bytes);
      if (s > 0) {
        std::memcpy(k.back().data(), k[0].data(), static_cast<size_t>(bytes));
        std::memcpy(v.back().data(), v[0].data(), static_cast<size_t>(bytes));
        continue;
      }
      for (int64_t i = 0; i < elements(); i++) {
        const bool outlier = i % kDim % 32 == 3;
        store_element(k[0].data(), t, i, normal(random) * (outlier ? 20.0f : 1.0f));
        store_element(v[0].data(), t, i, normal(random));
      }
    }
  }
  int64_t sets() const { return static_cast<int64_t>(k.size()); }
  Element type;
  std::vector<Memory> k, v, k_out, v_out;
};

Inputs& inputs_of(Element type) {
  static std::unique_ptr<Inputs> inputs;
  if (inputs == nullptr || inputs->type != type) {
    inputs.reset();
    inputs = std::make_unique<Inputs>(type);
  }
  return *inputs;
}

const void* at(const Memory& m, Element type, int64_t i) { return m.data() + i * element_bytes(type); }
void* at(Memory& m, Element type, int64_t i) { return m.data() + i * element_bytes(type); }

void report(benchmark::State& state, const Samples& samples, double read, double written, Element type) {
  report_time(state, samples, read + written);
  if (samples.empty()) return;
  const auto t = static_cast<size_t>(type);
  const double values = static_cast<double>(2 * elements() * element_bytes(type));
  if (copy_seconds[t] > 0 && read >= values)
    state.counters["x_copy"] = samples.least() / copy_seconds[t] * values / read;
  if (fill_seconds[t] > 0 && written >= values) {
    state.counters["percent_of_fill"] = 100 * fill_seconds[t] / samples.least() * written / values;
  }
}

// Copying K and V once, and filling as much memory.
void add_baselines(Element type) {
  const auto bytes = static_cast<size_t>(elements() * element_bytes(type));
  const double both = 2.0 * static_cast<double>(bytes);
  add_benchmark(std::string("copy/type:") + type_name(type), [=](benchmark::State& state, Samples& samples) {
    Inputs& in = inputs_of(type);
    size_t turn = 0;
    measure(state, samples, [&] {
      turn = (turn + 1) % in.k.size();
      std::memcpy(in.k_out[turn].data(), in.k[turn].data(), bytes);
      std::memcpy(in.v_out[turn].data(), in.v[turn].data(), bytes);
    });
    report(state, samples, both, both, type);
    copy_seconds[static_cast<size_t>(type)] = samples.least();
  });
  add_benchmark(std::string("fill/type:") + type_name(type), [=](benchmark::State& state, Samples& samples) {
    Inputs& in = inputs_of(type);
    size_t turn = 0;
    measure(state, samples, [&] {
      turn = (turn + 1) % in.k.size();
      std::memset(in.k_out[turn].data(), static_cast<int>(turn), bytes);
      std::memset(in.v_out[turn].data(), static_cast<int>(turn), bytes);
    });
    report(state, samples, 0, both, type);
    fill_seconds[static_cast<size_t>(type)] = samples.least();
  });
}

// The largest error of one group of x in steps of its range, in double; NaN if anything is.
double group_error(const Memory& x, const Memory& back, Element type, int64_t from, int64_t stride, int64_t bits) {
  double low = INFINITY, high = -INFINITY, worst = 0;
  for (int64_t i = from; i < from + kGroup * stride; i += stride) {
    const auto value = static_cast<double>(load_element(x.data(), type, i));
    const double error = std::fabs(value - static_cast<double>(load_element(back.data(), type, i)));
    low = std::min(low, value), high = std::max(high, value), worst = error <= worst ? worst : error;
  }
  return worst / (high - low) * static_cast<double>((1 << bits) - 1);
}

// ---------------------------------------------------------------------------------------------- records

struct RecordCase {
  const Kernels* kernels;
  int64_t bits;
  Element type;
  bool search;
  std::string recipe;  // of those that README names; then `bits` are those of V
  Format format() const {
    Format f;
    f.num_kv_heads = kHeads, f.head_dim = f.value_head_dim = kDim, f.k_bits = f.v_bits = bits;
    f.group_size = kGroup, f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
    if (recipe.empty()) return f;
    f.scale_type = ScaleType::kFloat8;
    f.k_search = kRecipeKeySearch, f.v_search = recipe == "balanced" ? kRecipeGroupSearch : kRecipeTokenSearch;
    f.k_bias_correction = f.v_gain_correction = f.v_rotated = true;
    f.v_symmetric = recipe != "balanced";
    f.v_group_size = f.v_symmetric ? kDim : 0;
    if (bits == 4) return f;  // near-lossless
    f.k_bits = 4;
    for (const KeyClass& c : recipe == "quality" ? std::vector<KeyClass>{{32, 4}, {64, 3}, {32, 2}}
                                                 : std::vector<KeyClass>{{32, 4}, {96, 2}}) {
      f.key_classes[f.num_key_classes++] = c;
    }
    return f;
  }
  std::string name(const char* what) const {
    const std::string b = std::to_string(bits);
    return std::string(what) + "/" + (recipe.empty() ? "K" + b + "V" + b + (search ? "_search" : "") : recipe) +
           "/type:" + type_name(type) + "/isa:" + kernels->name;
  }
};

class Records {
 public:
  explicit Records(const RecordCase& c)
      : format_(c.format()), layout_(record_layout(format_)), type_(c.type), groups_(tokens() / kGroup * kHeads) {
    for (int16_t i = 0; i < kDim; i++) order_[static_cast<size_t>(i * 37 % kDim)] = i;
  }

  int64_t bytes() const { return groups_ * layout_.bytes; }
  bool encode(const Kernels& kernels, const Memory& k, const Memory& v, Memory& records) const {
    bool fits = true;
    for (int64_t g = 0; g < groups_; g++) {
      const int64_t from = g * kGroup * kDim;
      fits = kernels.encode({&format_, &layout_, at(k, type_, from), at(v, type_, from), kDim, kDim, type_,
                             records.data() + g * layout_.bytes, order()}) &&
             fits;
    }
    return fits;
  }
  void decode(const Kernels& kernels, const Memory& records, Memory& k, Memory& v) const {
    // As cache_dequantize does.
    const bool stream = 2 * groups_ * kGroup * kDim * element_bytes(type_) >= cpu::kStreamBytes;
    for (int64_t g = 0; g < groups_; g++) {
      const int64_t from = g * kGroup * kDim;
      kernels.decode({&format_, &layout_, records.data() + g * layout_.bytes, 0, kGroup, at(k, type_, from),
                      at(v, type_, from), kDim, kDim, type_, stream, order()});
    }
    cpu::flush_streams();
  }
  // The error of values that come back, over their size: of the one of K and V that is further off.
  double relative_error(const Memory& k, const Memory& v, const Memory& k_back, const Memory& v_back) const {
    double error[2] = {0, 0}, size[2] = {0, 0};
    for (int64_t i = 0; i < elements(); i++) {
      for (const int side : {0, 1}) {
        const auto x = static_cast<double>(load_element((side == 0 ? k : v).data(), type_, i));
        const auto y = static_cast<double>(load_element((side == 0 ? k_back : v_back).data(), type_, i));
        error[side] += (x - y) * (x - y), size[side] += x * x;
      }
    }
    const double worse = std::max(error[0] / size[0], error[1] / size[1]);
    return error[0] + error[1] >= 0 ? std::sqrt(worse) : NAN;
  }
  // The largest error in steps of the group: keys have groups of 32 tokens, values of 32 channels.
  double largest_error(const Memory& k, const Memory& v, const Memory& k_back, const Memory& v_back) const {
    double worst = 0;
    const auto add = [&](double error) { worst = error <= worst ? worst : error; };  // NaN stays
    for (int64_t from = 0; from < groups_ * kGroup * kDim; from += kGroup * kDim) {
      for (int64_t i = 0; i < kDim; i++) add(group_error(k, k_back, type_, from + i, kDim, format_.k_bits));
      for (int64_t i = 0; i < kGroup * kDim; i += kGroup) {
        add(group_error(v, v_back, type_, from + i, 1, format_.v_bits));
      }
    }
    return worst;
  }

 private:
  const int16_t* order() const { return format_.num_key_classes == 0 ? nullptr : order_.data(); }

  Format format_;
  RecordLayout layout_;
  Element type_;
  int64_t groups_;
  std::array<int16_t, kDim> order_;
};

// Rounding to the nearest code is half a step; scale and zero rounded to float16 add a few percent, values that come
// back as bfloat16 2^-8 of their size; the search gives up the ends of the range.
double error_limit(const RecordCase& c) {
  if (!c.recipe.empty()) return c.bits == 2 ? 0.40 : c.bits == 3 ? 0.25 : 0.12;
  if (c.search) return 0.5 + 0.06 * static_cast<double>((1 << c.bits) - 1);
  return c.type == Element::kFloat32 ? 0.51 : 0.60;
}

// The scalar kernel's records and values for the first set of inputs, and its error.
struct Reference {
  explicit Reference(const RecordCase& c)
      : name(c.name("")), records(Records(c).bytes()), k(elements() * 4), v(elements() * 4) {
    const Inputs& in = inputs_of(c.type);
    const Kernels& scalar = *cpu::kernels_for(cpu::Isa::kScalar);
    const Records r(c);
    r.encode(scalar, in.k[0], in.v[0], records);
    r.decode(scalar, records, k, v);
    error = c.recipe.empty() ? r.largest_error(in.k[0], in.v[0], k, v) : r.relative_error(in.k[0], in.v[0], k, v);
  }
  std::string name;
  Memory records, k, v;
  double error;
};

const Reference& reference_of(RecordCase c) {
  static std::unique_ptr<Reference> reference;
  c.kernels = cpu::kernels_for(cpu::Isa::kScalar);
  if (reference == nullptr || reference->name != c.name("")) reference = std::make_unique<Reference>(c);
  return *reference;
}

bool same(const Memory& a, const Memory& b, int64_t bytes) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(bytes)) == 0;
}

void check_error(benchmark::State& state, double error, double limit) {
  state.counters["max_error"] = error;
  if (!(error <= limit)) {
    fail(state, "WRONG RESULT: values come back " + number(error, 3) + " steps off, more than " + number(limit, 3));
  }
}

void run_encode(benchmark::State& state, Samples& samples, const RecordCase& c) {
  Inputs& in = inputs_of(c.type);
  const Records r(c);
  const Reference& want = reference_of(c);
  std::vector<Memory> out;
  for (int64_t s = 0; s < in.sets(); s++) out.emplace_back(r.bytes());
  bool fits = r.encode(*c.kernels, in.k[0], in.v[0], out[0]);
  check_error(state, want.error, error_limit(c));
  size_t turn = 0;
  measure(state, samples, [&] {
    turn = (turn + 1) % out.size();
    fits = r.encode(*c.kernels, in.k[turn], in.v[turn], out[turn]) && fits;
  });
  if (!fits || !same(out[turn], want.records, r.bytes()))
    fail(state, "WRONG RESULT: records differ from the scalar kernel's");
  report(state, samples, 2.0 * static_cast<double>(elements() * element_bytes(c.type)), static_cast<double>(r.bytes()),
         c.type);
}

void run_decode(benchmark::State& state, Samples& samples, const RecordCase& c) {
  Inputs& in = inputs_of(c.type);
  const Records r(c);
  const Reference& want = reference_of(c);
  const int64_t bytes = elements() * element_bytes(c.type);
  std::vector<Memory>&k = in.k_out, &v = in.v_out;
  std::vector<Memory> records;
  for (int64_t s = 0; s < in.sets(); s++) {
    records.emplace_back(r.bytes());
    std::memcpy(records.back().data(), want.records.data(), static_cast<size_t>(r.bytes()));
  }
  check_error(state, want.error, error_limit(c));
  size_t turn = 0;
  measure(state, samples, [&] {
    turn = (turn + 1) % k.size();
    r.decode(*c.kernels, records[turn], k[turn], v[turn]);
  });
  if (!samples.empty() && (!same(k[turn], want.k, bytes) || !same(v[turn], want.v, bytes))) {
    fail(state, "WRONG RESULT: values differ from the scalar kernel's");
  }
  report(state, samples, static_cast<double>(r.bytes()), 2.0 * static_cast<double>(bytes), c.type);
}

// ---------------------------------------------------------------------------------------------- dense

struct DenseCase {
  const Kernels* kernels;
  int64_t bits;
  bool along_tokens;  // groups along the tokens of a channel, as keys have them; else along the channels of a token
  std::string name(const char* what) const {
    return std::string(what) + "/bits:" + std::to_string(bits) + "/axis:" + (along_tokens ? "tokens" : "channels") +
           "/type:f32/isa:" + kernels->name;
  }
};

// Codes, scale and zero of a tensor [head][token][channel] of float32.
struct Quantized {
  explicit Quantized(int64_t bits)
      : code_bytes(elements() * bits / 8),
        group_bytes(elements() / kGroup * 4),
        codes(code_bytes),
        scale(group_bytes),
        zero(group_bytes) {}
  int64_t code_bytes, group_bytes;
  Memory codes, scale, zero;
  double bytes() const { return static_cast<double>(code_bytes + 2 * group_bytes); }
  bool equals(const Quantized& o) const {
    return same(codes, o.codes, code_bytes) && same(scale, o.scale, group_bytes) && same(zero, o.zero, group_bytes);
  }
};

class Dense {
 public:
  explicit Dense(const DenseCase& c) : bits_(c.bits) {
    outer_ = c.along_tokens ? kHeads : kHeads * tokens();
    n_ = c.along_tokens ? tokens() : kDim;
    inner_ = c.along_tokens ? kDim : 1;
  }
  void quantize(const Kernels& kernels, const Memory& x, Quantized& to) const {
    QuantizeParams p{};
    p.outer = outer_, p.n = n_, p.inner = inner_, p.bits = bits_, p.group_size = kGroup;
    p.x = x.data(), p.type = Element::kFloat32;
    p.x_outer_stride = n_ * inner_, p.x_n_stride = inner_, p.x_inner_stride = 1;
    p.codes = to.codes.data(), p.scale = to.scale.as<float>(), p.zero = to.zero.as<float>();
    kernels.quantize(p, 0, units());
  }
  void dequantize(const Kernels& kernels, const Quantized& from, Memory& x) const {
    DequantizeParams p{};
    p.outer = outer_, p.n = n_, p.inner = inner_, p.bits = bits_, p.group_size = kGroup;
    p.codes = from.codes.data(), p.scale = from.scale.as<float>(), p.zero = from.zero.as<float>();
    p.codes_strides[0] = n_ * bits_ / 8 * inner_;
    p.scale_strides[0] = p.zero_strides[0] = n_ / kGroup * inner_;
    p.codes_strides[1] = p.scale_strides[1] = p.zero_strides[1] = inner_;
    p.codes_strides[2] = p.scale_strides[2] = p.zero_strides[2] = 1;
    p.out = x.data(), p.type = Element::kFloat32;
    kernels.dequantize(p, 0, units());
  }
  // In steps of the group, from the definition.
  double largest_error(const Memory& x, const Memory& back) const {
    double worst = 0;
    for (int64_t line = 0; line < outer_ * inner_; line++) {
      const int64_t start = line / inner_ * n_ * inner_ + line % inner_;
      for (int64_t g = 0; g < n_; g += kGroup) {
        const double error = group_error(x, back, Element::kFloat32, start + g * inner_, inner_, bits_);
        worst = error <= worst ? worst : error;
      }
    }
    return worst;
  }

 private:
  int64_t units() const { return outer_ * ceil_div(inner_, cpu::kInnerBlock); }
  int64_t bits_, outer_, n_, inner_;
};

// What the scalar kernel makes of the first set of inputs, and its error.
struct DenseReference {
  explicit DenseReference(const DenseCase& c) : name(c.name("")), quantized(c.bits), values(elements() * 4) {
    const Memory& x = inputs_of(Element::kFloat32).k[0];
    const Dense dense(c);
    dense.quantize(*c.kernels, x, quantized);
    dense.dequantize(*c.kernels, quantized, values);
    error = dense.largest_error(x, values);
  }
  std::string name;
  Quantized quantized;
  Memory values;
  double error;
};

const DenseReference& dense_reference_of(DenseCase c) {
  static std::unique_ptr<DenseReference> reference;
  c.kernels = cpu::kernels_for(cpu::Isa::kScalar);
  if (reference == nullptr || reference->name != c.name("")) reference = std::make_unique<DenseReference>(c);
  return *reference;
}

void run_dense(benchmark::State& state, Samples& samples, const DenseCase& c, bool back) {
  Inputs& in = inputs_of(Element::kFloat32);
  const Dense dense(c);
  std::vector<Quantized> quantized;
  for (int64_t s = 0; s < in.sets(); s++) quantized.emplace_back(c.bits);
  const DenseReference& want = dense_reference_of(c);
  check_error(state, want.error, 0.501);
  for (auto& q : quantized) dense.quantize(*c.kernels, in.k[0], q);
  size_t turn = 0;
  measure(state, samples, [&] {
    turn = (turn + 1) % quantized.size();
    if (back) {
      dense.dequantize(*c.kernels, quantized[turn], in.k_out[turn]);
    } else {
      dense.quantize(*c.kernels, in.k[turn], quantized[turn]);
    }
  });
  if (!quantized[turn].equals(want.quantized))
    fail(state, "WRONG RESULT: codes, scale or zero differ from the scalar kernel's");
  if (back && !same(in.k_out[turn], want.values, elements() * 4)) {
    fail(state, "WRONG RESULT: values differ from the scalar kernel's");
  }
  const double dense_bytes = 4.0 * static_cast<double>(elements()), bytes = quantized[0].bytes();
  report_time(state, samples, dense_bytes + bytes);
  const double copy = copy_seconds[static_cast<size_t>(Element::kFloat32)] / 2;  // the baselines move K and V
  const double fill = fill_seconds[static_cast<size_t>(Element::kFloat32)] / 2;
  if (!back && copy > 0) state.counters["x_copy"] = samples.least() / copy;
  if (back && fill > 0) state.counters["percent_of_fill"] = 100 * fill / samples.least();
}

// ---------------------------------------------------------------------------------------------- what there is

void add_records(int64_t bits, Element type, bool search, const std::string& recipe = "") {
  for (const Kernels* kernels : vector_kernels()) {
    const RecordCase c{kernels, bits, type, search, recipe};
    add_benchmark(c.name("encode"), [c](benchmark::State& state, Samples& samples) { run_encode(state, samples, c); });
    if (search || !recipe.empty()) continue;  // comes back like any other
    add_benchmark(c.name("decode"), [c](benchmark::State& state, Samples& samples) { run_decode(state, samples, c); });
  }
}

void add_dense(int64_t bits, bool along_tokens) {
  for (const Kernels* kernels : vector_kernels()) {
    const DenseCase c{kernels, bits, along_tokens};
    add_benchmark(c.name("quantize"),
                  [c](benchmark::State& state, Samples& samples) { run_dense(state, samples, c, false); });
    add_benchmark(c.name("dequantize"),
                  [c](benchmark::State& state, Samples& samples) { run_dense(state, samples, c, true); });
  }
}

void add_all() {
  for (const Element type : {Element::kBFloat16, Element::kFloat32}) {
    add_baselines(type);
    add_records(2, type, false);
  }
  for (const int64_t bits : {3, 4}) add_records(bits, Element::kFloat32, false);
  add_records(2, Element::kFloat32, true);
  for (const Element type : {Element::kBFloat16, Element::kFloat32}) {
    for (const char* recipe : {"compact", "balanced"}) add_records(2, type, false, recipe);
    add_records(3, type, false, "quality");
    add_records(4, type, false, "near-lossless");
  }
  for (const int64_t bits : {2, 4}) {
    for (const bool along_tokens : {false, true}) add_dense(bits, along_tokens);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, {1}, [] { add_all(); });
}
