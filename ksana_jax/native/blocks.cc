// A panel holds the words of a block for each of its 64 rows, the first word of all rows first: with 4 bits, word j has
// codes 4 j .. 4 j + 3 in its low halves of bytes, and the codes 16 further on in the high ones, as in GGUF files. With
// 5 and 6 bits, one and two more words have the highest ones: byte b has those of codes b, 4 + b and so on, the first
// in its lowest bits.

#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "block_simd.h"
#include "product.h"
#include "simd.h"

namespace ksana {
namespace {

// Blocks that are multiplied with all rows before the next ones: they stay in the first cache, and share a factor.
constexpr int64_t kDepth = 8;
constexpr int64_t kWordsAhead = 16;  // words of each row that memory is asked for ahead

// Scales or minima from the i-th on.
template <Stored kStored>
Simd::Numbers LoadScales(const char* from, int64_t i) {
  const char* at = from + i * BytesOf(kStored);
  if constexpr (kStored == kInt8) return Simd::LoadBytes(reinterpret_cast<const int8_t*>(at));
  else if constexpr (kStored == kFloat16) return Simd::LoadHalves(reinterpret_cast<const uint16_t*>(at));
  else return Simd::Load(reinterpret_cast<const float*>(at));
}

// Inputs of tiles: some blocks of a panel, and of rows of x.
struct Part {
  const int32_t* words;
  const char *scales, *minima;
  const uint16_t* factors;  // of scales and minima in int8
  const int8_t* codes;
  const BlockOfRow* of_rows;
  int64_t k, count;  // of a row; blocks of the part
  float* sums;
  bool accumulates;

  template <Stored kStored>
  Part Moved(int64_t rows, int64_t columns) const {
    Part part = *this;
    part.words += columns, part.scales += columns * BytesOf(kStored);
    part.codes += rows * k, part.of_rows += rows * (k / kBlock);
    if (minima) part.minima += columns * BytesOf(kStored);
    if (factors) part.factors += columns;
    part.sums += rows * kRowsOfPanel + columns;
    return part;
  }
};

// Codes 4 i .. 4 i + 3 of a block of each row, whose first word is at `words`.
template <int kBits>
Simd::Words Codes(const int32_t* words, int i) {
  using S = Simd;
  if constexpr (kBits == 8) {
    return S::Read(words + i * kRowsOfPanel);
  } else {
    const auto word = S::Read(words + i % 4 * kRowsOfPanel);
    const auto low = S::Masked(i < 4 ? word : S::Right(word, 4), 15);
    if constexpr (kBits == 4) return low;
    constexpr int kMore = kBits == 4 ? 1 : kBits - 4, kOfByte = 8 / kMore;
    const auto more = S::Read(words + (4 + i / kOfByte) * kRowsOfPanel);
    const int at = i % kOfByte * kMore;
    return S::Or(low, S::Masked(at < 4 ? S::Left(more, 4 - at) : S::Right(more, at - 4), (1 << kBits) - 16));
  }
}

// Computes a tile of kRows rows, and kVectors vectors of a panel's columns.
template <int kBits, int kGroups, Stored kStored, int kRows, int kVectors>
void Tile(const Part& p) {
  using S = Simd;
  constexpr int kPairs = 4 / kGroups;
  constexpr int64_t kBlocksAhead = kWordsAhead / kBits, kScalesOfLine = 64 / BytesOf(kStored);
  const float zero = kBits == 8 ? S::kBytesZero : p.minima ? 0 : 1 << (kBits - 1);
  typename S::Numbers totals[kRows][kVectors], factors[kVectors], of_minima[kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] = p.accumulates ? S::Load(p.sums + r * kRowsOfPanel + v * S::kWide) : S::AllOf(0.0f);
  for (int64_t b = 0; b < p.count; ++b) {
    const int32_t* words = p.words + b * kBits * kRowsOfPanel;  // a bit of 32 codes is a word
    if (kStored == kInt8 && b % kDepth == 0)
      for (int v = 0; v < kVectors; ++v) {
        const uint16_t* at = p.factors + b / kDepth * kRowsOfPanel * (p.minima ? 2 : 1) + v * S::kWide;
        factors[v] = S::LoadHalves(at);
        if (p.minima) of_minima[v] = S::LoadHalves(at + kRowsOfPanel);
      }
#pragma GCC unroll 2
    for (int group = 0; group < kGroups; ++group) {
      typename S::Words exact[kRows][kVectors];
      for (auto& row : exact)
        for (auto& sum : row) sum = S::Zero();
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
        // Codes that share words are multiplied at once.
        constexpr bool kShares = kGroups == 1 && kBits < 8;
        const int i = kShares ? pair : group * 4 + pair * 2, j = kShares ? i + 4 : i + 1;
        typename S::Words first[kRows], second[kRows];
        for (int r = 0; r < kRows; ++r) {
          const int8_t* codes = p.codes + r * p.k + b * kBlock;
          first[r] = S::All(codes + 4 * i), second[r] = S::All(codes + 4 * j);
        }
        for (int v = 0; v < kVectors; ++v) {
          const auto x = Codes<kBits>(words + v * S::kWide, i), y = Codes<kBits>(words + v * S::kWide, j);
          if (v * S::kWide % 16 == 0)
            for (int w = group * kPairs + pair; w < kBits; w += 4)
              __builtin_prefetch(words + (kWordsAhead + w) * kRowsOfPanel + v * S::kWide, 0, 2);
          for (int r = 0; r < kRows; ++r)
            exact[r][v] = S::template AddTwo<kBits>(exact[r][v], x, first[r], y, second[r]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (b * kGroups + group) * kRowsOfPanel + v * S::kWide;
        auto scale = LoadScales<kStored>(p.scales, at), minimum = scale;
        if (p.minima) minimum = LoadScales<kStored>(p.minima, at);
        if constexpr (kStored == kInt8) {
          scale = S::Times(scale, factors[v]);
          if (p.minima) minimum = S::Times(minimum, of_minima[v]);
        }
        if (v * S::kWide % kScalesOfLine == 0) {
          const int64_t ahead = (at + kBlocksAhead * kGroups * kRowsOfPanel) * BytesOf(kStored);
          __builtin_prefetch(p.scales + ahead, 0, 2);
          if (p.minima) __builtin_prefetch(p.minima + ahead, 0, 2);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const BlockOfRow& of_row = p.of_rows[r * (p.k / kBlock) + b];
          const float of_codes = kGroups == 2 ? of_row.sums[group] : of_row.sums[0] + of_row.sums[1];
          auto sum = S::template Total<kBits>(exact[r][v]);
          sum = S::Fused(S::AllOf(of_codes), S::AllOf(-zero), sum);  // exact: whole numbers below 2^24
          totals[r][v] = S::Fused(S::Times(scale, S::AllOf(of_row.scale)), sum, totals[r][v]);
          if (p.minima) totals[r][v] = S::Fused(minimum, S::AllOf(of_row.scale * of_codes), totals[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) S::Store(p.sums + r * kRowsOfPanel + v * S::kWide, totals[r][v]);
}

template <int kBits, int kGroups, Stored kStored, int kRows, int kVectors>
void Tiles(const Part& part, int64_t rows) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows)
    for (int64_t c = 0; c < kRowsOfPanel; c += kVectors * Simd::kWide)
      Tile<kBits, kGroups, kStored, kRows, kVectors>(part.Moved<kStored>(row, c));
  if constexpr (kRows > 1)
    if (row < rows) Tiles<kBits, kGroups, kStored, kRows - 1, kVectors>(part.Moved<kStored>(row, 0), rows - row);
}

// Widens scales or minima of some groups of a panel, times their factors if there are any.
template <Stored kStored>
void WidenScales(const char* from, const uint16_t* factors, int64_t groups, float* to) {
  for (int64_t c = 0; c < kRowsOfPanel; c += Simd::kWide) {
    const auto factor = kStored == kInt8 ? Simd::LoadHalves(factors + c) : Simd::AllOf(1.0f);
#pragma GCC unroll 1
    for (int64_t i = c; i < groups * kRowsOfPanel; i += kRowsOfPanel)
      Simd::Store(to + i, Simd::Times(LoadScales<kStored>(from, i), factor));
  }
}

template <int kBits, int kGroups, Stored kStored>
void Run(const Blocks& w, const char* words, int64_t panel, int64_t k, const int8_t* codes, const BlockOfRow* of_rows,
         int64_t rows, float* sums) {
  const int64_t blocks = k / kBlock;
  const char *from = words + panel * w.Bytes(k), *scales = from + w.WordBytes(k), *minima = scales + w.ScaleBytes(k);
  const char* factors = w.has_minima ? minima + w.ScaleBytes(k) : minima;
  Part part{reinterpret_cast<const int32_t*>(from),
            scales,
            w.has_minima ? minima : nullptr,
            kStored == kInt8 ? reinterpret_cast<const uint16_t*>(factors) : nullptr,
            codes,
            of_rows,
            k,
            blocks,
            sums,
            false};
  if (rows == 1) return Tiles<kBits, kGroups, kStored, 1, Simd::kVectorsOfOne>(part, 1);
  for (int64_t b = 0; b < blocks; b += kDepth) {
    alignas(64) float wide[2][kDepth * kGroups * kRowsOfPanel];
    Part some = part;
    some.count = std::min(kDepth, blocks - b), some.accumulates = b > 0;
    some.words += b * kBits * kRowsOfPanel, some.codes += b * kBlock, some.of_rows += b;
    const int64_t at = b * kGroups * kRowsOfPanel * BytesOf(kStored), groups = some.count * kGroups;
    if (part.factors) some.factors += b / kDepth * kRowsOfPanel * (part.minima ? 2 : 1);
    WidenScales<kStored>(part.scales + at, some.factors, groups, wide[0]);
    if (part.minima) WidenScales<kStored>(part.minima + at, some.factors + kRowsOfPanel, groups, wide[1]);
    some.scales = reinterpret_cast<const char*>(wide[0]);
    if (part.minima) some.minima = reinterpret_cast<const char*>(wide[1]);
    Tiles<kBits, kGroups, kFloat32, Simd::kRows, Simd::kVectors>(some, rows);
  }
}

template <int kBits, int kGroups>
auto RunOf(Stored stored) {
  return stored == kInt8      ? Run<kBits, kGroups, kInt8>
         : stored == kFloat16 ? Run<kBits, kGroups, kFloat16>
                              : Run<kBits, kGroups, kFloat32>;
}

template <int kBits>
auto RunOf(const Blocks& w) {
  return w.in_halves ? RunOf<kBits, 2>(w.stored) : RunOf<kBits, 1>(w.stored);
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
  const auto run = w.bits == 4   ? RunOf<4>(w)
                   : w.bits == 5 ? RunOf<5>(w)
                   : w.bits == 6 ? RunOf<6>(w)
                                 : RunOf<8>(w);
  run(w, words, panel, k, codes, blocks, rows, sums);
}

}  // namespace ksana
