// A layer's products with packed weights, and the operations between them. All of them are phases of one call, so that
// threads are woken once; between two phases they wait for each other without going to sleep.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "calls.h"

namespace ksana {
namespace {

// Multiplications and additions that are worth waking another thread for.
constexpr int64_t kWorthThreads = 1 << 18;
constexpr int64_t kNumbersOfJob = 1 << 14;  // of jobs that go over rows

int64_t ThreadsWorth(int64_t operations) { return operations < kWorthThreads ? 1 : INT64_MAX; }

int64_t RowJobs(int64_t t, int64_t d) { return (t * d + kNumbersOfJob - 1) / kNumbersOfJob; }

int64_t RowBlocks(int64_t t) { return (t + kRowsOfJob - 1) / kRowsOfJob; }

// Calls use(row) for the rows of a job of RowJobs.
template <typename Use>
void EachRow(int64_t t, int64_t d, int64_t index, Use use) {
  const int64_t jobs = RowJobs(t, d);
  for (int64_t row = index * t / jobs; row < (index + 1) * t / jobs; ++row) use(row);
}

// Jobs of products: a panel of weights, and some rows. Neighbours have the same panel.
struct Place {
  int64_t panel, row, rows;

  Place(int64_t t, int64_t index)
      : panel(index / RowBlocks(t)), row(index % RowBlocks(t) * kRowsOfJob), rows(std::min(kRowsOfJob, t - row)) {}
};

// y = x w^T, plus the numbers of `added` if it is not null.
template <typename Type, typename Number>
void PanelJob(const Packed& w, int64_t t, int64_t index, const Rows<typename Type::Number>& x,
              const typename Type::Number* added, Number* y, PanelScratch& scratch) {
  const Place at(t, index);
  MultiplyPanel<Type>(w, at.panel, x, at.row, at.rows, scratch.sums, scratch.unpacked);
  MultiplyHigh<Type>(w, at.panel, at.row, at.rows, scratch.added);
  EachPair(w, at.panel, at.rows, [&](int64_t r, int64_t column, int64_t count, int64_t sum) {
    Pair result =
        Finished<typename Type::Number>(w, at.row + r, column, count, scratch.sums + sum, scratch.added + sum);
    const int64_t to = (at.row + r) * w.n + column;
    if (added) {
      const Pair more = LoadSome(added + to, count);
      result = {result.first + more.first, result.second + more.second};
    }
    StoreSome(y + to, result, count);
  });
}

Floats Activated(Floats x, Activation activation) {
  if (activation == kSilu) return Silu(x);
  return 0.5f * x * (1.0f + Tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <typename Number>
void Add(const Number* x, const Number* more, int64_t d, Number* to) {
  for (int64_t i = 0; i < d; i += 2 * kLanes) {
    const Pair a = LoadSome(x + i, d - i), b = LoadSome(more + i, d - i);
    StoreSome(to + i, {a.first + b.first, a.second + b.second}, d - i);
  }
}

template <typename Number>
void Round(const Number* x, int64_t d, int64_t row, const Rounded& to) {
  if (to.in_blocks) {
    auto* blocks = reinterpret_cast<BlockOfRow*>(to.scales) + row * (d / kBlock);
    constexpr Stored kStored = std::is_same_v<Number, float> ? kFloat32 : kBfloat16;
    return RoundToBlocks(x + row * d, d, kStored, reinterpret_cast<int8_t*>(to.codes) + row * d, blocks);
  }
  to.scales[row] = RoundToCodes(x + row * d, d, to.codes + row * d);
}

// A thread's, kept from call to call: filling it with zeros takes as long as a small product.
PanelScratch* MakeScratch() {
  thread_local const auto kept = std::make_unique<PanelScratch>();
  return kept.get();
}

template <typename Type>
void RunProjections(const Projections& p, const Threads& threads) {
  using Number = typename Type::Number;
  const bool norms = p.norm.weight, rounds = p.w[0].rounds();
  const auto* x = reinterpret_cast<const Number*>(p.x);
  auto* normed = norms ? reinterpret_cast<Number*>(p.normed) : nullptr;
  const int64_t d = p.w[0].k, blocks = RowBlocks(p.t);
  const Rows<Number> rows{norms ? normed : x, p.rounded.codes, p.rounded.scales};
  int64_t panels = 0, operations = 0, tiles = 0;
  for (const Packed& w : p.w) panels += w.panels(), operations += p.t * w.n * w.k, tiles += w.adapters.jobs();
  const auto job = [&](PanelScratch* scratch, size_t phase, int64_t index) {
    if (phase == 0) {
      return EachRow(p.t, d, index, [&](int64_t row) {
        if (norms) p.norm.Apply(x + row * d, normed + row * d);
        if (rounds) Round(rows.numbers, d, row, p.rounded);
      });
    }
    int64_t i = 0;
    if (phase == 1) {
      for (; index >= p.w[i].adapters.jobs(); ++i) index -= p.w[i].adapters.jobs();
      return MultiplyLow<Type>(p.w[i], rows, index, *scratch);
    }
    for (; index >= p.w[i].panels() * blocks; ++i) index -= p.w[i].panels() * blocks;
    if (p.asked == Type::kStored)
      PanelJob<Type>(p.w[i], p.t, index, rows, nullptr, reinterpret_cast<Number*>(p.y[i]), *scratch);
    else PanelJob<Type>(p.w[i], p.t, index, rows, nullptr, reinterpret_cast<float*>(p.y[i]), *scratch);
  };
  RunPhases(threads, {norms || rounds ? RowJobs(p.t, d) : 0, tiles, panels * blocks}, MakeScratch, job,
            ThreadsWorth(operations));
}

// The matrix of a group, from the first group's.
Packed OfGroup(Packed w, int64_t group) {
  w.words += group * w.panels() * w.blocks.Bytes(w.k);
  return w;
}

template <typename Type>
void RunGroups(const GroupedBlocks& g, const Threads& threads) {
  using Number = typename Type::Number;
  struct Group {
    Packed w;
    int64_t row, rows, end;  // end: of its jobs
  };
  std::vector<Group> groups;
  const int64_t n = g.w.n, k = g.w.k;
  int64_t row = 0, jobs = 0;
  for (int64_t i = 0; i < g.groups; ++i) {
    const int64_t rows = std::min<int64_t>(g.counts[i], g.t - row);
    if (rows <= 0) continue;
    groups.push_back({OfGroup(g.w, i), row, rows, jobs += g.w.panels() * RowBlocks(rows)});
    row += rows;
  }
  const int64_t of_y = n * BytesOf(g.asked);
  std::memset(g.y + row * of_y, 0, (g.t - row) * of_y);
  const auto* x = reinterpret_cast<const Number*>(g.x);
  const auto job = [&](PanelScratch* scratch, size_t phase, int64_t index) {
    if (phase == 0) return EachRow(row, k, index, [&](int64_t r) { Round(x, k, r, g.rounded); });
    const auto of = std::upper_bound(groups.begin(), groups.end(), index,
                                     [](int64_t i, const Group& group) { return i < group.end; });
    if (of != groups.begin()) index -= std::prev(of)->end;
    const auto* blocks = reinterpret_cast<const BlockOfRow*>(g.rounded.scales) + of->row * (k / kBlock);
    const Rows<Number> rows{x + of->row * k, g.rounded.codes + of->row * k, reinterpret_cast<const float*>(blocks)};
    char* y = g.y + of->row * of_y;
    if (g.asked == Type::kStored)
      PanelJob<Type>(of->w, of->rows, index, rows, nullptr, reinterpret_cast<Number*>(y), *scratch);
    else PanelJob<Type>(of->w, of->rows, index, rows, nullptr, reinterpret_cast<float*>(y), *scratch);
  };
  RunPhases(threads, {RowJobs(row, k), jobs}, MakeScratch, job, ThreadsWorth(row * n * k));
}

// hidden = act(gate x) up x, of a panel's columns.
template <typename Type>
void GateJob(const Rest& p, int64_t index, const Rows<typename Type::Number>& x, typename Type::Number* hidden,
             PanelScratch& scratch) {
  using Number = typename Type::Number;
  const Place at(p.t, index);
  MultiplyPanel<Type>(p.gate, at.panel, x, at.row, at.rows, scratch.sums, scratch.unpacked);
  MultiplyPanel<Type>(p.up, at.panel, x, at.row, at.rows, scratch.others, scratch.unpacked);
  MultiplyHigh<Type>(p.gate, at.panel, at.row, at.rows, scratch.added);
  MultiplyHigh<Type>(p.up, at.panel, at.row, at.rows, scratch.added_to_others);
  EachPair(p.gate, at.panel, at.rows, [&](int64_t r, int64_t column, int64_t count, int64_t sum) {
    const int64_t row = at.row + r;
    const Pair gate = Finished<Number>(p.gate, row, column, count, scratch.sums + sum, scratch.added + sum);
    const Pair up = Finished<Number>(p.up, row, column, count, scratch.others + sum, scratch.added_to_others + sum);
    StoreSome(hidden + (at.row + r) * p.gate.n + column,
              {Activated(gate.first, p.activation) * up.first, Activated(gate.second, p.activation) * up.second}, count);
  });
}

template <typename Type>
void RunRestOf(const Rest& p, const Threads& threads) {
  using Number = typename Type::Number;
  const auto *x = reinterpret_cast<const Number*>(p.x), *attended = reinterpret_cast<const Number*>(p.attended);
  auto *y = reinterpret_cast<Number*>(p.y), *residual = reinterpret_cast<Number*>(p.residual);
  auto *normed = reinterpret_cast<Number*>(p.normed), *hidden = reinterpret_cast<Number*>(p.hidden);
  const int64_t d = p.output.n, heads = p.output.k, f = p.down.k, blocks = RowBlocks(p.t), rows = RowJobs(p.t, d);
  const bool norms_attention = p.after_attention.weight, norms_mlp = p.after_mlp.weight, rounds = p.output.rounds();
  const Number* gated = p.before_mlp.weight ? normed : residual;
  const auto rows_of = [&](const Number* numbers) {
    return Rows<Number>{numbers, p.rounded.codes, p.rounded.scales};
  };
  const auto job = [&](PanelScratch* scratch, size_t phase, int64_t index) {
    switch (phase) {
      case 0:
        return EachRow(p.t, heads, index, [&](int64_t row) { Round(attended, heads, row, p.rounded); });
      case 1:
        return MultiplyLow<Type>(p.output, rows_of(attended), index, *scratch);
      case 2:
        return PanelJob<Type>(p.output, p.t, index, rows_of(attended), norms_attention ? nullptr : x, residual,
                              *scratch);
      case 3:
        return EachRow(p.t, d, index, [&](int64_t row) {
          Number *r = residual + row * d, *m = normed + row * d;
          if (norms_attention) {
            p.after_attention.Apply(r, m);
            Add(x + row * d, m, d, r);
          }
          if (p.before_mlp.weight) p.before_mlp.Apply(r, m);
          if (rounds) Round(gated, d, row, p.rounded);
        });
      case 4: {
        const int64_t of_gate = p.gate.adapters.jobs();
        const bool is_up = index >= of_gate;
        return MultiplyLow<Type>(is_up ? p.up : p.gate, rows_of(gated), is_up ? index - of_gate : index, *scratch);
      }
      case 5:
        return GateJob<Type>(p, index, rows_of(gated), hidden, *scratch);
      case 6:
        return EachRow(p.t, f, index, [&](int64_t row) { Round(hidden, f, row, p.rounded); });
      case 7:
        return MultiplyLow<Type>(p.down, rows_of(hidden), index, *scratch);
      case 8:
        return PanelJob<Type>(p.down, p.t, index, rows_of(hidden), norms_mlp ? nullptr : residual, y, *scratch);
      default:
        return EachRow(p.t, d, index, [&](int64_t row) {
          Number *out = y + row * d, *m = normed + row * d;
          p.after_mlp.Apply(out, m);
          Add(residual + row * d, m, d, out);
        });
    }
  };
  RunPhases(threads,
            {rounds ? RowJobs(p.t, heads) : 0, p.output.adapters.jobs(), p.output.panels() * blocks, rows,
             p.gate.adapters.jobs() + p.up.adapters.jobs(), p.gate.panels() * blocks, rounds ? RowJobs(p.t, f) : 0,
             p.down.adapters.jobs(), p.down.panels() * blocks, norms_mlp ? rows : 0},
            MakeScratch, job, ThreadsWorth(p.t * d * f));
}

}  // namespace

void BlocksOfGroups(const GroupedBlocks& grouped, Stored stored, const Threads& threads) {
  if (stored == kFloat32) RunGroups<Float32>(grouped, threads);
  else RunGroups<Bfloat16>(grouped, threads);
}

void Project(const Projections& projections, Stored stored, const Threads& threads) {
  if (stored == kFloat32) RunProjections<Float32>(projections, threads);
  else RunProjections<Bfloat16>(projections, threads);
}

void RunRest(const Rest& rest, Stored stored, const Threads& threads) {
  if (stored == kFloat32) RunRestOf<Float32>(rest, threads);
  else RunRestOf<Bfloat16>(rest, threads);
}

}  // namespace ksana
