// Adapters beside packed weights: y[t] = (1 + gain) (w x[t]) + B (A x[t]), with A [R, K], B [N, R] and gain [N] of the
// slot of row t. Only the slots of a call's rows are read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "product.h"
#include "simd.h"

namespace ksana {

// The slots of a call's rows, sorted.
struct Slots {
  // Rows that are multiplied with an A while it is in a cache.
  static constexpr int64_t kRowsOfTile = 24;

  struct Tile {
    int64_t slot, begin, count;
  };

  const int32_t* of_row = nullptr;  // [T], -1 for no adapter; null where a call has no adapters
  std::vector<int64_t> rows;        // that have one
  std::vector<Tile> tiles;          // of `rows`

  Slots() = default;

  Slots(const int32_t* given, int64_t t, int64_t num_slots) : of_row(given) {
    if (!given) return;
    std::vector<int64_t> ends(num_slots + 1);
    for (int64_t row = 0; row < t; ++row)
      if (given[row] >= 0) ++ends[given[row] + 1];
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      for (int64_t at = 0; at < ends[slot + 1]; at += kRowsOfTile)
        tiles.push_back({slot, ends[slot] + at, std::min(kRowsOfTile, ends[slot + 1] - at)});
      ends[slot + 1] += ends[slot];
    }
    rows.resize(ends[num_slots]);
    for (int64_t row = 0; row < t; ++row)
      if (given[row] >= 0) rows[ends[given[row]]++] = row;
  }

  int64_t Of(int64_t row) const { return of_row ? of_row[row] : -1; }
};

// The adapters of one packed matrix [N, K].
struct Adapters {
  const Slots* slots = nullptr;
  int64_t num_slots = 0, rank = 0;  // rank is a multiple of 16
  const char* a = nullptr;          // [S, K / p, R, p], p numbers to a word
  const char* b = nullptr;          // [panels of 64 rows of N, S, R / p, 64, p]
  const float* gains = nullptr;     // [S, N]
  char* low = nullptr;              // [T, R] of x's type, for A x

  int64_t jobs() const { return slots ? slots->tiles.size() : 0; }
};

}  // namespace ksana
