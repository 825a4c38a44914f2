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

  // Words of a number of a and one of b, of 32 each: those of the first 16 numbers, and of the last.
  static void Interleave(Ints a, Ints b, Ints& first, Ints& last) {
    first = Zip<0>(a, b, std::make_integer_sequence<int, 2 * kLanes>());
    last = Zip<kLanes>(a, b, std::make_integer_sequence<int, 2 * kLanes>());
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

// c[kRows, kVectors * 16] (+)= a[kRows, inner] b[inner, kVectors * 16]: all of c in registers.
template <typename Type, int kRows, int kVectors>
inline void Tile(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                 int64_t inner, bool accumulate) {
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = accumulate ? Load(c + r * c_stride + v * kLanes) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    Ints row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = KeptInRegister(LoadInts(b + i * b_stride + v * kLanes));
    for (int r = 0; r < kRows; ++r) {
      const Ints x = Ints{} + a[r * a_stride + i];
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Type::Add(sums[r][v], row[v], x);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <typename Type, int kVectors, int kRows = 6>
inline void Columns(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                    int64_t rows, int64_t inner, bool accumulate) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_stride, c += kRows * c_stride)
    Tile<Type, kRows, kVectors>(a, a_stride, b, b_stride, c, c_stride, inner, accumulate);
  if constexpr (kRows > 1)
    if (rows) Columns<Type, kVectors, kRows - 1>(a, a_stride, b, b_stride, c, c_stride, rows, inner, accumulate);
}

// c[rows, columns] (+)= a[rows, inner] b[inner, columns]; `inner` counts words, columns is a multiple of 16. A number
// of c is summed in the order of `inner`, whatever the other dimensions.
template <typename Type>
inline void Multiply(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                     int64_t rows, int64_t inner, int64_t columns, bool accumulate) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= columns; at += 4 * kLanes)
    Columns<Type, 4>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner, accumulate);
  for (; at < columns; at += kLanes)
    Columns<Type, 1>(a, a_stride, b + at, b_stride, c + at, c_stride, rows, inner, accumulate);
}

}  // namespace ksana
