// Random histories of calls against the model of histories.h. KIVI_HISTORIES says how many (2000), KIVI_HISTORY_SEED
// which one is the first (0): one seed is one history. One that fails is made as small as it gets and printed as code.
#include "tests/ops/histories.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>

namespace kivi::test {
namespace {

// --------------------------------------------------------------------------------------------------------- generating

class Dice {
 public:
  explicit Dice(uint32_t seed) : rng_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }
  uint32_t seed() { return static_cast<uint32_t>(rng_() % 1000000); }

 private:
  std::mt19937 rng_;
};

// Options beyond KIVI, each by itself.
void go_beyond(CacheOptions& o, Dice& dice) {
  const std::vector<std::vector<double>> searches = {{}, {}, {0.95, 0.9}, {0.84, 0.68}};
  o.scale_dtype = dice.of<std::string>({"float8", "float8", "float16", "float32"});
  o.range_search = dice.one_in(4);
  o.k_search = dice.of(searches);
  o.v_search = dice.of(searches);
  o.k_bias_correction = dice.one_in(2);
  o.v_gain_correction = dice.one_in(2);
  o.v_symmetric = dice.one_in(2);
  o.v_rotated = dice.one_in(2);
  if (dice.one_in(2) && o.head_dim > 16)
    o.k_classes = {16, dice.of<int64_t>({2, 4, 8}), o.head_dim - 16, dice.of(kAllBits)};
  if (dice.one_in(3) && o.head_dim > 48) o.k_classes = {16, 4, 32, dice.of<int64_t>({1, 3}), o.head_dim - 48, 2};
}

uint32_t some_attention(Dice& dice) {
  uint32_t with = 0;
  for (const With w : {kBoolMask, kFloatMask, kNotCausal, kWindow, kSoftcap, kSinks, kSlopes, kScale, kOtherType}) {
    if (dice.one_in(4)) with |= w;
  }
  return dice.one_in(4) ? with & kOtherType : with;
}

History history_of(uint32_t seed) {
  Dice dice(seed);
  History h;
  CacheOptions& o = h.options;
  const auto size = [&] { return dice.one_in(3) ? 1 + dice.below(24) : dice.of<int64_t>({16, 20, 33, 40, 64, 72}); };
  o.num_kv_heads = 1 + dice.below(3);
  o.head_dim = dice.one_in(60) ? 272 : size();
  if (dice.one_in(2)) o.value_head_dim = size();
  o.group_size = dice.of<int64_t>({16, 16, 16, 32, 32, 64, 128});
  o.residual_length = dice.of<int64_t>({0, 1, 15, 16, 32, dice.below(70)});
  o.sink_length = dice.of<int64_t>({0, 4, dice.below(9)});
  o.precision = dice.of<std::string>({"fast", "exact"});
  h.batch = 1 + dice.below(3);
  h.queries_per_head = 1 + dice.below(4);
  h.type = dice.of<at::ScalarType>({at::kFloat, at::kFloat, at::kHalf, at::kBFloat16});
  const int64_t kind = dice.below(10);
  if (kind < 2) {
    o.recipe = dice.of<std::string>({"kivi", "compact", "balanced", "quality", "near-lossless"});
  } else {
    o.k_bits = dice.of(kAllBits);
    o.v_bits = dice.of(kAllBits);
    if (kind < 6) o.scale_dtype = dice.of<std::string>({"float16", "float16", "float32"});
    if (dice.one_in(4)) o.v_group_size = dice.one_in(2) ? 2 * o.group_size : o.value_head_dim.value_or(o.head_dim);
    if (kind >= 6) go_beyond(o, dice);
  }
  if (o.v_group_size) o.v_group_size = std::min(*o.v_group_size, o.value_head_dim.value_or(o.head_dim));
  const bool huge = dice.one_in(40);
  const std::vector<Do> calls = {Do::kAppend,  Do::kAppend, Do::kAppend,    Do::kForward,     Do::kForward,
                                 Do::kForward, Do::kAttend, Do::kAttend,    Do::kAttend,      Do::kTruncate,
                                 Do::kReorder, Do::kSelect, Do::kRepeat,    Do::kClone,       Do::kSwitch,
                                 Do::kReserve, Do::kReset,  Do::kGiveOrder, Do::kSaveAndLoad, Do::kSaveAndLoad};
  int64_t tokens = 0;  // about as many as the cache holds
  for (int64_t count = 4 + dice.below(20), i = 0; i < count; i++) {
    Step s = {dice.of(calls), 1 + dice.below(3), dice.seed(), 0};
    if (s.what == Do::kReset && !dice.one_in(4)) s.what = Do::kAttend;
    if (s.what == Do::kAppend || s.what == Do::kForward) {
      const int64_t most[] = {3, 3, 20, 20, 60, 60, 100, 301};
      s.n = dice.below(most[tokens == 0 && dice.one_in(2) ? 6 : dice.below(dice.one_in(3) ? 8 : 6)]);
      tokens += s.n;
      if (dice.one_in(3)) s.with |= kRagged;
      if (dice.one_in(3)) s.with |= kQueries;
      if (dice.one_in(20)) s.with |= kConstant;
      if (dice.one_in(3)) s.with |= kTransposed;
      if (huge && dice.one_in(3)) s.with |= kHuge;
      if (s.what == Do::kForward && !dice.one_in(3)) s.with |= some_attention(dice);
    } else if (s.what == Do::kAttend) {
      s.with = some_attention(dice);
    } else if (s.what == Do::kTruncate) {
      s.n = dice.one_in(4) ? dice.below(tokens + 2) : std::max<int64_t>(0, tokens - dice.below(40));
      tokens = std::min(tokens, s.n);
    } else if (s.what == Do::kReserve) {
      s.n = dice.below(400);
    } else if (s.what == Do::kReset) {
      tokens = 0;
    }
    h.steps.push_back(s);
  }
  return h;
}

// ------------------------------------------------------------------------------------------------ shrinking, printing

bool breaks(const History& h) {
  try {
    const KVCache cache(h.options);
  } catch (const c10::Error&) {
    return false;  // not a history at all
  }
  return !what_breaks(h).empty();
}

// Takes every change that leaves it broken, until none is left or `most` were tried.
History shrunk(History h, int most = 1500) {
  bool smaller = true;
  const auto attempt = [&](const auto& change) {
    History candidate = h;
    change(candidate);
    if (most <= 0) return;
    most--;
    if (breaks(candidate)) h = candidate, smaller = true;
  };
  const auto lessen = [&](const auto& field, int64_t least) {
    for (const int64_t by : {1000, 64, 16, 4, 1}) {
      const int64_t now = field(h), next = by == 1000 ? least
                                                      : std::max(least, by == 1                ? now - 1
                                                                        : now / by * by == now ? now - by
                                                                                               : now / by * by);
      if (next < now) attempt([&](History& c) { field(c) = next; });
    }
  };
  const CacheOptions plain;
  while (smaller && most > 0) {
    smaller = false;
    for (size_t run = h.steps.size(); run >= 1; run /= 2) {
      for (size_t i = h.steps.size(); i-- > 0;) {
        if (i + run > h.steps.size()) continue;
        attempt([&](History& c) {
          c.steps.erase(c.steps.begin() + static_cast<int64_t>(i), c.steps.begin() + static_cast<int64_t>(i + run));
        });
      }
    }
    for (size_t i = 0; i < h.steps.size(); i++) {
      for (uint32_t bit = 1; bit <= kAllWith; bit *= 2) {
        if ((h.steps[i].with & bit) != 0) attempt([&](History& c) { c.steps[i].with &= ~bit; });
      }
      lessen([i](History& c) -> int64_t& { return c.steps[i].n; }, 0);
    }
    const auto option = [&](auto CacheOptions::*field) {
      if (!(h.options.*field == plain.*field)) attempt([&](History& c) { c.options.*field = plain.*field; });
    };
    option(&CacheOptions::recipe), option(&CacheOptions::k_classes), option(&CacheOptions::k_search);
    option(&CacheOptions::v_search), option(&CacheOptions::range_search), option(&CacheOptions::k_bias_correction);
    option(&CacheOptions::v_gain_correction), option(&CacheOptions::v_symmetric), option(&CacheOptions::v_rotated);
    option(&CacheOptions::scale_dtype), option(&CacheOptions::value_head_dim), option(&CacheOptions::v_group_size);
    option(&CacheOptions::k_bits), option(&CacheOptions::v_bits);
    if (h.options.precision != "exact") attempt([&](History& c) { c.options.precision = "exact"; });
    if (h.type != at::kFloat) attempt([&](History& c) { c.type = at::kFloat; });
    lessen([](History& c) -> int64_t& { return c.options.num_kv_heads; }, 1);
    lessen([](History& c) -> int64_t& { return c.options.head_dim; }, 1);
    lessen([](History& c) -> int64_t& { return c.options.group_size; }, 16);
    lessen([](History& c) -> int64_t& { return c.options.residual_length; }, 0);
    lessen([](History& c) -> int64_t& { return c.options.sink_length; }, 0);
    lessen([](History& c) -> int64_t& { return c.batch; }, 1);
    lessen([](History& c) -> int64_t& { return c.queries_per_head; }, 1);
  }
  return h;
}

std::string code_of(const History& h) {
  std::ostringstream s;
  s.precision(17);
  const CacheOptions &o = h.options, plain;
  const auto text = [](const std::string& t) { return "\"" + t + "\""; };
  const auto list = [](const auto& values) {
    std::ostringstream l;
    for (size_t i = 0; i < values.size(); i++) l << (i == 0 ? "{" : ", ") << values[i];
    return l.str() + "}";
  };
  const auto put = [&](const char* name, const auto& value, const auto& standard, const auto& shown) {
    if (!(value == standard)) s << "  h.options." << name << " = " << shown << ";\n";
  };
  s << "TEST(Histories, Found) {\n  History h;\n";
  put("num_kv_heads", o.num_kv_heads, plain.num_kv_heads, o.num_kv_heads);
  put("head_dim", o.head_dim, plain.head_dim, o.head_dim);
  put("value_head_dim", o.value_head_dim, plain.value_head_dim, o.value_head_dim.value_or(0));
  put("k_bits", o.k_bits, plain.k_bits, o.k_bits);
  put("v_bits", o.v_bits, plain.v_bits, o.v_bits);
  put("group_size", o.group_size, plain.group_size, o.group_size);
  put("residual_length", o.residual_length, plain.residual_length, o.residual_length);
  put("sink_length", o.sink_length, plain.sink_length, o.sink_length);
  put("precision", o.precision, plain.precision, text(o.precision));
  put("range_search", o.range_search, false, "true");
  put("scale_dtype", o.scale_dtype, plain.scale_dtype, text(o.scale_dtype));
  put("recipe", o.recipe, plain.recipe, text(o.recipe));
  put("k_search", o.k_search, plain.k_search, list(o.k_search));
  put("v_search", o.v_search, plain.v_search, list(o.v_search));
  put("k_bias_correction", o.k_bias_correction, false, "true");
  put("v_gain_correction", o.v_gain_correction, false, "true");
  put("v_group_size", o.v_group_size, plain.v_group_size, o.v_group_size.value_or(0));
  put("v_symmetric", o.v_symmetric, false, "true");
  put("v_rotated", o.v_rotated, false, "true");
  put("k_classes", o.k_classes, plain.k_classes, list(o.k_classes));
  s << "  h.batch = " << h.batch << ", h.queries_per_head = " << h.queries_per_head << ";\n  h.type = at::k" << h.type
    << ";\n  h.steps = {\n";
  const char* calls[] = {"kAppend", "kForward", "kAttend",      "kTruncate", "kReorder", "kSelect",   "kRepeat",
                         "kClone",  "kSwitch",  "kSaveAndLoad", "kReset",    "kReserve", "kGiveOrder"};
  const char* with[] = {"kRagged", "kBoolMask", "kFloatMask", "kNotCausal", "kWindow", "kSoftcap",  "kSinks",
                        "kSlopes", "kScale",    "kOtherType", "kQueries",   "kHuge",   "kConstant", "kTransposed"};
  for (const Step& step : h.steps) {
    s << "      {Do::" << calls[static_cast<int>(step.what)] << ", " << step.n << ", " << step.seed << ", ";
    std::string names;
    for (int i = 0; i < 14; i++) {
      if ((step.with >> i & 1) != 0) names += (names.empty() ? "" : " | ") + std::string(with[i]);
    }
    s << (names.empty() ? "0" : names) << "},\n";
  }
  s << "  };\n  EXPECT_EQ(what_breaks(h), \"\");\n}\n";
  return s.str();
}

// -------------------------------------------------------------------------------------------------------------- tests

char running[64];

// A crash leaves no time to print more than the seed.
void on_crash(int signal) {
  std::fputs(running, stderr);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

TEST(Histories, TheCacheIsWhatTheModelIs) {
  const Threads one(1);  // the tensors are so small that a second thread is only waited for
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS}) std::signal(signal, on_crash);
  const int64_t first = from_environment("KIVI_HISTORY_SEED", 0), count = from_environment("KIVI_HISTORIES", 2000);
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 3; seed++) {
    std::snprintf(running, sizeof(running), "in history KIVI_HISTORY_SEED=%lld\n", static_cast<long long>(seed));
    const History h = history_of(static_cast<uint32_t>(seed));
    const std::string what = what_breaks(h);
    if (what.empty()) continue;
    failures++;
    const History small = shrunk(h);
    ADD_FAILURE() << "history " << seed << " (KIVI_HISTORY_SEED=" << seed << " KIVI_HISTORIES=1), " << what
                  << "\nmade smaller, " << what_breaks(small) << "\n\n"
                  << code_of(small);
  }
  std::printf("%lld histories from seed %lld on\n", static_cast<long long>(count), static_cast<long long>(first));
}

}  // namespace
}  // namespace kivi::test
