// Vectors of floats or words of 32 bits, as wide as registers are. Plain C++ with the vector extensions of gcc and clang:
// the compiler splits a vector on processors whose registers are narrower than AVX2's.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ksana {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;  // gcc 12 fails to compile longer vectors
#else
constexpr int kLanes = 8;
#endif
constexpr bool kManyRegisters = kLanes != 8;  // 32 instead of 16

constexpr int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

// Begins at a cache line, so that no register that is loaded from its rows crosses one.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* at, size_t) { ::operator delete(at, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

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

inline Ints LoadCodes(const int8_t* from) {
  // gcc 12 would convert lane by lane.
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
  Ints x;
  for (int i = 0; i < kLanes; ++i) x[i] = from[i];
  return x;
#endif
}

inline Floats FromCodes(const int8_t* from) { return __builtin_convertvector(LoadCodes(from), Floats); }

inline Floats All(float x) { return x - Floats{}; }

// sums + a b, rounded once. Left to itself, gcc 12 rounds twice in some loops and once in others, as it thinks faster.
inline Floats MultiplyAdd(Floats sums, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#else
  return sums + a * b;
#endif
}

// Lane i of the result is table[codes[i] % 16].
inline Floats Lookup(const float* table, Ints codes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)Load(table));
#elif defined(__AVX2__)
  const __m256 low = _mm256_permutevar8x32_ps((__m256)Load(table), (__m256i)codes);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)Load(table + 8), (__m256i)codes);
  return (Floats)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = table[codes[i] & 15];
  return x;
#endif
}

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

template <int kStep = kLanes / 2>
inline float Sum(Floats x) {
  x += Swap<kStep>(x);
  if constexpr (kStep > 1) return Sum<kStep / 2>(x);
  return x[0];
}

template <int kStep = kLanes / 2>
inline float Highest(Floats x) {
  x = Max(x, Swap<kStep>(x));
  if constexpr (kStep > 1) return Highest<kStep / 2>(x);
  return x[0];
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

// 1 / (1 + exp(-x)).
inline Floats Sigmoid(Floats x) {
  const Floats most = All(80.0f), y = -x;
  return 1.0f / (1.0f + Exp(y > most ? most : y));
}

inline Floats Silu(Floats x) {
  const Floats most = All(80.0f), y = -x;
  return x / (1.0f + Exp(y > most ? most : y));
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

// Lane i of the result is the sum of the lanes of x[i], of kLanes.
template <int kStep = kLanes / 2>
inline Floats SumEach(Floats* x) {
  for (int i = 0; i < kStep; ++i) x[i] = Fold<kStep>(x[i], x[i + kStep]);
  if constexpr (kStep > 1) return SumEach<kStep / 2>(x);
  return x[0];
}

// Exchanges lanes and vectors of a square matrix, of those that differ in bit kStep.
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

// Transposes a matrix of kLanes rows and columns.
template <int kStep = kLanes / 2>
inline void Transpose(Ints* x) {
  Exchange<kStep>(x);
  if constexpr (kStep > 1) Transpose<kStep / 2>(x);
}

// to[columns, rows] = from[rows, columns]^T; columns is a multiple of kLanes. Asks memory for `ahead`, which has the
// shape of `from`.
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
