// Vectors of 16 floats, and the few matrix products that attention is made of. Plain C++ with the vector extensions of
// gcc and clang: the compiler splits a vector where registers are narrower.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace ksana {

constexpr int kLanes = 16;

constexpr int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

inline Floats Load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline Floats All(float x) { return x - Floats{}; }

inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

inline float Sum(Floats x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

inline float Highest(Floats x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = best > x[i] ? best : x[i];
  return best;
}

// exp(x) for x <= 88, within 2 units in the last place; 0 below -87. The polynomial is the Taylor series to degree 7 on
// [-ln 2 / 2, ln 2 / 2], where its remainder is below 2^-27.
inline Floats Exp(Floats x) {
  const Ints vanishes = x < All(-87.0f);
  x = vanishes ? All(0.0f) : x;
  const Floats magic = All(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = All(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints scale = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &scale, sizeof(power));
  return vanishes ? All(0.0f) : p * power;
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1).
inline Floats Tanh(Floats x) {
  const Floats most = All(20.0f);
  x = x > most ? most : (x < -most ? -most : x);
  return 1.0f - 2.0f / (Exp(2.0f * x) + 1.0f);
}

// c[rows, kVectors * 16] (+)= a[rows, inner] b[inner, kVectors * 16], rows <= kRows: all of c in registers.
template <int kRows, int kVectors>
inline void Tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                 int64_t inner, bool accumulate) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = accumulate ? Load(c + r * c_stride + v * kLanes) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = Load(b + i * b_stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const float x = a[r * a_stride + i];
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <int kVectors>
inline void Columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                    int64_t rows, int64_t inner, bool accumulate) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    Tile<4, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner, accumulate);
  for (; r + 2 <= rows; r += 2)
    Tile<2, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner, accumulate);
  for (; r < rows; ++r)
    Tile<1, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner, accumulate);
}

// c[rows, columns] (+)= a[rows, inner] b[inner, columns]; columns is a multiple of 16.
inline void Multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                     int64_t rows, int64_t inner, int64_t columns, bool accumulate) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= columns; at += 4 * kLanes)
    Columns<4>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner, accumulate);
  for (; at < columns; at += kLanes)
    Columns<1>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner, accumulate);
}

// Lanes without bit kStep of the result are sums of two lanes of a, lanes with it of b.
template <int kStep, int... i>
inline Floats Fold(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i & kStep ? kLanes + i : i)...) +
         __builtin_shufflevector(a, b, (i & kStep ? kLanes + (i ^ kStep) : i ^ kStep)...);
}

template <int kStep>
inline Floats Fold(Floats a, Floats b) {
  return Fold<kStep>(a, b, std::make_integer_sequence<int, kLanes>());
}

// Lane i of the result is the sum of the lanes of x[i], of 16.
inline Floats SumEach(Floats* x) {
  for (int i = 0; i < 8; ++i) x[i] = Fold<8>(x[i], x[i + 8]);
  for (int i = 0; i < 4; ++i) x[i] = Fold<4>(x[i], x[i + 4]);
  for (int i = 0; i < 2; ++i) x[i] = Fold<2>(x[i], x[i + 2]);
  return Fold<1>(x[0], x[1]);
}

// Exchanges lanes and vectors of a 16 x 16 matrix, of those that differ in bit kStep.
template <int kStep, int... i>
inline void Exchange(Floats& a, Floats& b, std::integer_sequence<int, i...>) {
  const Floats first = __builtin_shufflevector(a, b, (i & kStep ? kLanes + (i ^ kStep) : i)...);
  b = __builtin_shufflevector(a, b, (i & kStep ? kLanes + i : i ^ kStep)...);
  a = first;
}

template <int kStep>
inline void Exchange(Floats* x) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & kStep)) Exchange<kStep>(x[i], x[i | kStep], std::make_integer_sequence<int, kLanes>());
}

// to[columns, rows] = from[rows, columns]^T; columns is a multiple of 16.
inline void Transpose(const float* from, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  int64_t r = 0;
  for (; r + kLanes <= rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = Load(from + (r + i) * columns + c);
      Exchange<8>(x);
      Exchange<4>(x);
      Exchange<2>(x);
      Exchange<1>(x);
      for (int i = 0; i < kLanes; ++i) Store(to + (c + i) * to_stride + r, x[i]);
    }
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * columns + c];
}

// Additions in the order of `SumEach`: numbers whose indices leave the same remainder modulo 16 one after the other, then
// the sixteen sums as a tree, 0 with 8, 4 with 12, ...
template <int kRows, int kVectors>
inline void TileByLanes(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                        int64_t inner) {
  constexpr int kOrder[kLanes] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
  Floats waiting[5][kRows][kVectors];
  int depth = 0;
  for (int leaf = 0; leaf < kLanes; ++leaf, ++depth) {
    Floats sums[kRows][kVectors] = {};
    for (int64_t i = kOrder[leaf]; i < inner; i += kLanes) {
      Floats row[kVectors];
      for (int v = 0; v < kVectors; ++v) row[v] = Load(b + i * b_stride + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const float x = a[r * a_stride + i];
        for (int v = 0; v < kVectors; ++v) sums[r][v] += x * row[v];
      }
    }
    for (int bits = leaf; bits & 1; bits >>= 1) {
      --depth;
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] += waiting[depth][r][v];
    }
    std::memcpy(waiting[depth], sums, sizeof(sums));
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, waiting[0][r][v]);
}

template <int kVectors>
inline void ColumnsByLanes(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, int64_t rows, int64_t inner) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8)
    TileByLanes<8, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner);
  for (; r + 2 <= rows; r += 2)
    TileByLanes<2, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner);
  for (; r < rows; ++r)
    TileByLanes<1, kVectors>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner);
}

// c[rows, columns] = a[rows, inner] b[inner, columns], the same numbers bit by bit as `MultiplyTransposed` has for b^T;
// inner and columns are multiples of 16.
inline void MultiplyByLanes(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                            int64_t c_stride, int64_t rows, int64_t inner, int64_t columns) {
  int64_t at = 0;
  for (; at + 2 * kLanes <= columns; at += 2 * kLanes)
    ColumnsByLanes<2>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner);
  if (at < columns) ColumnsByLanes<1>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner);
}

// c[rows, columns] = a[rows, inner] b[columns, inner]^T; both dimensions are multiples of 16. For few rows, for which
// it would not pay to transpose b.
inline void MultiplyTransposed(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                               int64_t c_stride, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t at = 0; at < columns; at += kLanes) {
    for (int64_t r = 0; r < rows; ++r) {
      Floats sums[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        Floats sum{};
        for (int64_t i = 0; i < inner; i += kLanes)
          sum += Load(a + r * a_stride + i) * Load(b + (at + j) * b_stride + i);
        sums[j] = sum;
      }
      Store(c + r * c_stride + at, SumEach(sums));
    }
  }
}

}  // namespace ksana
