// The arrays of a call of attention, and a thread's buffers for it.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "numbers.h"
#include "pattern.h"
#include "simd.h"
#include "vectors.h"

namespace ksana {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kJobRows = 64;
constexpr int64_t kPieceKeys = 64;
constexpr int64_t kSectionKeys = 1024;
constexpr int64_t kFewRows = 4;

// The arrays of a call. Sizes have the letters of the contract.
struct Call {
  int64_t s, q, n, h, l, sides, k, b, p, j;
  bool by_head;  // each kv head has a table: [S, K, P] in place of [S, P]
  Vectors queries, pool;  // results have the queries' type
  const int32_t* tables;
  const int32_t* starts;
  const int32_t* positions;
  int64_t layer;
  Pattern pattern;
  Vectors sink_queries;      // [S, Q, J, N, H]
  const float* sinks;        // [N], or null
  float soft_cap;            // 0 for none
  const float* factors;      // of queries in the mass, [S, Q], or null
  char* out;
  float* lse;
  float* mass;  // or null

  int64_t group() const { return n / k; }
  int64_t RowsOfJob() const { return std::min(kJobRows, q * group()); }
  int64_t num_jobs() const { return s * k * JobsOfHead(); }
  int64_t NumTables() const { return by_head ? s * k : s; }
  int64_t JobsOfHead() const { return (q * group() + kJobRows - 1) / kJobRows; }
  int64_t BlocksOfPiece() const { return std::max<int64_t>(1, kPieceKeys / b); }
  int64_t KeysOfPiece() const { return BlocksOfPiece() * b; }
  int64_t KeysOfSection() const { return std::max<int64_t>(1, kSectionKeys / KeysOfPiece()) * KeysOfPiece(); }
  int64_t MostKeys() const { return RoundUp(KeysOfPiece(), 2 * kLanes); }

  // Index of the first number of a block's keys (side 0) or values (side 1) in units of vectors. A pool with one side
  // has vectors that are both.
  int64_t VectorOf(int64_t block, int64_t side, int64_t head) const {
    return (((block * l + layer) * sides + side % sides) * k + head) * b;
  }

  // Where an entry of a table begins and its section ends; blocks that a head selects count as neighbours.
  int64_t KeyOf(int64_t table, int64_t entry) const { return by_head ? entry * b : starts[table * p + entry]; }
  int64_t EndOfSection(int64_t key) const { return (key / KeysOfSection() + 1) * KeysOfSection(); }
};

// What some rows have of their keys: the highest score, the sum of weights next to it, and that of weighted values.
struct Sums {
  float *top, *total, *out;  // [rows], [rows], [rows, wide]

  explicit Sums(float* at) : top(at), total(at + kJobRows), out(at + 2 * kJobRows) {}

  static int64_t Size(int64_t rows, int64_t wide) { return 2 * kJobRows + rows * wide; }
};

// A thread's buffers, kept from one job to the next. `wide` is H rounded up to whole vectors of words.
template <typename Type>
struct Scratch {
  const int64_t rows_of_job, words, wide, most_keys;
  Lines<int32_t> queries, block, keys, values, zeros;
  std::vector<const int32_t*> rows, ahead;  // keys or values of a piece, and of the next one
  Lines<float> scores, sums, more_sums, query, key;
  std::vector<int32_t> positions, key_positions, seen;
  std::vector<int64_t> live, sections;  // table entries with a key that may be visible; where sections of them begin

  static int64_t Wide(int64_t h) { return RoundUp(h, Type::kPerWord * kLanes); }

  explicit Scratch(const Call& call)
      : rows_of_job(call.RowsOfJob()), words(Wide(call.h) / Type::kPerWord), wide(Wide(call.h)),
        most_keys(call.MostKeys()), queries(rows_of_job * words), block(most_keys * words), keys(words * most_keys),
        values(most_keys * words), zeros(words), rows(most_keys), ahead(most_keys), scores(rows_of_job * most_keys),
        sums(Sums::Size(rows_of_job, wide)), more_sums(sums.size()), query(wide), key(wide), positions(rows_of_job),
        key_positions(most_keys), seen(most_keys) {
    live.reserve(call.p);
  }
};

}  // namespace ksana
