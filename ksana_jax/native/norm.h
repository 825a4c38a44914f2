// Norms of rows.
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

struct LayerNorm {
  int64_t d = 0;
  const char* weight = nullptr;  // [D], or [2, D] with a bias, of the type of rows
  bool has_bias = false;
  float eps = 0;

  // y[D] = (x[D] - mean) over their standard deviation, times weights, plus the bias. A sum's order depends on D alone.
  template <typename Number>
  void Apply(const Number* x, Number* y) const {
    const Number* w = reinterpret_cast<const Number*>(weight);
    const float mean = MeanOf(x, [](Floats some, Floats) { return some; });
    const auto centred = [mean](Floats some, Floats ones) { return some - mean * ones; };
    const float variance = MeanOf(x, [&](Floats some, Floats ones) { return centred(some, ones) * centred(some, ones); });
    const float factor = 1.0f / std::sqrt(variance + eps);
    for (int64_t i = 0; i < d; i += kStep) {
      const Pair some = LoadSome(x + i, d - i), scale = LoadSome(w + i, d - i);
      Pair bias{};
      if (has_bias) bias = LoadSome(w + d + i, d - i);
      StoreSome(y + i,
                {(some.first - mean) * factor * scale.first + bias.first,
                 (some.second - mean) * factor * scale.second + bias.second},
                d - i);
    }
  }

 private:
  static constexpr int64_t kStep = 2 * kLanes;

  // The mean of function(numbers, 1 for each of them and 0 for padding).
  template <typename Number, typename Function>
  float MeanOf(const Number* x, const Function& function) const {
    Pair sums[2] = {};
    for (int64_t i = 0; i < d; i += kStep) {
      float ones[kStep];
      for (int64_t j = 0; j < kStep; ++j) ones[j] = i + j < d;
      const Pair some = LoadSome(x + i, d - i), used = LoadPair(ones);
      Pair& sum = sums[i / kStep % 2];
      sum.first += function(some.first, used.first);
      sum.second += function(some.second, used.second);
    }
    return Sum((sums[0].first + sums[0].second) + (sums[1].first + sums[1].second)) / d;
  }
};

}  // namespace ksana
