// A decode step of kivi::KVCache captured in a graph and replayed, with the emulator's graphs: only launches are kept,
// so what the host did while it captured is not done again.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "emulator/emulator.h"
#include "kivi/kivi.h"
#include "tests/ops/support.h"

namespace kivi::test {
namespace {

constexpr int64_t kHeads = 2, kDim = 64;

at::Tensor tokens(int64_t count, int64_t seed, int64_t heads = kHeads) { return randn({2, heads, count, kDim}, seed); }

KVCache cache_of(const std::string& recipe) {
  CacheOptions o;
  o.num_kv_heads = kHeads;
  o.head_dim = kDim;
  o.residual_length = 32;
  o.recipe = recipe;
  return KVCache(o);
}

// While a graph is captured, memory that is freed is kept for its replays, as torch does on a device.
class Capture : public c10::Allocator {
 public:
  Capture() : before_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, 1);
    emulator::begin_capture();
  }
  ~Capture() override {
    if (capturing_) end();
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void end() {
    graph_ = emulator::end_capture();
    c10::SetCPUAllocator(before_, 1);
    capturing_ = false;
  }
  void replay() const { emulator::replay(graph_); }

  c10::DataPtr allocate(size_t bytes) override {
    kept_.push_back(before_->allocate(bytes));
    return {kept_.back().get(), nullptr, [](void*) {}, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  c10::Allocator* const before_;
  std::vector<c10::DataPtr> kept_;
  emulator::Graph graph_;
  bool capturing_ = true;
};

class Graphs : public testing::TestWithParam<const char*> {};

// Lengths grow on the device alone: across flushes, and over the edge of a page.
TEST_P(Graphs, AReplayedStepDoesWhatACallDoes) {
  KVCache eager = cache_of(GetParam()), graphed = cache_of(GetParam());
  const at::Tensor q = at::zeros({2, 4, 1, kDim}), k = at::zeros({2, kHeads, 1, kDim}), v = at::zeros_like(k);
  for (KVCache* c : {&eager, &graphed}) c->forward(tokens(150, 1, 4), tokens(150, 2), tokens(150, 3));
  graphed.reserve(150 + 40);
  Capture graph;
  const at::Tensor out = graphed.forward(q, k, v);
  graph.end();
  EXPECT_EQ(graphed.length(), 150);  // nothing ran
  for (int64_t step = 0; step < 40; step++) {
    q.copy_(tokens(1, 1000 + step, 4));
    k.copy_(tokens(1, 2000 + step));
    v.copy_(tokens(1, 3000 + step));
    graph.replay();
    EXPECT_TRUE(at::equal(out, eager.forward(q, k, v))) << step;
  }
  EXPECT_EQ(graphed.length(), 190);
  EXPECT_EQ(graphed.quantized_length(), eager.quantized_length());
  EXPECT_TRUE(same_state(graphed.state(), eager.state()));
  // And on without the graph.
  for (KVCache* c : {&eager, &graphed}) c->append(tokens(70, 4), tokens(70, 5));
  EXPECT_TRUE(same_state(graphed.state(), eager.state()));
}

INSTANTIATE_TEST_SUITE_P(Recipes, Graphs, testing::Values("kivi", "balanced", "quality"));

// A graph that appends more than was reserved ends with an error, and other rows keep their pages.
TEST(Graph, WhatWasNotReservedIsAnError) {
  KVCache c = cache_of("kivi");
  c.append(tokens(150, 1), tokens(150, 2));
  c.reserve(160);
  const at::Tensor k = tokens(1, 3), v = tokens(1, 4);
  Capture graph;
  c.append(k, v);
  graph.end();
  EXPECT_THROW(
      {
        for (int64_t step = 0; step < 200; step++) graph.replay();
      },
      emulator::Error);
}

TEST(Graph, TheFirstTokensCannotBeCaptured) {
  KVCache c = cache_of("kivi");
  Capture graph;
  EXPECT_THROW(c.append(tokens(1, 1), tokens(1, 2)), c10::Error);
  graph.end();
  EXPECT_TRUE(c.empty());
}

// Classes of key channels are chosen on the host.
TEST(Graph, ClassesMustBeChosenBefore) {
  KVCache c = cache_of("balanced");
  c.append(tokens(10, 1), tokens(10, 2));
  Capture graph;
  EXPECT_THROW(c.append(tokens(1, 1), tokens(1, 2)), c10::Error);
  graph.end();
  EXPECT_EQ(c.length(), 10);
}

// Pages that a graph will write to stay with their rows when tokens go.
TEST(Graph, TruncationKeepsWhatWasReserved) {
  KVCache eager = cache_of("kivi"), graphed = cache_of("kivi");
  const at::Tensor k = at::zeros({2, kHeads, 1, kDim}), v = at::zeros_like(k);
  for (KVCache* c : {&eager, &graphed}) c->append(tokens(330, 1), tokens(330, 2));
  graphed.reserve(400);
  Capture graph;
  graphed.append(k, v);
  graph.end();
  for (KVCache* c : {&eager, &graphed}) c->truncate(40);
  for (int64_t step = 0; step < 300; step++) {
    k.copy_(tokens(1, 2000 + step));
    v.copy_(tokens(1, 3000 + step));
    graph.replay();
    eager.append(k, v);
  }
  EXPECT_TRUE(same_state(graphed.state(), eager.state()));
}

// The block table of the device grows in one mode and is written in another: its buffers must be plain.
TEST(BlockTable, IsUploadedInAnyMode) {
  KVCache plain = cache_of("kivi"), cache = cache_of("kivi");
  const at::Tensor k = tokens(1100, 1), v = tokens(1100, 2);
  const auto append = [&](KVCache& c, int64_t begin, int64_t end) {
    c.append(k.narrow(2, begin, end - begin), v.narrow(2, begin, end - begin));
  };
  {
    const c10::InferenceMode mode;
    append(cache, 0, 700);
    append(cache, 700, 800);  // one more page: the table gets room for two
  }
  append(cache, 800, 900);
  append(cache, 900, 1100);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 700}, {700, 800}, {800, 900}, {900, 1100}}) {
    append(plain, begin, end);
  }
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
}

}  // namespace
}  // namespace kivi::test
