// Capture of launches in a graph.
#include <cuda_runtime_api.h>

#include <utility>

#include "emulator/emulator.h"

namespace emulator {
namespace {

bool g_capturing = false;
Graph g_graph;

void run_body(const void* body) { (*static_cast<const std::function<void()>*>(body))(); }

}  // namespace

void submit(const Launch& launch, std::function<void()> body) {
  if (g_capturing) {
    g_graph.push_back({launch, std::move(body)});
  } else {
    run(launch, run_body, &body);
  }
}

void begin_capture() {
  g_capturing = true;
  g_graph.clear();
}

Graph end_capture() {
  g_capturing = false;
  return std::exchange(g_graph, {});
}

void replay(const Graph& graph) {
  for (const GraphNode& node : graph) run(node.launch, run_body, &node.body);
}

}  // namespace emulator

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = emulator::g_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
