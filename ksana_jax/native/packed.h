// Products with packed weights. A panel holds 64 rows of a matrix w[N, K] as words [K / numbers of a word, 64], so that
// a product reads it from the first word to the last and keeps sums of 64 columns of y = x w^T in vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "adapters.h"
#include "blocks.h"
#include "pairs.h"
#include "product.h"
#include "simd.h"

namespace ksana {

constexpr int64_t kPanel = 64;
constexpr int64_t kRowsOfJob = 128;
// Columns of a tile of many rows.
constexpr int64_t kStrip = (kManyRegisters ? 4 : 2) * kLanes;
// Words of a panel that are multiplied with all rows of a job before the next ones: they stay in the second cache.
constexpr int64_t kDepth = 512;
// The same for matrix units, which multiply 32 rows: they stay in the first cache.
constexpr int64_t kTileDepth = 256;
// Words that are unpacked at a time. A strip of them stays in the first cache.
constexpr int64_t kUnpackedDepth = kLanes == 16 ? 64 : 128;
constexpr int64_t kLine = 16;  // words that caches keep together

// A packed matrix. Codes of int8 have four to a word, whatever the type of x.
struct Packed {
  const char* words = nullptr;
  int64_t n = 0, k = 0;
  const float* scales = nullptr;  // of rows, [N], where words are codes
  const int32_t* sums = nullptr;  // of a row's codes, [N], where x is rounded to codes too; else null
  const char* bias = nullptr;     // [N], of x's type, or null
  Blocks blocks;                  // where words are codes in blocks
  Adapters adapters;

  // True if x is rounded to codes too.
  bool rounds() const { return sums || blocks.bits; }

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
};

// Some words of a panel, widened or as they are, one strip after the other; and rows of x, widened if the words are.
struct Unpacked {
  static constexpr int64_t kOfStrip = kUnpackedDepth * kStrip + kLanes;  // no power of 2: caches keep few such lines

  alignas(64) int32_t words[kPanel / kStrip * kOfStrip], rows[kRowsOfJob * kUnpackedDepth];

  static int64_t IndexOf(int64_t word, int64_t column) {
    return (kStrip < kPanel ? column / kStrip * kOfStrip : 0) + word * kStrip + column % kStrip;
  }
};

// Sums of a job, [rows][64], what adapters add to them, and unpacked words.
struct PanelScratch {
  alignas(64) float sums[kRowsOfJob * kPanel], others[kRowsOfJob * kPanel];
  alignas(64) float added[kRowsOfJob * kPanel], added_to_others[kRowsOfJob * kPanel];
  Unpacked unpacked;
};

// Calls unpack(vector, to) for the vectors of `count` words of a panel, each of which becomes kMore words from `to` on,
// kStrip apart.
template <int64_t kMore, typename Use>
void EachWord(const int32_t* from, int64_t count, int32_t* to, Use unpack) {
  for (int64_t w = 0; w < count; ++w)
    for (int64_t c = 0; c < kPanel; c += kLanes)
      unpack(LoadInts(from + w * kPanel + c), to + Unpacked::IndexOf(w * kMore, c));
}

// Words of float32 or codes as they are.
template <typename Type>
void Unpack(const int32_t* from, int64_t count, int32_t* to, Type) {
  EachWord<1>(from, count, to, [](Ints some, int32_t* at) { StoreInts(at, some); });
}

// Words of bfloat16 as two of float32.
inline void Unpack(const int32_t* from, int64_t count, int32_t* to, Bfloat16) {
  EachWord<2>(from, count, to, [](Ints some, int32_t* at) {
    StoreInts(at, BitCast<Ints>(Bfloat16::First(some)));
    StoreInts(at + kStrip, BitCast<Ints>(Bfloat16::Second(some)));
  });
}

// The b-th code of each word, as the bits of a float, whose upper half holds it exactly.
inline Ints Code(Ints words, int b) {
  return BitCast<Ints>(__builtin_convertvector(words << (24 - 8 * b) >> 24, Floats));
}

// Words of codes as words of a type: calls use(b, vector) for the b-th of each.
template <typename Use>
void EachOfCodes(Ints codes, Float32, Use use) {
  for (int b = 0; b < 4; ++b) use(b, Code(codes, b));
}

template <typename Use>
void EachOfCodes(Ints codes, Bfloat16, Use use) {
  for (int b = 0; b < 2; ++b) use(b, (Code(codes, 2 * b) >> 16 & 0xffff) | (Code(codes, 2 * b + 1) & -65536));
}

template <typename Type>
void UnpackCodes(const int32_t* from, int64_t count, int32_t* to, Type) {
  EachWord<4 / Type::kPerWord>(from, count, to, [](Ints codes, int32_t* at) {
    EachOfCodes(codes, Type{}, [at](int b, Ints words) { StoreInts(at + b * kStrip, words); });
  });
}

// Rows of x as they are multiplied: numbers [T, K], or codes + Int8::kOffset and a scale for each row.
template <typename Number>
struct Rows {
  const Number* numbers;
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
};

// Stores the lowest bytes of words + Int8::kOffset, as many as fit.
inline void StoreBytes(uint8_t* to, Floats words, int64_t room) {
  const Ints bits = BitCast<Ints>(words) + Int8::kOffset;
  uint8_t bytes[kLanes];
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8((__m512i)bits));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)bits), high = _mm256_extracti128_si256((__m256i)bits, 1);
  const __m128i lowest = _mm_set1_epi32(255);
  const __m128i halves = _mm_packus_epi32(_mm_and_si128(low, lowest), _mm_and_si128(high, lowest));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(halves, halves));
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
    // Not as one operation with one rounding: codes must be equal with any compiler.
    StoreBytes(codes + i, KeptInRegister(some.first * factor) + magic, d - i);
    StoreBytes(codes + i + kLanes, KeptInRegister(some.second * factor) + magic, d - i - kLanes);
  }
  return largest / 127.0f + Sum(nothing);
}

// sums[rows][64] = a b, some words at a time: rows_of(at, count) returns rows of a; unpack(from, count) unpacks words
// of b, kFewer times fewer, from the panel. Prefetches the next ones.
template <typename Type, int64_t kFewer, typename RowsOf, typename Unpack>
void MultiplyUnpacked(RowsOf rows_of, int64_t stride, const int32_t* panel, int64_t inner, Unpack unpack, int64_t rows,
                      float* sums, const Unpacked& unpacked) {
  const int32_t* words = unpacked.words;
  for (int64_t at = 0; at < inner; at += kUnpackedDepth) {
    const int64_t some = std::min(kUnpackedDepth, inner - at);
    unpack(panel + at / kFewer * kPanel, some / kFewer);
    if (ByTiles<Type>() && some % kTile == 0) {
      MultiplyByTiles(rows_of(at, some), stride, words, kPanel, sums, kPanel, rows, some, kPanel, at > 0);
      continue;
    }
    const char* next = reinterpret_cast<const char*>(panel + (at + some) / kFewer * kPanel);
    const auto row_of = [words, next](int64_t i, int64_t at, int v) {
      const int64_t column = at + v * kLanes;
      const int64_t index = column / kStrip * kUnpackedDepth * kStrip + i * kStrip + column % kStrip;
      if (v % (kLine / kLanes) == 0) __builtin_prefetch(next + index * (4 / kFewer), 0, 2);
      return LoadInts(words + Unpacked::IndexOf(i, column));
    };
    MultiplyRows<Type>(rows_of(at, some), stride, row_of, sums, kPanel, rows, some, kPanel, at > 0);
  }
}

// sums[64] (+)= a b for one row a, of `count` words of a panel that are codes; they are widened in registers.
template <typename Type>
void MultiplyRowByCodes(const int32_t* a, const int32_t* panel, int64_t count, float* sums, bool accumulate) {
  constexpr int kVectors = kPanel / kLanes, kMore = 4 / Type::kPerWord;
  Floats totals[kVectors];
  for (int v = 0; v < kVectors; ++v) totals[v] = accumulate ? Load(sums + v * kLanes) : Floats{};
  for (int64_t w = 0; w < count; ++w) {
    Ints x[kMore];
    for (int b = 0; b < kMore; ++b) x[b] = Ints{} + a[w * kMore + b];
    for (int v = 0; v < kVectors; ++v)
      EachOfCodes(LoadInts(panel + w * kPanel + v * kLanes), Type{},
                  [&](int b, Ints words) { totals[v] = Type::Add(totals[v], words, x[b]); });
  }
  for (int v = 0; v < kVectors; ++v) Store(sums + v * kLanes, totals[v]);
}

// The same for words that are not widened, for which a tile may be narrower than a panel: it then reads strips of one.
template <typename Type>
void MultiplyWords(const int32_t* a, int64_t inner, const int32_t* words, int64_t rows, float* sums,
                   Unpacked& unpacked) {
  if (ByTiles<Type>()) {
    const int64_t whole = inner / kTile * kTile;
    for (int64_t at = 0; at < whole; at += kTileDepth)
      MultiplyByTiles(a + at, inner, words + at * kPanel, kPanel, sums, kPanel, rows, std::min(kTileDepth, whole - at),
                      kPanel, at > 0);
    if (whole < inner)
      Multiply<Type>(a + whole, inner, words + whole * kPanel, kPanel, sums, kPanel, rows, inner - whole, kPanel,
                     whole > 0);
    return;
  }
  if (kStrip < kPanel && rows > 1) {
    const auto unpack = [&](const int32_t* from, int64_t count) { Unpack(from, count, unpacked.words, Type{}); };
    MultiplyUnpacked<Type, 1>([a](int64_t at, int64_t) { return a + at; }, inner, words, inner, unpack, rows, sums,
                              unpacked);
  } else {
    for (int64_t at = 0; at < inner; at += kDepth)
      Multiply<Type>(a + at, inner, words + at * kPanel, kPanel, sums, kPanel, rows, std::min(kDepth, inner - at),
                     kPanel, at > 0);
  }
}

// sums[rows][64] = x w[panel]^T for rows of x from `row` on, whose codes are multiplied exactly.
template <typename Number>
void MultiplyCodes(const Packed& w, int64_t panel, const Rows<Number>& x, int64_t row, int64_t rows, float* sums,
                   Unpacked& unpacked) {
  const int64_t inner = w.k / Int8::kPerWord;
  const auto* words = reinterpret_cast<const int32_t*>(w.words) + panel * inner * kPanel;
  MultiplyWords<Int8>(reinterpret_cast<const int32_t*>(x.codes + row * w.k), inner, words, rows, sums, unpacked);
  int32_t extra[kPanel] = {};  // of the offset added to codes of x
  for (int64_t c = 0; c < std::min(kPanel, w.n - panel * kPanel); ++c)
    extra[c] = Int8::kOffset * w.sums[panel * kPanel + c];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < kPanel; c += kLanes) {
      float* at = sums + r * kPanel + c;
      const Ints exact = BitCast<Ints>(Load(at)) - LoadInts(extra + c);
      Store(at, __builtin_convertvector(exact, Floats) * x.scales[row + r]);
    }
}

// The same for numbers, without scales of weights. Sums are in the order of K, whatever the rows.
template <typename Type>
void MultiplyPanel(const Packed& w, int64_t panel, const Rows<typename Type::Number>& x, int64_t row, int64_t rows,
                   float* sums, Unpacked& unpacked) {
  if (w.blocks.bits) {  // codes have no 128 added, and a `BlockOfRow` for each 32 replaces scales
    const auto* blocks = reinterpret_cast<const BlockOfRow*>(x.scales) + row * (w.k / kBlock);
    const auto* codes = reinterpret_cast<const int8_t*>(x.codes) + row * w.k;
    return MultiplyBlocks(w.blocks, w.words, panel, w.k, codes, blocks, rows, sums);
  }
  if (w.sums) return MultiplyCodes(w, panel, x, row, rows, sums, unpacked);
  const int64_t per_word = w.scales ? Int8::kPerWord : Type::kPerWord;
  const auto* words = reinterpret_cast<const int32_t*>(w.words) + panel * (w.k / per_word) * kPanel;
  const auto* numbers = x.numbers + row * w.k;
  const auto* a = reinterpret_cast<const int32_t*>(numbers);
  if (!w.scales && (Type::kAtOnce || rows == 1))
    return MultiplyWords<Type>(a, w.k / Type::kPerWord, words, rows, sums, unpacked);
  using Factor = std::conditional_t<Type::kAtOnce, Type, Float32>;
  const auto rows_of = [&](int64_t at, int64_t count) -> const int32_t* {
    if constexpr (Type::kAtOnce) {
      return a + at;
    } else {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < count; ++i)
          unpacked.rows[r * kUnpackedDepth + i] = uint32_t{numbers[r * w.k + at + i]} << 16;
      return unpacked.rows;
    }
  };
  const int64_t stride = Type::kAtOnce ? w.k / Factor::kPerWord : kUnpackedDepth;
  const int64_t inner = w.k / Factor::kPerWord;
  const auto unpack = [&](const int32_t* from, int64_t count) { Unpack(from, count, unpacked.words, Type{}); };
  const auto unpack_codes = [&](const int32_t* from, int64_t count) {
    UnpackCodes(from, count, unpacked.words, Factor{});
  };
  constexpr int64_t kMore = 4 / Factor::kPerWord;
  if (w.scales && rows == 1 && !ByTiles<Factor>())
    for (int64_t at = 0; at < inner; at += kUnpackedDepth) {
      const int64_t some = std::min(kUnpackedDepth, inner - at);
      MultiplyRowByCodes<Factor>(rows_of(at, some), words + at / kMore * kPanel, some / kMore, sums, at > 0);
    }
  else if (w.scales) MultiplyUnpacked<Factor, kMore>(rows_of, stride, words, inner, unpack_codes, rows, sums, unpacked);
  else if constexpr (!Type::kAtOnce)
    MultiplyUnpacked<Factor, Type::kPerWord>(rows_of, stride, words, inner, unpack, rows, sums, unpacked);
}

// Computes A x of a tile of rows that share a slot. Sums are in the order of K, whatever the rows.
template <typename Type>
void MultiplyLow(const Packed& w, const Rows<typename Type::Number>& x, int64_t index, PanelScratch& scratch) {
  using Number = typename Type::Number;
  const Adapters& adapters = w.adapters;
  const Slots::Tile tile = adapters.slots->tiles[index];
  const int64_t* rows = &adapters.slots->rows[tile.begin];
  const int64_t inner = w.k / Type::kPerWord, rank = adapters.rank;
  const auto* a = reinterpret_cast<const int32_t*>(adapters.a) + tile.slot * inner * rank;
  int32_t* some_of_rows = scratch.unpacked.rows;
  float* sums = scratch.sums;
  // Columns at a time, whose sums of all rows have room.
  const int64_t most = kRowsOfJob * kPanel / Slots::kRowsOfTile / kLine * kLine;
  for (int64_t column = 0; column < rank; column += most) {
    const int64_t columns = std::min(most, rank - column);
    for (int64_t at = 0; at < inner; at += kUnpackedDepth) {
      const int64_t some = std::min(kUnpackedDepth, inner - at);
      for (int64_t r = 0; r < tile.count; ++r)
        std::memcpy(some_of_rows + r * kUnpackedDepth, x.numbers + rows[r] * w.k + at * Type::kPerWord, 4 * some);
      Multiply<Type>(some_of_rows, kUnpackedDepth, a + at * rank + column, rank, sums, columns, tile.count, some, columns,
                     at > 0);
    }
    for (int64_t r = 0; r < tile.count; ++r)
      for (int64_t c = 0; c < columns; c += 2 * kLanes) {
        const int64_t count = std::min<int64_t>(2 * kLanes, columns - c);
        auto* to = reinterpret_cast<Number*>(adapters.low) + rows[r] * rank + column + c;
        StoreSome(to, LoadSome(sums + r * columns + c, count), count);
      }
  }
}

// added[rows][64] = B (A x) of rows from `row` on, of those that have an adapter.
template <typename Type>
void MultiplyHigh(const Packed& w, int64_t panel, int64_t row, int64_t rows, float* added) {
  const Adapters& adapters = w.adapters;
  if (!adapters.jobs()) return;
  const int64_t inner = adapters.rank / Type::kPerWord;
  const auto* low = reinterpret_cast<const int32_t*>(adapters.low);
  const auto* b = reinterpret_cast<const int32_t*>(adapters.b) + panel * adapters.num_slots * inner * kPanel;
  for (int64_t r = 0, end; r < rows; r = end) {
    const int64_t slot = adapters.slots->Of(row + r);
    for (end = r + 1; end < rows && adapters.slots->Of(row + end) == slot;) ++end;
    if (slot < 0) continue;
    Multiply<Type>(low + (row + r) * inner, inner, b + slot * inner * kPanel, kPanel, added + r * kPanel, kPanel, end - r,
                   inner, kPanel, false);
  }
}

// Returns numbers of y, from their sums: scaled, with what the adapter of the row adds, and with bias.
template <typename Number>
Pair Finished(const Packed& w, int64_t row, int64_t column, int64_t count, const float* sums, const float* added) {
  Pair x = LoadPair(sums);
  if (w.scales) {
    const Pair scale = LoadSome(w.scales + column, count);
    x = {x.first * scale.first, x.second * scale.second};
  }
  if (w.adapters.slots && w.adapters.slots->Of(row) >= 0) {
    const Pair gain = LoadSome(w.adapters.gains + w.adapters.slots->Of(row) * w.n + column, count);
    const Pair more = LoadPair(added);
    x = {x.first + gain.first * x.first + more.first, x.second + gain.second * x.second + more.second};
  }
  if (w.bias) {
    const Pair bias = LoadSome(reinterpret_cast<const Number*>(w.bias) + column, count);
    x = {x.first + bias.first, x.second + bias.second};
  }
  return x;
}

// Calls use(row, first column, how many, index of the first sum) for the numbers of y that a panel gives, as many as
// a pair has at most.
template <typename Use>
void EachPair(const Packed& w, int64_t panel, int64_t rows, Use use) {
  const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, w.n);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t column = begin; column < end; column += 2 * kLanes)
      use(r, column, std::min<int64_t>(2 * kLanes, end - column), r * kPanel + column - begin);
}

}  // namespace ksana
