// A job of attention: some queries of a tile and one kv head, over all blocks of the tile's table.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention.h"
#include "product.h"

namespace ksana {

// It walks the table in pieces of about kPieceKeys keys, with an online softmax in float32 (arXiv:2205.14135, algorithm
// 1), which begins again with each section of about kSectionKeys keys; sections are added in their order. A query's
// result is the same bit by bit whatever the other queries of its tile: sums have one order, and pieces and sections
// begin at multiples of their size in the text. Where a pattern hides whole blocks, this holds for blocks of a multiple
// of 16. `Type` is the type of both factors of products: Float32, or Bfloat16 if keys, values and
// queries are; weights are rounded to it.
template <typename Type>
class Job {
 public:
  Job(const Call& call, Scratch<Type>& scratch, int64_t index) : call_(call), scratch_(scratch) {
    const int64_t of_head = call.JobsOfHead();
    tile_ = index / of_head / call.k;
    head_ = index / of_head % call.k;
    first_row_ = index % of_head * kJobRows;
    rows_ = std::min(kJobRows, call.q * call.group() - first_row_);
    first_ = kFar;
    last_ = -1;
    for (int64_t r = 0; r < rows_; ++r) {
      const int32_t position = call.positions[tile_ * call.q + QueryOf(r)];
      scratch.positions[r] = position;
      if (position < 0) continue;
      first_ = std::min(first_, position);
      last_ = std::max(last_, position);
    }
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t vector = (tile_ * call.q + QueryOf(r)) * call.n + HeadOf(r);
      ReadVector(call.queries, vector, &scratch.queries[r * scratch.words]);
    }
  }

  int64_t table() const { return TableOf(head_); }

  void Attend() {
    const Sums sums(scratch_.sums.data()), more(scratch_.more_sums.data());
    FindLive(0, call_.p);
    AttendSection(0, sums);
    for (int64_t i = 1; i < num_sections(); ++i) {
      AttendSection(i, more);
      Add(sums, more);
    }
    for (int64_t r = 0; r < rows_; ++r) Finish(sums, r);
  }

  // Does a part of `Attend`: gives what the rows have of a section, from one entry of the table to another.
  void AttendEntries(int64_t begin, int64_t end, const Sums& sums) {
    FindLive(begin, end);
    AttendSection(0, sums);
  }

  // Does the rest of it, with the sums of all sections, each `size` numbers.
  void AddUp(float* sums, int64_t size, int64_t num_sections) {
    for (int64_t i = 1; i < num_sections; ++i) Add(Sums(sums), Sums(sums + i * size));
    for (int64_t r = 0; r < rows_; ++r) Finish(Sums(sums), r);
  }

  // Adds the weights that slots get from these rows to the mass; `Attend` has run for them.
  void Weigh() {
    float* mass = call_.mass + (tile_ * call_.k + head_) * call_.p * call_.b;
    FindLive(0, call_.p);
    Walk(0, scratch_.live.size(), [this, mass] {
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t query = tile_ * call_.q + QueryOf(r);
        const float lse = call_.lse[query * call_.n + HeadOf(r)];
        const float factor = call_.factors ? call_.factors[query] : 1.0f;
        if (lse == kNothing || factor == 0.0f) continue;
        const float* scores = &scratch_.scores[r * scratch_.most_keys];
        for (int64_t c = 0; c < num_keys_; ++c)
          if (scores[c] != kNothing)
            mass[piece_[c / call_.b] * call_.b + c % call_.b] += factor * std::exp(scores[c] - lse);
      }
    });
  }

 private:
  int64_t QueryOf(int64_t row) const { return (first_row_ + row) / call_.group(); }
  int64_t HeadOf(int64_t row) const { return head_ * call_.group() + (first_row_ + row) % call_.group(); }
  int64_t TableOf(int64_t head) const { return call_.by_head ? tile_ * call_.k + head : tile_; }
  int64_t BlockOf(int64_t head, int64_t entry) const { return call_.tables[TableOf(head) * call_.p + entry]; }
  int32_t StartOf(int64_t entry) const { return call_.starts[table() * call_.p + entry]; }

  int64_t num_sections() const { return scratch_.sections.size() - 1; }

  // Finds the blocks with a key that may be visible, and the sections among them, from one entry of the table to another.
  void FindLive(int64_t begin, int64_t end) {
    auto &live = scratch_.live, &sections = scratch_.sections;
    live.clear();
    sections.clear();
    int64_t next = 0;  // key with which the next section begins
    for (int64_t entry = begin; entry < end && last_ >= 0; ++entry) {
      if (call_.pattern.SeesNone(first_, last_, StartOf(entry), call_.b)) continue;
      if (const int64_t key = call_.KeyOf(table(), entry); key >= next) {
        sections.push_back(live.size());
        next = call_.EndOfSection(key);
      }
      live.push_back(entry);
    }
    sections.push_back(live.size());
  }

  void AttendSection(int64_t section, const Sums& sums) {
    std::fill_n(sums.top, rows_, kNothing);
    std::fill_n(sums.total, rows_, 0.0f);
    std::fill_n(sums.out, rows_ * scratch_.wide, 0.0f);
    if (section >= num_sections()) return;
    Walk(scratch_.sections[section], scratch_.sections[section + 1], [this, &sums] { Absorb(sums); });
  }

  // Computes the scores of live blocks from begin to end piece by piece, and calls `next` after each.
  template <typename Next>
  void Walk(int64_t begin, int64_t end, Next next) {
    for (begin_ = begin; begin_ < end; begin_ += num_blocks_) {
      piece_ = &scratch_.live[begin_];
      const int64_t most = std::min(end - begin_, call_.BlocksOfPiece()), keys = call_.KeysOfPiece();
      // Blocks that a head selects are rarely neighbours: its pieces have as many as they can.
      const int64_t ends = call_.by_head ? kFar : (StartOf(*piece_) / keys + 1) * keys;
      num_blocks_ = 1;
      while (num_blocks_ < most && StartOf(piece_[num_blocks_]) < ends) ++num_blocks_;
      Score();
      next();
    }
  }

  // True if blocks are read where they are.
  bool InPlace() const { return call_.h == scratch_.wide && call_.pool.stored == Type::kStored; }

  // True if the vectors of a block are its keys and its values: they are read once for both, and for all heads.
  bool BothAtOnce() const { return call_.sides == 1; }

  // Returns the block that is read a piece after the i-th one of this piece, to prefetch it meanwhile: blocks
  // are anywhere in memory. After the last one of a kv head come the next head's, adjacent to them in one table.
  const int32_t* Ahead(int64_t i, int64_t side) const {
    const int64_t num_live = scratch_.live.size();
    i += begin_ + call_.BlocksOfPiece();
    const int64_t head = std::min(head_ + (i >= num_live), call_.k - 1);
    return At(call_.VectorOf(BlockOf(head, scratch_.live[i % num_live]), side, head));
  }

  const int32_t* At(int64_t vector) const {
    return reinterpret_cast<const int32_t*>(call_.pool.At(vector));
  }

  void Score() {
    num_keys_ = num_blocks_ * call_.b;
    padded_ = RoundUp(num_keys_, kLanes * Type::kPerWord);
    masked_ = padded_ > num_keys_;
    std::fill(scratch_.key_positions.begin() + num_keys_, scratch_.key_positions.begin() + padded_, kFar);
    for (int64_t i = 0; i < num_blocks_; ++i) {
      const int32_t start = StartOf(piece_[i]);
      masked_ |= !call_.pattern.SeesAll(first_, last_, start, call_.b);
      for (int64_t c = 0; c < call_.b; ++c) scratch_.key_positions[i * call_.b + c] = start + c;
    }
    float* scores = scratch_.scores.data();
    if (BothAtOnce()) {
      ReadRows(0);
      for (int64_t c = 0; c < padded_; c += 4)
        DotsOfRows<Type, kManyRegisters ? 4 : 2, 4>(scratch_.queries.data(), scratch_.words, &scratch_.rows[c],
                                                    &scratch_.ahead[c], scores + c, scratch_.most_keys, rows_,
                                                    scratch_.words);
    } else if (rows_ <= kFewRows && !ByTiles<Type>()) {
      ReadRows(0);
      for (int64_t c = 0; c < padded_; c += kLanes)
        MultiplyTransposed<Type, kFewRows>(rows_, scratch_.queries.data(), scratch_.words, &scratch_.rows[c],
                                           &scratch_.ahead[c], scores + c, scratch_.most_keys, scratch_.words);
    } else {
      for (int64_t i = 0; i < num_blocks_; ++i) {
        const int32_t* block = ReadBlock(i, 0);
        Transpose(block, scratch_.words, call_.b, scratch_.words, &scratch_.keys[i * call_.b], scratch_.most_keys,
                  InPlace() ? Ahead(i, 0) : block);
      }
      MultiplyMany(scratch_.queries.data(), scratch_.words, scratch_.keys.data(), scratch_.most_keys, scores,
                   scratch_.most_keys, scratch_.words, padded_, false);
    }
    if (call_.pattern.sink_position != 0 && call_.j > 0) ScoreSinks();
    if (call_.soft_cap > 0) {
      for (int64_t r = 0; r < rows_; ++r)
        for (int64_t c = 0; c < padded_; c += kLanes) {
          float* at = scores + r * scratch_.most_keys + c;
          Store(at, call_.soft_cap * Tanh(Load(at) * (1.0f / call_.soft_cap)));
        }
    }
    if (masked_) Mask();
  }

  // Returns the B vectors of a block of the piece, `words` words each: where they are, or a copy, which is made while
  // memory is asked for the block ahead.
  const int32_t* ReadBlock(int64_t i, int64_t side) const {
    const int64_t vector = call_.VectorOf(BlockOf(head_, piece_[i]), side, head_);
    if (InPlace()) return At(vector);
    int32_t* copy = &scratch_.block[i * call_.b * scratch_.words];
    if (BothAtOnce() && side == 1) return copy;
    const char* ahead = reinterpret_cast<const char*>(Ahead(i, side));
    for (int64_t at = 0; at < call_.b * call_.pool.bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    for (int64_t c = 0; c < call_.b; ++c)
      ReadVector(call_.pool, vector + c, copy + c * scratch_.words);
    return copy;
  }

  // Reads H numbers as words, and zeros up to `wide`.
  void ReadVector(const Vectors& array, int64_t vector, int32_t* to) const {
    auto* numbers = reinterpret_cast<typename Type::Number*>(to);
    if constexpr (std::is_same_v<Type, Float32>) array.Read(vector, numbers);
    else std::memcpy(numbers, array.At(vector), call_.h * sizeof(*numbers));
    std::fill(numbers + call_.h, numbers + scratch_.wide, typename Type::Number{});
  }

  // Replaces the scores of repositioned sinks by the sink queries' scores.
  void ScoreSinks() {
    for (int64_t c = 0; c < num_keys_; ++c) {
      const int32_t key = scratch_.key_positions[c];
      if (key >= call_.pattern.num_sinks) continue;
      masked_ = true;
      const int64_t vector = call_.VectorOf(BlockOf(head_, piece_[c / call_.b]), 0, head_) + c % call_.b;
      for (int64_t r = 0; r < rows_; ++r) {
        if (scratch_.positions[r] < 0 || !call_.pattern.Repositioned(scratch_.positions[r], key)) continue;
        const int64_t turned = (tile_ * call_.q + QueryOf(r)) * call_.j + std::min<int64_t>(key, call_.j - 1);
        scratch_.scores[r * scratch_.most_keys + c] = Dot(turned * call_.n + HeadOf(r), vector);
      }
    }
  }

  // Multiplies a sink query with a stored key.
  float Dot(int64_t query, int64_t key) {
    Lines<float>&a = scratch_.query, &b = scratch_.key;
    call_.sink_queries.Read(query, a.data());
    call_.pool.Read(key, b.data());
    float sum = 0;
    for (int64_t d = 0; d < call_.h; ++d) sum += a[d] * b[d];
    return sum;
  }

  // Hides keys from the rows that do not see them, and marks those that some row sees.
  void Mask() {
    std::fill_n(scratch_.seen.begin(), padded_, 0);
    for (int64_t r = 0; r < rows_; ++r) {
      float* scores = &scratch_.scores[r * scratch_.most_keys];
      const int32_t position = scratch_.positions[r];
      for (int64_t c = 0; c < padded_; c += kLanes) {
        const Ints keys = LoadInts(&scratch_.key_positions[c]);
        const Ints visible = position < 0 ? Ints{} : call_.pattern.Visible(position, keys);
        StoreInts(&scratch_.seen[c], LoadInts(&scratch_.seen[c]) | visible);
        Store(scores + c, visible ? Load(scores + c) : All(kNothing));
      }
    }
  }

  void Absorb(const Sums& sums) {
    const int64_t wide = scratch_.wide;
    for (int64_t r = 0; r < rows_; ++r) {
      float* scores = &scratch_.scores[r * scratch_.most_keys];
      Floats best = Load(scores);
      for (int64_t c = kLanes; c < padded_; c += kLanes) best = Max(best, Load(scores + c));
      const float before = sums.top[r], top = std::max(before, Highest(best));
      const float base = top == kNothing ? 0.0f : top;
      Floats sum{};
      for (int64_t c = 0; c < padded_; c += kLanes * Type::kPerWord) {
        const Floats weights = Exp(Load(scores + c) - base);
        sum += weights;
        if constexpr (std::is_same_v<Type, Float32>) {
          Store(scores + c, weights);
        } else {
          const Floats others = Exp(Load(scores + c + kLanes) - base);
          sum += others;
          Store(scores + c / 2, BitCast<Floats>(Type::Round(weights, others)));
        }
      }
      const float fade = before == kNothing ? 0.0f : std::exp(before - base);
      sums.top[r] = top;
      sums.total[r] = sums.total[r] * fade + Sum(sum);
      if (fade != 1.0f) {
        float* out = sums.out + r * wide;
        for (int64_t d = 0; d < wide; d += kLanes) Store(out + d, Load(out + d) * fade);
      }
    }
    ReadRows(1);
    const auto* weights = reinterpret_cast<const int32_t*>(scratch_.scores.data());
    const int32_t* const *rows = scratch_.rows.data(), *const *ahead = scratch_.ahead.data();
    const auto values = [rows, ahead](int64_t i, int64_t at, int v) {
      return Type::Column(rows + i * Type::kPerWord, ahead + i * Type::kPerWord, at, v);
    };
    if (!ByTiles<Type>() && (BothAtOnce() || rows_ <= kFewRows)) {
      MultiplyRows<Type>(weights, scratch_.most_keys, values, sums.out, wide, rows_,
                         padded_ / Type::kPerWord, wide, true);
    } else {
      int32_t* to = scratch_.values.data();
      for (int64_t i = 0; i < padded_ / Type::kPerWord; ++i)
        for (int64_t at = 0; at < wide; at += Type::kPerWord * kLanes)
          for (int v = 0; v < Type::kPerWord; ++v, to += kLanes) StoreInts(to, values(i, at, v));
      MultiplyMany(weights, scratch_.most_keys, scratch_.values.data(), wide, sums.out, wide,
                   padded_ / Type::kPerWord, wide, true);
    }
  }

  // c (+)= a b for all rows.
  void MultiplyMany(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                    int64_t inner, int64_t columns, bool accumulate) const {
    const auto multiply = ByTiles<Type>() ? MultiplyByTiles : Multiply<Type>;
    multiply(a, a_stride, b, b_stride, c, c_stride, rows_, inner, columns, accumulate);
  }

  // Finds the keys (side 0) or values (side 1) of the piece, and prefetches the next piece's. Absent keys and
  // values that no row sees are zeros: a weight of 0 would not silence a NaN.
  void ReadRows(int64_t side) {
    const int32_t** rows = scratch_.rows.data();
    std::fill(rows + num_keys_, rows + padded_, scratch_.zeros.data());
    std::copy(rows + num_keys_, rows + padded_, scratch_.ahead.begin() + num_keys_);
    for (int64_t i = 0; i < num_blocks_; ++i) {
      const int32_t *block = ReadBlock(i, side), *ahead = InPlace() ? Ahead(i, side) : block;
      for (int64_t c = 0; c < call_.b; ++c) {
        const bool hidden = side == 1 && masked_ && !scratch_.seen[i * call_.b + c];
        rows[i * call_.b + c] = hidden ? scratch_.zeros.data() : block + c * scratch_.words;
        scratch_.ahead[i * call_.b + c] = ahead + c * scratch_.words;
      }
    }
  }

  // Adds the sums of a later section.
  void Add(const Sums& sums, const Sums& more) const {
    for (int64_t r = 0; r < rows_; ++r) {
      if (more.top[r] == kNothing) continue;
      const float top = std::max(sums.top[r], more.top[r]);
      const float fade = std::exp(sums.top[r] - top), weight = std::exp(more.top[r] - top);
      sums.top[r] = top;
      sums.total[r] = sums.total[r] * fade + more.total[r] * weight;
      float* out = sums.out + r * scratch_.wide;
      const float* added = more.out + r * scratch_.wide;
      for (int64_t d = 0; d < scratch_.wide; d += kLanes)
        Store(out + d, MultiplyAdd(Load(out + d) * fade, Load(added + d), Floats{} + weight));
    }
  }

  void Finish(const Sums& sums, int64_t r) {
    const int64_t vector = (tile_ * call_.q + QueryOf(r)) * call_.n + HeadOf(r);
    float top = sums.top[r], total = sums.total[r], weight = 0.0f;
    const bool nothing = total == 0.0f || scratch_.positions[r] < 0;
    if (!nothing) {
      float fade = 1.0f;
      if (call_.sinks != nullptr) {
        const float sink = call_.sinks[HeadOf(r)], higher = std::max(top, sink);
        fade = std::exp(top - higher);
        total = total * fade + std::exp(sink - higher);
        top = higher;
      }
      weight = fade / total;
    }
    call_.lse[vector] = nothing ? kNothing : top + std::log(total);
    const float* out = sums.out + r * scratch_.wide;
    if (call_.queries.stored == kFloat32) {
      auto* to = reinterpret_cast<float*>(call_.out) + vector * call_.h;
      for (int64_t d = 0; d < call_.h; ++d) to[d] = out[d] * weight;
    } else {
      auto* to = reinterpret_cast<uint16_t*>(call_.out) + vector * call_.h;
      for (int64_t d = 0; d < call_.h; ++d) to[d] = Narrow(out[d] * weight, call_.queries.stored);
    }
  }

  const Call& call_;
  Scratch<Type>& scratch_;
  int64_t tile_, head_, first_row_, rows_, begin_ = 0;
  int64_t num_blocks_ = 0, num_keys_ = 0, padded_ = 0;  // of the piece; padded to whole vectors of words
  int32_t first_, last_;                                // positions of the job's queries
  bool masked_ = false;
  const int64_t* piece_ = nullptr;  // entries of the table
};

}  // namespace ksana
