// Paged attention: the contract of `pallas_kernels.contract.Call`.

#include <algorithm>

#include "calls.h"

namespace ksana {
namespace {

// Scores that are worth waking another thread for: about 30 us.
constexpr int64_t kWorthThreads = 1 << 12;
// Jobs of a thread below which sections of their keys are divided among threads.
constexpr int64_t kFewJobs = 2;
// Numbers that the sums of all sections may have, 64 MiB: many threads have many jobs, and long texts many sections.
constexpr int64_t kMostSums = 1 << 24;

// An upper bound of the number of scores, from the blocks present.
int64_t NumScores(const Call& call) {
  const auto is_there = [](int32_t start) { return start < kFar; };
  const int64_t blocks = std::count_if(call.starts, call.starts + call.NumTables() * call.p, is_there);
  return blocks * call.b * call.q * (call.by_head ? call.group() : call.n);
}

// Returns the entries of each table with which a section begins, and p.
std::vector<std::vector<int64_t>> SectionsOfTables(const Call& call) {
  std::vector<std::vector<int64_t>> sections(call.NumTables());
  for (int64_t table = 0; table < call.NumTables(); ++table) {
    int64_t next = 0;
    for (int64_t entry = 0; entry < call.p; ++entry) {
      const int64_t key = call.KeyOf(table, entry);
      if (key < next || call.starts[table * call.p + entry] >= kFar) continue;
      sections[table].push_back(entry);
      next = call.EndOfSection(key);
    }
    sections[table].push_back(call.p);
  }
  return sections;
}

// Divides sections among threads, and adds up their results when all are there. False if there is nothing to divide, or
// no room for their sums.
template <typename Type>
bool AttendInSections(const Call& call, const Threads& threads) {
  const auto sections = SectionsOfTables(call);
  size_t count = 0;
  for (const auto& of_table : sections) count = std::max(count, of_table.size() - 1);
  const int64_t jobs = call.num_jobs(), most = count;
  const int64_t size = Sums::Size(call.RowsOfJob(), Scratch<Type>::Wide(call.h));
  if (most <= 1 || jobs * most * size > kMostSums) return false;
  Lines<float> sums(jobs * most * size);
  const auto make = [&] { return Scratch<Type>(call); };
  RunPhases(threads, {jobs * most, jobs}, make, [&](Scratch<Type>& scratch, size_t phase, int64_t index) {
    if (phase == 0) {
      const int64_t section = index % most;
      Job<Type> job(call, scratch, index / most);
      const auto& entries = sections[job.table()];
      const bool is_there = section + 1 < static_cast<int64_t>(entries.size());
      job.AttendEntries(is_there ? entries[section] : 0, is_there ? entries[section + 1] : 0, Sums(&sums[index * size]));
    } else {
      Job<Type>(call, scratch, index).AddUp(&sums[index * most * size], size, most);
    }
  });
  return true;
}

template <typename Type>
void Run(const Call& call, const Threads& threads) {
  const auto make = [&] { return Scratch<Type>(call); };
  const int64_t jobs = call.num_jobs(), most = NumScores(call) < kWorthThreads ? 1 : threads.count;
  const bool has_few_jobs = most > 1 && jobs < kFewJobs * most;
  if (!has_few_jobs || !AttendInSections<Type>(call, threads)) {
    const auto attend = [&](Scratch<Type>& scratch, int64_t index) { Job<Type>(call, scratch, index).Attend(); };
    RunJobs(threads, jobs, make, attend, most);
  }
  if (call.mass == nullptr) return;
  std::fill_n(call.mass, call.s * call.k * call.p * call.b, 0.0f);
  const int64_t of_head = call.JobsOfHead();
  RunJobs(threads, call.s * call.k, make, [&](Scratch<Type>& scratch, int64_t index) {
    for (int64_t i = 0; i < of_head; ++i) Job<Type>(call, scratch, index * of_head + i).Weigh();
  });
}

}  // namespace

void Attend(Call call, const Threads& threads) {
  // Without an instruction for products of bfloat16, blocks that are keys and values of many heads are widened once.
  const bool widens = call.sides == 1 && !Bfloat16::kAtOnce;
  if (call.pool.stored == kBfloat16 && call.queries.stored == kBfloat16 && !widens) Run<Bfloat16>(call, threads);
  else Run<Float32>(call, threads);
}

}  // namespace ksana
