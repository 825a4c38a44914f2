// A layer's products with packed weights, with what lies between them. All of them are phases of one call, so that
// threads are woken once; between two phases they wait for each other without going to sleep.

#include <memory>

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
void PanelJob(const Packed& w, int64_t t, int64_t index, const typename Type::Number* x,
              const typename Type::Number* added, Number* y, PanelScratch& scratch) {
  const Place at(t, index);
  MultiplyPanel<Type>(w, at.panel, x + at.row * w.k, at.rows, scratch.sums, scratch.wide);
  EachPair(w, at.panel, at.rows, [&](int64_t r, int64_t column, int64_t count, int64_t sum) {
    Pair result = Finished<typename Type::Number>(w, column, count, scratch.sums + sum);
    const int64_t to = (at.row + r) * w.n + column;
    if (added) {
      const Pair more = LoadSome(added + to, count);
      result = {result.first + more.first, result.second + more.second};
    }
    StoreSome(y + to, result, count);
  });
}

Floats Activated(Floats x, Activation activation) {
  if (activation == kSilu) {
    const Floats most = All(80.0f), y = -x;
    return x / (1.0f + Exp(y > most ? most : y));
  }
  return 0.5f * x * (1.0f + Tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <typename Type>
struct Runner {
  using Number = typename Type::Number;

  static Number* At(char* array) { return reinterpret_cast<Number*>(array); }
  static const Number* At(const char* array) { return reinterpret_cast<const Number*>(array); }
  static std::unique_ptr<PanelScratch> Make() { return std::make_unique<PanelScratch>(); }

  static void Project(const Projections& p, const Threads& threads) {
    const bool norms = p.norm.weight != nullptr;
    const Number* x = norms ? At(p.normed) : At(p.x);
    int64_t panels = 0, operations = 0;
    for (const Packed& w : p.w) panels += w.panels(), operations += p.t * w.n * w.k;
    const auto job = [&](std::unique_ptr<PanelScratch>& scratch, size_t phase, int64_t index) {
      if (phase == 0) {
        EachRow(p.t, p.norm.d, index, [&](int64_t row) {
          p.norm.Apply(At(p.x) + row * p.norm.d, At(p.normed) + row * p.norm.d);
        });
        return;
      }
      int64_t i = 0;
      for (; index >= p.w[i].panels() * RowBlocks(p.t); ++i) index -= p.w[i].panels() * RowBlocks(p.t);
      if (p.asked == Type::kStored) PanelJob<Type>(p.w[i], p.t, index, x, nullptr, At(p.y[i]), *scratch);
      else PanelJob<Type>(p.w[i], p.t, index, x, nullptr, reinterpret_cast<float*>(p.y[i]), *scratch);
    };
    RunPhases(threads, {norms ? RowJobs(p.t, p.norm.d) : 0, panels * RowBlocks(p.t)}, Make, job,
              ThreadsWorth(operations));
  }

  static void Rest_(const Rest& p, const Threads& threads) {
    const int64_t d = p.output.n, blocks = RowBlocks(p.t), rows = RowJobs(p.t, d);
    const bool after_attention = p.after_attention.weight, after_mlp = p.after_mlp.weight;
    Number *residual = At(p.residual), *normed = At(p.normed), *y = At(p.y);
    const auto add = [&](const Number* x, const Number* more, Number* to) {
      for (int64_t i = 0; i < d; i += 2 * kLanes) {
        const Pair a = LoadSome(x + i, d - i), b = LoadSome(more + i, d - i);
        StoreSome(to + i, {a.first + b.first, a.second + b.second}, d - i);
      }
    };
    const auto job = [&](std::unique_ptr<PanelScratch>& scratch, size_t phase, int64_t index) {
      switch (phase) {
        case 0:
          return PanelJob<Type>(p.output, p.t, index, At(p.attended), after_attention ? nullptr : At(p.x), residual,
                                *scratch);
        case 1:
          return EachRow(p.t, d, index, [&](int64_t row) {
            Number *r = residual + row * d, *m = normed + row * d;
            if (after_attention) {
              p.after_attention.Apply(r, m);
              add(At(p.x) + row * d, m, r);
            }
            p.before_mlp.Apply(r, m);
          });
        case 2:
          return Gate(p, index, *scratch);
        case 3:
          return PanelJob<Type>(p.down, p.t, index, At(p.hidden), after_mlp ? nullptr : residual, y, *scratch);
        default:
          return EachRow(p.t, d, index, [&](int64_t row) {
            Number *out = y + row * d, *m = normed + row * d;
            p.after_mlp.Apply(out, m);
            add(residual + row * d, m, out);
          });
      }
    };
    RunPhases(threads,
              {p.output.panels() * blocks, rows, p.gate.panels() * blocks, p.down.panels() * blocks,
               after_mlp ? rows : 0},
              Make, job, ThreadsWorth(p.t * d * p.down.k));
  }

  static void Gate(const Rest& p, int64_t index, PanelScratch& scratch) {
    const Place at(p.t, index);
    const Number* x = At(p.normed) + at.row * p.gate.k;
    MultiplyPanel<Type>(p.gate, at.panel, x, at.rows, scratch.sums, scratch.wide);
    MultiplyPanel<Type>(p.up, at.panel, x, at.rows, scratch.others, scratch.wide);
    EachPair(p.gate, at.panel, at.rows, [&](int64_t r, int64_t column, int64_t count, int64_t sum) {
      const Pair gate = Finished<Number>(p.gate, column, count, scratch.sums + sum);
      const Pair up = Finished<Number>(p.up, column, count, scratch.others + sum);
      StoreSome(At(p.hidden) + (at.row + r) * p.gate.n + column,
                {Activated(gate.first, p.activation) * up.first, Activated(gate.second, p.activation) * up.second},
                count);
    });
  }
};

}  // namespace

void Project(const Projections& projections, Stored stored, const Threads& threads) {
  if (stored == kFloat32) Runner<Float32>::Project(projections, threads);
  else Runner<Bfloat16>::Project(projections, threads);
}

void RunRest(const Rest& rest, Stored stored, const Threads& threads) {
  if (stored == kFloat32) Runner<Float32>::Rest_(rest, threads);
  else Runner<Bfloat16>::Rest_(rest, threads);
}

}  // namespace ksana
