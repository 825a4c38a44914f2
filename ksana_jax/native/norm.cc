// Norms as a separate operator.

#include "norm.h"

#include <algorithm>

#include "calls.h"

namespace ksana {

constexpr int64_t kJobNumbers = 1 << 15;

template <typename Number, typename Kind>
void Normalise(const Kind& norm, int64_t t, const char* x, char* y, const Threads& threads) {
  const int64_t rows = std::max<int64_t>(1, kJobNumbers / norm.d);
  const auto* from = reinterpret_cast<const Number*>(x);
  auto* to = reinterpret_cast<Number*>(y);
  const auto none = [] { return 0; };
  RunJobs(threads, (t + rows - 1) / rows, none, [&](int, int64_t index) {
    for (int64_t row = index * rows; row < std::min(t, (index + 1) * rows); ++row)
      norm.Apply(from + row * norm.d, to + row * norm.d);
  });
}

template <typename Kind>
void NormRows(const Kind& norm, int64_t t, const char* x, char* y, Stored stored, const Threads& threads) {
  if (norm.d == 0) return;
  if (stored == kFloat32) Normalise<float>(norm, t, x, y, threads);
  else Normalise<uint16_t>(norm, t, x, y, threads);
}

template void NormRows(const Norm&, int64_t, const char*, char*, Stored, const Threads&);
template void NormRows(const LayerNorm&, int64_t, const char*, char*, Stored, const Threads&);

}  // namespace ksana
