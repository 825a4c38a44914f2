// Paged attention on a CPU: the contract of `pallas_kernels.contract.Call`, as a custom call of XLA. Jobs are taken by
// the threads of XLA's own pool.

#include <algorithm>
#include <cstring>

#include "job.h"
#include "jobs.h"
#include "xla/ffi/api/ffi.h"

namespace ksana {
namespace {

namespace ffi = xla::ffi;

// Scores that are worth waking another thread for: about 30 us.
constexpr int64_t kWorthThreads = 1 << 12;

// An upper bound of the number of scores, from the blocks that are there.
int64_t NumScores(const Call& call) {
  const auto is_there = [](int32_t start) { return start < kFar; };
  const int64_t blocks = std::count_if(call.starts, call.starts + call.s * call.p, is_there);
  return blocks * call.b * call.q * call.n;
}

template <typename Type>
void Run(const Call& call, ffi::ThreadPool& pool) {
  const auto make = [&] { return Scratch<Type>(call); };
  if (NumScores(call) < kWorthThreads) {
    auto scratch = make();
    for (int64_t i = 0; i < call.num_jobs(); ++i) Job<Type>(call, scratch, i).Attend();
  } else {
    RunJobs(pool, call.num_jobs(), make,
            [&](Scratch<Type>& scratch, int64_t index) { Job<Type>(call, scratch, index).Attend(); });
  }
  if (call.mass == nullptr) return;
  std::fill_n(call.mass, call.s * call.k * call.p * call.b, 0.0f);
  const int64_t of_head = call.JobsOfHead();
  RunJobs(pool, call.s * call.k, make, [&](Scratch<Type>& scratch, int64_t index) {
    for (int64_t i = 0; i < of_head; ++i) Job<Type>(call, scratch, index * of_head + i).Weigh();
  });
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
  if (call.stored == kBfloat16 && call.asked == kBfloat16) Run<Bfloat16>(call, pool);
  else Run<Float32>(call, pool);
  return ffi::Error::Success();
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
