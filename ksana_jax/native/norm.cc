// Norms on a CPU: rows x[T, D] divided by their root mean square, times weights, as a custom call of XLA.
//
// A row is summed in an order that depends on D alone, so that its result is the same whatever the other rows and their
// number; XLA compiles a sum differently for different numbers of rows.

#include <algorithm>
#include <cmath>

#include "jobs.h"
#include "numbers.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ksana {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kJobNumbers = 1 << 15;
constexpr int64_t kVectors = 4;  // of partial sums

struct Norm {
  int64_t t, d;
  const char *x, *weight;
  char* y;
  Stored stored;
  float eps;
  bool plus_one;
};

struct Scratch {
  std::unique_ptr<float[]> x, weight;
  int64_t wide;

  explicit Scratch(const Norm& n) : wide(RoundUp(n.d, kVectors * kLanes)) {
    x.reset(new float[wide]()), weight.reset(new float[wide]());
    Widen(n.weight, n.d, n.stored, weight.get());
    if (n.plus_one)
      for (int64_t i = 0; i < n.d; ++i) weight[i] += 1.0f;
  }
};

void Row(const Norm& n, Scratch& scratch, int64_t row) {
  float* x = scratch.x.get();
  const int64_t bytes = n.d * BytesOf(n.stored);
  Widen(n.x + row * bytes, n.d, n.stored, x);
  Floats sums[kVectors] = {};
  for (int64_t i = 0; i < scratch.wide; i += kVectors * kLanes)
    for (int v = 0; v < kVectors; ++v) {
      const Floats some = Load(x + i + v * kLanes);
      sums[v] += some * some;
    }
  const float mean = Sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / n.d;
  const float factor = 1.0f / std::sqrt(mean + n.eps);
  for (int64_t i = 0; i < n.d; ++i) x[i] *= factor;
  const float* weight = scratch.weight.get();
  if (n.stored == kFloat32) {
    auto* to = reinterpret_cast<float*>(n.y + row * bytes);
    for (int64_t i = 0; i < n.d; ++i) to[i] = x[i] * weight[i];
    return;
  }
  auto* to = reinterpret_cast<uint16_t*>(n.y + row * bytes);
  if (!n.plus_one)
    for (int64_t i = 0; i < n.d; ++i) x[i] = FromBfloat16(Narrow(x[i], n.stored));
  for (int64_t i = 0; i < n.d; ++i) to[i] = Narrow(x[i] * weight[i], n.stored);
}

ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y,
                   int32_t stored, float eps, bool plus_one) {
  Norm n{};
  n.d = weight.element_count(), n.t = n.d ? x.element_count() / n.d : 0;
  n.x = static_cast<const char*>(x.untyped_data());
  n.weight = static_cast<const char*>(weight.untyped_data());
  n.y = static_cast<char*>(y->untyped_data());
  n.stored = static_cast<Stored>(stored), n.eps = eps, n.plus_one = plus_one;
  if (n.stored != kFloat32 && n.stored != kBfloat16)
    return ffi::Error::InvalidArgument("numbers that are neither float32 nor bfloat16");
  if (n.d == 0) return ffi::Error::Success();
  const int64_t rows = std::max<int64_t>(1, kJobNumbers / n.d);
  const auto make = [&] { return Scratch(n); };
  RunJobs(pool, (n.t + rows - 1) / rows, make, [&](Scratch& scratch, int64_t index) {
    for (int64_t row = index * rows; row < std::min(n.t, (index + 1) * rows); ++row) Row(n, scratch, row);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ksana

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_rms_norm, ksana::RmsNorm,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // weight
                                  .Ret<ksana::ffi::AnyBuffer>()  // y
                                  .Attr<int32_t>("stored")
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));
