// Prints a checksum of the bits of products by SOURCE, few_bits.cc (with FEW_BITS) or few_rows.cc, for tests/ops/test_arm.py.

#include SOURCE

#include <cinttypes>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t kMost = 20;  // rows
constexpr int64_t kNumbers[] = {kMost, 1, 2, 3, 4, 6, 7, 8, 9};

uint32_t Random() {
  static uint32_t state = 1;
  return state = state * 1664525u + 1013904223u;
}

std::vector<float> RandomFloats(int64_t n) {
  std::vector<float> numbers(n);
  for (float& number : numbers) number = static_cast<int32_t>(Random()) * 0x1p-30f;
  return numbers;
}

// The product of `rows` rows, which are the first of those of `all`. The most rows come first.
void Print(const char* name, int64_t rows, const std::vector<float>& out, int64_t n, std::vector<float>& all) {
  if (rows == kMost) all = out;
  if (std::memcmp(out.data(), all.data(), sizeof(float) * n)) std::printf("A row's bits depend on others.\n");
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &out[i], sizeof(bits));
    sum = (sum ^ bits) * 1099511628211u;
  }
  std::printf("%s %" PRId64 " %016" PRIx64 "\n", name, rows, sum);
}

#ifdef FEW_BITS

void PrintProducts() {
  constexpr int64_t kIn = 100, kOut = 200, kGroups = 4, kUnits = 4;
  const std::vector<float> x = RandomFloats(kMost * kIn);
  std::vector<float> out(kMost * kOut), all;
  std::vector<uint8_t> tiles(kUnits * kGroups * kDepth * kColumns), zeros(kUnits * kGroups * kColumns);
  std::vector<uint8_t> exponents(zeros.size());
  std::vector<uint16_t> scales(zeros.size()), offsets(zeros.size());
  for (uint8_t& byte : tiles) byte = Random() >> 24;
  for (uint8_t& zero : zeros) zero = Random() >> 28;
  for (uint8_t& exponent : exponents) exponent = 120 + (Random() >> 28);
  for (uint16_t& half : scales) half = Random() >> 18;  // from denormal to 1
  for (uint16_t& half : offsets) half = 0x8000 | Random() >> 18;
  for (int kind = 0; kind < 7; ++kind) {
    Weight weight = {tiles.data(), kGroups, kOut, kind % 2 == 1 || kind == 6, kGroups, 0, scales.data()};
    if (kind / 2 == 1) weight.offsets = offsets.data();
    if (kind / 2 == 2) weight.zeros = zeros.data();
    if (kind == 6) weight.exponents = exponents.data();
    for (int64_t rows : kNumbers) {
      ProductOfTiles(BestCode(), x.data(), kIn, weight, out.data(), rows, 0, kUnits);
      Print(kind == 6 ? "mxfp4" : weight.four_bits ? "int4" : "int8", rows, out, rows * kOut, all);
    }
  }
}

#else

template <typename W>
void PrintProductsOf(const char* name) {
  constexpr int64_t kIn = 100, kOut = 10 * kColumns;
  const std::vector<float> x = RandomFloats(kMost * kOut), numbers = RandomFloats((kIn + 2 * kDepth) * kOut);
  std::vector<float> out(kMost * kOut), all, all_transposed;
  std::vector<W> weight(numbers.size());
  for (size_t i = 0; i < weight.size(); ++i) Set(weight[i], numbers[i]);
  for (int64_t rows : kNumbers) {
    ProductOfColumns(x.data(), weight.data(), rows, kIn, kOut, 0, kOut, 0, kIn, out.data());
    std::vector<float> in_order(rows * kOut);
    StoreColumns(out.data(), kColumns, rows, in_order.data(), rows, kOut, 0, kOut);
    Print(name, rows, in_order, rows * kOut, all);
    ProductWithRows(x.data(), weight.data(), out.data(), rows, kOut, kIn, 0, kIn);
    Print(name, rows, out, rows * kIn, all_transposed);
  }
}

void CheckConversions() {
  for (int i = 0; i < 1 << 16; i += kLanes) {
    BFloat16 halves[kLanes], rounded[kLanes], one;
    int8_t bytes[kLanes];
    float wide[kLanes], of_bytes[kLanes];
    for (int k = 0; k < kLanes; ++k) halves[k].bits = i + k, bytes[k] = i / kLanes + k;
    Store(wide, Loaded(halves)), Store(of_bytes, Loaded(bytes));
    bool same = true;
    for (int k = 0; k < kLanes; ++k) {
      const float expected = Wide(halves[k]);
      same = same && std::memcmp(&wide[k], &expected, sizeof(expected)) == 0 && of_bytes[k] == bytes[k];
      const uint32_t bits = static_cast<uint32_t>(i + k) << 16 | Random() >> 16;
      std::memcpy(&wide[k], &bits, sizeof(bits));
    }
    Store(rounded, Loaded(wide));
    for (int k = 0; k < kLanes; ++k) {
      Set(one, wide[k]);
      same = same && one.bits == rounded[k].bits;
    }
    if (!same) std::printf("Vectors from %d on are converted wrongly.\n", i);
  }
}

void PrintProducts() {
  CheckConversions();
  PrintProductsOf<float>("float32");
  PrintProductsOf<BFloat16>("bfloat16");
}

#endif

}  // namespace

int main() { PrintProducts(); }
