#include "emulator/orders.h"

#include <cstdlib>
#include <sstream>

namespace emulator {
namespace {

constexpr const char* kAllOrders = "ascending,descending,random:2,random_warps:3";

Order order_of(const std::string& name) {
  if (name == "ascending") return Order::ascending;
  if (name == "descending") return Order::descending;
  if (name == "random") return Order::random;
  if (name == "random_warps") return Order::random_warps;
  fail("KIVI_CUDA_ORDERS: no order is called \"%s\"", name.c_str());
}

std::vector<NamedOrder> parse(const std::string& text) {
  std::vector<NamedOrder> orders;
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    const size_t colon = item.find(':');
    const std::string name = item.substr(0, colon);
    const uint64_t seeds = colon == std::string::npos ? 1 : std::strtoull(item.c_str() + colon + 1, nullptr, 10);
    const Order order = order_of(name);
    if (seeds == 0) fail("KIVI_CUDA_ORDERS: \"%s\" names no seed", item.c_str());
    for (uint64_t seed = 1; seed <= seeds; seed++) {
      orders.push_back({order, seed, name + ", seed " + std::to_string(seed)});
    }
  }
  if (orders.empty()) fail("KIVI_CUDA_ORDERS names no order");
  return orders;
}

}  // namespace

std::vector<NamedOrder> orders_to_try() {
  const char* const chosen = std::getenv("KIVI_CUDA_ORDERS");
  if (chosen != nullptr && *chosen != 0) return parse(chosen);
  return parse(watches_races() ? "ascending" : kAllOrders);
}

}  // namespace emulator
