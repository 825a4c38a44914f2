// Vectors of a processor for products of blocks of codes: `Words` of four codes each, and as many `Numbers`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "numbers.h"
#include "product.h"

namespace ksana {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct Simd {
  static constexpr int kWide = 16, kRows = 4, kVectors = 2, kVectorsOfOne = 4;
  using Words = __m512i;
  using Numbers = __m512;

  static Words Zero() { return _mm512_setzero_si512(); }
  static Words Read(const void* from) { return _mm512_loadu_si512(from); }
  static Words All(const int8_t* word) {
    int32_t x;
    std::memcpy(&x, word, sizeof(x));
    return _mm512_set1_epi32(x);
  }
  static Words Masked(Words x, int8_t mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
  static Words Or(Words a, Words b) { return _mm512_or_si512(a, b); }
  static Words Left(Words x, int bits) { return _mm512_slli_epi16(x, bits); }
  static Words Right(Words x, int bits) { return _mm512_srli_epi16(x, bits); }
  // sums + the products of bytes a, without a sign, and b.
  static Words Add(Words sums, Words a, Words b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));  // gcc 12 moves sums around the intrinsic
    return sums;
  }
  template <int kBits>
  static Words AddTwo(Words sums, Words a, Words x, Words b, Words y) {
    return Add(Add(sums, a, x), b, y);
  }
  static constexpr int kBytesZero = 128;
  template <int kBits>
  static Numbers Total(Words sums) {
    return _mm512_cvtepi32_ps(sums);
  }
  static Numbers LoadBytes(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static Numbers LoadHalves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Numbers AllOf(float x) { return _mm512_set1_ps(x); }
  static Numbers Times(Numbers a, Numbers b) { return _mm512_mul_ps(a, b); }
  static Numbers Fused(Numbers a, Numbers b, Numbers c) { return _mm512_fmadd_ps(a, b, c); }
  static Numbers Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Numbers x) { _mm512_storeu_ps(to, x); }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Simd {
  static constexpr int kWide = 8, kRows = 3, kVectors = 2, kVectorsOfOne = 4;
  using Words = __m256i;
  using Numbers = __m256;

  static Words Zero() { return _mm256_setzero_si256(); }
  static Words Read(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Words All(const int8_t* word) {
    int32_t x;
    std::memcpy(&x, word, sizeof(x));
    return _mm256_set1_epi32(x);
  }
  static Words Masked(Words x, int8_t mask) { return _mm256_and_si256(x, _mm256_set1_epi8(mask)); }
  static Words Or(Words a, Words b) { return _mm256_or_si256(a, b); }
  static Words Left(Words x, int bits) { return _mm256_slli_epi16(x, bits); }
  static Words Right(Words x, int bits) { return _mm256_srli_epi16(x, bits); }
#ifdef __AVXVNNI__
  template <int kBits>
  static Words AddTwo(Words sums, Words a, Words x, Words b, Words y) {
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sums, a, x), b, y);
  }
  static constexpr int kBytesZero = 128;
  template <int kBits>
  static Numbers Total(Words sums) {
    return _mm256_cvtepi32_ps(sums);
  }
#else
  static Words Widened(Words pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
  // Sums of products have 16 bits: with 4 bits, 16 products of a block, at most 16 x 15 x 127 = 30,480; with 5 and 6,
  // four, 4 x 63 x 127 = 32,004; with 8, two of a magnitude and a code, 2 x 128 x 127 = 32,512.
  template <int kBits>
  static Words AddTwo(Words sums, Words a, Words x, Words b, Words y) {
    if constexpr (kBits == 8) return AddBytes(AddBytes(sums, a, x), b, y);
    const Words some = _mm256_add_epi16(_mm256_maddubs_epi16(a, x), _mm256_maddubs_epi16(b, y));
    sums = kBits == 4 ? _mm256_add_epi16(sums, some) : _mm256_add_epi32(sums, Widened(some));
    asm("" : "+x"(sums));  // gcc 12 computes them later, when they no longer fit registers
    return sums;
  }
  static Words AddBytes(Words sums, Words a, Words b) {
    const Words codes = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    return _mm256_add_epi32(sums, Widened(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(b, codes))));
  }
  static constexpr int kBytesZero = 0;
  template <int kBits>
  static Numbers Total(Words sums) {
    return _mm256_cvtepi32_ps(kBits == 4 ? Widened(sums) : sums);
  }
#endif
  static Numbers LoadBytes(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static Numbers LoadHalves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Numbers AllOf(float x) { return _mm256_set1_ps(x); }
  static Numbers Times(Numbers a, Numbers b) { return _mm256_mul_ps(a, b); }
  static Numbers Fused(Numbers a, Numbers b, Numbers c) { return _mm256_fmadd_ps(a, b, c); }
  static Numbers Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Numbers x) { _mm256_storeu_ps(to, x); }
};

#elif defined(__aarch64__)

struct Simd {
  static constexpr int kWide = 4, kRows = 4, kVectors = 4, kVectorsOfOne = 8;
  using Words = int8x16_t;
  using Numbers = float32x4_t;

  static Words Zero() { return vdupq_n_s8(0); }
  static Words Read(const void* from) { return vld1q_s8(static_cast<const int8_t*>(from)); }
  static Words All(const int8_t* word) {
    int32_t x;
    std::memcpy(&x, word, sizeof(x));
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
  }
  static Words Masked(Words x, int8_t mask) { return vandq_s8(x, vdupq_n_s8(mask)); }
  static Words Or(Words a, Words b) { return vorrq_s8(a, b); }
  static Words Left(Words x, int bits) { return Shifted(x, bits); }
  static Words Right(Words x, int bits) { return Shifted(x, -bits); }
  static Words Shifted(Words x, int bits) {
    return vreinterpretq_s8_u16(vshlq_u16(vreinterpretq_u16_s8(x), vdupq_n_s16(bits)));
  }
  template <int kBits>
  static Words AddTwo(Words sums, Words a, Words x, Words b, Words y) {
    if constexpr (kBits == 8) {  // codes + 128
      const Words sign = vdupq_n_s8(-128);
      a = veorq_s8(a, sign), b = veorq_s8(b, sign);
    }
    return vreinterpretq_s8_s32(AddBytes(AddBytes(vreinterpretq_s32_s8(sums), a, x), b, y));
  }
  static constexpr int kBytesZero = 0;
  template <int kBits>
  static Numbers Total(Words sums) {
    return vcvtq_f32_s32(vreinterpretq_s32_s8(sums));
  }
  static Numbers LoadBytes(const int8_t* from) {
    int32_t x;
    std::memcpy(&x, from, sizeof(x));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(x))))));
  }
  static Numbers LoadHalves(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
  static Numbers AllOf(float x) { return vdupq_n_f32(x); }
  static Numbers Times(Numbers a, Numbers b) { return vmulq_f32(a, b); }
  static Numbers Fused(Numbers a, Numbers b, Numbers c) { return vfmaq_f32(c, a, b); }
  static Numbers Load(const float* from) { return vld1q_f32(from); }
  static void Store(float* to, Numbers x) { vst1q_f32(to, x); }
};

#else  // one lane: correct, not fast

struct Simd {
  static constexpr int kWide = 1, kRows = 1, kVectors = 1, kVectorsOfOne = 1;
  using Words = int32_t;
  using Numbers = float;

  static Words Zero() { return 0; }
  static Words Read(const void* from) {
    Words x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static Words All(const int8_t* word) { return Read(word); }
  static Words Masked(Words x, int mask) { return x & mask * 0x01010101; }
  static Words Or(Words a, Words b) { return a | b; }
  static Words Left(Words x, int bits) { return static_cast<uint32_t>(x) << bits; }
  static Words Right(Words x, int bits) { return x >> bits; }
  template <int kBits>
  static Words AddTwo(Words sums, Words a, Words x, Words b, Words y) {
    for (int i = 0; i < 32; i += 8)
      sums += (a >> i & 255) * static_cast<int8_t>(x >> i) + (b >> i & 255) * static_cast<int8_t>(y >> i);
    return sums;
  }
  static constexpr int kBytesZero = 128;
  template <int kBits>
  static Numbers Total(Words sums) {
    return static_cast<float>(sums);
  }
  static Numbers LoadBytes(const int8_t* from) { return *from; }
  static Numbers LoadHalves(const uint16_t* from) {
    float x;
    Widen(from, 1, kFloat16, &x);
    return x;
  }
  static Numbers AllOf(float x) { return x; }
  static Numbers Times(Numbers a, Numbers b) { return a * b; }
  static Numbers Fused(Numbers a, Numbers b, Numbers c) { return std::fma(a, b, c); }
  static Numbers Load(const float* from) { return *from; }
  static void Store(float* to, Numbers x) { *to = x; }
};

#endif

}  // namespace ksana
