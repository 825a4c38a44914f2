// Root mean square norms of rows.
#pragma once

#include <cmath>

#include "pairs.h"

namespace ksana {

struct Norm {
  int64_t d = 0;
  const char* weight = nullptr;  // [D], of the type of rows; null without a norm
  float eps = 0;
  bool plus_one = false;  // weights are those stored + 1

  // y[D] = x[D] over its root mean square, times weights. A sum's order depends on D alone. x may be y.
  template <typename Number>
  void Apply(const Number* x, Number* y) const {
    const Number* w = reinterpret_cast<const Number*>(weight);
    constexpr int64_t kStep = 2 * kLanes;
    Pair sums[2] = {};
    for (int64_t i = 0; i < d; i += kStep) {
      const Pair some = LoadSome(x + i, d - i);
      Pair& sum = sums[i / kStep % 2];
      sum.first += some.first * some.first;
      sum.second += some.second * some.second;
    }
    const float mean = Sum((sums[0].first + sums[0].second) + (sums[1].first + sums[1].second)) / d;
    const float factor = 1.0f / std::sqrt(mean + eps);
    for (int64_t i = 0; i < d; i += kStep) {
      Pair some = LoadSome(x + i, d - i), scale = LoadSome(w + i, d - i);
      some = {some.first * factor, some.second * factor};
      if (plus_one) {
        scale = {scale.first + 1.0f, scale.second + 1.0f};
      } else if constexpr (sizeof(Number) == 2) {  // Llama rounds before it multiplies
        uint16_t rounded[kStep];
        StorePair(rounded, some);
        some = LoadPair(rounded);
      }
      StoreSome(y + i, {some.first * scale.first, some.second * scale.second}, d - i);
    }
  }
};

}  // namespace ksana
