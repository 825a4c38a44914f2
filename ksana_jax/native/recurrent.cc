// Recurrent layers: states are read and written in their pool, and a text's tokens are computed one after the other, so
// that their bits do not depend on how steps cut it.

#include "recurrent.h"

#include <algorithm>
#include <cmath>

#include "calls.h"
#include "pairs.h"

namespace ksana {
namespace {

constexpr int64_t kStep = 2 * kLanes;
// Operations that are worth waking another thread for: about 10 us.
constexpr int64_t kWorthThreads = 1 << 18;
constexpr int64_t kChannelsOfJob = 128;
constexpr int64_t kNumbersOfJob = 1 << 12;  // of jobs that go over rows

float Wide(float x) { return x; }
float Wide(uint16_t x) { return FromBfloat16(x); }

// Rounds to numbers of the type of activations.
template <typename Number>
Pair Rounded(Pair x) {
  if constexpr (sizeof(Number) == 2) {
    Number rounded[kStep];
    StorePair(rounded, x);
    return LoadPair(rounded);
  }
  return x;
}

// Taps [channels, kernel] and bias of a convolution by lag, [kernel + 1, channels].
struct Taps {
  int64_t kernel = 0, stride = 0;
  Lines<float> numbers;

  template <typename Number>
  void Read(const Number* taps, const Number* bias, int64_t channels, int64_t kernel_) {
    kernel = kernel_, stride = RoundUp(channels, kStep);
    numbers.assign((kernel + 1) * stride, 0.0f);
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t i = 0; i < kernel; ++i) numbers[i * stride + c] = Wide(taps[c * kernel + i]);
    for (int64_t c = 0; bias && c < channels; ++c) numbers[kernel * stride + c] = Wide(bias[c]);
  }
  Pair At(int64_t i, int64_t c) const { return LoadPair(numbers.data() + i * stride + c); }
};

// Convolves channels [0, n) of a text's tokens, which input(token, channel, count) gives, and writes their state.
// Calls use(token, channel, count, result) for each kStep channels. before, after: rows of states, or null.
template <typename Number, typename Input, typename Use>
void Convolve(const Texts& texts, int64_t text, int64_t n, int64_t row, const Number* before, Number* after,
              const Taps& taps, Input input, Use use) {
  const int64_t count = texts.Count(text), first = texts.Last(text) + 1 - count, past = taps.kernel - 1;
  const auto earlier = [&](int64_t nth, int64_t c) {  // nth < 0: tokens before the step
    return before ? LoadSome(before + (nth + past) * row + c, n - c) : Pair{};
  };
  for (int64_t nth = 0; nth < count; ++nth) {
    for (int64_t c = 0; c < n; c += kStep) {
      Pair sum{};
      for (int64_t i = 0; i <= past; ++i) {
        const int64_t from = nth - past + i;
        const Pair x = from < 0 ? earlier(from, c) : input(first + from, c, n - c), tap = taps.At(i, c);
        sum = {MultiplyAdd(sum.first, x.first, tap.first), MultiplyAdd(sum.second, x.second, tap.second)};
      }
      const Pair bias = taps.At(taps.kernel, c);
      use(first + nth, c, n - c, Rounded<Number>({sum.first + bias.first, sum.second + bias.second}));
    }
  }
  // The oldest first: where both are one slot, a row is read before it is written.
  for (int64_t i = 0; after && i < past; ++i) {
    const int64_t from = count - past + i;
    for (int64_t c = 0; c < n; c += kStep)
      StoreSome(after + i * row + c, from < 0 ? earlier(from, c) : input(first + from, c, n - c), n - c);
  }
}

template <typename Number>
void RunShortConv(const ShortConv& s, const Threads& threads) {
  const auto *x = reinterpret_cast<const Number*>(s.x), *gates = reinterpret_cast<const Number*>(s.gate);
  const auto *weights = reinterpret_cast<const Number*>(s.taps), *bias = reinterpret_cast<const Number*>(s.bias);
  const StateSlots<Number> pool{reinterpret_cast<Number*>(s.pool), s.slots, s.layers, (s.kernel - 1) * s.d, s.layer};
  auto* y = reinterpret_cast<Number*>(s.y);
  const auto job = [&](Taps& taps, int64_t index) {
    const int64_t at = index * kChannelsOfJob, n = std::min(kChannelsOfJob, s.d - at);
    taps.Read(weights + at * s.kernel, bias ? bias + at : nullptr, n, s.kernel);
    const auto input = [&](int64_t token, int64_t c, int64_t count) {
      return LoadSome(x + token * s.d + at + c, count);
    };
    const auto use = [&](int64_t token, int64_t c, int64_t count, Pair sum) {
      const Pair gate = LoadSome(gates + token * s.d + at + c, count);
      StoreSome(y + token * s.d + at + c, {sum.first * gate.first, sum.second * gate.second}, count);
    };
    for (int64_t token = 0; token < s.texts.t; ++token)
      if (s.texts.IsPadding(token)) std::fill_n(y + token * s.d + at, n, Number{0});
    for (int64_t text = 0; text < s.texts.r; ++text) {
      if (s.texts.Count(text) == 0) continue;
      const Number* before = pool.At(s.texts.of_texts[text]);
      Number* after = pool.At(s.texts.of_texts[s.texts.r + text]);
      Convolve(s.texts, text, n, s.d, before ? before + at : nullptr, after ? after + at : nullptr, taps, input, use);
    }
  };
  const int64_t work = s.texts.t * s.d * s.kernel;
  RunJobs(threads, (s.d + kChannelsOfJob - 1) / kChannelsOfJob, [] { return Taps(); }, job,
          work < kWorthThreads ? 1 : INT64_MAX);
}

// A job has this many columns of a head's state, so that they stay in the first cache while a text's tokens pass.
constexpr int kColumns = 32, kVectors = kColumns / kLanes;
constexpr int kChains = 8 / kVectors;  // sums that are added up side by side

struct Columns {
  Floats x[kVectors] = {};
};

void AddUp(const Columns (&chains)[kChains], Columns& sum) {
  for (int v = 0; v < kVectors; ++v) {
    sum.x[v] = chains[0].x[v];
    for (int c = 1; c < kChains; ++c) sum.x[v] += chains[c].x[v];
  }
}

// Calls use(row, chain) for rows 0 to n.
template <typename Use>
inline void EachRow(int64_t n, Use use) {
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains)
    for (int c = 0; c < kChains; ++c) use(i + c, c);
  for (; i < n; ++i) use(i, 0);
}

// keys^T S; copies S to `copy`.
template <bool kCopies>
Columns Recalled(const float* from, int64_t stride, float* copy, const float* keys, int64_t n) {
  Columns chains[kChains], sum;
  EachRow(n, [&](int64_t i, int c) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats x = Load(from + i * stride + v * kLanes);
      if (kCopies) Store(copy + i * kColumns + v * kLanes, x);
      chains[c].x[v] = MultiplyAdd(chains[c].x[v], All(keys[i]), x);
    }
  });
  AddUp(chains, sum);
  return sum;
}

// S = decays S + keys u^T; returns queries^T S.
Columns Updated(const float* from, int64_t stride, float* to, int64_t to_stride, const float* decays,
                const float* keys, const float* queries, int64_t n, const Columns& u) {
  Columns chains[kChains], sum;
  EachRow(n, [&](int64_t i, int c) {
    for (int v = 0; v < kVectors; ++v) {
      Floats x = Load(from + i * stride + v * kLanes) * decays[i];
      x = MultiplyAdd(x, All(keys[i]), u.x[v]);
      Store(to + i * to_stride + v * kLanes, x);
      chains[c].x[v] = MultiplyAdd(chains[c].x[v], All(queries[i]), x);
    }
  });
  AddUp(chains, sum);
  return sum;
}

struct HeadScratch {
  Lines<float> state, decays, keys;
  Taps taps;
};

template <typename Number>
class MatricesCall {
 public:
  explicit MatricesCall(const Matrices& m)
      : m_(m),
        convs_{reinterpret_cast<Number*>(m.conv_pool), m.slots, m.layers, (m.kernel - 1) * m.AllChannels(), m.layer},
        states_{m.matrix_pool, m.slots, m.layers, m.heads * m.k * m.v, m.layer},
        blocks_((m.v + kColumns - 1) / kColumns) {}

  void Run(const Threads& threads) {
    const int64_t rows = RowJobs(), t = m_.texts.t;
    const int64_t work = 2 * t * m_.heads * m_.k * m_.v;
    const auto job = [&](HeadScratch& scratch, size_t phase, int64_t index) {
      if (phase == 0) ConvolveHead(scratch, index);
      else if (phase == 1) Recur(scratch, index);
      else
        for (int64_t token = index * t / rows; token < (index + 1) * t / rows; ++token) Finish(token);
    };
    RunPhases(threads, {2 * m_.key_heads + m_.heads, m_.texts.r * m_.heads * blocks_, rows}, [] { return HeadScratch(); },
              job, work < kWorthThreads ? 1 : INT64_MAX);
  }

 private:
  int64_t RowJobs() const { return (m_.texts.t * m_.heads * m_.v + kNumbersOfJob - 1) / kNumbersOfJob; }

  // Convolves a head of queries, keys or values in all texts.
  void ConvolveHead(HeadScratch& scratch, int64_t index) {
    const int part = std::min<int64_t>(index / m_.key_heads, 2);
    const int64_t n = part == 2 ? m_.v : m_.k, at = (index - part * m_.key_heads) * n;
    const int64_t all = m_.AllChannels(), to = part * m_.Channels(0) + at;
    const auto* given = reinterpret_cast<const Number*>(m_.given) + to;
    const auto* bias = reinterpret_cast<const Number*>(m_.bias);
    scratch.taps.Read(reinterpret_cast<const Number*>(m_.taps[part]) + at * m_.kernel, bias ? bias + to : nullptr, n,
                      m_.kernel);
    const bool norms = m_.delta && part < 2;
    const float scale = part == 0 && m_.delta ? 1.0f / std::sqrt(static_cast<float>(m_.k)) : 1.0f;
    Pair squares{};
    const auto input = [&](int64_t token, int64_t c, int64_t count) { return LoadSome(given + token * all + c, count); };
    const auto use = [&](int64_t token, int64_t c, int64_t count, Pair x) {
      x = {Silu(x.first), Silu(x.second)};
      float* result = m_.convolved + token * all + to;
      StoreSome(result + c, x, count);
      if (!norms) return;
      squares = c == 0 ? Pair{} : squares;
      squares = {MultiplyAdd(squares.first, x.first, x.first), MultiplyAdd(squares.second, x.second, x.second)};
      if (count > kStep) return;
      const float factor = scale / std::sqrt(Sum(squares.first + squares.second) + 1e-6f);
      for (int64_t i = 0; i < n; ++i) result[i] *= factor;
    };
    for (int64_t text = 0; text < m_.texts.r; ++text) {
      if (m_.texts.Count(text) == 0) continue;
      const Number* before = convs_.At(m_.texts.of_texts[text]);
      Number* after = convs_.At(m_.texts.of_texts[m_.texts.r + text]);
      Convolve(m_.texts, text, n, all, before ? before + to : nullptr, after ? after + to : nullptr, scratch.taps, input,
               use);
    }
  }

  // Computes some columns of a head's state through the tokens of a text, and of those that continue it.
  void Recur(HeadScratch& scratch, int64_t index) {
    const int64_t at = index % blocks_ * kColumns, head = index / blocks_ % m_.heads;
    int64_t text = index / blocks_ / m_.heads;
    if (m_.texts.Continues(text, m_.slots)) return;
    do RecurText(scratch, at, head, text);
    while (++text < m_.texts.r && m_.texts.Continues(text, m_.slots));
  }

  void RecurText(HeadScratch& scratch, int64_t at, int64_t head, int64_t text) {
    const int64_t count = m_.texts.Count(text), first = m_.texts.Last(text) + 1 - count, width = std::min<int64_t>(kColumns, m_.v - at);
    if (count == 0) return;
    const int64_t offset = head * m_.k * m_.v + at;
    scratch.state.resize(m_.k * kColumns), scratch.decays.resize(m_.k), scratch.keys.resize(m_.k);
    float* const state = scratch.state.data();
    const float* before = states_.At(m_.texts.of_texts[text]);
    float* after = states_.At(m_.texts.of_texts[m_.texts.r + text]);
    const bool in_place = width == kColumns;  // else, the state is copied, with zeros as further columns
    if (!before || !in_place) std::fill_n(state, m_.k * kColumns, 0.0f);
    for (int64_t i = 0; before && !in_place && i < m_.k; ++i)
      std::copy_n(before + offset + i * m_.v, width, state + i * kColumns);
    const float* from = before && in_place ? before + offset : state;
    for (int64_t nth = 0; nth < count; ++nth) {
      const bool ends = after && in_place && nth == count - 1;
      Token(scratch, head, first + nth, at, width, from, from == state ? kColumns : m_.v,
            ends ? after + offset : state, ends ? m_.v : kColumns);
      from = state;
    }
    for (int64_t i = 0; after && !in_place && i < m_.k; ++i)
      std::copy_n(state + i * kColumns, width, after + offset + i * m_.v);
  }

  void Token(HeadScratch& scratch, int64_t head, int64_t token, int64_t at, int64_t width, const float* from,
             int64_t stride, float* to, int64_t to_stride) {
    const int64_t of_keys = m_.Channels(0), key_head = head / (m_.heads / m_.key_heads), n = m_.k;
    const float* queries = m_.convolved + token * m_.AllChannels() + key_head * n;
    const float *keys = queries + of_keys, beta = m_.beta[token * m_.heads + head];
    const float* decay = m_.decay + (token * m_.heads + head) * m_.decay_channels;
    if (m_.decay_channels == 1) std::fill_n(scratch.decays.data(), n, *decay), decay = scratch.decays.data();
    Columns u;
    float values[kColumns] = {};
    std::copy_n(m_.convolved + token * m_.AllChannels() + 2 * of_keys + head * m_.v + at, width, values);
    for (int v = 0; v < kVectors; ++v) u.x[v] = Load(values + v * kLanes);
    if (m_.delta) {
      for (int64_t i = 0; i < n; ++i) scratch.keys[i] = keys[i] * decay[i];
      float* const state = scratch.state.data();
      const Columns found = from == state ? Recalled<false>(from, stride, state, scratch.keys.data(), n)
                                          : Recalled<true>(from, stride, state, scratch.keys.data(), n);
      for (int v = 0; v < kVectors; ++v) u.x[v] -= found.x[v];
      from = state, stride = kColumns;
    }
    for (int v = 0; v < kVectors; ++v) u.x[v] *= beta;
    const Columns read = Updated(from, stride, to, to_stride, decay, keys, queries, n, u);
    for (int v = 0; v < kVectors; ++v) Store(values + v * kLanes, read.x[v]);
    std::copy_n(values, width, m_.read + (token * m_.heads + head) * m_.v + at);
  }

  // Norms and gates a row.
  void Finish(int64_t token) {
    const int64_t width = m_.heads * m_.v, of_group = m_.heads / m_.groups;
    auto* y = reinterpret_cast<Number*>(m_.y) + token * width;
    if (m_.texts.IsPadding(token)) return (void)std::fill_n(y, width, Number{0});
    for (int64_t group = 0; group < m_.groups; ++group) {
      Pair squares{};
      EachPair(token, group * of_group, (group + 1) * of_group, [&](float* x, int64_t at, int64_t, int64_t count) {
        Pair some = LoadSome(x, count);
        if (m_.gate_first) {
          const Pair gate = Gate(token * width + at, count);
          some = Skipped(token, at, some, count);
          some = {some.first * gate.first, some.second * gate.second};
          StoreSome(x, some, count);
        }
        squares = {MultiplyAdd(squares.first, some.first, some.first),
                   MultiplyAdd(squares.second, some.second, some.second)};
      });
      const float mean = Sum(squares.first + squares.second) / (of_group * m_.v), factor = 1.0f / std::sqrt(mean + m_.eps);
      EachPair(token, group * of_group, (group + 1) * of_group, [&](float* x, int64_t at, int64_t of_head, int64_t count) {
        const auto* norm = reinterpret_cast<const Number*>(m_.norm) + (m_.gate_first ? at : of_head);
        const Pair some = LoadSome(x, count), scale = LoadSome(norm, count);
        Pair result{some.first * factor * scale.first, some.second * factor * scale.second};
        if (!m_.gate_first) {
          const Pair gate = Gate(token * width + at, count);
          result = {result.first * gate.first, result.second * gate.second};
        }
        StoreSome(y + at, result, count);
      });
    }
  }

  // Calls use(numbers read, their place in the row, in their head, count) for parts of some heads.
  template <typename Use>
  void EachPair(int64_t token, int64_t head, int64_t end, Use use) {
    for (; head < end; ++head)
      for (int64_t c = 0; c < m_.v; c += kStep) {
        const int64_t at = head * m_.v + c;
        use(m_.read + token * m_.heads * m_.v + at, at, c, m_.v - c);
      }
  }

  Pair Gate(int64_t at, int64_t count) const {
    const Pair x = LoadSome(m_.gate + at, count);
    return m_.sigmoid ? Pair{Sigmoid(x.first), Sigmoid(x.second)} : Pair{Silu(x.first), Silu(x.second)};
  }

  Pair Skipped(int64_t token, int64_t at, Pair x, int64_t count) const {
    if (!m_.skip) return x;
    const Pair v = LoadSome(m_.convolved + token * m_.AllChannels() + 2 * m_.Channels(0) + at, count);
    const Floats factor = All(m_.skip[at / m_.v]);
    return {MultiplyAdd(x.first, factor, v.first), MultiplyAdd(x.second, factor, v.second)};
  }

  const Matrices& m_;
  const StateSlots<Number> convs_;
  const StateSlots<float> states_;
  const int64_t blocks_;
};

}  // namespace

void Convolve(const ShortConv& conv, Stored stored, const Threads& threads) {
  if (stored == kFloat32) RunShortConv<float>(conv, threads);
  else RunShortConv<uint16_t>(conv, threads);
}

void Recur(const Matrices& matrices, Stored stored, const Threads& threads) {
  if (stored == kFloat32) MatricesCall<float>(matrices).Run(threads);
  else MatricesCall<uint16_t>(matrices).Run(threads);
}

}  // namespace ksana
