// A panel holds the words of a block for each of its 64 rows, the first word of all rows first: with 4 bits, word j has
// codes 4 j .. 4 j + 3 in its low halves of bytes, and the codes 16 further on in the high ones, as in GGUF files.

#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "product.h"
#include "simd.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ksana {
namespace {

constexpr int64_t kPanelRows = 64;
// Blocks that are multiplied with all rows before the next ones: they stay in the first cache.
constexpr int64_t kDepth = 8;
constexpr int64_t kAhead = 16;  // words of each row that memory is asked for ahead

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
  static Words Low(Words x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Words Shifted(Words x) { return _mm512_srli_epi16(x, 4); }
  // sums + the products of bytes a, without a sign, and b.
  static Words Add(Words sums, Words a, Words b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));  // gcc 12 moves sums around the intrinsic
    return sums;
  }
  static Words AddBytes(Words sums, Words a, Words b) { return Add(sums, a, b); }
  static constexpr int kBytesZero = 128;
  static Numbers Total(Words sums) { return _mm512_cvtepi32_ps(sums); }
  static Numbers TotalOfHalves(Words sums) { return Total(sums); }
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
  static Words Low(Words x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Words Shifted(Words x) { return _mm256_srli_epi16(x, 4); }
#ifdef __AVXVNNI__
  static Words Add(Words sums, Words a, Words b) { return _mm256_dpbusd_avx_epi32(sums, a, b); }
  static Words AddBytes(Words sums, Words a, Words b) { return Add(sums, a, b); }
  static constexpr int kBytesZero = 128;
  static Numbers TotalOfHalves(Words sums) { return Total(sums); }
#else
  // Sums have 16 bits: 16 products of a block in each, at most 16 x 15 x 127 = 30,480.
  static Words Add(Words sums, Words a, Words b) { return _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b)); }
  static Numbers TotalOfHalves(Words sums) { return Total(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
  // Two products of a magnitude and a code have 16 bits: 2 x 128 x 127 = 32,512.
  static Words AddBytes(Words sums, Words a, Words b) {
    const Words codes = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    const Words pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(b, codes));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static constexpr int kBytesZero = 0;
#endif
  static Numbers Total(Words sums) { return _mm256_cvtepi32_ps(sums); }
  static Numbers LoadHalves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Numbers AllOf(float x) { return _mm256_set1_ps(x); }
  static Numbers Times(Numbers a, Numbers b) { return _mm256_mul_ps(a, b); }
  static Numbers Fused(Numbers a, Numbers b, Numbers c) { return _mm256_fmadd_ps(a, b, c); }
  static Numbers Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Numbers x) { _mm256_storeu_ps(to, x); }
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
  static Words Low(Words x) { return x & 0x0f0f0f0f; }
  static Words Shifted(Words x) { return x >> 4; }
  static Words Add(Words sums, Words a, Words b) {
    for (int i = 0; i < 32; i += 8) sums += (a >> i & 255) * static_cast<int8_t>(b >> i);
    return sums;
  }
  static Words AddBytes(Words sums, Words a, Words b) { return Add(sums, a, b); }
  static constexpr int kBytesZero = 128;
  static Numbers Total(Words sums) { return static_cast<float>(sums); }
  static Numbers TotalOfHalves(Words sums) { return Total(sums); }
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

// Inputs of tiles: some blocks of a panel, and of rows of x.
struct Part {
  const int32_t* words;
  const char *scales, *minima;
  bool in_float32;
  const int8_t* codes;
  const BlockOfRow* of_rows;
  int64_t k, count;  // of a row; blocks of the part
  float* sums;
  bool accumulates;

  int64_t BytesOfScales(int64_t count) const { return count * (in_float32 ? sizeof(float) : sizeof(uint16_t)); }

  // Scales or minima from the i-th on.
  Simd::Numbers Load(const char* from, int64_t i) const {
    const char* at = from + BytesOfScales(i);
    return in_float32 ? Simd::Load(reinterpret_cast<const float*>(at))
                      : Simd::LoadHalves(reinterpret_cast<const uint16_t*>(at));
  }

  Part Moved(int64_t rows, int64_t columns) const {
    Part part = *this;
    part.words += columns, part.scales += BytesOfScales(columns);
    part.codes += rows * k, part.of_rows += rows * (k / kBlock);
    if (minima) part.minima += BytesOfScales(columns);
    part.sums += rows * kPanelRows + columns;
    return part;
  }
};

// Computes a tile of kRows rows, and kVectors vectors of a panel's columns.
template <bool kInBytes, bool kInHalves, int kRows, int kVectors>
void Tile(const Part& p) {
  using S = Simd;
  constexpr int kWords = kInBytes ? 8 : 4, kGroups = kInHalves ? 2 : 1;
  constexpr int kWordsOfGroup = kInBytes ? kWords / kGroups : kWords;  // of 4 bits, halves of a block share words
  const float zero = kInBytes ? S::kBytesZero : p.minima ? 0 : 8;
  typename S::Numbers totals[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] = p.accumulates ? S::Load(p.sums + r * kPanelRows + v * S::kWide) : S::AllOf(0.0f);
  for (int64_t g = 0; g < p.count * kGroups; ++g) {
    const int64_t b = g / kGroups, half = g % kGroups, first_word = kInBytes ? half * kWordsOfGroup : 0;
    typename S::Words exact[kRows][kVectors];
    for (auto& row : exact)
      for (auto& sum : row) sum = S::Zero();
    for (int j = 0; j < kWordsOfGroup; ++j) {
      const int32_t* at = p.words + (b * kWords + first_word + j) * kPanelRows;
      typename S::Words x[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        x[v] = S::Read(at + v * S::kWide);
        if (v * S::kWide % 16 == 0) __builtin_prefetch(at + v * S::kWide + kAhead * kPanelRows, 0, 2);
        if (!kInBytes && kInHalves && half) x[v] = S::Shifted(x[v]);
      }
      for (int r = 0; r < kRows; ++r) {
        const int8_t* codes = p.codes + r * p.k + b * kBlock + half * (kBlock / 2) + j * 4;
        const typename S::Words first = S::All(codes);
        if constexpr (kInBytes) {
          for (int v = 0; v < kVectors; ++v) exact[r][v] = S::AddBytes(exact[r][v], x[v], first);
        } else {
          for (int v = 0; v < kVectors; ++v) exact[r][v] = S::Add(exact[r][v], S::Low(x[v]), first);
          if constexpr (kInHalves) continue;
          const typename S::Words second = S::All(codes + kBlock / 2);
          for (int v = 0; v < kVectors; ++v) exact[r][v] = S::Add(exact[r][v], S::Low(S::Shifted(x[v])), second);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = g * kPanelRows + v * S::kWide;
      const auto scale = p.Load(p.scales, at);
      if (v * S::kWide % 32 == 0) {
        const int64_t ahead = p.BytesOfScales(at + kAhead / kWordsOfGroup * kPanelRows);
        __builtin_prefetch(p.scales + ahead, 0, 2);
        if (p.minima) __builtin_prefetch(p.minima + ahead, 0, 2);
      }
      for (int r = 0; r < kRows; ++r) {
        const BlockOfRow& of_row = p.of_rows[r * (p.k / kBlock) + b];
        const float of_codes = kInHalves ? of_row.sums[half] : of_row.sums[0] + of_row.sums[1];
        auto sum = kInBytes ? S::Total(exact[r][v]) : S::TotalOfHalves(exact[r][v]);
        sum = S::Fused(S::AllOf(of_codes), S::AllOf(-zero), sum);  // exact: whole numbers below 2^24
        totals[r][v] = S::Fused(S::Times(scale, S::AllOf(of_row.scale)), sum, totals[r][v]);
        if (p.minima)
          totals[r][v] = S::Fused(p.Load(p.minima, at), S::AllOf(of_row.scale * of_codes), totals[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) S::Store(p.sums + r * kPanelRows + v * S::kWide, totals[r][v]);
}

template <bool kInBytes, bool kInHalves, int kRows, int kVectors>
void Tiles(const Part& part, int64_t rows) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows)
    for (int64_t c = 0; c < kPanelRows; c += kVectors * Simd::kWide)
      Tile<kInBytes, kInHalves, kRows, kVectors>(part.Moved(row, c));
  if constexpr (kRows > 1)
    if (row < rows) Tiles<kInBytes, kInHalves, kRows - 1, kVectors>(part.Moved(row, 0), rows - row);
}

template <bool kInBytes, bool kInHalves>
void Run(const Blocks& w, const char* words, int64_t panel, int64_t k, const int8_t* codes, const BlockOfRow* of_rows,
         int64_t rows, float* sums) {
  constexpr int64_t kWords = (kInBytes ? 8 : 4) * kPanelRows;
  const int64_t blocks = k / kBlock, depth = rows == 1 ? blocks : kDepth;
  for (int64_t b = 0; b < blocks; b += depth) {
    const int64_t at = panel * blocks + b;
    const int64_t scales = at * kPanelRows * (kInHalves ? 2 : 1) * (w.in_float32 ? sizeof(float) : sizeof(uint16_t));
    const Part part{reinterpret_cast<const int32_t*>(words) + at * kWords,
                    w.scales + scales,
                    w.minima ? w.minima + scales : nullptr,
                    w.in_float32,
                    codes + b * kBlock,
                    of_rows + b,
                    k,
                    std::min(depth, blocks - b),
                    sums,
                    b > 0};
    if (rows == 1) Tiles<kInBytes, kInHalves, 1, Simd::kVectorsOfOne>(part, 1);
    else Tiles<kInBytes, kInHalves, Simd::kRows, Simd::kVectors>(part, rows);
  }
}

}  // namespace

void RoundToBlocks(const void* x, int64_t k, Stored stored, int8_t* codes, BlockOfRow* blocks) {
  const auto* from = static_cast<const char*>(x);
  for (int64_t b = 0; b < k / kBlock; ++b) {
    float numbers[kBlock];
    Widen(from + b * kBlock * BytesOf(stored), kBlock, stored, numbers);
    Floats most{}, nothing{};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats some = Load(numbers + i);
      most = Max(most, Max(some, -some));
      nothing += some * 0.0f;
    }
    const float largest = Highest(most), factor = largest > 0 ? 127.0f / largest : 0.0f;
    const Floats magic = All(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    int32_t whole[kBlock], sums[2] = {};
    for (int64_t i = 0; i < kBlock; i += kLanes)  // in two operations, as in `RoundToCodes`
      StoreInts(whole + i, BitCast<Ints>(KeptInRegister(Load(numbers + i) * factor) + magic));
    for (int64_t i = 0; i < kBlock; ++i) codes[b * kBlock + i] = static_cast<int8_t>(whole[i]);
    for (int64_t i = 0; i < kBlock; ++i) sums[i / (kBlock / 2)] += codes[b * kBlock + i];
    blocks[b] = {largest / 127.0f + Sum(nothing), {static_cast<float>(sums[0]), static_cast<float>(sums[1])}};
  }
}

void MultiplyBlocks(const Blocks& w, const char* words, int64_t panel, int64_t k, const int8_t* codes,
                    const BlockOfRow* blocks, int64_t rows, float* sums) {
  const auto run = w.in_bytes ? (w.in_halves ? Run<true, true> : Run<true, false>)
                              : (w.in_halves ? Run<false, true> : Run<false, false>);
  run(w, words, panel, k, codes, blocks, rows, sums);
}

}  // namespace ksana
