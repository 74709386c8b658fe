// A decode step of kivi::KVCache captured in a graph and replayed, with the emulator's graphs: only launches are kept,
// so what the host did while it captured is not done again.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

class Graphs : public testing::TestWithParam<const char*> {};

// Lengths grow on the device alone: across flushes, and over the edge of a page.
TEST_P(Graphs, AReplayedStepDoesWhatACallDoes) {
  KVCache eager = cache_of(GetParam()), graphed = cache_of(GetParam());
  const at::Tensor q = at::zeros({2, 4, 1, kDim}), k = at::zeros({2, kHeads, 1, kDim}), v = at::zeros_like(k);
  for (KVCache* c : {&eager, &graphed}) c->forward(tokens(150, 1, 4), tokens(150, 2), tokens(150, 3));
  graphed.reserve(150 + 40);
  emulator::begin_capture();
  const at::Tensor out = graphed.forward(q, k, v);
  const emulator::Graph graph = emulator::end_capture();
  EXPECT_EQ(graphed.length(), 150);  // nothing ran
  for (int64_t step = 0; step < 40; step++) {
    q.copy_(tokens(1, 1000 + step, 4));
    k.copy_(tokens(1, 2000 + step));
    v.copy_(tokens(1, 3000 + step));
    emulator::replay(graph);
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
  emulator::begin_capture();
  c.append(k, v);
  const emulator::Graph graph = emulator::end_capture();
  EXPECT_THROW(
      {
        for (int64_t step = 0; step < 200; step++) emulator::replay(graph);
      },
      emulator::Error);
}

TEST(Graph, TheFirstTokensCannotBeCaptured) {
  KVCache c = cache_of("kivi");
  emulator::begin_capture();
  EXPECT_THROW(c.append(tokens(1, 1), tokens(1, 2)), c10::Error);
  emulator::end_capture();
  EXPECT_TRUE(c.empty());
}

// Classes of key channels are chosen on the host.
TEST(Graph, ClassesMustBeChosenBefore) {
  KVCache c = cache_of("balanced");
  c.append(tokens(10, 1), tokens(10, 2));
  emulator::begin_capture();
  EXPECT_THROW(c.append(tokens(1, 1), tokens(1, 2)), c10::Error);
  emulator::end_capture();
  EXPECT_EQ(c.length(), 10);
}

// Pages that a graph will write to stay with their rows when tokens go.
TEST(Graph, TruncationKeepsWhatWasReserved) {
  KVCache eager = cache_of("kivi"), graphed = cache_of("kivi");
  const at::Tensor k = at::zeros({2, kHeads, 1, kDim}), v = at::zeros_like(k);
  for (KVCache* c : {&eager, &graphed}) c->append(tokens(330, 1), tokens(330, 2));
  graphed.reserve(400);
  emulator::begin_capture();
  graphed.append(k, v);
  const emulator::Graph graph = emulator::end_capture();
  for (KVCache* c : {&eager, &graphed}) c->truncate(40);
  for (int64_t step = 0; step < 300; step++) {
    k.copy_(tokens(1, 2000 + step));
    v.copy_(tokens(1, 3000 + step));
    emulator::replay(graph);
    eager.append(k, v);
  }
  EXPECT_TRUE(same_state(graphed.state(), eager.state()));
}

}  // namespace
}  // namespace kivi::test
