// Paged attention on a CPU: the contract of `pallas_kernels.contract.Call`, as a custom call of XLA.
//
// A job is a tile of queries, one kv head and up to kJobRows rows (queries x query heads of the kv head). It walks the
// blocks of its table in pieces of about kPieceKeys keys, with an online softmax in float32 (arXiv:2205.14135,
// algorithm 1). Jobs are taken by the threads of XLA's own pool.
//
// A query's result is the same bit by bit whatever the other queries of its tile: pieces begin at multiples of their size
// in the text, and sums have one order. Where a pattern hides whole blocks, this holds for blocks of a multiple of 16.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "jobs.h"
#include "numbers.h"
#include "pattern.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ksana {
namespace {

namespace ffi = xla::ffi;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kJobRows = 64;
constexpr int64_t kPieceKeys = 64;
// With fewer rows, keys are not transposed: dot products along the head dim cost less.
constexpr int64_t kFewRows = 8;
constexpr int64_t kCacheLine = 64;

// The arrays of a call. Sizes have the letters of the contract, `wide` is H rounded up to whole vectors.
struct Call {
  int64_t s, q, n, h, l, k, b, p, j, wide;
  Stored stored, asked;  // types of the pool, and of queries and results
  const char* queries;
  const char* pool;
  const float* scales;  // of codes, [M, L, 2, K, B]; else null
  const int32_t* tables;
  const int32_t* starts;
  const int32_t* positions;
  int64_t layer;
  Pattern pattern;
  const char* sink_queries;  // [S, Q, J, N, H]; null where J is 0
  const float* sinks;        // [N], or null
  float soft_cap;            // 0 for none
  const float* factors;      // of queries in the mass, [S, Q], or null
  char* out;
  float* lse;
  float* mass;  // or null

  int64_t group() const { return n / k; }
  // Index of the first number of a block's keys (side 0) or values (side 1) in units of vectors.
  int64_t VectorOf(int64_t block, int64_t side, int64_t head) const {
    return (((block * l + layer) * 2 + side) * k + head) * b;
  }
  int64_t num_jobs() const { return s * k * JobsOfHead(); }
  int64_t JobsOfHead() const { return (q * group() + kJobRows - 1) / kJobRows; }
};

// What a thread needs for a job, kept from one job to the next.
struct Scratch {
  std::vector<float> queries, block, keys, values, scores, out;
  std::vector<int32_t> positions, key_positions;
  std::vector<float> top, total;
  std::vector<char> seen;

  explicit Scratch(const Call& call, int64_t most_keys)
      : queries(kJobRows * call.wide), block(RoundUp(call.b, kLanes) * call.wide), keys(call.wide * most_keys),
        values(most_keys * call.wide), scores(kJobRows * most_keys), out(kJobRows * call.wide), positions(kJobRows), key_positions(most_keys),
        top(kJobRows), total(kJobRows), seen(most_keys) {}
};

class Job {
 public:
  Job(const Call& call, Scratch& scratch, int64_t index, int64_t blocks_of_piece)
      : call_(call), scratch_(scratch), blocks_of_piece_(blocks_of_piece),
        most_keys_(RoundUp(blocks_of_piece * call.b, kLanes)) {
    const int64_t of_head = call.JobsOfHead();
    tile_ = index / of_head / call.k;
    head_ = index / of_head % call.k;
    first_row_ = index % of_head * kJobRows;
    rows_ = std::min(kJobRows, call.q * call.group() - first_row_);
    transposes_ = rows_ >= kFewRows;
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
      float* to = &scratch.queries[r * call.wide];
      std::fill(to + call.h, to + call.wide, 0.0f);
      const int64_t vector = (tile_ * call.q + QueryOf(r)) * call.n + HeadOf(r);
      Widen(call.queries + vector * call.h * BytesOf(call.asked), call.h, call.asked, to);
    }
  }

  void Attend() {
    std::fill_n(scratch_.top.begin(), rows_, kNothing);
    std::fill_n(scratch_.total.begin(), rows_, 0.0f);
    std::fill_n(scratch_.out.begin(), rows_ * call_.wide, 0.0f);
    Walk([this] { Absorb(); });
    for (int64_t r = 0; r < rows_; ++r) Finish(r);
  }

  // Adds the weights that slots get from these rows to the mass; `Attend` has run for them.
  void Weigh() {
    float* mass = call_.mass + (tile_ * call_.k + head_) * call_.p * call_.b;
    Walk([this, mass] {
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t query = tile_ * call_.q + QueryOf(r);
        const float lse = call_.lse[query * call_.n + HeadOf(r)];
        const float factor = call_.factors ? call_.factors[query] : 1.0f;
        if (lse == kNothing || factor == 0.0f) continue;
        const float* scores = &scratch_.scores[r * most_keys_];
        for (int64_t c = 0; c < num_keys_; ++c)
          if (scores[c] != kNothing) mass[piece_[c / call_.b] * call_.b + c % call_.b] += factor * std::exp(scores[c] - lse);
      }
    });
  }

 private:
  int64_t QueryOf(int64_t row) const { return (first_row_ + row) / call_.group(); }
  int64_t HeadOf(int64_t row) const { return head_ * call_.group() + (first_row_ + row) % call_.group(); }

  // Computes the scores of one piece of the table after the other, and calls `next` after each. While a piece is
  // computed, its values and the keys of the next one are on their way from memory: blocks lie anywhere in it. The blocks
  // of a piece are those of one stretch of the text, however few of them a query of this tile sees.
  template <typename Next>
  void Walk(Next next) {
    if (last_ < 0) return;
    const int32_t* starts = call_.starts + tile_ * call_.p;
    live_.clear();
    for (int64_t entry = 0; entry < call_.p; ++entry)
      if (starts[entry] < kFar && !call_.pattern.SeesNone(first_, last_, starts[entry], call_.b)) live_.push_back(entry);
    const int64_t num_live = live_.size();
    Prefetch(0, blocks_of_piece_, 0);
    const int64_t stretch = blocks_of_piece_ * call_.b;
    for (int64_t begin = 0, end; begin < num_live; begin = end) {
      const int64_t place = starts[live_[begin]] / stretch;
      const int64_t most = std::min(num_live, begin + blocks_of_piece_);
      for (end = begin + 1; end < most && starts[live_[end]] / stretch == place;) ++end;
      piece_ = &live_[begin];
      num_blocks_ = end - begin;
      Prefetch(begin, end, 1);
      Prefetch(end, end + blocks_of_piece_, 0);
      Score();
      next();
    }
  }

  void Prefetch(int64_t begin, int64_t end, int64_t side) const {
    const int64_t size = call_.b * call_.h * BytesOf(call_.stored);
    end = std::min<int64_t>(end, live_.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t vector = call_.VectorOf(call_.tables[tile_ * call_.p + live_[i]], side, head_);
      const char* from = call_.pool + vector * call_.h * BytesOf(call_.stored);
      for (int64_t at = 0; at < size; at += kCacheLine) __builtin_prefetch(from + at, 0, 2);
    }
  }

  void Score() {
    num_keys_ = num_blocks_ * call_.b;
    const int64_t padded = RoundUp(num_keys_, kLanes), wide = call_.wide;
    if (padded > num_keys_) std::fill_n(scratch_.keys.begin(), wide * most_keys_, 0.0f);
    masked_ = padded > num_keys_;
    for (int64_t i = 0; i < num_blocks_; ++i) ReadKeys(i);
    const float* queries = scratch_.queries.data();
    float* scores = scratch_.scores.data();
    if (transposes_)
      MultiplyByLanes(queries, wide, scratch_.keys.data(), most_keys_, scores, most_keys_, rows_, wide, padded);
    else
      MultiplyTransposed(queries, wide, scratch_.keys.data(), wide, scores, most_keys_, rows_, wide, padded);
    if (call_.pattern.sink_position != 0 && call_.j > 0) ScoreSinks();
    if (call_.soft_cap > 0) {
      for (int64_t r = 0; r < rows_; ++r)
        for (int64_t c = 0; c < padded; c += kLanes) {
          float* at = scores + r * most_keys_ + c;
          Store(at, call_.soft_cap * Tanh(Load(at) * (1.0f / call_.soft_cap)));
        }
    }
    std::fill_n(scratch_.seen.begin(), num_keys_, !masked_);
    if (masked_) Mask(padded);
  }

  void ReadKeys(int64_t i) {
    const int64_t entry = piece_[i], at = i * call_.b;
    const int32_t start = call_.starts[tile_ * call_.p + entry];
    const int64_t vector = call_.VectorOf(call_.tables[tile_ * call_.p + entry], 0, head_);
    masked_ |= !call_.pattern.SeesAll(first_, last_, start, call_.b);
    for (int64_t c = 0; c < call_.b; ++c) scratch_.key_positions[at + c] = start + c;
    if (transposes_) {
      ReadBlock(vector, scratch_.block.data());
      Transpose(scratch_.block.data(), call_.b, call_.wide, &scratch_.keys[at], most_keys_);
    } else {
      ReadBlock(vector, &scratch_.keys[at * call_.wide]);
    }
  }

  // Reads the B vectors of a block, and zeros up to `wide` after each.
  void ReadBlock(int64_t vector, float* to) const {
    if (call_.scales == nullptr && call_.h == call_.wide) {
      Widen(call_.pool + vector * call_.h * BytesOf(call_.stored), call_.b * call_.h, call_.stored, to);
      return;
    }
    for (int64_t c = 0; c < call_.b; ++c) ReadVector(vector + c, to + c * call_.wide);
  }

  void ReadVector(int64_t vector, float* to) const {
    Widen(call_.pool + vector * call_.h * BytesOf(call_.stored), call_.h, call_.stored, to);
    std::fill(to + call_.h, to + call_.wide, 0.0f);
    if (call_.scales == nullptr) return;
    const float scale = call_.scales[vector];
    for (int64_t d = 0; d < call_.h; ++d) to[d] *= scale;
  }

  // Replaces the scores of repositioned sinks by those of the sink queries.
  void ScoreSinks() {
    std::vector<float> query(call_.h);
    for (int64_t c = 0; c < num_keys_; ++c) {
      const int32_t key = scratch_.key_positions[c];
      if (key >= call_.pattern.num_sinks) continue;
      masked_ = true;
      for (int64_t r = 0; r < rows_; ++r) {
        if (scratch_.positions[r] < 0 || !call_.pattern.Repositioned(scratch_.positions[r], key)) continue;
        const int64_t turned = (tile_ * call_.q + QueryOf(r)) * call_.j + std::min<int64_t>(key, call_.j - 1);
        Widen(call_.sink_queries + (turned * call_.n + HeadOf(r)) * call_.h * BytesOf(call_.asked), call_.h,
              call_.asked, query.data());
        float sum = 0;
        for (int64_t d = 0; d < call_.h; ++d)
          sum += query[d] * (transposes_ ? scratch_.keys[d * most_keys_ + c] : scratch_.keys[c * call_.wide + d]);
        scratch_.scores[r * most_keys_ + c] = sum;
      }
    }
  }

  void Mask(int64_t padded) {
    for (int64_t r = 0; r < rows_; ++r) {
      float* scores = &scratch_.scores[r * most_keys_];
      const int32_t position = scratch_.positions[r];
      for (int64_t c = 0; c < num_keys_; ++c) {
        const bool visible = position >= 0 && call_.pattern.Visible(position, scratch_.key_positions[c]);
        scratch_.seen[c] |= visible;
        if (!visible) scores[c] = kNothing;
      }
      std::fill(scores + num_keys_, scores + padded, kNothing);
    }
  }

  void Absorb() {
    const int64_t padded = RoundUp(num_keys_, kLanes), wide = call_.wide;
    for (int64_t i = 0; i < num_blocks_; ++i) ReadValues(i);
    for (int64_t r = 0; r < rows_; ++r) {
      float* scores = &scratch_.scores[r * most_keys_];
      Floats best = Load(scores);
      for (int64_t c = kLanes; c < padded; c += kLanes) best = Max(best, Load(scores + c));
      const float before = scratch_.top[r], top = std::max(before, Highest(best));
      const float base = top == kNothing ? 0.0f : top;
      Floats sum{};
      for (int64_t c = 0; c < padded; c += kLanes) {
        const Floats weights = Exp(Load(scores + c) - base);
        Store(scores + c, weights);
        sum += weights;
      }
      const float fade = before == kNothing ? 0.0f : std::exp(before - base);
      scratch_.top[r] = top;
      scratch_.total[r] = scratch_.total[r] * fade + Sum(sum);
      if (fade != 1.0f) {
        float* out = &scratch_.out[r * wide];
        for (int64_t d = 0; d < wide; d += kLanes) Store(out + d, Load(out + d) * fade);
      }
    }
    Multiply(scratch_.scores.data(), most_keys_, scratch_.values.data(), wide, scratch_.out.data(), wide, rows_,
             num_keys_, wide, true);
  }

  // Values that no row sees are zeros: a weight of 0 would not silence a NaN.
  void ReadValues(int64_t i) {
    const int64_t entry = piece_[i], at = i * call_.b;
    const int64_t vector = call_.VectorOf(call_.tables[tile_ * call_.p + entry], 1, head_);
    const char* seen = &scratch_.seen[at];
    float* to = &scratch_.values[at * call_.wide];
    if (std::memchr(seen, 0, call_.b) == nullptr) return ReadBlock(vector, to);
    for (int64_t c = 0; c < call_.b; ++c, to += call_.wide) {
      if (seen[c]) ReadVector(vector + c, to);
      else std::fill_n(to, call_.wide, 0.0f);
    }
  }

  void Finish(int64_t r) {
    const int64_t vector = (tile_ * call_.q + QueryOf(r)) * call_.n + HeadOf(r);
    float top = scratch_.top[r], total = scratch_.total[r], weight = 0.0f;
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
    const float* out = &scratch_.out[r * call_.wide];
    if (call_.asked == kFloat32) {
      auto* to = reinterpret_cast<float*>(call_.out) + vector * call_.h;
      for (int64_t d = 0; d < call_.h; ++d) to[d] = out[d] * weight;
    } else {
      auto* to = reinterpret_cast<uint16_t*>(call_.out) + vector * call_.h;
      for (int64_t d = 0; d < call_.h; ++d) to[d] = Narrow(out[d] * weight, call_.asked);
    }
  }

  const Call& call_;
  Scratch& scratch_;
  const int64_t blocks_of_piece_, most_keys_;
  int64_t tile_, head_, first_row_, rows_, num_blocks_ = 0, num_keys_ = 0;
  int32_t first_, last_;
  bool transposes_, masked_ = false;
  std::vector<int64_t> live_;  // entries of the table of which some key may be visible
  const int64_t* piece_ = nullptr;  // some of them
};

ffi::Error Run(const Call& call, ffi::ThreadPool& pool) {
  const int64_t blocks_of_piece = std::max<int64_t>(1, kPieceKeys / call.b);
  const int64_t most_keys = RoundUp(blocks_of_piece * call.b, kLanes);
  const auto make = [&] { return Scratch(call, most_keys); };
  RunJobs(pool, call.num_jobs(), make, [&](Scratch& scratch, int64_t index) {
    Job(call, scratch, index, blocks_of_piece).Attend();
  });
  if (call.mass == nullptr) return ffi::Error::Success();
  std::fill_n(call.mass, call.s * call.k * call.p * call.b, 0.0f);
  const int64_t of_head = call.JobsOfHead();
  RunJobs(pool, call.s * call.k, make, [&](Scratch& scratch, int64_t index) {
    for (int64_t i = 0; i < of_head; ++i) Job(call, scratch, index * of_head + i, blocks_of_piece).Weigh();
  });
  return ffi::Error::Success();
}

template <typename Buffer>
auto* OrNull(Buffer& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, ffi::Buffer<ffi::F32> scales,
                  ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> positions,
                  ffi::Buffer<ffi::S32> numbers, ffi::AnyBuffer q_sink, ffi::Buffer<ffi::F32> sinks,
                  ffi::Buffer<ffi::F32> factors, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::F32>> lse, ffi::Result<ffi::Buffer<ffi::F32>> mass, int32_t stored,
                  int32_t asked, float soft_cap) {
  const auto dims = q.dimensions(), of_pool = kv.dimensions();
  Call call{};
  call.s = dims[0], call.q = dims[1], call.n = dims[2], call.h = dims[3];
  call.l = of_pool[1], call.k = of_pool[3], call.b = of_pool[4];
  call.p = tables.dimensions()[1];
  call.j = q_sink.element_count() ? q_sink.dimensions()[2] : 0;
  call.wide = RoundUp(call.h, kLanes);
  if (call.h > 512) return ffi::Error::InvalidArgument("head dim above 512");
  call.stored = static_cast<Stored>(stored);
  call.asked = static_cast<Stored>(asked);
  call.queries = static_cast<const char*>(q.untyped_data());
  call.pool = static_cast<const char*>(kv.untyped_data());
  call.scales = OrNull(scales);
  call.tables = tables.typed_data();
  call.starts = starts.typed_data();
  call.positions = positions.typed_data();
  const int32_t* given = numbers.typed_data();
  call.layer = given[0];
  std::memcpy(&call.pattern, given + 1, sizeof(Pattern));
  call.sink_queries = call.j ? static_cast<const char*>(q_sink.untyped_data()) : nullptr;
  call.sinks = OrNull(sinks);
  call.soft_cap = soft_cap;
  call.factors = OrNull(factors);
  call.out = static_cast<char*>(out->untyped_data());
  call.lse = lse->typed_data();
  call.mass = OrNull(*mass);
  return Run(call, pool);
}

}  // namespace
}  // namespace ksana

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_attend, ksana::Attend,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                     // q
                                  .Arg<ksana::ffi::AnyBuffer>()                     // kv
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // scales
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // tables
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // starts
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // positions
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // layer, pattern
                                  .Arg<ksana::ffi::AnyBuffer>()                     // q_sink
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // sinks
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // mass_factor
                                  .Ret<ksana::ffi::AnyBuffer>()                     // out
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()       // lse
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()       // mass
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked")
                                  .Attr<float>("soft_cap"));
