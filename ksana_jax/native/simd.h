// Vectors of 16 floats or words of 32 bits. Plain C++ with the vector extensions of gcc and clang: the compiler splits
// a vector where registers are narrower.
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

inline Ints LoadInts(const int32_t* from) {
  Ints x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void StoreInts(int32_t* to, Ints x) { std::memcpy(to, &x, sizeof(x)); }

inline Floats All(float x) { return x - Floats{}; }

inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// The lanes of x, those that differ in bit kStep exchanged.
template <int kStep, int... i>
inline Floats Swap(Floats x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, (i ^ kStep)...);
}

template <int kStep>
inline Floats Swap(Floats x) {
  return Swap<kStep>(x, std::make_integer_sequence<int, kLanes>());
}

inline float Sum(Floats x) {
  x += Swap<8>(x);
  x += Swap<4>(x);
  x += Swap<2>(x);
  return (x + Swap<1>(x))[0];
}

inline float Highest(Floats x) {
  x = Max(x, Swap<8>(x));
  x = Max(x, Swap<4>(x));
  x = Max(x, Swap<2>(x));
  return Max(x, Swap<1>(x))[0];
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
inline void Exchange(Ints& a, Ints& b, std::integer_sequence<int, i...>) {
  const Ints first = __builtin_shufflevector(a, b, (i & kStep ? kLanes + (i ^ kStep) : i)...);
  b = __builtin_shufflevector(a, b, (i & kStep ? kLanes + i : i ^ kStep)...);
  a = first;
}

template <int kStep>
inline void Exchange(Ints* x) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & kStep)) Exchange<kStep>(x[i], x[i | kStep], std::make_integer_sequence<int, kLanes>());
}

// Transposes a matrix of 16 rows and columns.
inline void Transpose(Ints* x) {
  Exchange<8>(x);
  Exchange<4>(x);
  Exchange<2>(x);
  Exchange<1>(x);
}

// to[columns, rows] = from[rows, columns]^T; columns is a multiple of 16. Asks memory for `ahead`, which has the shape
// of `from`.
inline void Transpose(const int32_t* from, int64_t from_stride, int64_t rows, int64_t columns, int32_t* to,
                      int64_t to_stride, const int32_t* ahead) {
  int64_t r = 0;
  for (; r + kLanes <= rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      Ints x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = LoadInts(from + (r + i) * from_stride + c);
        __builtin_prefetch(ahead + (r + i) * from_stride + c, 0, 2);
      }
      Transpose(x);
      for (int i = 0; i < kLanes; ++i) StoreInts(to + (c + i) * to_stride + r, x[i]);
    }
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

}  // namespace ksana
