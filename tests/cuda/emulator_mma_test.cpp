// The emulator's tensor cores against expectations written another way: the layouts of fragments as tables of what each
// bit of a lane's and of an element's number adds to row and column.
#include <array>
#include <cstdint>
#include <random>

#include "cuda/device.h"
#include "cuda/device_memory.h"

namespace kivi::cuda {
namespace {

struct Place {
  int row, col;
};
struct Layout {
  std::array<Place, 5> lane_bits;
  std::array<Place, 3> element_bits;
};

constexpr Layout kA = {{{{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}}}, {{{0, 1}, {8, 0}, {0, 8}}}};
constexpr Layout kB = {{{{2, 0}, {4, 0}, {0, 1}, {0, 2}, {0, 4}}}, {{{1, 0}, {8, 0}, {0, 0}}}};
constexpr Layout kC = {{{{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}}}, {{{0, 1}, {8, 0}, {0, 0}}}};

Place place(const Layout& layout, int lane, int element) {
  Place sum{0, 0};
  for (size_t bit = 0; bit < 5; bit++) {
    if ((lane >> bit & 1) != 0) sum = {sum.row + layout.lane_bits[bit].row, sum.col + layout.lane_bits[bit].col};
  }
  for (size_t bit = 0; bit < 3; bit++) {
    if ((element >> bit & 1) != 0) {
      sum = {sum.row + layout.element_bits[bit].row, sum.col + layout.element_bits[bit].col};
    }
  }
  return sum;
}

// Fragments as lanes hold them: a 4 registers, b 2, c and d 4 floats a lane.
template <class T>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const unsigned lane = threadIdx.x;
  uint32_t own_a[4], own_b[2];
  float own[4];
  for (unsigned i = 0; i < 4; i++) own_a[i] = a[4 * lane + i];
  for (unsigned i = 0; i < 2; i++) own_b[i] = b[2 * lane + i];
  for (unsigned i = 0; i < 4; i++) own[i] = c[4 * lane + i];
  mma_m16n8k16<T>(own, own_a, own_b, own);
  for (unsigned i = 0; i < 4; i++) d[4 * lane + i] = own[i];
}

template <class T>
T element(float v);
template <>
__half element(float v) {
  return __float2half_rn(v);
}
template <>
__nv_bfloat16 element(float v) {
  return __float2bfloat16_rn(v);
}

struct Matrices {
  float a[16][16] = {}, b[16][8] = {}, c[16][8] = {};
};

// a * b + c by the instruction.
template <class T>
std::vector<float> by_instruction(const Matrices& m) {
  std::vector<T> a, b;
  std::vector<float> c;
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 8; i++) a.push_back(element<T>(m.a[place(kA, lane, i).row][place(kA, lane, i).col]));
    for (int i = 0; i < 4; i++) b.push_back(element<T>(m.b[place(kB, lane, i).row][place(kB, lane, i).col]));
    for (int i = 0; i < 4; i++) c.push_back(m.c[place(kC, lane, i).row][place(kC, lane, i).col]);
  }
  const DeviceArray<T> device_a(a), device_b(b);
  const DeviceArray<float> device_c(c), device_d(128);
  check(launch(mma_kernel<T>, "mma", dim3(1), dim3(32), 0, nullptr, reinterpret_cast<const uint32_t*>(device_a.data()),
               reinterpret_cast<const uint32_t*>(device_b.data()), device_c.data(), device_d.data()));
  const std::vector<float> fragments = device_d.get();
  std::vector<float> d(128);
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 4; i++) {
      const Place at = place(kC, lane, i);
      d[static_cast<size_t>(at.row * 8 + at.col)] = fragments[static_cast<size_t>(4 * lane + i)];
    }
  }
  return d;
}

template <class T>
void test_product() {
  std::mt19937 random(1);
  Matrices m;
  const auto whole = [&] { return static_cast<float>(static_cast<int>(random() % 15) - 7); };
  for (auto& row : m.a) {
    for (float& v : row) v = whole();
  }
  for (auto& row : m.b) {
    for (float& v : row) v = whole();
  }
  for (auto& row : m.c) {
    for (float& v : row) v = whole();
  }
  std::vector<float> want;
  for (int row = 0; row < 16; row++) {
    for (int col = 0; col < 8; col++) {
      float sum = m.c[row][col];
      for (int k = 0; k < 16; k++) sum += m.a[row][k] * m.b[k][col];
      want.push_back(sum);
    }
  }
  in_every_order([&] { EXPECT_EQ(by_instruction<T>(m), want); });
}

TEST(EmulatorMma, ProductOfHalf) { test_product<__half>(); }
TEST(EmulatorMma, ProductOfBfloat16) { test_product<__nv_bfloat16>(); }

class WithMmaBits {
 public:
  explicit WithMmaBits(int bits) { emulator::mma_bits = bits; }
  ~WithMmaBits() { emulator::mma_bits = 0; }
};

TEST(EmulatorMma, KeepsSoManyBitsBelowTheLargestExponent) {
  Matrices m;
  m.a[0][0] = m.b[0][0] = 1024;  // 2^20, of which float keeps eighths
  m.a[0][1] = m.b[1][0] = 0.5;
  m.a[0][2] = 0.75;
  m.b[2][0] = 0.25;
  EXPECT_EQ(by_instruction<__half>(m)[0], 0x1p20f + 0.5f);  // from 0.4375
  const WithMmaBits bits(23);
  EXPECT_EQ(by_instruction<__half>(m)[0], 0x1p20f + 0.375f);
  emulator::mma_bits = 21;
  EXPECT_EQ(by_instruction<__half>(m)[0], 0x1p20f);
}

TEST(EmulatorMma, TakesSubnormals) {
  Matrices m;
  m.a[3][5] = 0x1p-24f;  // the smallest of half
  m.b[5][2] = 1024;
  EXPECT_EQ(by_instruction<__half>(m)[3 * 8 + 2], 0x1p-14f);
}

// Lane l gives row l % 8 of matrix l / 8; elements are numbered through.
__global__ void ldmatrix_kernel(uint16_t* out, bool transpose) {
  SharedCarver carver;
  auto* const rows = carver.take<uint16_t>(32 * 8);
  for (unsigned i = 0; i < 8; i++) rows[threadIdx.x * 8 + i] = static_cast<uint16_t>(threadIdx.x * 8 + i);
  __syncwarp();
  uint32_t own[4];
  if (transpose) {
    ldmatrix_x4_trans(own, rows + threadIdx.x * 8);
  } else {
    ldmatrix_x4(own, rows + threadIdx.x * 8);
  }
  for (unsigned i = 0; i < 8; i++) out[threadIdx.x * 8 + i] = static_cast<uint16_t>(own[i / 2] >> (16 * (i % 2)));
}

TEST(EmulatorMma, LoadsOfMatrices) {
  for (const bool transpose : {false, true}) {
    in_every_order([&] {
      const DeviceArray<uint16_t> device(32 * 8);
      check(launch(ldmatrix_kernel, "ldmatrix", dim3(1), dim3(32), 512, nullptr, device.data(), transpose));
      const std::vector<uint16_t> out = device.get();
      for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 8; i++) {
          // A register holds what a register of C would, in 16 bits: the first 8 rows of C.
          Place at = place(kC, lane, i % 2);
          if (transpose) at = {at.col, at.row};
          EXPECT_EQ(out[static_cast<size_t>(lane * 8 + i)], (i / 2 * 8 + at.row) * 8 + at.col);
        }
      }
    });
  }
}

// The functions that kernels' tests use.
TEST(EmulatorMma, AgreesWithItsTables) {
  for (unsigned lane = 0; lane < 32; lane++) {
    for (unsigned i = 0; i < 8; i++) {
      const Place at = place(kA, static_cast<int>(lane), static_cast<int>(i));
      EXPECT_EQ(emulator::mma_a(lane, i).row, static_cast<unsigned>(at.row));
      EXPECT_EQ(emulator::mma_a(lane, i).col, static_cast<unsigned>(at.col));
    }
    for (unsigned i = 0; i < 4; i++) {
      const Place b = place(kB, static_cast<int>(lane), static_cast<int>(i));
      const Place c = place(kC, static_cast<int>(lane), static_cast<int>(i));
      EXPECT_EQ(emulator::mma_b(lane, i).row, static_cast<unsigned>(b.row));
      EXPECT_EQ(emulator::mma_b(lane, i).col, static_cast<unsigned>(b.col));
      EXPECT_EQ(emulator::mma_c(lane, i).row, static_cast<unsigned>(c.row));
      EXPECT_EQ(emulator::mma_c(lane, i).col, static_cast<unsigned>(c.col));
    }
  }
}

}  // namespace
}  // namespace kivi::cuda
