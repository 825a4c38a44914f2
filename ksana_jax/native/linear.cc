// Products of activations with weights on a CPU: y[T, N] = x[T, K] w[N, K]^T, as a custom call of XLA.
//
// Both operands are read where they are, along K. A tile of y is kept in registers, with one vector of partial sums for
// each number, so that the order of summation is the same whatever the number of rows: a row of y depends on its row of
// x alone.

#include <algorithm>
#include <cstring>

#include "jobs.h"
#include "numbers.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace ksana {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRows = 3, kColumns = 5;  // of a tile: its 15 sums are added up at once
constexpr int64_t kJobRows = 64, kJobColumns = 8 * kColumns;
// Multiplications and additions that are worth waking another thread for.
constexpr int64_t kWorthThreads = 1 << 18;

struct Float32 {
  using Number = float;
  using Vector = Floats;
  static constexpr int64_t kStep = kLanes;
  static Vector Read(const Number* from) { return Load(from); }
  static Floats Add(Floats sums, Vector a, Vector b) { return sums + a * b; }
};

#ifdef __AVX512BF16__
struct Bfloat16 {
  using Number = uint16_t;
  using Vector = __m512bh;
  static constexpr int64_t kStep = 2 * kLanes;
  static Vector Read(const Number* from) {
    Vector x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static Floats Add(Floats sums, Vector a, Vector b) { return (Floats)_mm512_dpbf16_ps((__m512)sums, a, b); }
};
#else
struct Bfloat16 {
  using Number = uint16_t;
  struct Vector {
    Floats even, odd;
  };
  static constexpr int64_t kStep = 2 * kLanes;
  static Vector Read(const Number* from) {
    Ints pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    const Ints even = pairs << 16, odd = pairs & -65536;
    Vector x;
    std::memcpy(&x.even, &even, sizeof(even));
    std::memcpy(&x.odd, &odd, sizeof(odd));
    return x;
  }
  static Floats Add(Floats sums, Vector a, Vector b) { return sums + a.even * b.even + a.odd * b.odd; }
};
#endif

struct Product {
  int64_t t, n, k;
  const char *x, *w;
  char* y;
  Stored asked;  // type of y
};

// Otherwise compilers read an operand from memory again in each instruction, and reads become the limit.
template <typename Vector>
void KeepInRegister(Vector& x) {
#ifdef __AVX512F__
  if constexpr (sizeof(Vector) == 64) asm("" : "+v"(x));
#endif
}

template <typename Type>
typename Type::Vector ReadTail(const typename Type::Number* from, int64_t count) {
  typename Type::Number padded[Type::kStep] = {};
  std::memcpy(padded, from, count * sizeof(padded[0]));
  return Type::Read(padded);
}

template <typename Type, int kTileRows, int kTileColumns, bool kPrefetches>
void Tile(const Product& p, int64_t row, int64_t column) {
  const auto* x = reinterpret_cast<const typename Type::Number*>(p.x) + row * p.k;
  const auto* w = reinterpret_cast<const typename Type::Number*>(p.w) + column * p.k;
  Floats sums[RoundUp(kTileRows * kTileColumns, kLanes)] = {};
  const auto add = [&](auto read) {
    typename Type::Vector columns[kTileColumns];
    for (int c = 0; c < kTileColumns; ++c) {
      columns[c] = read(w + c * p.k);
      KeepInRegister(columns[c]);
    }
    for (int r = 0; r < kTileRows; ++r) {
      const typename Type::Vector values = read(x + r * p.k);
      for (int c = 0; c < kTileColumns; ++c) {
        Floats& sum = sums[r * kTileColumns + c];
        sum = Type::Add(sum, values, columns[c]);
      }
    }
  };
  int64_t i = 0;
  for (; i + Type::kStep <= p.k; i += Type::kStep) {
    if (kPrefetches)
      for (int c = 0; c < kTileColumns; ++c) __builtin_prefetch(w + (kTileColumns + c) * p.k + i, 0, 2);
    add([&](auto* from) { return Type::Read(from + i); });
  }
  if (i < p.k) add([&](auto* from) { return ReadTail<Type>(from + i, p.k - i); });
  float totals[RoundUp(kTileRows * kTileColumns, kLanes)];
  for (int64_t at = 0; at < kTileRows * kTileColumns; at += kLanes) Store(totals + at, SumEach(sums + at));
  for (int r = 0; r < kTileRows; ++r) {
    const int64_t at = (row + r) * p.n + column;
    for (int c = 0; c < kTileColumns; ++c) {
      const float total = totals[r * kTileColumns + c];
      if (p.asked == kFloat32) reinterpret_cast<float*>(p.y)[at + c] = total;
      else reinterpret_cast<uint16_t*>(p.y)[at + c] = Narrow(total, p.asked);
    }
  }
}

template <typename Type, int kTileColumns>
void Column(const Product& p, int64_t row, int64_t end, int64_t column) {
  if (row + kRows <= end) Tile<Type, kRows, kTileColumns, true>(p, row, column), row += kRows;
  for (; row + kRows <= end; row += kRows) Tile<Type, kRows, kTileColumns, false>(p, row, column);
  if (row + 2 <= end) Tile<Type, 2, kTileColumns, true>(p, row, column), row += 2;
  if (row < end) Tile<Type, 1, kTileColumns, true>(p, row, column);
}

template <typename Type>
void OneJob(const Product& p, int64_t index, int64_t of_columns) {
  const int64_t row = index / of_columns * kJobRows, end = std::min(row + kJobRows, p.t);
  int64_t column = index % of_columns * kJobColumns;
  const int64_t last = std::min(column + kJobColumns, p.n);
  for (; column + kColumns <= last; column += kColumns) Column<Type, kColumns>(p, row, end, column);
  for (; column < last; ++column) Column<Type, 1>(p, row, end, column);
}

template <typename Type>
void Multiply(const Product& p, ffi::ThreadPool& pool) {
  const int64_t of_rows = (p.t + kJobRows - 1) / kJobRows, of_columns = (p.n + kJobColumns - 1) / kJobColumns;
  const auto run = [&](int, int64_t index) { OneJob<Type>(p, index, of_columns); };
  if (p.t * p.n * p.k < kWorthThreads)
    for (int64_t index = 0; index < of_rows * of_columns; ++index) run(0, index);
  else
    RunJobs(pool, of_rows * of_columns, [] { return 0; }, run);
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                  int32_t stored, int32_t asked) {
  Product p{};
  p.k = w.dimensions()[1], p.n = w.dimensions()[0], p.t = p.k ? x.element_count() / p.k : 0;
  p.x = static_cast<const char*>(x.untyped_data());
  p.w = static_cast<const char*>(w.untyped_data());
  p.y = static_cast<char*>(y->untyped_data());
  p.asked = static_cast<Stored>(asked);
  if (stored == kFloat32) Multiply<Float32>(p, pool);
  else if (stored == kBfloat16) Multiply<Bfloat16>(p, pool);
  else return ffi::Error::InvalidArgument("numbers that are neither float32 nor bfloat16");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ksana

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_linear, ksana::Linear,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // w
                                  .Ret<ksana::ffi::AnyBuffer>()  // y
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked"));
