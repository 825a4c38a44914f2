// Products of small matrices of words. A word has 32 bits: one float32, or two bfloat16 or four codes that are neighbours
// along the dimension that is summed over.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "simd.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace ksana {

template <typename To, typename From>
inline To BitCast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &x, sizeof(to));
  return to;
}

struct Float32 {
  using Number = float;
  static constexpr Stored kStored = kFloat32;
  static constexpr int64_t kPerWord = 1;

  // sums + a b, lane by lane.
  static Floats Add(Floats sums, Ints a, Ints b) { return sums + BitCast<Floats>(a) * BitCast<Floats>(b); }

  // Words of the v-th 16 columns after column `at` of a row; asks memory for those of another.
  static Ints Column(const int32_t* const* rows, const int32_t* const* ahead, int64_t at, int v) {
    __builtin_prefetch(ahead[0] + at + v * kLanes, 0, 2);
    return LoadInts(rows[0] + at + v * kLanes);
  }
};

struct Bfloat16 {
  using Number = uint16_t;
  static constexpr Stored kStored = kBfloat16;
  static constexpr int64_t kPerWord = 2;

  // sums + the products of both numbers of a word.
  static Floats Add(Floats sums, Ints a, Ints b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    const Ints upper = Ints{} - 65536;
    const Floats second = sums + BitCast<Floats>(a & upper) * BitCast<Floats>(b & upper);
    return second + BitCast<Floats>(a << 16) * BitCast<Floats>(b << 16);
#endif
  }

  // Rounds 32 numbers to nearest, ties to even.
  static Ints Round(Floats first, Floats second) {
#ifdef __AVX512BF16__
    return (Ints)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
    return UpperHalves(Rounded(first), Rounded(second), std::make_integer_sequence<int, 2 * kLanes>());
  }

  // The same of a number of one row and one of the next; `at` is a multiple of 32.
  static Ints Column(const int32_t* const* rows, const int32_t* const* ahead, int64_t at, int v) {
    const int64_t word = at / 2 + v / 2 * kLanes;
    const auto all = std::make_integer_sequence<int, 2 * kLanes>();
    __builtin_prefetch(ahead[v % 2] + word, 0, 2);
    const Ints a = LoadInts(rows[0] + word), b = LoadInts(rows[1] + word);
    return v % 2 ? Zip<kLanes>(a, b, all) : Zip<0>(a, b, all);
  }

 private:
  using Shorts = int16_t __attribute__((vector_size(64)));

  static Ints Rounded(Floats x) {  // in the upper halves
    const Ints bits = BitCast<Ints>(x);
    return bits + 0x7fff + (bits >> 16 & 1);
  }

  template <int... i>
  static Ints UpperHalves(Ints a, Ints b, std::integer_sequence<int, i...>) {
    return (Ints)__builtin_shufflevector((Shorts)a, (Shorts)b, (2 * i + 1)...);
  }

  template <int kFirst, int... i>
  static Ints Zip(Ints a, Ints b, std::integer_sequence<int, i...>) {
    return (Ints)__builtin_shufflevector((Shorts)a, (Shorts)b, (i % 2 * 2 * kLanes + kFirst + i / 2)...);
  }
};

// Codes of int8 in sums of integers, whose bits lie in Floats: a are weights, b activations + 128, four of each in a word.
struct Int8 {
  static constexpr int64_t kPerWord = 4;

  static Floats Add(Floats sums, Ints a, Ints b) {
#ifdef __AVX512VNNI__  // gcc 12 moves sums from register to register and to memory around the intrinsic
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(b), "v"(a));
    return sums;
#else
    Ints total = BitCast<Ints>(sums);
    for (int i = 0; i < 4; ++i) total += (a << (24 - 8 * i) >> 24) * (b >> 8 * i & 255);
    return BitCast<Floats>(total);
#endif
  }
};

// Returns x, of which the compiler knows nothing. In tiles, it would otherwise read an operand from memory again in each
// instruction, and reads become the limit.
template <typename Vector>
inline Vector KeptInRegister(Vector x) {
#ifdef __AVX512F__
  asm("" : "+v"(x));
#endif
  return x;
}

// c[kRows, kVectors * 16] (+)= a[kRows, inner] b[inner, kVectors * 16]: all of c in registers. row_of(i, v) returns the
// v-th vector of b's i-th row.
template <typename Type, int kRows, int kVectors, typename RowOf>
inline void Tile(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t inner,
                 bool accumulate) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = accumulate ? Load(c + r * c_stride + v * kLanes) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    Ints row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = KeptInRegister(row_of(i, v));
    for (int r = 0; r < kRows; ++r) {
      const Ints x = Ints{} + a[r * a_stride + i];
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Type::Add(sums[r][v], row[v], x);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <typename Type, int kVectors, int kRows = 6, typename RowOf>
inline void Columns(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t rows,
                    int64_t inner, bool accumulate) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_stride, c += kRows * c_stride)
    Tile<Type, kRows, kVectors>(a, a_stride, row_of, c, c_stride, inner, accumulate);
  if constexpr (kRows > 1)
    if (rows) Columns<Type, kVectors, kRows - 1>(a, a_stride, row_of, c, c_stride, rows, inner, accumulate);
}

// c[rows, columns] (+)= a[rows, inner] b[inner, columns]; `inner` counts words, columns is a multiple of 16. A number
// of c is summed in the order of `inner`, whatever the other dimensions. row_of(i, at, v) returns the v-th vector after
// column `at` of b's i-th row; `at` is a multiple of 32, unless the last 16 columns are left.
template <typename Type, typename RowOf>
inline void MultiplyRows(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t rows,
                         int64_t inner, int64_t columns, bool accumulate) {
  int64_t at = 0;
  const auto some = [&](auto vectors) {
    for (; at + vectors * kLanes <= columns; at += vectors * kLanes) {
      const auto from = [row_of, at](int64_t i, int v) { return row_of(i, at, v); };
      Columns<Type, vectors>(a, a_stride, from, c + at, c_stride, rows, inner, accumulate);
    }
  };
  some(std::integral_constant<int, 4>());
  some(std::integral_constant<int, 2>());
  some(std::integral_constant<int, 1>());
}

// The same of a matrix b whose rows are `b_stride` words apart.
template <typename Type>
inline void Multiply(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                     int64_t rows, int64_t inner, int64_t columns, bool accumulate) {
  const auto row_of = [=](int64_t i, int64_t at, int v) { return LoadInts(b + i * b_stride + at + v * kLanes); };
  MultiplyRows<Type>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
}

// c[kRows, 16] = a[kRows, words] b[16, words]^T, summed in the order of `Multiply`; asks memory for 16 more rows.
template <typename Type, int kRows>
inline void MultiplyTransposed(const int32_t* a, int64_t a_stride, const int32_t* const* b, const int32_t* const* ahead,
                               float* c, int64_t c_stride, int64_t words) {
  Floats sums[kRows] = {};
  for (int64_t w = 0; w < words; w += kLanes) {
    Ints x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __builtin_prefetch(ahead[i] + w, 0, 2);
      x[i] = LoadInts(b[i] + w);
    }
    Transpose(x);
    for (int i = 0; i < kLanes; ++i)
      for (int r = 0; r < kRows; ++r) sums[r] = Type::Add(sums[r], x[i], Ints{} + a[r * a_stride + w + i]);
  }
  for (int r = 0; r < kRows; ++r) Store(c + r * c_stride, sums[r]);
}

// The same for a number of rows that the compiler does not know, kMost at most.
template <typename Type, int kMost>
inline void MultiplyTransposed(int64_t rows, const int32_t* a, int64_t a_stride, const int32_t* const* b,
                               const int32_t* const* ahead, float* c, int64_t c_stride, int64_t words) {
  if (rows == kMost) MultiplyTransposed<Type, kMost>(a, a_stride, b, ahead, c, c_stride, words);
  else if constexpr (kMost > 1)
    MultiplyTransposed<Type, kMost - 1>(rows, a, a_stride, b, ahead, c, c_stride, words);
}

}  // namespace ksana
