// Products of small matrices of words. A word has 32 bits: one float32, or two bfloat16 or four codes that are neighbours
// along the dimension that is summed over.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "simd.h"
#include "tiles.h"

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
  static constexpr int kRows = 6;  // of the tallest tile
  static constexpr bool kAtOnce = true;

  // sums + a b, lane by lane.
  static Floats Add(Floats sums, Ints a, Ints b) { return MultiplyAdd(sums, BitCast<Floats>(a), BitCast<Floats>(b)); }

  // Words of the v-th kLanes columns after column `at` of a row; prefetches another row's.
  static Ints Column(const int32_t* const* rows, const int32_t* const* ahead, int64_t at, int v) {
    __builtin_prefetch(ahead[0] + at + v * kLanes, 0, 2);
    return LoadInts(rows[0] + at + v * kLanes);
  }
};

struct Bfloat16 {
  using Number = uint16_t;
  static constexpr Stored kStored = kBfloat16;
  static constexpr int64_t kPerWord = 2;
  // True if an instruction multiplies both numbers of words. Otherwise, words are unpacked to two of float32.
#ifdef __AVX512BF16__
  static constexpr bool kAtOnce = true;
#else
  static constexpr bool kAtOnce = false;
#endif
  static constexpr int kRows = kManyRegisters ? 6 : 4;

  // sums + the product of the first numbers of words + the product of the second ones.
  static Floats Add(Floats sums, Ints a, Ints b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    return MultiplyAdd(MultiplyAdd(sums, First(a), First(b)), Second(a), Second(b));
#endif
  }

  static Floats First(Ints words) { return BitCast<Floats>(words << 16); }
  static Floats Second(Ints words) { return BitCast<Floats>(words & -65536); }

  // Rounds numbers to nearest, ties to even.
  static Ints Round(Floats first, Floats second) {
#ifdef __AVX512BF16__
    return (Ints)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
    return UpperHalves(Rounded(first), Rounded(second), std::make_integer_sequence<int, 2 * kLanes>());
  }

  // The same for a number of one row and one of the next; `at` is a multiple of 2 kLanes.
  static Ints Column(const int32_t* const* rows, const int32_t* const* ahead, int64_t at, int v) {
    const int64_t word = at / 2 + v / 2 * kLanes;
    const auto all = std::make_integer_sequence<int, 2 * kLanes>();
    __builtin_prefetch(ahead[v % 2] + word, 0, 2);
    const Ints a = LoadInts(rows[0] + word), b = LoadInts(rows[1] + word);
    return v % 2 ? Zip<kLanes>(a, b, all) : Zip<0>(a, b, all);
  }

 private:
  using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));

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

// True if matrix units multiply words of a type, however few the rows.
template <typename Type>
bool ByTiles() {
  return std::is_same_v<Type, Bfloat16> && HasTiles();
}

#ifdef __aarch64__
// sums + the products of bytes a and b, four of each in a word.
inline int32x4_t AddBytes(int32x4_t sums, int8x16_t a, int8x16_t b) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sums, a, b);
#else
  const int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8(b)), second = vmull_high_s8(a, b);
  return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)));
#endif
}
#endif

// Codes of int8 in sums of integers, whose bits are in Floats: a are weights, b activations + kOffset, four of each in
// a word.
struct Int8 {
  static constexpr int64_t kPerWord = 4;
  static constexpr bool kAtOnce = true;
  static constexpr int kRows = kManyRegisters ? 6 : 4;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  static constexpr int32_t kOffset = 128;  // the instruction takes bytes without sign on one side
#else
  static constexpr int32_t kOffset = 0;
#endif

  static Floats Add(Floats sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)  // gcc 12 moves sums from register to register and to memory around the intrinsic
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(b), "v"(a));
    return sums;
#elif defined(__AVXVNNI__)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(b), "x"(a));
    return sums;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Sums of two products fit into 16 bits: codes of activations are not below -127.
    const __m256i weights = (__m256i)a, signs = _mm256_sign_epi8((__m256i)b, weights);
    const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), signs);
    return BitCast<Floats>(BitCast<Ints>(sums) + (Ints)_mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
#elif defined(__aarch64__)
    return (Floats)AddBytes((int32x4_t)sums, (int8x16_t)a, (int8x16_t)b);
#else
    Ints total = BitCast<Ints>(sums);
    for (int i = 0; i < 4; ++i) total += (a << (24 - 8 * i) >> 24) * (b << (24 - 8 * i) >> 24);
    return BitCast<Floats>(total);
#endif
  }
};

// Returns x, hidden from the compiler. In tiles, it would otherwise read an operand from memory again in each
// instruction, and reads become the limit.
template <typename Vector>
inline Vector KeptInRegister(Vector x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX2__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// c[kRows, kVectors kLanes] (+)= a[kRows, inner] b[inner, kVectors kLanes]: all of c in registers. row_of(i, v) returns
// the v-th vector of b's i-th row.
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
      Ints x = Ints{} + a[r * a_stride + i];
      if constexpr (!Type::kAtOnce) x = KeptInRegister(x);  // or it would be split before it is in all lanes
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Type::Add(sums[r][v], row[v], x);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <typename Type, int kRows, int kVectors, typename RowOf>
inline void Columns(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t rows,
                    int64_t inner, bool accumulate) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_stride, c += kRows * c_stride)
    Tile<Type, kRows, kVectors>(a, a_stride, row_of, c, c_stride, inner, accumulate);
  if constexpr (kRows > 1)
    if (rows) Columns<Type, kRows - 1, kVectors>(a, a_stride, row_of, c, c_stride, rows, inner, accumulate);
}

// c[rows, columns] (+)= a[rows, inner] b[inner, columns] from column `at` on, in tiles of kRows rows and kVectors
// vectors, and smaller ones.
template <typename Type, int kRows, int kVectors, typename RowOf>
inline void Tiles(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t rows,
                  int64_t inner, int64_t columns, bool accumulate, int64_t at = 0) {
  for (; at + kVectors * kLanes <= columns; at += kVectors * kLanes) {
    const auto from = [row_of, at](int64_t i, int v) { return row_of(i, at, v); };
    Columns<Type, kRows, kVectors>(a, a_stride, from, c + at, c_stride, rows, inner, accumulate);
  }
  if constexpr (kVectors > 1)
    Tiles<Type, kRows, kVectors / 2>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate, at);
}

// c[rows, columns] (+)= a[rows, inner] b[inner, columns]; `inner` counts words, columns is a multiple of kLanes. A
// number of c is summed in the order of `inner`, whatever the other dimensions. row_of(i, at, v) returns the v-th vector
// after column `at` of b's i-th row; `at` is a multiple of 2 kLanes, unless the last kLanes columns are left.
template <typename Type, typename RowOf>
inline void MultiplyRows(const int32_t* a, int64_t a_stride, RowOf row_of, float* c, int64_t c_stride, int64_t rows,
                         int64_t inner, int64_t columns, bool accumulate) {
  // Tiles fill the registers: 32 of AVX-512 and NEON, 16 of others.
  if constexpr (kManyRegisters)
    return Tiles<Type, Type::kRows, 4>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
  if (rows == 1) Tiles<Type, 1, 8>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
  else if (rows <= 3) Tiles<Type, 3, 4>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
  else Tiles<Type, Type::kRows, 2>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
}

// The same for a matrix b whose rows are `b_stride` words apart.
template <typename Type>
inline void Multiply(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                     int64_t rows, int64_t inner, int64_t columns, bool accumulate) {
  const auto row_of = [=](int64_t i, int64_t at, int v) { return LoadInts(b + i * b_stride + at + v * kLanes); };
  MultiplyRows<Type>(a, a_stride, row_of, c, c_stride, rows, inner, columns, accumulate);
}

// c[kRows, kLanes] = a[kRows, words] b[kLanes, words]^T, summed in the order of `Multiply`; asks memory for as many
// rows more.
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

// c[kRows, kColumns] = a[kRows, words] b[kColumns, words]^T, read along their words: the order of summation is another
// than that of `Multiply`, and again the same whatever the number of rows. Asks memory for as many rows of b more.
template <typename Type, int kRows, int kColumns>
inline void Dots(const int32_t* a, int64_t a_stride, const int32_t* const* b, const int32_t* const* ahead, float* c,
                 int64_t c_stride, int64_t words) {
  Floats sums[RoundUp(kRows * kColumns, kLanes)] = {};
  for (int64_t w = 0; w < words; w += kLanes) {
    Ints columns[kColumns];
    for (int i = 0; i < kColumns; ++i) {
      __builtin_prefetch(ahead[i] + w, 0, 2);
      columns[i] = KeptInRegister(LoadInts(b[i] + w));
    }
    for (int r = 0; r < kRows; ++r) {
      const Ints x = KeptInRegister(LoadInts(a + r * a_stride + w));
      for (int i = 0; i < kColumns; ++i) sums[r * kColumns + i] = Type::Add(sums[r * kColumns + i], columns[i], x);
    }
  }
  float found[RoundUp(kRows * kColumns, kLanes)];
  for (int i = 0; i < kRows * kColumns; i += kLanes) Store(found + i, SumEach(sums + i));
  for (int r = 0; r < kRows; ++r) std::memcpy(c + r * c_stride, found + r * kColumns, sizeof(float) * kColumns);
}

// c[rows, kColumns] = a[rows, words] b[kColumns, words]^T as in `Dots`.
template <typename Type, int kRows, int kColumns>
inline void DotsOfRows(const int32_t* a, int64_t a_stride, const int32_t* const* b, const int32_t* const* ahead,
                       float* c, int64_t c_stride, int64_t rows, int64_t words) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_stride, c += kRows * c_stride, ahead = b)
    Dots<Type, kRows, kColumns>(a, a_stride, b, ahead, c, c_stride, words);
  if constexpr (kRows > 1)
    if (rows) DotsOfRows<Type, kRows - 1, kColumns>(a, a_stride, b, ahead, c, c_stride, rows, words);
}

}  // namespace ksana
