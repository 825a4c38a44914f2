// Paged attention: the contract of `pallas_kernels.contract.Call`.

#include <algorithm>

#include "calls.h"

namespace ksana {
namespace {

// Scores that are worth waking another thread for: about 30 us.
constexpr int64_t kWorthThreads = 1 << 12;
// Rows below which a job costs more for reading its keys than for products with them.
constexpr int64_t kLeastRows = 8;

// An upper bound of the number of scores, from the blocks present.
int64_t NumScores(const Call& call) {
  const auto is_there = [](int32_t start) { return start < kFar; };
  const int64_t blocks = std::count_if(call.starts, call.starts + call.NumTables() * call.p, is_there);
  return blocks * call.b * call.q * (call.by_head ? call.group() : call.n);
}

template <typename Type>
void Run(const Call& call, const Threads& threads) {
  const auto make = [&] { return Scratch<Type>(call); };
  const auto attend = [&](Scratch<Type>& scratch, int64_t index) { Job<Type>(call, scratch, index).Attend(); };
  RunJobs(threads, call.num_jobs(), make, attend, NumScores(call) < kWorthThreads ? 1 : INT64_MAX);
  if (call.mass == nullptr) return;
  std::fill_n(call.mass, call.s * call.k * call.p * call.b, 0.0f);
  const int64_t of_head = call.JobsOfHead();
  RunJobs(threads, call.s * call.k, make, [&](Scratch<Type>& scratch, int64_t index) {
    for (int64_t i = 0; i < of_head; ++i) Job<Type>(call, scratch, index * of_head + i).Weigh();
  });
}

}  // namespace

void Attend(Call call, const Threads& threads) {
  // Few jobs, as of one query whose heads share their keys, are divided until each thread has one.
  call.rows_of_job = kJobRows;
  while (call.num_jobs() < threads.count && call.rows_of_job >= 2 * kLeastRows) call.rows_of_job /= 2;
  // Without an instruction for products of bfloat16, blocks that are keys and values of many heads are widened once.
  const bool widens = call.sides == 1 && !Bfloat16::kAtOnce;
  if (call.pool.stored == kBfloat16 && call.queries.stored == kBfloat16 && !widens) Run<Bfloat16>(call, threads);
  else Run<Float32>(call, threads);
}

}  // namespace ksana
