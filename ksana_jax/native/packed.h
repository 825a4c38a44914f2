// Products with packed weights. A panel holds 64 rows of a matrix w[N, K] as words [K / numbers of a word, 64], so that
// a product reads it from the first word to the last and keeps sums of 64 columns of y = x w^T in vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "pairs.h"
#include "product.h"
#include "simd.h"

namespace ksana {

constexpr int64_t kPanel = 64;
constexpr int64_t kRowsOfJob = 128;
// Words of a panel that are multiplied with all rows of a job before the next ones: they stay in the second cache.
constexpr int64_t kDepth = 512;
// Codes are widened to as many words at a time, which stay in the first cache.
constexpr int64_t kCodesDepth = 64;

// A packed matrix. Codes of int8 have four to a word, whatever the type of x.
struct Packed {
  const char* words = nullptr;
  int64_t n = 0, k = 0;
  const float* scales = nullptr;  // of rows, [N], where words are codes
  const int32_t* sums = nullptr;  // of a row's codes, [N], where x is rounded to codes too; else null
  const char* bias = nullptr;     // [N], of x's type, or null

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
};

// Sums of a job, [rows][64], and the widened codes.
struct PanelScratch {
  alignas(64) float sums[kRowsOfJob * kPanel], others[kRowsOfJob * kPanel];
  alignas(64) int32_t wide[kCodesDepth * kPanel];
};

// Words of codes, four of a column each, as words of the type.
inline void WidenCodes(const int32_t* codes, int64_t words, int32_t* to, Float32) {
  for (int64_t i = 0; i < words * kPanel; i += kLanes) {
    const Ints some = LoadInts(codes + i);
    int32_t* at = to + i / kPanel * 4 * kPanel + i % kPanel;
    for (int b = 0; b < 4; ++b)
      StoreInts(at + b * kPanel, BitCast<Ints>(__builtin_convertvector(some << (24 - 8 * b) >> 24, Floats)));
  }
}

inline void WidenCodes(const int32_t* codes, int64_t words, int32_t* to, Bfloat16) {
  const Ints upper = Ints{} - 65536;
  for (int64_t i = 0; i < words * kPanel; i += kLanes) {
    const Ints some = LoadInts(codes + i);
    int32_t* at = to + i / kPanel * 2 * kPanel + i % kPanel;
    Ints x[4];  // a code is exact in the upper half of a float
    for (int b = 0; b < 4; ++b) x[b] = BitCast<Ints>(__builtin_convertvector(some << (24 - 8 * b) >> 24, Floats));
    for (int b = 0; b < 2; ++b)
      StoreInts(at + b * kPanel, BitCast<Ints>((x[2 * b] >> 16 & 0xffff) | (x[2 * b + 1] & upper)));
  }
}

// Rows of x as they are multiplied: numbers [T, K], or codes + 128 and a scale for each row.
template <typename Number>
struct Rows {
  const Number* numbers;
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
};

// Stores the lowest bytes of 16 words + 128, as many as there is room for.
inline void StoreBytes(uint8_t* to, Floats words, int64_t room) {
  const Ints bits = BitCast<Ints>(words) + 128;
  uint8_t bytes[kLanes];
#ifdef __AVX512F__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8((__m512i)bits));
#else
  for (int i = 0; i < kLanes; ++i) bytes[i] = bits[i];
#endif
  if (room >= kLanes) std::memcpy(to, bytes, kLanes);
  else if (room > 0) std::memcpy(to, bytes, room);
}

// Rounds a row to codes of -127 to 127; returns their scale, which is not finite if a number of the row is not.
template <typename Number>
float RoundToCodes(const Number* x, int64_t d, uint8_t* codes) {
  Floats most{}, nothing{};
  for (int64_t i = 0; i < d; i += 2 * kLanes) {
    const Pair some = LoadSome(x + i, d - i);
    most = Max(most, Max(Max(some.first, -some.first), Max(some.second, -some.second)));
    nothing += (some.first + some.second) * 0.0f;
  }
  const float largest = Highest(most), factor = largest > 0 ? 127.0f / largest : 0.0f;
  const Floats magic = All(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < d; i += 2 * kLanes) {
    const Pair some = LoadSome(x + i, d - i);
    // Not as one operation with one rounding: codes are those of any compiler.
    StoreBytes(codes + i, KeptInRegister(some.first * factor) + magic, d - i);
    StoreBytes(codes + i + kLanes, KeptInRegister(some.second * factor) + magic, d - i - kLanes);
  }
  return largest / 127.0f + Sum(nothing);
}

// sums[rows][64] = x w[panel]^T for rows of x from `row` on, whose codes are multiplied exactly.
template <typename Number>
void MultiplyCodes(const Packed& w, int64_t panel, const Rows<Number>& x, int64_t row, int64_t rows, float* sums) {
  const int64_t stride = w.k / Int8::kPerWord;
  const auto* a = reinterpret_cast<const int32_t*>(x.codes + row * w.k);
  const auto* words = reinterpret_cast<const int32_t*>(w.words) + panel * stride * kPanel;
  Multiply<Int8>(a, stride, words, kPanel, sums, kPanel, rows, stride, kPanel, false);
  int32_t extra[kPanel] = {};  // of the 128 that are added to codes of x
  for (int64_t c = 0; c < std::min(kPanel, w.n - panel * kPanel); ++c) extra[c] = 128 * w.sums[panel * kPanel + c];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < kPanel; c += kLanes) {
      float* at = sums + r * kPanel + c;
      const Ints exact = BitCast<Ints>(Load(at)) - LoadInts(extra + c);
      Store(at, __builtin_convertvector(exact, Floats) * x.scales[row + r]);
    }
}

// The same of numbers, without scales of weights. The order of a sum is that of K, whatever the rows.
template <typename Type>
void MultiplyPanel(const Packed& w, int64_t panel, const Rows<typename Type::Number>& x, int64_t row, int64_t rows,
                   float* sums, int32_t* wide) {
  if (w.sums) return MultiplyCodes(w, panel, x, row, rows, sums);
  const auto* words = reinterpret_cast<const int32_t*>(w.words);
  const auto* a = reinterpret_cast<const int32_t*>(x.numbers + row * w.k);
  const int64_t stride = w.k / Type::kPerWord;
  constexpr int64_t kMore = 4 / Type::kPerWord;  // words of the type in one of codes
  const int64_t depth = w.scales ? kCodesDepth : kDepth;
  for (int64_t at = 0; at < stride; at += depth) {
    const int64_t some = std::min(depth, stride - at);
    const int32_t* b = words + (panel * stride + at) * kPanel;
    if (w.scales) {
      WidenCodes(words + (panel * stride + at) / kMore * kPanel, some / kMore, wide, Type{});
      b = wide;
    }
    Multiply<Type>(a + at, stride, b, kPanel, sums, kPanel, rows, some, kPanel, at > 0);
  }
}

// Returns numbers of y, from their sums: scaled, with bias.
template <typename Number>
Pair Finished(const Packed& w, int64_t column, int64_t count, const float* sums) {
  Pair x = LoadPair(sums);
  if (w.scales) {
    const Pair scale = LoadSome(w.scales + column, count);
    x = {x.first * scale.first, x.second * scale.second};
  }
  if (w.bias) {
    const Pair bias = LoadSome(reinterpret_cast<const Number*>(w.bias) + column, count);
    x = {x.first + bias.first, x.second + bias.second};
  }
  return x;
}

// Calls use(row, first column, how many, index of the first sum) for the numbers of y that a panel gives, 32 at most.
template <typename Use>
void EachPair(const Packed& w, int64_t panel, int64_t rows, Use use) {
  const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, w.n);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t column = begin; column < end; column += 2 * kLanes)
      use(r, column, std::min<int64_t>(2 * kLanes, end - column), r * kPanel + column - begin);
}

}  // namespace ksana
