// Products of activations with weights on a CPU: y[T, N] = x[T, K] w[N, K]^T, as a custom call of XLA.
//
// Both operands are read where they are, along K. A tile of y is kept in registers, with one vector of partial sums for
// each number, so that the order of summation is the same whatever the number of rows: a row of y depends on its row of
// x alone.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "jobs.h"
#include "numbers.h"
#include "product.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ksana {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRows = 3, kColumns = 5;  // of a tile: its 15 sums are added up at once
constexpr int64_t kJobRows = 64, kJobColumns = 8 * kColumns;
// Multiplications and additions that are worth waking another thread for.
constexpr int64_t kWorthThreads = 1 << 18;

struct Product {
  int64_t t, n, k;
  const char *x, *w;
  const float* scales;  // of rows of w, which then are codes; else null
  char* y;
  Stored asked;  // type of y
};

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
      const float total = totals[r * kTileColumns + c] * (p.scales ? p.scales[column + c] : 1.0f);
      if (p.asked == kFloat32) reinterpret_cast<float*>(p.y)[at + c] = total;
      else reinterpret_cast<uint16_t*>(p.y)[at + c] = Narrow(total, p.asked);
    }
  }
}

inline Floats FromCodes(const int8_t* from) {
#ifdef __AVX512F__  // gcc 12 converts lane by lane otherwise
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = from[i];
  return x;
#endif
}

// Returns rows of the weights; codes are copied, which bfloat16 holds exactly too.
template <typename Type>
const typename Type::Number* Weights(const Product& p, int64_t column, int64_t count, typename Type::Number* copy) {
  using Number = typename Type::Number;
  if (p.scales == nullptr) return reinterpret_cast<const Number*>(p.w) + column * p.k;
  const auto* codes = reinterpret_cast<const int8_t*>(p.w) + column * p.k;
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
  const int64_t row = index / of_columns * kJobRows, end = std::min(row + kJobRows, p.t);
  int64_t column = index % of_columns * kJobColumns;
  const int64_t last = std::min(column + kJobColumns, p.n);
  for (; column + kColumns <= last; column += kColumns) Column<Type, kColumns>(p, row, end, column, copy);
  for (; column < last; ++column) Column<Type, 1>(p, row, end, column, copy);
}

template <typename Type>
void Run(const Product& p, ffi::ThreadPool& pool) {
  const int64_t of_rows = (p.t + kJobRows - 1) / kJobRows, of_columns = (p.n + kJobColumns - 1) / kJobColumns;
  using Copy = std::vector<typename Type::Number>;
  const auto make = [&] { return Copy(p.scales ? kColumns * p.k : 0); };
  const auto run = [&](Copy& copy, int64_t index) { OneJob<Type>(p, index, of_columns, copy.data()); };
  if (p.t * p.n * p.k < kWorthThreads) {
    Copy copy = make();
    for (int64_t index = 0; index < of_rows * of_columns; ++index) run(copy, index);
  } else {
    RunJobs(pool, of_rows * of_columns, make, run);
  }
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                  ffi::Result<ffi::AnyBuffer> y, int32_t stored, int32_t asked) {
  Product p{};
  p.k = w.dimensions()[1], p.n = w.dimensions()[0], p.t = p.k ? x.element_count() / p.k : 0;
  p.x = static_cast<const char*>(x.untyped_data());
  p.w = static_cast<const char*>(w.untyped_data());
  p.scales = scales.element_count() ? scales.typed_data() : nullptr;
  p.y = static_cast<char*>(y->untyped_data());
  p.asked = static_cast<Stored>(asked);
  if (stored == kFloat32) Run<Float32>(p, pool);
  else if (stored == kBfloat16) Run<Bfloat16>(p, pool);
  else return ffi::Error::InvalidArgument("numbers that are neither float32 nor bfloat16");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ksana

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_linear, ksana::Linear,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()               // x
                                  .Arg<ksana::ffi::AnyBuffer>()               // w
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // scales
                                  .Ret<ksana::ffi::AnyBuffer>()               // y
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked"));
