// The keys that a query sees.
#pragma once

#include <cstdint>

#include "simd.h"

namespace ksana {

// Positions of absent blocks start here.
constexpr int32_t kFar = 1 << 30;

// The numbers of `pallas_kernels.patterns.Pattern`, in its order; `pallas_kernels.mask` explains them.
struct Pattern {
  int32_t window, num_sinks, stride, has_global, global_every, sink_position, sink_ceiling;

  // Mask of keys that a query sees; lanes are -1 or 0.
  Ints Visible(int32_t query, Ints keys) const {
    const Ints distance = query - keys;
    Ints inside = distance < window;
    if (stride != 1) inside &= distance % stride == 0;
    inside |= keys < num_sinks;
    if (has_global) inside |= keys % global_every == 0;
    return inside & (distance >= 0);
  }

  bool Repositioned(int32_t query, int32_t key) const {
    if (key >= num_sinks || sink_position == 0) return false;
    const int32_t distance = query - key;
    return sink_position == 1 || (distance >= window && distance > sink_ceiling);
  }

  // True if no query at first..last sees any of `size` positions from `start`; false is always right.
  bool SeesNone(int32_t first, int32_t last, int32_t start, int32_t size) const {
    if (start > last) return true;
    const bool far = first - (start + size - 1) >= window;
    return far && start >= num_sinks && !has_global;
  }

  // True if each query at first..last sees all of them, and with its own query; false is always right.
  bool SeesAll(int32_t first, int32_t last, int32_t start, int32_t size) const {
    return start + size - 1 <= first && last - start < window && stride == 1 &&
           !(sink_position != 0 && start < num_sinks);
  }
};

}  // namespace ksana
