// Runs numbered jobs, in phases, on the threads of a pool and the calling one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace ksana {

// The pool's threads, and how a task is handed to one of them.
struct Threads {
  int64_t count;
  std::function<void(std::function<void()>)> schedule;

  void Start(std::function<void()> task) const {
#ifdef __SANITIZE_THREAD__  // which does not see how XLA's pool, compiled without it, hands a task over
    std::thread(std::move(task)).detach();
#else
    schedule(std::move(task));
#endif
  }
};

// Waits for another thread, which may not have a core: after some tries it offers its own.
class Patience {
 public:
  void Wait() {
    if (++tries_ % 64 == 0) std::this_thread::yield();
#ifdef __x86_64__
    else __builtin_ia32_pause();
#endif
  }

 private:
  int64_t tries_ = 0;
};

// Calls job(scratch, phase, index) for each phase and each index below its count; a phase begins when all jobs of the
// previous one are done. Each thread creates its scratch. The calling thread works too and waits only for jobs that
// have begun, so that a pool whose threads are all busy cannot block it. `most` limits the number of threads.
template <typename Make, typename Job>
void RunPhases(const Threads& threads, std::initializer_list<int64_t> counts, Make make, Job job,
               int64_t most = INT64_MAX) {
  struct Phase {
    int64_t count = 0;
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto phases = std::make_shared<std::vector<Phase>>(counts.size());
  int64_t widest = 0, at = 0;
  for (const int64_t count : counts) {
    (*phases)[at++].count = count;
    widest = std::max(widest, count);
  }
  // A thread that comes late finds no job left, and does not touch objects that the caller has destroyed by then.
  const auto work = [phases, &make, &job] {
    std::optional<decltype(make())> scratch;
    for (size_t p = 0; p < phases->size(); ++p) {
      Phase& phase = (*phases)[p];
      for (int64_t i = phase.next.fetch_add(1); i < phase.count; i = phase.next.fetch_add(1)) {
        if (!scratch) scratch.emplace(make());
        job(*scratch, p, i);
        phase.done.fetch_add(1, std::memory_order_release);
      }
      for (Patience patience; phase.done.load(std::memory_order_acquire) < phase.count;) patience.Wait();
    }
  };
  const int64_t helpers = std::min({threads.count, widest, most}) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Start(work);
  work();
}

// The same with one phase: job(scratch, index).
template <typename Make, typename Job>
void RunJobs(const Threads& threads, int64_t count, Make make, Job job, int64_t most = INT64_MAX) {
  RunPhases(threads, {count}, make, [&](auto& scratch, size_t, int64_t index) { job(scratch, index); }, most);
}

}  // namespace ksana
