// Products of activations with weights that are not packed: y[T, N] = x[T, K] w[N, K]^T.
//
// Both operands are read where they are, along K. A tile of y is kept in registers, with one vector of partial sums for
// each number, so that the order of summation is the same whatever the number of rows: a row of y depends on its row of
// x alone.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "calls.h"

namespace ksana {
namespace {

// Size of a tile, whose sums are added up at once.
constexpr int64_t kRows = kManyRegisters ? 3 : 2, kColumns = kManyRegisters ? 5 : 4;
constexpr int64_t kRowsAtOnce = 64, kColumnsAtOnce = 8 * kColumns;
// Multiplications and additions that are worth waking another thread for.
constexpr int64_t kWorthThreads = 1 << 18;

template <typename Number>
Ints Read(const Number* from) {
  Ints x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <typename Number>
Ints ReadTail(const Number* from, int64_t count) {
  Number padded[sizeof(Ints) / sizeof(Number)] = {};
  std::memcpy(padded, from, count * sizeof(Number));
  return Read(padded);
}

// A tile of y: w are kTileColumns rows of the weights.
template <typename Type, int kTileRows, int kTileColumns, bool kPrefetches>
void Dots(const Product& p, const typename Type::Number* w, int64_t row, int64_t column) {
  const auto* x = reinterpret_cast<const typename Type::Number*>(p.x) + row * p.k;
  Floats sums[RoundUp(kTileRows * kTileColumns, kLanes)];
  std::fill(std::begin(sums), std::end(sums), KeptInRegister(Floats{}));  // not by memset
  const auto add = [&](auto read) {
    Ints columns[kTileColumns];
    for (int c = 0; c < kTileColumns; ++c) columns[c] = KeptInRegister(read(w + c * p.k));
    for (int r = 0; r < kTileRows; ++r) {
      const Ints values = read(x + r * p.k);
      for (int c = 0; c < kTileColumns; ++c) {
        Floats& sum = sums[r * kTileColumns + c];
        sum = Type::Add(sum, values, columns[c]);
      }
    }
  };
  constexpr int64_t kStep = kLanes * Type::kPerWord;
  int64_t i = 0;
  for (; i + kStep <= p.k; i += kStep) {
    if (kPrefetches)
      for (int c = 0; c < kTileColumns; ++c) __builtin_prefetch(w + (kTileColumns + c) * p.k + i, 0, 2);
    add([&](auto* from) { return Read(from + i); });
  }
  if (i < p.k) add([&](auto* from) { return ReadTail(from + i, p.k - i); });
  float totals[RoundUp(kTileRows * kTileColumns, kLanes)];
  for (int64_t at = 0; at < kTileRows * kTileColumns; at += kLanes) Store(totals + at, SumEach(sums + at));
  for (int r = 0; r < kTileRows; ++r) {
    const int64_t at = (row + r) * p.n + column;
    for (int c = 0; c < kTileColumns; ++c) {
      const float total = totals[r * kTileColumns + c] * (p.scales && !p.parts ? p.scales[column + c] : 1.0f);
      if (p.asked == kFloat32) reinterpret_cast<float*>(p.y)[at + c] = total;
      else reinterpret_cast<uint16_t*>(p.y)[at + c] = Narrow(total, p.asked);
    }
  }
}

// Numbers of float8_e4m3fn: a sign, 4 bits of an exponent with bias 7, and 3 of a mantissa. No step has numbers so small
// that a processor may take them for zero.
inline Floats FromFloat8(const int8_t* from) {
  const Ints codes = LoadCodes(from), size = codes & 127;
  const Floats usual = BitCast<Floats>((size << 20) + (120 << 23));
  const Floats small = __builtin_convertvector(size, Floats) * 0x1p-9f;  // without the leading 1
  return BitCast<Floats>(BitCast<Ints>(size < 8 ? small : usual) | (codes & INT32_MIN));
}

// Copies codes [count, K] of float8_e4m3fn times the scales of parts of rows, rounded to the type.
template <typename Type>
void CopyScaled(const int8_t* codes, const float* scales, int64_t count, int64_t k, int64_t parts,
                typename Type::Number* copy) {
  constexpr int64_t kStep = kLanes * Type::kPerWord;  // divides 32
  const int64_t size = count * k, of_part = k / parts;
  for (int64_t i = 0; i < size; i += kStep) {
    __builtin_prefetch(codes + size + i, 0, 2);
    const float scale = scales[i / of_part];
    const Floats first = FromFloat8(codes + i) * scale;
    if constexpr (std::is_same_v<Type, Float32>) {
      Store(copy + i, first);
    } else {
      const Ints words = Type::Round(first, FromFloat8(codes + i + kLanes) * scale);
      std::memcpy(copy + i, &words, sizeof(words));
    }
  }
}

// Returns rows of the weights; codes are copied: integers without scales, which bfloat16 holds exactly too.
template <typename Type>
const typename Type::Number* Weights(const Product& p, int64_t column, int64_t count, typename Type::Number* copy) {
  using Number = typename Type::Number;
  if (p.scales == nullptr) return reinterpret_cast<const Number*>(p.w) + column * p.k;
  const auto* codes = reinterpret_cast<const int8_t*>(p.w) + column * p.k;
  if (p.parts) {
    CopyScaled<Type>(codes, p.scales + column * p.parts, count, p.k, p.parts, copy);
    return copy;
  }
  constexpr int64_t kStep = 2 * kLanes;
  const int64_t size = count * p.k;
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    __builtin_prefetch(codes + size + i, 0, 2);
    const Floats first = FromCodes(codes + i), second = FromCodes(codes + i + kLanes);
    if constexpr (std::is_same_v<Type, Float32>) {
      Store(copy + i, first);
      Store(copy + i + kLanes, second);
    } else {
      const Ints words = Type::Round(first, second);
      std::memcpy(copy + i, &words, sizeof(words));
    }
  }
  for (; i < size; ++i) {
    if constexpr (std::is_same_v<Type, Float32>) copy[i] = codes[i];
    else copy[i] = Narrow(codes[i], kBfloat16);
  }
  return copy;
}

template <typename Type, int kTileColumns>
void Column(const Product& p, int64_t row, int64_t end, int64_t column, typename Type::Number* copy) {
  const auto* w = Weights<Type>(p, column, kTileColumns, copy);
  if (row + kRows <= end) Dots<Type, kRows, kTileColumns, true>(p, w, row, column), row += kRows;
  for (; row + kRows <= end; row += kRows) Dots<Type, kRows, kTileColumns, false>(p, w, row, column);
  if (row + 2 <= end) Dots<Type, 2, kTileColumns, true>(p, w, row, column), row += 2;
  if (row < end) Dots<Type, 1, kTileColumns, true>(p, w, row, column);
}

template <typename Type>
void OneJob(const Product& p, int64_t index, int64_t of_columns, typename Type::Number* copy) {
  const int64_t row = index / of_columns * kRowsAtOnce, end = std::min(row + kRowsAtOnce, p.t);
  int64_t column = index % of_columns * kColumnsAtOnce;
  const int64_t last = std::min(column + kColumnsAtOnce, p.n);
  for (; column + kColumns <= last; column += kColumns) Column<Type, kColumns>(p, row, end, column, copy);
  for (; column < last; ++column) Column<Type, 1>(p, row, end, column, copy);
}

// Computes products of the same N and K.
template <typename Type>
void Run(const std::vector<Product>& products, const Threads& threads) {
  if (products.empty()) return;
  const int64_t n = products[0].n, k = products[0].k, of_columns = (n + kColumnsAtOnce - 1) / kColumnsAtOnce;
  std::vector<int64_t> ends;  // of each product's jobs
  int64_t jobs = 0, rows = 0;
  for (const Product& p : products) {
    ends.push_back(jobs += (p.t + kRowsAtOnce - 1) / kRowsAtOnce * of_columns);
    rows += p.t;
  }
  using Copy = std::vector<typename Type::Number>;
  const auto make = [&] { return Copy(products[0].scales ? kColumns * k : 0); };
  const auto run = [&](Copy& copy, int64_t index) {
    const int64_t at = std::upper_bound(ends.begin(), ends.end(), index) - ends.begin();
    OneJob<Type>(products[at], at ? index - ends[at - 1] : index, of_columns, copy.data());
  };
  RunJobs(threads, jobs, make, run, rows * n * k < kWorthThreads ? 1 : INT64_MAX);
}

}  // namespace

void Linear(const Product& product, Stored stored, const Threads& threads) {
  if (stored == kFloat32) Run<Float32>({product}, threads);
  else Run<Bfloat16>({product}, threads);
}

void LinearOfGroups(const GroupedProduct& grouped, Stored stored, const Threads& threads) {
  const Product& all = grouped.all;
  const auto size = [](Stored kind) { return kind == kFloat32 ? sizeof(float) : sizeof(uint16_t); };
  const int64_t of_x = all.k * size(stored), of_y = all.n * size(all.asked);
  const int64_t of_w = all.n * all.k * (all.scales ? 1 : size(stored));
  std::vector<Product> products;
  int64_t row = 0;
  for (int64_t group = 0; group < grouped.groups; ++group) {
    const int64_t count = std::min<int64_t>(grouped.counts[group], all.t - row);
    if (count <= 0) continue;
    const float* scales = all.scales ? all.scales + group * all.n * std::max<int64_t>(all.parts, 1) : nullptr;
    products.push_back({count, all.n, all.k, all.x + row * of_x, all.w + group * of_w, scales, all.y + row * of_y,
                        all.asked, all.parts});
    row += count;
  }
  std::memset(all.y + row * of_y, 0, (all.t - row) * of_y);
  if (stored == kFloat32) Run<Float32>(products, threads);
  else Run<Bfloat16>(products, threads);
}

}  // namespace ksana
